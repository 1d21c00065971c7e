"""A run's events are read whole and in order, whatever happens to its files meanwhile."""

import json
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.observe import reading
from paceline.observe.reading import EventTail, read_events, rotated_name
from paceline.records import UserError


def line(event: str, **values: Any) -> str:
    return json.dumps({"schema": 1, "t": 1.5, "event": event, **values}) + "\n"


def put(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def kinds(events: Any) -> list[str]:
    return [event["event"] for event in events]


def test_a_torn_last_line_is_given_out_once_it_is_whole(tmp_path: Path) -> None:
    path, whole = tmp_path / "events.jsonl", line("two", step=2)
    put(path, line("one") + whole[:20])
    tail = EventTail(tmp_path)
    assert kinds(read_events(tmp_path)) == ["one"]
    assert kinds(tail.poll()) == ["one"]
    assert tail.poll() == []
    put(path, whole[20:-1])
    assert tail.poll() == []
    put(path, "\n" + line("three"))
    assert tail.poll() == [json.loads(whole), json.loads(line("three"))]
    assert kinds(read_events(tmp_path)) == ["one", "two", "three"]
    assert tail.poll() == []


def test_full_files_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number in (1_000_000, 999_999, 1_000_001):  # a name's order is not a number's
        put(tmp_path / rotated_name(number), line(f"of {number}"))
    put(tmp_path / "events.jsonl", line("newest"))
    assert kinds(read_events(tmp_path)) == ["of 999999", "of 1000000", "of 1000001", "newest"]


def test_the_rest_of_a_file_that_is_renamed_while_it_is_read_comes_before_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    put(path, line("one") + line("two")[:10])
    tail = EventTail(tmp_path)
    assert kinds(tail.poll()) == ["one"]
    put(path, line("two")[10:] + line("three"))
    path.rename(tmp_path / rotated_name(1))
    put(path, line("four"))
    path.rename(tmp_path / rotated_name(2))
    assert kinds(tail.poll()) == ["two", "three", "four"]  # a run killed now has no events.jsonl
    put(path, line("five"))
    assert kinds(tail.poll()) == ["five"]
    assert kinds(read_events(tmp_path)) == ["one", "two", "three", "four", "five"]


def test_a_tail_beside_a_writer_that_rotates_misses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    path, written = tmp_path / "events.jsonl", 3000
    done, polled = threading.Event(), threading.Event()

    def write() -> None:
        for number in range(written):
            put(path, line("step", step=number))
            if number % 7 == 0:
                path.rename(tmp_path / rotated_name(number // 7 + 1))
            if number == written // 2:
                polled.wait(60)
        done.set()

    put(tmp_path / "settings.yaml", "")
    tail, found = EventTail(tmp_path), []
    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        found += tail.poll()
        polled.set()
    writer.join()
    found += tail.poll()
    assert [event["step"] for event in found] == list(range(written))


@pytest.mark.parametrize("between", ["open", "list"])
def test_a_rename_at_the_worst_moment_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, between: str
) -> None:
    """Once when events.jsonl was chosen but not opened, once when it has been read to its end."""
    path = tmp_path / "events.jsonl"
    put(path, line("one"))
    tail = EventTail(tmp_path)
    tail.poll()

    def rotate() -> None:
        monkeypatch.undo()
        put(path, line("two"))
        path.rename(tmp_path / rotated_name(1))
        put(path, line("three"))

    if between == "open":
        opened: Callable[..., Any] = reading._opened

        def late(path: Path) -> Any:
            rotate()
            return opened(path)

        monkeypatch.setattr(reading, "_opened", late)
    else:
        full = EventTail._full
        looks = iter((False, True))

        def look(self: EventTail) -> bool:
            if next(looks):
                rotate()
            return full(self)

        monkeypatch.setattr(EventTail, "_full", look)
    assert kinds(tail.poll()) == ["two", "three"]
    assert tail.poll() == []


def test_what_a_kill_tore_is_left_out_and_damage_is_told(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    put(
        path, line("started") + '{"schema": 1, "ev\n' + line("resumed") + "\0\0\n" + line("step") + "[" * 100_000 + "\n"
    )
    begins = len(line("started") + '{"schema": 1, "ev\n' + line("resumed"))
    first, second, bad, step, last = read_events(tmp_path)
    assert kinds((first, second, bad, step, last)) == ["started", "resumed", "unreadable", "step", "unreadable"]
    assert bad["message"] == f"events.jsonl has a line that is no event, at byte {begins:,}."
    assert (bad["schema"], bad["t"]) == (1, 1.5)
    tail = EventTail(tmp_path)
    assert kinds(tail.poll()) == ["started", "resumed", "unreadable", "step"]  # a `resumed` may follow
    put(path, line("resumed"))
    assert kinds(tail.poll()) == ["resumed"]
    path.rename(tmp_path / rotated_name(1))
    put(tmp_path / rotated_name(1), '{"half')
    put(path, line("step"))
    assert kinds(tail.poll()) == ["unreadable", "step"]


def test_numbers_that_are_not_finite_are_numbers_again_and_texts_stay_texts(tmp_path: Path) -> None:
    told = line("step", loss="nan", accepted_K=[1, "inf"], best={"held_out_loss": "-inf"}, s="inf", message="nan")
    put(tmp_path / "events.jsonl", told + line("started", settings={"train": {"lr": "nan"}}, host="inf", loss="a nan"))
    step, started = read_events(tmp_path)
    assert math.isnan(step["loss"])
    assert (step["accepted_K"], step["best"], step["s"]) == ([1, math.inf], {"held_out_loss": -math.inf}, math.inf)
    assert step["message"] == "nan"
    assert (started["settings"], started["host"], started["loss"]) == ({"train": {"lr": "nan"}}, "inf", "a nan")


def test_a_folder_that_was_begun_anew_is_read_from_its_beginning(tmp_path: Path) -> None:
    put(tmp_path / rotated_name(1), line("one"))
    put(tmp_path / "events.jsonl", line("two") + line("three"))
    tail = EventTail(tmp_path)
    assert kinds(tail.poll()) == ["one", "two", "three"]
    (tmp_path / rotated_name(1)).unlink()
    (tmp_path / "events.jsonl").write_text(line("anew"))
    assert kinds(tail.poll()) == ["anew"]


def test_a_run_that_has_written_nothing_yet_is_one(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").touch()
    tail = EventTail(tmp_path)
    assert tail.poll() == []
    put(tmp_path / "events.jsonl", line("started"))
    assert kinds(tail.poll()) == ["started"]


def test_what_is_no_run_is_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for place, why in (
        (tmp_path, "it has neither events.jsonl nor settings.yaml"),
        (tmp_path / "none", "not there"),
        (file, "a file"),
    ):
        for read in (read_events, EventTail):
            with pytest.raises(UserError, match=rf"{place}.*{why}.*Name the run_dir"):
                read(place)


def test_events_of_a_newer_schema_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    newer = tmp_path / "newer"
    newer.mkdir()
    put(newer / "events.jsonl", line("started") + '{"schema": 7, "when": 5}\n')
    with pytest.raises(UserError, match=r"schema 7, but this version of paceline reads 1\. Update paceline"):
        list(read_events(newer))
    with pytest.raises(UserError, match="schema 7"):
        EventTail(newer).poll()
    for number in (2, 4):  # the first ones may have been removed to make room
        put(tmp_path / rotated_name(number), line(str(number)))
    events = read_events(tmp_path)
    assert next(events)["event"] == "2"
    with pytest.raises(UserError, match=r"a file is missing, events-000003\.jsonl"):
        next(events)


def test_what_might_never_end_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events.jsonl")
    with pytest.raises(UserError, match=r"^A run's events are in a file, but .*/events.jsonl is none: copy the whole"):
        EventTail(tmp_path).poll()
    (tmp_path / "events.jsonl").rename(tmp_path / "fifo")
    (tmp_path / "events.jsonl").symlink_to("/dev/null")
    with pytest.raises(UserError, match=r"^A run's events are in a file, but "):
        list(read_events(tmp_path))
