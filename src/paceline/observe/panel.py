"""The one panel of a run: where it stands, how fast, what each role does, who waits for whom. Made of a RunState alone.

It is a list of lines, none longer than the width it is made for. Where columns do not fit, those that matter least go;
where the height does not do, what matters least goes whole.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.text import Text

from paceline.observe.lines import clock, shown_slots, size
from paceline.observe.state import RunState

SILENT_S = 30.0  # without an event: a run that works has a sample every few seconds
_NARROW = 60  # columns under which roles have short names
_GAP = "   "  # between two numbers
_COLOURS = {"running": "green", "finished": "green", "failed": "red", "interrupted": "yellow", "hung": "red"}
_SENTENCE = 3  # lines that one may take
_SHOWN = 0.005  # of the time; who waits less waits 0 %

# A part of the panel: how soon it goes where the height does not do (0: last), and its lines.
Part = tuple[int, list[Text]]


def panel(state: RunState, *, now: int | float, width: int, height: int | None = None) -> RenderableType:
    """Return the panel at a moment, `now` in seconds since 1970, for so many columns.

    With `height` it has no more lines than that.
    """
    return Group(*panel_lines(state, now=now, width=width, height=height))


def panel_lines(state: RunState, *, now: int | float, width: int, height: int | None = None) -> list[Text]:
    """Return the panel's lines."""
    parts = [part for part in _parts(state, float(now), width) if part[1]]
    if height is not None:
        parts = _fitting(parts, height)
    lines = [line for _, part in parts for line in part]
    for line in lines:
        line.no_wrap = True
        line.truncate(width, overflow="ellipsis")
    return lines


def _fitting(parts: Sequence[Part], height: int) -> list[Part]:
    """Return the parts that matter most; of the last one to have room, what of it has."""
    left, kept = height, {}
    for place, (_, lines) in sorted(enumerate(parts), key=lambda item: item[1][0]):
        if left > 0:
            kept[place] = lines[:left]
            left -= len(lines)
    return [(0, kept[place]) for place in sorted(kept)]


def _parts(state: RunState, now: float, width: int) -> Iterator[Part]:
    yield 3, [_title(state, now, width)]
    if state.outcome == "starting":
        told = [f"✓ {stage['name']} {_seconds(stage['s'])}" for stage in state.stages]
        yield 5, [Text(line, style="dim") for line in told]
    if state.total_steps:
        yield 0, [_bar(state, width)]
    yield 1, _flowing(list(_progress(state)), width)
    yield 4, _flowing(list(_speed(state)), width)
    yield 2, _roles(state, now, width)
    yield 7, _flowing(list(_memory(state, width)), width)
    yield from _sentences(state, width)


def _title(state: RunState, now: float, width: int) -> Text:
    under_way = state.outcome in ("starting", "running")
    end = now if under_way else state.last_t
    told = [(state.outcome, _COLOURS.get(state.outcome, "cyan"))]
    if under_way and state.last_t is not None and now - state.last_t > SILENT_S:
        told.append((f"silent for {clock(now - state.last_t)}", "yellow"))
    if state.started_t is not None and end is not None:
        told.append((clock(max(0.0, end - state.started_t)), "dim"))
    right = Text("  ").join([Text(*one) for one in told])
    room = width - right.cell_len - 2
    name = state.run or "run"
    # A path's end says more than its beginning.
    name = name if cell_len(name) <= room else f"…{name[max(0, len(name) - room + 1) :]}" if room > 1 else ""
    return Text(name, style="bold") + Text(" " * max(2, width - cell_len(name) - right.cell_len)) + right


def _bar(state: RunState, width: int) -> Text:
    done, total = state.step or 0, max(state.total_steps or 0, 1)
    share = min(done / total, 1.0)
    left, right = f"step {done:,}/{total:,} ", f" {100 * share:.0f} %"
    if state.eta_s is not None:
        right += f"  eta {clock(state.eta_s)}"
    room = max(0, width - len(left) - len(right))
    full = int(room * share)
    return Text.assemble(left, ("━" * full, "green"), ("─" * (room - full), "dim"), right)


Item = tuple[str, str]  # what, and how much


def _progress(state: RunState) -> Iterator[Item]:
    if state.loss is not None:
        yield "loss", f"{state.loss:.4f}"
    if state.acceptance is not None:
        yield "τ estimate", f"{state.acceptance:.2f}"
    if shares := state.slot_acceptance_K:
        slots = shown_slots(len(shares))
        yield f"slots {'/'.join(map(str, slots))}", f"{'/'.join(f'{100 * shares[k - 1]:.0f}' for k in slots)} %"
    if state.true_tau is not None:
        yield "true τ", f"{state.true_tau:.2f} (step {state.true_tau_steps:,})"
    if state.held_out_loss is not None:
        yield "held out", f"{state.held_out_loss:.4f}"
    if state.lr is not None:
        yield "lr", f"{state.lr:.1e}"
    if state.grad_norm is not None:
        yield "norm", f"{state.grad_norm:.3g}"
    if state.epoch is not None:
        yield "epoch", str(state.epoch)
    if state.saved_steps is not None:
        yield "saved", f"step {state.saved_steps:,}"


def _speed(state: RunState) -> Iterator[Item]:
    if state.tokens_per_s is not None:
        yield "tokens/s", f"{state.tokens_per_s:,.0f}"
    if state.blocks_per_s is not None:
        yield "blocks/s", f"{state.blocks_per_s:,.1f}"
    if state.mfu is not None:
        yield "MFU", f"{100 * state.mfu:.1f} %"


def _memory(state: RunState, width: int) -> Iterator[Item]:
    if state.queue_bytes is not None:
        limit = f" of {size(state.queue_limit_bytes)}" if state.queue_limit_bytes else ""
        yield "queue", f"{size(state.queue_bytes)}{limit}"
    if state.host_bytes is not None:
        yield "host", size(state.host_bytes)
    if "memory" not in _columns(state, 0.0, width)[0]:
        for gpu in state.gpus:
            yield gpu["device"], f"{_gpu_memory(gpu)} {_percent(gpu.get('utilisation'))}"


def _flowing(items: Sequence[Item], width: int) -> list[Text]:
    """Return items side by side, in as many lines as they need; none is split."""
    lines: list[Text] = []
    for what, value in items:
        text = Text.assemble((what, "dim"), f" {value}")
        if lines and lines[-1].cell_len + len(_GAP) + text.cell_len <= width:
            lines[-1] = lines[-1] + Text(_GAP) + text
        else:
            lines.append(text)
    return lines


def _roles(state: RunState, now: float, width: int) -> list[Text]:
    if not state.roles:
        return []
    heads, rows = _columns(state, now, width)
    widths = [max(cell_len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    lines = [Text("  ".join(_cell(*one) for one in zip(heads, heads, widths, strict=True)), style="dim")]
    for row in rows:
        cells = [
            Text(_cell(head, cell, wide), style=_COLOURS.get(cell, "") if head == "state" else "")
            for head, cell, wide in zip(heads, row, widths, strict=True)
        ]
        lines.append(Text("  ").join(cells))
    return lines


def _cell(head: str, text: str, width: int) -> str:
    return text.rjust(width) if head in ("busy", "wait", "memory", "GPU") else text.ljust(width)


def _columns(state: RunState, now: float, width: int) -> tuple[list[str], list[list[str]]]:
    """Return the names of the columns that fit, and their cells."""
    narrow = width < _NARROW
    gpus = {gpu["device"]: gpu for gpu in state.gpus}
    table: dict[str, list[str]] = {name: [] for name in ("role", "device", "state", "busy", "wait", "for")}
    if gpus:
        table |= {"memory": [], "GPU": []}
    for name, role in state.roles.items():
        gpu = gpus.get(_device(str(role.get("device"))))
        cells = {
            "role": _short(name) if narrow else name,
            "device": str(role.get("device")),
            "state": _state(role, now),
            "busy": _percent(role.get("busy_share")),
            "wait": _percent(role.get("wait_share")),
            "for": (role.get("waits_for") or "") if (role.get("wait_share") or 0.0) >= _SHOWN else "",
            "memory": _gpu_memory(gpu) if gpu else "",
            "GPU": _percent(gpu.get("utilisation")) if gpu else "",
        }
        for head in table:
            table[head].append(cells[head])
    table = {head: cells for head, cells in table.items() if any(cells)}  # before roles run they have no shares
    for spare in (("for",), ("memory", "GPU"), ("device",)):
        if _width(table) > width:
            table = {head: cells for head, cells in table.items() if head not in spare}
    return list(table), [list(row) for row in zip(*table.values(), strict=True)]


def _width(table: dict[str, list[str]]) -> int:
    return sum(max(map(cell_len, (head, *cells))) for head, cells in table.items()) + 2 * (len(table) - 1)


def _state(role: dict[str, Any], now: float) -> str:
    """Return a role's state; of one that starts, for how long it has been in it."""
    state, since = str(role.get("state")), role.get("since_t")
    if state not in ("loading", "compiling") or not since:
        return state
    share = f" {_percent(role['loaded'])}" if state == "loading" and role.get("loaded") is not None else ""
    return f"{state}{share} {_seconds(max(0.0, now - since))}"


def _sentences(state: RunState, width: int) -> Iterator[Part]:
    if state.message:
        yield 1, _wrapped(Text(state.message, style=_COLOURS.get(state.outcome, "")), width)
    if state.bottleneck:
        yield 5, _wrapped(Text(state.bottleneck, style="yellow"), width)
    if state.faults and state.faults[-1]["message"] and state.faults[-1]["event"] != "failed":
        fault = state.faults[-1]
        at = time.strftime("%H:%M:%S", time.localtime(fault["t"])) if fault["t"] else ""
        yield 6, _wrapped(Text.assemble((f"{at} ", "dim"), (fault["message"], "red")), width)


def _wrapped(text: Text, width: int) -> list[Text]:
    lines = text.wrap(_MEASURE, width)
    if len(lines) > _SENTENCE:
        lines[_SENTENCE - 1].append(" …")
    for line in lines:
        line.rstrip()
    return list(lines[:_SENTENCE])


_MEASURE = Console(width=80, force_terminal=False)  # rich asks one what a tab is


def _short(name: str) -> str:
    return name.replace("target replica", "target").replace("drafter rank", "drafter")


def _device(name: str) -> str:
    return "cuda:0" if name == "cuda" else name


def _gpu_memory(gpu: dict[str, Any]) -> str:
    used, total = gpu.get("memory_used_bytes"), gpu.get("memory_total_bytes")
    return "" if used is None or not total else f"{used / 2**30:.1f}/{total / 2**30:.1f} GiB"


def _percent(value: int | float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def _seconds(seconds: int | float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
