"""What a person reads when `paceline evaluate` is done, in 80 columns. Free of torch."""

from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size

from paceline.records import many

_COLUMNS = 80
_SLOTS_A_LINE = 8
_MOST_CATEGORY = 24  # columns
_FEWEST = 6  # prompts that can tell two drafters apart at 95 %: five differ to one side by chance once in 16 times


def evaluation_text(report: dict[str, Any]) -> str:
    """Return what `evaluate` measured."""
    checkpoint = report["checkpoint"]
    return "\n".join(
        [
            *([f"drafter   of checkpoint {checkpoint}, after step {report['train_steps']:,}"] if checkpoint else []),
            *asked_lines(report),
            f"acceptance length {report['tau_trained']:.2f}, mean of {many(report['prompts'], 'request')}; "
            f"{report['tau_pooled']:.2f} pooled over {many(report['cycles'], 'cycle')}",
            *slot_lines(report["per_slot_acceptance"][1:]),
            *_context_lines(report["by_context"]),
            *_category_lines(report["by_category"]),
            *(against_lines(report["against"]) if "against" in report else []),
            _lossless_line(report),
            *_speed_lines(report),
        ]
    )


def asked_lines(report: dict[str, Any]) -> list[str]:
    """Return what was asked, and how."""
    name, of = _short_path(report["prompt_set"]), report["prompts_of"]
    some = f"{report['prompts']:,}"
    if report["prompts_seed"] is not None:
        some += f" of {of:,} drawn by seed {report['prompts_seed']}"
    arguments = ", ".join(f"{key}={value}" for key, value in report["template_args"].items())
    greedy = "greedy" if report["temperature"] == 0 else f"temperature {report['temperature']:g}"
    number = f", {report['dtype']}" if "dtype" in report else ""
    lines = [
        f"prompts   {name} ({some}; sha256 {report['prompts_sha256'][:12]})",
        f"template  {(report['chat_template'] or 'none')[:12]}, thinking {report['thinking']}"
        + (f", {arguments}" if arguments else ""),
        f"decoding  {greedy}{number}, up to {report['max_new_tokens']:,} new tokens",
    ]
    return [_cut(line, _COLUMNS) for line in lines]


def slot_lines(shares: Sequence[float]) -> list[str]:
    """Return the share of cycles accepted up to each slot, a few a line."""
    lines = []
    for at in range(0, len(shares), _SLOTS_A_LINE):
        part = shares[at : at + _SLOTS_A_LINE]
        lines.append(f"accepted up to slot {at + 1:2d}.. " + " ".join(f"{share:.2f}" for share in part))
    return lines


def against_lines(against: dict[str, Any]) -> list[str]:
    """Return a comparison with another run."""
    level, difference = f"{against['confidence']:.0%}", against["difference"]
    sure = against["prompts"] >= _FEWEST and not difference["low"] <= 0 <= difference["high"]
    apart = ", apart" if sure else ""
    lines = [
        f"against   {_short_path(against['evaluation'])}",
        f"          here {_interval(against['own'])}, there {_interval(against['other'])}",
        f"          difference {_interval(difference, sign='+')}{apart}",
        f"          {level} intervals, paired bootstrap over {many(against['prompts'], 'prompt')}",
    ]
    if against["left_out"]:
        lines.append(f"          left out: {many(against['left_out'], 'prompt')} with a draft cycle on one side only")
    return lines


def _interval(value: dict[str, float], sign: str = "") -> str:
    return f"{value['mean']:{sign}.2f} [{value['low']:{sign}.2f}, {value['high']:{sign}.2f}]"


def _context_lines(bins: Sequence[dict[str, Any]]) -> list[str]:
    lines = [f"{'context tokens':>24} {'cycles':>10} {'length':>7}"]
    for one in bins:
        where = f"{one['from']:,}-{one['to']:,}"
        lines.append(f"{where:>24} {one['cycles']:>10,} {one['tau']:>7.2f}")
    return lines


def _category_lines(categories: Sequence[dict[str, Any]]) -> list[str]:
    if not categories:
        return []
    lines = [f"{'category':>24} {'requests':>10} {'length':>7} {'pooled':>7}"]
    for one in categories:
        name = _cut(one["category"], _MOST_CATEGORY)
        name = " " * (_MOST_CATEGORY - cell_len(name)) + name
        lines.append(f"{name} {one['prompts']:>10,} {_number(one['tau']):>7} {_number(one['tau_pooled']):>7}")
    return lines


def _lossless_line(report: dict[str, Any]) -> str:
    if report["lossless"] is None:
        return f"lossless: not compared, tokens are drawn and {report['dtype']} rounds"
    line = f"lossless ({report['dtype']}): {'yes' if report['lossless'] else 'NO'}"
    wrong, near, gap = report["mismatches"], report["near_ties"], report["largest_gap"]
    if wrong or near:
        line += f"; of {many(report['prompts'], 'answer')} {near:,} part at near ties, {wrong:,} differ"
    if gap is not None:
        line += f"\n          largest gap {gap:.3g}; a near tie is up to {report['near_tie_bound']:.3g}"
    return line


def _speed_lines(report: dict[str, Any]) -> list[str]:
    if "speedup_vs_autoregressive" not in report:
        return []
    return [
        f"speed against plain decoding: {report['speedup_vs_autoregressive']:.2f}x "
        f"({report['speculative_tokens_per_s']:,.1f} and {report['plain_tokens_per_s']:,.1f} tokens/s, "
        f"{many(report['timed_prompts'], 'prompt')})"
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _short_path(path: str) -> str:
    """Return the end of a path that is too long for a line."""
    return path if len(path) <= 30 else f"…{path[-29:]}"


def _cut(text: str, columns: int) -> str:
    """Return text that somebody wrote as it may stand in a line of a table: printable, and no wider than `columns`."""
    plain = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
    return plain if cell_len(plain) <= columns else f"{set_cell_size(plain, columns - 1).rstrip()}…"
