"""`paceline doctor`: try what a run needs, say what it means, and write the machine's profile for `train`."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from paceline.observe.console import Console
from paceline.probe.entries import ENTRIES, Entry
from paceline.probe.examine import Result, examine
from paceline.probe.finding import Bench
from paceline.probe.summary import profile_of
from paceline.runtime.profile import cache_folder, profile_path, save_profile

WIDTH = 80  # of the table, whatever the terminal has: lines stay readable in a report
STYLES = {"ok": "green", "degraded": "yellow", "skipped": "dim"}


def doctor(*, console: Console, out: Path | None = None, runs: Path = Path("runs")) -> dict[str, Any]:
    """Run every probe, print the table, write the profile to `out` (default: the cache), return all of it.

    `runs` is the folder whose disk is tried. That a probe fails is a result: nothing is raised for it, nor for a
    profile that cannot be written.
    """
    place = out or profile_path()
    console.stage(f"{len(ENTRIES)} probes, each in a process with a time limit; this takes one to four minutes")
    with tempfile.TemporaryDirectory(prefix="paceline-doctor-", ignore_cleanup_errors=True) as scratch:
        bench = Bench(devices=0, cache=str(cache_folder()), runs=str(runs), scratch=scratch)
        results = examine(bench, lambda entry: console.line(_starting(entry)))
    profile = profile_of(results)
    try:
        save_profile(profile, place)
        kept = f"The profile is in {place}."
    except OSError as error:
        kept = f"The profile could not be written to {place} ({error.strerror or error}): `train` will not find it."
    console.rich.print(_table(results), width=WIDTH)
    console.line(f"Policy: `train` takes `{profile.policy}`. {profile.reason} {kept}")
    return {
        "probes": [result.json() for result in results],
        "profile": profile.model_dump(mode="json"),
        "profile_path": str(place),
    }


def _starting(entry: Entry) -> str:
    number = ENTRIES.index(entry) + 1
    return f"  {number:2d}/{len(ENTRIES)} {entry.name}, at most {entry.limit_s} s"


def _table(results: Sequence[Result]) -> Table:
    """Return a row a probe; what a verdict means and what to do stand under it."""
    table = Table(box=None, pad_edge=False, width=WIDTH)
    for name in ("verdict", "probe", "observed"):
        table.add_column(name, overflow="fold")
    for result in results:
        verdict = Text(result.verdict, style=STYLES.get(result.verdict, "red"))
        words = Text(result.observed)
        if result.meaning:
            words.append(f"\n→ {result.meaning} {result.remedy}", style="italic")
        table.add_row(verdict, Text(result.name), words)
    return table
