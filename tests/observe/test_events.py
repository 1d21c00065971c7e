"""Events and what is quarantined survive a killed process and a disk that is full for a while."""

import errno
import json
from pathlib import Path
from typing import Any

from paceline.observe.events import EventLog
from paceline.observe.quarantine import Quarantine


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


def test_what_a_full_disk_does_not_take_is_written_later(tmp_path: Path) -> None:
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

        def close(self) -> None:
            self.file.close()

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
