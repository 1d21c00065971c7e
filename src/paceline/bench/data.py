"""`paceline bench data`: what opening, planning, batching, loading and preparing data cost on this machine.

The bars are those that two CPU cores are held to. Times of one run on a busy machine say little: run it again.
"""

import os
import shutil
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from paceline.bench import padding
from paceline.bench.lengths import run_lengths
from paceline.bench.processes import Ran, run_child, run_prepare
from paceline.bench.sparse import ORIGIN, write_sparse_dataset
from paceline.bench.texts import write_long_rows, write_short_rows
from paceline.data.writer import writing
from paceline.observe.console import Console
from paceline.records import UserError

BUCKETS = (6, 12, 24)
FEW_ROWS = 10_000  # of the small one of two datasets whose memory is compared
PASSES = 3  # of the loader over either
LONG_PASS_ROWS = 100_000  # of a pass over long rows, where a whole one takes minutes: its peak comes before the first
LOADER_ROWS = 8_000
ROUNDS = 3  # of prepare against the tokenizer
LONG_ROWS, LONG_CHARACTERS = 4_000, 7_500  # conversations of about 2,300 tokens
_FIXED_BYTES, _ROW_BYTES = 400 << 20, 1000  # disk that all this takes, and that each short row adds

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure and what it is held to."""

    name: str
    value: str
    bar: str
    met: bool | None  # None: held to nothing


def bench_data(
    *, console: Console, rows: int = 1_000_000, target: str | None = None, work: Path | None = None
) -> Result:
    """Measure everything and return the figures; `rows` short rows are prepared and loaded to watch memory.

    `target` is a folder with a tokenizer and a chat template; without one it is the demo's SmolLM2. Files are made in a
    new folder in `work` (or where the system has its temporary files) and removed.

    Raises:
        UserError: the disk is too small, or the target cannot be used.
        RunError: a process that measures failed.
    """
    base = work or Path(tempfile.gettempdir())
    _check_disk(base, _FIXED_BYTES + rows * _ROW_BYTES)
    folder = Path(target) if target else _demo_target(console)
    _check_target(folder)
    with tempfile.TemporaryDirectory(dir=base, prefix="paceline-bench-") as made:
        place = Path(made)
        result: Result = {"cores": len(os.sched_getaffinity(0))}
        for title, measure in (
            ("opening and planning 1,095,082 rows", lambda: _opening(place)),
            ("padding", _padding),
            ("the loader", lambda: _loader(place)),
            ("prepare and the tokenizer alone, in turns", lambda: _prepare_speed(place, folder)),
            (f"memory of prepare and loader, up to {rows:,} rows", lambda: _memory(place, folder, rows)),
            (f"memory of the loader, up to {rows:,} long rows", lambda: _memory_of_long_rows(place, rows)),
        ):
            console.stage(title)
            result |= measure()
    bars = bars_of(result)
    result["bars"] = [asdict(bar) for bar in bars]
    console.table("", ["what", "measured", "bar", "met"], [[b.name, b.value, b.bar, _yes(b.met)] for b in bars])
    return result


def bars_of(result: Result) -> list[Bar]:
    """Return the figures beside what they are held to."""
    static, optimum = result["padding_static"], result["padding_optimum"]
    above = max(static[str(k)] - optimum[str(k)] for k in BUCKETS)
    shares = " ".join(f"{static[str(k)]:.1%}" for k in BUCKETS)
    prepared = result["prepare_memory"]["ratio"] - 1
    speed, share = result["loader_tokens_per_s"], result["prepare_share_of_tokenizer"]
    by_cpu, whole = (result[f"prepare_share_of_tokenizer_{kind}"] for kind in ("by_cpu_time", "whole_command"))
    return [
        Bar("open", f"{result['open_s']:.2f} s", "0.3 s", result["open_s"] <= 0.3),
        Bar("plan", f"{result['plan_s']:.2f} s", "1.0 s", result["plan_s"] <= 1.0),
        Bar("resident above import", f"{result['resident_mib']:.0f} MiB", "300 MiB", result["resident_mib"] <= 300),
        Bar("padding, 6 12 24 buckets", shares, "", None),
        Bar("  above the optimum", f"{100 * above:.2f} points", "0.5 points", above <= 0.005),
        Bar("padding, trimmed", f"{result['padding_trim']:.2%}", "2 %", result["padding_trim"] <= 0.02),
        Bar("padding, packed", f"{result['padding_packed']:.2%}", "1 %", result["padding_packed"] <= 0.01),
        Bar("memory of prepare", f"{prepared:+.1%}", "+5 %", prepared <= 0.05),  # giving some back is no fault
        *_memory_bars(result["loader_memory"], "short"),
        *_memory_bars(result["loader_memory_long_rows"], "long"),
        Bar("loader", f"{speed / 1e6:.1f} M tokens/s", "5 M tokens/s", speed >= 5e6),
        Bar("prepare, of the tokenizer's speed", f"{share:.0%}", "80 %", share >= 0.8),
        Bar("  by the processors' time", f"{by_cpu:.0%}", "", None),
        Bar("  with its start", f"{whole:.0%}", "", None),
    ]


def _memory_bars(held: Result, kind: str) -> list[Bar]:
    one_pass, sizes = held["ratio_in_a_pass"] - 1, held["ratio_of_sizes"] - 1
    return [
        Bar(f"memory of the loader, {kind} rows", f"{one_pass:+.1%}", "±5 %", abs(one_pass) <= 0.05),
        Bar(f"  its peak by size, {kind} rows", f"{sizes:+.1%}", "±5 %", abs(sizes) <= 0.05),
        Bar(f"  for the index of a {kind} row", f"{held['index_bytes_a_row']:.1f} bytes", "", None),
    ]


def _opening(place: Path) -> Result:
    folder = place / "sparse"
    manifest, size = write_sparse_dataset(folder, run_lengths())
    _drop_cache(folder)
    found = run_child("open", folder)
    shutil.rmtree(folder)
    body = {"rows": manifest.rows, "tokens": manifest.tokens, **asdict(size)}
    return {**found, "opened": body}


def _padding() -> Result:
    lengths_N = run_lengths()
    return {
        "padding_static": {str(k): padding.static_padding(lengths_N, k) for k in BUCKETS},
        "padding_optimum": {str(k): share for k, share in padding.least_padding(lengths_N, BUCKETS).items()},
        "padding_equal_count": {str(k): padding.equal_count_padding(lengths_N, k) for k in BUCKETS},
        "padding_trim": padding.trim_padding(lengths_N),
        "padding_packed": padding.packed_padding(lengths_N, 8_192),
        "padding_packed_32768": padding.packed_padding(lengths_N, 32_768),
    }


def _loader(place: Path) -> Result:
    folder = place / "body"
    rng = np.random.default_rng(0)
    with writing(folder) as writer:
        for length in run_lengths(LOADER_ROWS, seed=1).tolist():
            mask = np.arange(length) >= length // 2
            writer.add(rng.integers(4, 49_000, length, dtype=np.int32), mask, int(mask.sum()) - 1)
        writer.complete(ORIGIN)
    found = run_child("load", folder)
    shutil.rmtree(folder)
    return {"loader_tokens_per_s": found["tokens"] / found["seconds"], "loader_run": found}


def _prepare_speed(place: Path, target: Path) -> Result:
    """Compare tokens a second, the best of several turns each, because other work on the machine only slows down.

    The tokenizer is called in two ways, and the faster one is what prepare is held to. A second run with a quarter of
    the rows lets prepare's start drop out, as it does in long runs. The share by the processors' time is hardly changed
    by other work; that of the whole command is what a person waits for.
    """
    whole, quarter, out = place / "long.jsonl", place / "quarter.jsonl", place / "long"
    write_long_rows(whole, LONG_ROWS, LONG_CHARACTERS)
    write_long_rows(quarter, LONG_ROWS // 4, LONG_CHARACTERS)
    bare, long, short = [], [], []
    for _ in range(ROUNDS):
        bare.append(run_child("tokenize", target, whole))
        long.append(run_prepare(whole, out, target))
        short.append(run_prepare(quarter, out, target))
    best = {key: min(found[key] for found in bare) for key in ("seconds", "cpu_s", "backend_seconds", "backend_cpu_s")}
    bare_s, bare_cpu_s = (min(best[key], best[f"backend_{key}"]) for key in ("seconds", "cpu_s"))
    long_s, short_s = min(ran.seconds for ran in long), min(ran.seconds for ran in short)
    cpu_s = min(ran.cpu_s for ran in long) - min(ran.cpu_s for ran in short)
    more = long[0].result["tokens"] - short[0].result["tokens"]
    speed, steady = bare[0]["tokens"] / bare_s, more / max(long_s - short_s, 1e-9)
    return {
        "prepare_share_of_tokenizer": steady / speed,
        "prepare_share_of_tokenizer_by_cpu_time": more / max(cpu_s, 1e-9) / (bare[0]["tokens"] / bare_cpu_s),
        "prepare_share_of_tokenizer_whole_command": long[0].result["tokens"] / long_s / speed,
        "prepare_tokens_per_s": steady,
        "tokenizer_tokens_per_s": bare[0]["tokens"] / best["seconds"],
        "tokenizer_backend_tokens_per_s": bare[0]["tokens"] / best["backend_seconds"],
        "prepare_start_s": short_s - (long_s - short_s) * short[0].result["tokens"] / more,
        "prepare_rounds": {
            "tokenizer_s": [found["seconds"] for found in bare],
            "tokenizer_backend_s": [found["backend_seconds"] for found in bare],
            "whole_s": [ran.seconds for ran in long],
            "quarter_s": [ran.seconds for ran in short],
        },
    }


def _memory(place: Path, target: Path, rows: int) -> Result:
    """Compare what prepare's processes allocate for few and for many rows, and what the loader does."""
    prepared: list[Ran] = []
    passes: list[list[Result]] = []
    counts = (min(FEW_ROWS, rows), rows)
    for count in counts:
        source, out = place / "short.jsonl", place / "short"
        write_short_rows(source, count)
        prepared.append(run_prepare(source, out, target))
        source.unlink()
        passes.append([run_child("load", out) for _ in range(PASSES)])
        shutil.rmtree(out, ignore_errors=True)
    return {
        "prepare_memory": {
            "rows": list(counts),
            "peak_mib": [ran.peak_mib for ran in prepared],
            "processes": [ran.processes for ran in prepared],
            "ratio": prepared[1].peak_mib / prepared[0].peak_mib,
            "rows_per_s": rows / prepared[1].seconds,
        },
        "loader_memory": _loader_memory(counts, passes),
    }


def _memory_of_long_rows(place: Path, rows: int) -> Result:
    """Compare what the loader allocates for few and for many rows of 2,300 tokens.

    The same count of them makes thirty times as many micro-batches and record batches as short ones do.
    """
    passes: list[list[Result]] = []
    counts = (min(FEW_ROWS, rows), rows)
    for count in counts:
        folder = place / "sparse"
        write_sparse_dataset(folder, run_lengths(count), masks=True)
        passes.append([run_child("load", folder, LONG_PASS_ROWS) for _ in range(PASSES)])
        shutil.rmtree(folder)
    return {"loader_memory_long_rows": _loader_memory(counts, passes)}


def _loader_memory(counts: tuple[int, int], passes: list[list[Result]]) -> Result:
    """Return the peaks of passes over few and over many rows, planning included, and what they hold in between.

    Between micro-batches it is looked at how far it moves in a pass over the many, and how much more that holds.

    Of several passes it is the median: where the allocator finds room differs from run to run.
    """
    held = [[found["held_mib"] for found in several] for several in passes]
    few, many = (median(max(looks) for looks in several) for several in held)
    peaks = [[found["peak_mib"] for found in several] for several in passes]
    return {
        "rows": list(counts),
        "held_mib": held,
        "most_mib": [few, many],
        "peak_mib": peaks,
        "ratio_in_a_pass": median(max(looks) / min(looks) for looks in held[1]),
        "ratio_of_sizes": median(peaks[1]) / median(peaks[0]),
        "index_bytes_a_row": (many - few) * 2**20 / max(counts[1] - counts[0], 1),
        "tokens_per_s": max(found["tokens"] / found["seconds"] for found in passes[1]),
    }


def _demo_target(console: Console) -> Path:
    from paceline.runtime.profile import cache_folder
    from paceline.target.smollm2 import fetch_smollm2

    return fetch_smollm2(cache_folder(), console.line)


def _check_target(folder: Path) -> None:
    """Refuse at once what the third measurement would stumble over."""
    from paceline.target.load import describe, load_tokenizer

    describe(str(folder))
    if not load_tokenizer(str(folder), None).chat_template:
        raise UserError(f"The target must have a chat template, {folder} has none (--target). Choose another one.")


def _check_disk(base: Path, needed: int) -> None:
    try:
        free = shutil.disk_usage(base).free
    except OSError as error:
        raise UserError(f"Folder {base} cannot be used ({error.strerror}). Choose another one with --work.") from None
    if free < needed:
        raise UserError(
            f"The measurements need {needed / 1e9:,.1f} GB of disk in {base}, {free / 1e9:,.1f} GB are free. Choose "
            "another folder with --work, or fewer rows with --rows."
        )


def _drop_cache(folder: Path) -> None:
    """Let the files' pages go, as on a machine that has not read them yet."""
    for path in folder.iterdir():
        with path.open("rb") as file, suppress(OSError, AttributeError):
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _yes(met: bool | None) -> str:
    return {True: "yes", False: "NO", None: ""}[met]
