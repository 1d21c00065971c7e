"""Runs all probes of the table and judges what came back."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from paceline.probe.entries import ENTRIES, Entry
from paceline.probe.expected import Version, parse
from paceline.probe.finding import Bench, Finding, Verdict
from paceline.probe.runner import Call, run_probes

Announce = Callable[[Entry], None]


@dataclass(frozen=True, slots=True)
class Result:
    """A probe's finding, judged: what was seen against what this version should do, and what follows."""

    name: str
    verdict: Verdict
    observed: str
    expected: str  # empty where nobody knows
    meaning: str  # empty where there is nothing to say
    remedy: str
    seconds: float
    numbers: dict[str, Any] = field(default_factory=dict)

    def json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def examine(bench: Bench, announce: Announce, entries: Sequence[Entry] = ENTRIES) -> list[Result]:
    """Run every probe that this machine can run; `announce` is told of each before it starts.

    The first of `entries` is the one that says which GPUs there are.
    """
    first, *others = entries
    announce(first)
    ((found, seconds),) = run_probes([_call(first)], bench)
    devices = found.numbers.get("devices", []) if found.verdict == "ok" else []
    bench = replace(bench, devices=len(devices))
    version = parse(str(found.numbers.get("torch", "")))
    results = [judge(first, found, seconds, version, bool(devices))]
    for batch in batches(others, len(devices)):
        if lacking := _lacking(batch[0], len(devices)):
            results += [judge(entry, Finding("skipped", lacking), 0.0, version, False) for entry in batch]
            continue
        findings = run_probes([_call(entry) for entry in batch], bench)
        for entry in batch:
            announce(entry)
            found, seconds = next(findings)
            results.append(judge(entry, found, seconds, version, bool(devices)))
        findings.close()
    return results


def batches(entries: Sequence[Entry], devices: int) -> Iterator[list[Entry]]:
    """Yield the entries that share a process: neighbours of a group.

    On a GPU only the harmless share one: after an error in CUDA the next probe of the process would fail with it.
    """
    batch: list[Entry] = []
    for entry in entries:
        if batch and not (_shares(entry, devices) and _shares(batch[-1], devices) and entry.group == batch[-1].group):
            yield batch
            batch = []
        batch.append(entry)
    yield batch


def _shares(entry: Entry, devices: int) -> bool:
    return bool(entry.group) and (entry.harmless or not devices)


def judge(entry: Entry, found: Finding, seconds: float, version: Version | None, gpu: bool) -> Result:
    """Return the result, with the words of the entry where the probe has none of its own."""
    verdict: Verdict = "ok" if entry.hazard and found.verdict in ("died", "hung") else found.verdict
    wanted = "" if version is None or verdict == "skipped" else (entry.expected(version, gpu) or "")
    observed = found.observed
    if version and wanted and found.saw:
        torch = f"torch {version[0]}.{version[1]}"
        as_it_should = found.saw == wanted or (wanted == "fails" and found.saw in ("died", "hung"))
        observed += f"; expected of {torch}: {wanted}" if as_it_should else f"; NOT expected, {torch} should: {wanted}"
    meaning, remedy = entry.others.get(found.verdict, (entry.meaning, entry.remedy))
    quiet = verdict == "skipped" or (verdict == "ok" and not entry.hazard)
    return Result(
        entry.name,
        verdict,
        observed,
        wanted,
        "" if quiet else found.meaning or meaning,
        "" if quiet else found.remedy or remedy,
        round(seconds, 1),
        found.numbers,
    )


def _call(entry: Entry) -> Call:
    return Call(f"{__package__}.{entry.function}", float(entry.limit_s), entry.arguments)


def _lacking(entry: Entry, devices: int) -> str:
    """Return why the machine cannot run a probe, or an empty text."""
    if entry.needs == "cuda" and not devices:
        return "needs a CUDA device"
    if entry.needs == "cuda pair" and devices < 2:
        return "needs two CUDA devices"
    return ""
