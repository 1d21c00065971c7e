"""Whatever a probe does, the runner returns one finding for it and goes on."""

import os
import time
from pathlib import Path

import pytest

from paceline.probe import runner
from paceline.probe.finding import Bench, Finding
from paceline.probe.runner import Call, run_probes

LONG = 60.0  # never reached


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    return Bench(devices=0, cache=str(tmp_path), runs=str(tmp_path), scratch=str(tmp_path))


def run(bench: Bench, *names: str, limit: float = LONG) -> list[Finding]:
    calls = [Call(f"fakes:{name}", limit, tuple(arguments)) for name, *arguments in map(str.split, names)]
    return [finding for finding, _ in run_probes(calls, bench)]


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def wait_for_end(pid: int) -> None:
    for _ in range(200):
        if not alive(pid):
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} lives")


def test_probes_share_a_process_and_get_arguments(bench: Bench) -> None:
    first, second = run(bench, "fine one", "fine two")
    assert (first.verdict, second.verdict) == ("ok", "ok")
    word, pid = first.observed.split()
    assert (word, second.observed) == ("one", f"two {pid}")
    assert pid != str(os.getpid())
    assert first.numbers == {"scratch": bench.scratch, "odd": "nan"}


def test_a_crash_is_a_finding_and_the_rest_runs_in_a_new_process(bench: Bench) -> None:
    before, crash, after = run(bench, "fine", "segfaults", "fine")
    assert (crash.verdict, crash.saw) == ("died", "died")
    assert crash.observed == "died with SIGSEGV; its last words: something / the last line"
    assert after.verdict == "ok"
    assert after.observed != before.observed


def test_a_hang_is_ended_with_all_its_processes(bench: Bench) -> None:
    (hang,) = run(bench, "hangs", limit=6.0)
    assert (hang.verdict, hang.observed) == ("hung", "no answer within 6 s")
    wait_for_end(int(Path(bench.scratch, "pid").read_text()))


def test_an_answer_counts_after_its_process_ended(bench: Bench) -> None:
    findings = run_probes([Call("fakes:fine", LONG)] * 2, bench)
    first, _ = next(findings)
    wait_for_end(int(first.observed.split()[1]))
    second, _ = next(findings)
    assert second == first


def test_noise_is_not_the_answer(bench: Bench) -> None:
    (finding,) = run(bench, "makes_noise")
    assert finding == Finding("ok", "the answer")


def test_an_exception_is_told_with_its_place(bench: Bench) -> None:
    empty, caused, exits = run(bench, "raises_empty", "raises_with_cause", "exits")
    assert empty.verdict == "refused"
    assert empty.observed.startswith("AssertionError: <empty message> in raises_empty (fakes.py:")
    assert caused.observed.startswith("RuntimeError: many lines in raises_with_cause (fakes.py:")
    assert "caused by AssertionError: <empty message> in raises_empty (fakes.py:" in caused.observed
    assert exits.observed.startswith("SystemExit: 3 in exits")


def test_leaving_without_an_answer(bench: Bench) -> None:
    leaves, after = run(bench, "leaves", "fine")
    assert (leaves.verdict, leaves.observed) == ("died", "ended with status 0 and without an answer")
    assert after.verdict == "ok"


def test_a_probe_that_cannot_be_imported(bench: Bench) -> None:
    ((finding, _),) = run_probes([Call("no_such_module:probe", LONG)], bench)
    assert finding.verdict == "refused"
    assert finding.observed.startswith("ModuleNotFoundError: No module named 'no_such_module'")


def test_no_process_at_all(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.sys, "executable", "/nowhere/python")
    findings = run(bench, "fine", "fine")
    assert [finding.verdict for finding in findings] == ["refused", "refused"]
    assert "no process could be started" in findings[0].observed


def test_compilers_have_a_cache_of_their_own(bench: Bench) -> None:
    (finding,) = run(bench, "environment")
    assert Path(finding.observed).parent == Path(bench.scratch)
