"""Parts of a measurement: each in a process of its own that is ended at its limit, and one table of what they found.

A script names its parts and calls `main`. The same script runs as the child of a part, which writes OUT/PART.json: rows
of the table, and data that later parts compare with. OUT/table.md and OUT/table.json are written anew behind every
part, of all parts that OUT knows, so parts may be run in several calls. The status is 1 where a part failed, was ended
or was not begun, or missed a bar, and 2 where the machine has too few GPUs.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.records import PacelineError

GRACE_S = 10.0  # from the end of a part's limit to SIGKILL; meanwhile it writes what it has found

LEAST_S = 5.0  # a part with less time than this is not begun


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table; `met` is None where there is nothing to meet, or not here."""

    what: str
    value: Any
    bar: str = ""
    met: bool | None = None


@dataclass(slots=True)
class Found:
    """What a part found out."""

    rows: list[Row] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # blocks of text under the table

    def add(self, what: str, value: Any, bar: str = "", met: bool | None = None) -> None:
        """Add a row and print it at once."""
        self.rows.append(Row(what, value, bar, met))
        print(f"  {what}: {short(value)}{_judged(self.rows[-1])}", flush=True)


@dataclass(frozen=True, slots=True)
class Part:
    """One part: what it does, and how many seconds it may take. What it has found when it fails is kept."""

    body: Callable[[argparse.Namespace, Found], None]
    limit_s: int


def main(
    script: str, title: str, parts: Mapping[str, Part], parser: argparse.ArgumentParser, gpus: Callable[..., int]
) -> int:
    """Run the parts that the command line names, or one as a child, and return the status.

    `gpus` says how many are needed for what the command line asks.
    """
    parser.add_argument("--out", type=Path, required=True, help="folder of the table; it may hold other parts' results")
    parser.add_argument("--parts", nargs="+", choices=list(parts), default=list(parts), help="default: all, in order")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: stand-ins at a tiny shape")
    parser.add_argument("--within", type=float, default=590.0, help="seconds of all parts; default: %(default)s")
    parser.add_argument("--child", choices=list(parts), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked.device == "cuda" and here < gpus(asked):
        print(
            f"This measures on {gpus(asked)} CUDA devices, and this machine has {here}. Use one that has them, or "
            "--device cpu to try the script.",
            file=sys.stderr,
        )
        return 2
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.child:
        return _child(parts[asked.child], asked)
    ends = time.monotonic() + asked.within
    for name in [name for name in parts if name in asked.parts]:
        limit_s = min(parts[name].limit_s, ends - time.monotonic())
        print(f"{name}, at most {limit_s:.0f} s", flush=True)
        (asked.out / f"{name}.json").unlink(missing_ok=True)
        ended = {"ended": f"not begun within {asked.within:g} s (--within)", "seconds": 0.0}
        if limit_s > LEAST_S:
            ended = _ended([sys.executable, script, *sys.argv[1:], "--child", name], limit_s)
        _note(asked.out / f"{name}.json", ended)
        print(f"  {name}: {ended['ended']} after {ended['seconds']} s", flush=True)
        table, fine = tabled(title, asked.out, list(parts))
        (asked.out / "table.md").write_text(table, encoding="utf-8")
    print(table)
    return 0 if fine else 1


def _child(part: Part, asked: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended at the part's limit"))
    found = Found()
    try:
        part.body(asked, found)
    except PacelineError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        _write(asked.out / f"{asked.child}.json", asdict(found))
    return 0


def known(out: Path, name: str) -> dict[str, Any]:
    """Return another part's data; nothing where it has not been run."""
    try:
        data: dict[str, Any] = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))["data"]
    except FileNotFoundError:
        return {}
    return data


def tabled(title: str, out: Path, names: Sequence[str]) -> tuple[str, bool]:
    """Return all that is known as Markdown, write it as JSON, and say whether nothing failed and no bar was missed."""
    results = {name: _read(out / f"{name}.json") for name in names if (out / f"{name}.json").is_file()}
    lines = [f"# {title}", "", machine(), "", "| part | what | value | bar | |", "| --- | --- | --- | --- | --- |"]
    fine, notes = True, []
    for name, result in results.items():
        rows = [Row(**row) for row in result["rows"]]
        for row in rows:
            lines.append(f"| {name} | {row.what} | {short(row.value)} | {row.bar} | {_word(row)} |")
        if result["ended"] != "done":
            lines.append(f"| {name} | the part itself | {result['ended']} | done | MISSED |")
        fine = fine and result["ended"] == "done" and all(row.met is not False for row in rows)
        lines.append(f"| {name} | seconds of the part | {result['seconds']} | | |")
        notes += result["notes"]
    text = "\n".join(lines + [f"\n```\n{note}\n```" for note in notes]) + "\n"
    _write(out / "table.json", {"title": title, "machine": machine(), "fine": fine, "parts": results})
    return text, fine


def machine() -> str:
    """Return what this machine is."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = f"{count} x {torch.cuda.get_device_name(0)}" if count else "no GPU"
    return f"{gpus}, torch {torch.__version__}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d %H:%M')}"


def short(value: Any) -> str:
    """Return a value as the table shows it."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "/")


def _word(row: Row) -> str:
    return "" if row.met is None else "met" if row.met else "MISSED"


def _judged(row: Row) -> str:
    return f" (bar {row.bar}: {_word(row) or 'not judged here'})" if row.bar else ""


def _ended(command: list[str], limit_s: float) -> dict[str, Any]:
    """Run a command in a process group of its own and say how it ended; the group ends with it."""
    began = time.monotonic()
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}  # as the command line sets it
    process = subprocess.Popen(command, start_new_session=True, env=environment)
    try:
        status = process.wait(limit_s)
        ended = "done" if status == 0 else f"failed with status {status}"
    except subprocess.TimeoutExpired:
        ended = f"ended at its limit of {limit_s:.0f} s"
    finally:
        _end(process)
    return {"ended": ended, "seconds": round(time.monotonic() - began, 1)}


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process and its group, after a while in which it may write what it has found."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _note(path: Path, ended: dict[str, Any]) -> None:
    """Write down how a part ended, also one that wrote nothing."""
    found = _read(path) if path.is_file() else asdict(Found())
    _write(path, {**found, **ended})


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"ended": "unknown", "seconds": None, **json.loads(path.read_text(encoding="utf-8"))}
    return found


def _write(path: Path, value: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    part.replace(path)
