"""`paceline doctor`: try what a run needs, say what it means, and write the machine's profile for `train`."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill, indent, wrap
from typing import Any

from rich.text import Text

from paceline.observe.console import Console
from paceline.probe.entries import ENTRIES, Entry
from paceline.probe.examine import Result, examine
from paceline.probe.finding import Bench
from paceline.probe.summary import profile_of
from paceline.records import UserError
from paceline.runtime.profile import cache_folder, profile_path, save_profile

WIDTH = 80  # of the table, whatever the terminal has: lines stay readable in a report
GAP, NAME = " " * 9, 32  # columns of verdict and name
STYLES = {"ok": "green", "degraded": "yellow", "skipped": "dim"}


def doctor(*, console: Console, out: Path | None = None, runs: Path = Path("runs")) -> dict[str, Any]:
    """Run every probe, print the table, write the profile to `out` (default: the cache), return all of it.

    `runs` is the folder whose disk is tried. That a probe fails is a result: nothing is raised for it, nor for a
    profile that cannot be written.

    Raises:
        UserError: there is no folder for temporary files or no home for the cache.
    """
    place = out or profile_path()
    console.stage(f"{len(ENTRIES)} probes, each in a process with a time limit: one to four minutes")
    with _scratch() as scratch:
        bench = Bench(devices=0, cache=str(cache_folder()), runs=str(runs), scratch=scratch)
        results = examine(bench, lambda entry: console.line(_starting(entry)))
    profile = profile_of(results)
    try:
        save_profile(profile, place)
        kept = f"The profile is in {place}."
    except OSError as error:
        kept = f"The profile could not be written to {place} ({error.strerror or error}): `train` will not find it."
    console.rich.print(_report(results), soft_wrap=True)
    for name, fp8 in profile.fp8.items():
        said = f"fp8: `auto` is {'on' if fp8.works else 'off'} on {name}: {fp8.reason}."
        console.line(fill(said, WIDTH))
    console.line(f"Policy: `train` takes `{profile.policy}`. {profile.reason} {kept}")
    return {
        "probes": [result.json() for result in results],
        "profile": profile.model_dump(mode="json"),
        "profile_path": str(place),
    }


def _scratch() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="paceline-doctor-", ignore_cleanup_errors=True)
    except OSError as error:
        raise UserError(
            f"The doctor needs a folder for temporary files, and none can be written ({error.strerror or error}): name "
            "one in TMPDIR."
        ) from error


def _starting(entry: Entry) -> str:
    number = ENTRIES.index(entry) + 1
    return f"  {number:2d}/{len(ENTRIES)} {entry.name}, at most {entry.limit_s} s"


def _report(results: Sequence[Result]) -> Text:
    """Return a row a probe: verdict, name, what was observed; under it what that means for a run and what to do."""
    report = Text(f"{'verdict':{len(GAP)}}{'probe':{NAME}}observed\n", style="")
    for result in results:
        first, *more = wrap(result.observed, WIDTH - len(GAP) - NAME) or [""]
        report.append(f"{result.verdict:{len(GAP)}}", STYLES.get(result.verdict, "red"))
        report.append(f"{result.name:{NAME - 1}} {first}\n")
        report.append("".join(f"{GAP}{'':{NAME}}{line}\n" for line in more))
        for words in filter(None, (result.meaning, result.remedy)):
            report.append(indent(fill(words, WIDTH - len(GAP) - 2), f"{GAP}  ") + "\n", "italic")
    return report
