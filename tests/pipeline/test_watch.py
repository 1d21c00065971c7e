"""What hangs is found after its limit, and nothing else; time in which the process was stopped does not count."""

from pathlib import Path

import pytest

from paceline.pipeline.watch import Watch, write_stacks
from paceline.runtime.pulse import Moment, Pulse


class Clock:
    """Time as the test wants it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def pulse(kind: str, what: str = "") -> Pulse:
    made = Pulse()
    made.now = Moment(kind, what)  # type: ignore[arg-type]
    return made


def watched(
    pulses: dict[str, Pulse], seconds: float, clock: Clock, watch: Watch[str]
) -> tuple[dict[str, float], dict[str, str]]:
    """Look every half second for so long."""
    for _ in range(int(seconds * 2)):
        clock.now += 0.5
        watch.look(pulses)
    return watch.hung(), watch.stalled()


def test_long_work_hangs_and_a_wait_does_not() -> None:
    clock = Clock()
    watch = Watch[str](10.0, 30.0, clock=clock)
    pulses = {"a": pulse("works"), "b": pulse("waits", "room"), "c": pulse("starts"), "d": pulse("patient", "disk")}
    assert watched(pulses, 10, clock, watch) == ({}, {})
    hung, stalled = watched(pulses, 1, clock, watch)
    assert list(hung) == ["a"]
    assert hung["a"] == pytest.approx(10.5, abs=0.6)
    assert stalled == {}
    del pulses["a"]
    assert list(watched(pulses, 25, clock, watch)[0]) == ["c"]


def test_new_work_counts_anew() -> None:
    clock = Clock()
    watch = Watch[str](10.0, 30.0, clock=clock)
    pulses = {"a": pulse("works")}
    for _ in range(5):
        assert watched(pulses, 8, clock, watch) == ({}, {})
        pulses["a"].work()


@pytest.mark.parametrize(("kind", "stalls"), [("waits", True), ("works", False), ("patient", False), ("starts", False)])
def test_a_run_stalls_only_when_all_have_waited_for_long(kind: str, stalls: bool) -> None:
    clock = Clock()
    watch = Watch[str](10.0, 30.0, clock=clock)
    pulses = {"a": pulse("waits", "room"), "b": pulse(kind, "more")}
    found = watched(pulses, 12, clock, watch)[1]
    assert found == ({"a": "room", "b": "more"} if stalls else {})
    pulses["a"].now = Moment("waits", "other")
    assert watched(pulses, 8, clock, watch)[1] == {}, "one has just begun to wait"


def test_nothing_stalls_while_data_is_being_read() -> None:
    clock, shards = Clock(), [0]
    watch = Watch[str](10.0, 30.0, moving=lambda: shards[0], clock=clock)
    pulses = {"a": pulse("waits", "the loader")}
    for _ in range(4):
        shards[0] += 1
        assert watched(pulses, 8, clock, watch)[1] == {}
    assert watched(pulses, 12, clock, watch)[1] == {"a": "the loader"}


def test_whoever_leaves_has_done_something_that_the_others_have_yet_to_notice() -> None:
    clock = Clock()
    watch = Watch[str](10.0, 30.0, clock=clock)
    pulses = {"a": pulse("works"), "b": pulse("waits", "what a makes")}
    assert list(watched(pulses, 11, clock, watch)[0]) == ["a"]
    del pulses["a"]
    assert watched(pulses, 9, clock, watch) == ({}, {})
    assert watched(pulses, 2, clock, watch) == ({}, {"b": "what a makes"})


def test_time_in_which_the_process_was_stopped_does_not_count() -> None:
    clock = Clock()
    watch = Watch[str](10.0, 30.0, clock=clock)
    pulses = {"a": pulse("works"), "b": pulse("waits", "room")}
    watched(pulses, 1, clock, watch)
    clock.now += 3600
    assert watched(pulses, 5, clock, watch) == ({}, {})
    assert list(watched(pulses, 5, clock, watch)[0]) == ["a"]


def test_stacks_have_names_and_are_appended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "stacks.txt"
    write_stacks(path)
    write_stacks(path, also_stderr=True)
    text = path.read_text()
    assert text.count("MainThread") == 2
    assert text.count("test_stacks_have_names_and_are_appended") == 2
    assert "in test_stacks_have_names_and_are_appended" in capfd.readouterr().err


def test_stacks_that_no_file_takes_go_to_stderr(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_stacks(tmp_path / "gone" / "stacks.txt")
    told = capfd.readouterr().err
    assert told.startswith(f"{tmp_path}/gone/stacks.txt cannot be written: No such file or directory.\n")
    assert "MainThread" in told
    assert "test_watch.py" in told


def test_each_thread_of_a_role_is_watched_for_itself() -> None:
    clock = Clock()
    watch = Watch[str](10.0, 30.0, clock=clock)
    role = pulse("works")
    role.others = (pulse("works"), pulse("waits", "data"))
    for _ in range(3):
        role.others[1].now = Moment("works")  # one that goes on does not hide the other one
        hung, _ = watched({"a": role}, 5, clock, watch)
    assert hung == {"a": pytest.approx(14.5, abs=0.6)}
    for other in role.others:
        other.now = Moment("waits", "data")
    assert watched({"a": role}, 11, clock, watch) == ({}, {"a": "data"})
