"""Events and what is quarantined survive a killed process and a disk that is full for a while."""

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from paceline.observe import events
from paceline.observe.events import EventLog
from paceline.observe.quarantine import Quarantine
from paceline.observe.reading import EventTail, read_events, rotated_numbers


def lines(run: Path) -> list[str]:
    return (run / "events.jsonl").read_text().splitlines()


def test_a_torn_line_stays_alone(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"event": "one"}\n{"even')
    for kind in ("two", "three"):
        with EventLog(tmp_path) as log:
            log.write(kind)
    first, torn, *rest = lines(tmp_path)
    assert (json.loads(first)["event"], torn) == ("one", '{"even')
    assert [json.loads(line)["event"] for line in rest] == ["two", "three"]


class Disk:
    """Takes a few bytes and is full; later it takes all."""

    def __init__(self, file: Any) -> None:
        self.file, self.room = file, 5

    def write(self, content: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = content[: self.room]
        self.room -= len(taken)
        return self.file.write(taken)

    def tell(self) -> int:
        return self.file.tell()

    def close(self) -> None:
        self.file.close()


def test_what_a_full_disk_does_not_take_is_written_later(tmp_path: Path) -> None:
    with EventLog(tmp_path) as log:
        disk = log._lines._file = Disk(log._lines._file)  # type: ignore[assignment]
        log.write("one")
        log.write("two")
        assert lines(tmp_path) == ['{"sch']
        disk.room = 10**6
        log.write("three")
        assert [json.loads(line)["event"] for line in lines(tmp_path)] == ["one", "two", "three"]
        disk.room = 0
        log.write("lost")
    assert len(lines(tmp_path)) == 3


def test_a_file_is_not_full_while_a_line_of_it_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "FULL_BYTES", 3)
    with EventLog(tmp_path) as log:
        disk = log._lines._file = Disk(log._lines._file)  # type: ignore[assignment]
        log.write("one")
        assert rotated_numbers(tmp_path) == []
        disk.room = 10**6
        log.write("two")
    assert rotated_numbers(tmp_path) == [1]
    assert [event["event"] for event in read_events(tmp_path)] == ["one", "two"]


def test_numbers_that_json_has_not_are_strings(tmp_path: Path) -> None:
    def strict(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    with EventLog(tmp_path) as log:
        log.write(
            "odd", loss=float("nan"), sums=[1.5, float("inf")], rows=({"of": -float("inf")},), text="nan", none=None
        )
    told = json.loads(lines(tmp_path)[0], parse_constant=strict)
    assert (told["loss"], told["sums"], told["rows"]) == ("nan", [1.5, "inf"], [{"of": "-inf"}])
    assert (told["text"], told["none"]) == ("nan", None)


class Killed(BaseException):
    """Ends a process at once; nothing catches it."""


def test_full_files_are_numbered_and_a_tail_beside_them_sees_every_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "FULL_BYTES", 1000)
    written, done = 1500, threading.Event()

    def write() -> None:
        for part in range(3):  # the run is resumed
            with EventLog(tmp_path) as log:
                for number in range(part * written // 3, (part + 1) * written // 3):
                    log.write("step", step=number)
        done.set()

    (tmp_path / "settings.yaml").touch()
    tail, found = EventTail(tmp_path), []
    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        found += tail.poll()
    writer.join()
    found += tail.poll()
    assert [event["step"] for event in found] == list(range(written))
    assert found == list(read_events(tmp_path))
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("events-*.jsonl"))]
    assert len(sizes) > 50
    assert all(1000 <= size < 1100 for size in sizes)
    assert rotated_numbers(tmp_path) == list(range(1, len(sizes) + 1))


@pytest.mark.parametrize("operation", ["before the rename", "after the rename", "after the new file"])
def test_a_process_killed_while_it_rotates_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    monkeypatch.setattr(events, "FULL_BYTES", 300)
    rename, opened, number = Path.rename, os.open, 0

    def killed_rename(self: Path, to: Path) -> Path:
        if operation == "before the rename":
            raise Killed
        return rename(self, to)

    def killed_open(path: Any, *how: Any) -> int:
        if operation == "after the new file":
            os.close(opened(path, *how))
        raise Killed

    for _ in range(4):
        log = EventLog(tmp_path)
        with monkeypatch.context() as patched, pytest.raises(Killed):
            patched.setattr(Path, "rename", killed_rename)
            patched.setattr(os, "open", killed_open)
            while True:
                number += 1
                log.write("step", step=number)
        if log._lines._file:
            log._lines._file.close()
    with EventLog(tmp_path) as log:
        log.write("step", step=number + 1)
    assert [event["step"] for event in read_events(tmp_path)] == list(range(1, number + 2))


def test_a_disk_that_has_no_room_for_a_new_file_keeps_the_run_going(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "FULL_BYTES", 100)
    with EventLog(tmp_path) as log:
        with monkeypatch.context() as patched:

            def full(path: Any, *_: Any) -> int:
                raise OSError(errno.ENOSPC, "No space left on device")

            patched.setattr(os, "open", full)
            for number in range(5):
                log.write("step", step=number)
            assert not (tmp_path / "events.jsonl").exists()
        log.write("step", step=5)
    assert [event["step"] for event in read_events(tmp_path)] == list(range(6))


def test_followers_get_what_a_reader_gets_in_the_order_of_the_file(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []

    def answer(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["step"] % 50 == 0:
            log.write("answer", to=event["step"])

    log = EventLog(tmp_path, [answer, found.append])
    writers = [
        threading.Thread(target=lambda: [log.write("step", step=step, loss=float("inf")) for step in range(200)])
        for _ in range(3)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    log.write("odd", rows=({"of": Path("x").name},), accepted_K=(1, float("-inf")), message="nan", loss=float("inf"))
    log.close()
    assert found == list(read_events(tmp_path))
    assert len(found) == 3 * 200 + 3 * 4 + 1
    assert found[-1] | {"t": 0} == {
        "schema": 1,
        "t": 0,
        "event": "odd",
        "rows": [{"of": "x"}],
        "accepted_K": [1, float("-inf")],
        "message": "nan",
        "loss": float("inf"),
    }


def test_a_follower_that_raises_is_told_once_and_ends_nothing(tmp_path: Path) -> None:
    told: list[str] = []
    found: list[dict[str, Any]] = []

    def broken(event: dict[str, Any]) -> None:
        raise KeyError("loss")

    with EventLog(tmp_path, [broken, found.append], tell=told.append) as log:
        log.write("one")
        log.write("two")
    assert [event["event"] for event in found] == ["one", "two"]
    assert told == ["  what follows the run's events failed at `one` (KeyError: 'loss')"]


def test_there_is_no_quarantine_file_while_nothing_is_in_it(tmp_path: Path) -> None:
    with Quarantine(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
    for step in (3, 4):
        with Quarantine(tmp_path) as quarantine:
            quarantine.write("rejected", step=step, loss=float("nan"))
    told = [json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
    assert [(one["event"], one["schema"], one["step"], one["loss"]) for one in told] == [
        ("rejected", 1, 3, "nan"),
        ("rejected", 1, 4, "nan"),
    ]


def test_a_quarantine_is_made_with_its_first_line_and_read_without_torn_ones(tmp_path: Path) -> None:
    with Quarantine(tmp_path) as quarantine:
        assert quarantine.entries() == []
        assert not list(tmp_path.iterdir())
        quarantine.write("quarantined", reason="out of vocabulary", row=3)
    path = tmp_path / "quarantine.jsonl"
    path.write_text(path.read_text() + '{"event": "quarantined", "ro')
    with Quarantine(tmp_path) as quarantine:
        quarantine.write("quarantined", reason="no tokens", row=4)
        found = [(entry["event"], entry["reason"], entry["row"]) for entry in quarantine.entries()]
    assert found == [("quarantined", "out of vocabulary", 3), ("quarantined", "no tokens", 4)]
    assert all(entry["schema"] == 1 and entry["t"] > 0 for entry in quarantine.entries())
