"""Damaged bytes are found, by command and in the background."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.data import verify
from paceline.data.store import CompletionDataset, open_dataset
from paceline.data.verify import BackgroundCheck, check_counts, watched
from paceline.recipes.prepare import verify_datasets
from paceline.records import RunError, UserError

ROWS = [([5, 6, 7, 8], 1), ([9, 10, 11], 1)]


def flip(folder: Path) -> None:
    """Flip one bit in the middle; size and footer stay as they are."""
    path = folder / "data-00000-of-00001.arrow"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_whole_datasets(make_dataset: Callable[..., CompletionDataset]) -> None:
    one, two = make_dataset(ROWS, "one"), make_dataset(ROWS[:1], "two")
    seen: list[tuple[int, int | None]] = []
    summary = verify_datasets([one.folder, two.folder], lambda *counts: seen.append(counts))
    assert (summary["rows"], summary["shards"], summary["whole"]) == (3, 2, True)
    assert seen == [(1, 2), (2, 2)]
    check = BackgroundCheck([one, two])
    check.finish()
    check.close()


def test_a_flipped_bit_names_the_shard(make_dataset: Callable[..., CompletionDataset]) -> None:
    dataset = make_dataset(ROWS)
    flip(dataset.folder)
    with pytest.raises(UserError, match=r"data-00000-of-00001\.arrow is damaged: its sha256"):
        verify_datasets([dataset.folder])
    check = BackgroundCheck([dataset])
    with pytest.raises(RunError, match=r"data-00000-of-00001\.arrow is damaged"):
        check.finish()
    with pytest.raises(RunError, match="damaged"):
        check.look()


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("bus"), SystemExit(3)])
def test_a_check_that_fails_is_no_check_that_passed(
    make_dataset: Callable[..., CompletionDataset], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def failing(folder: Path, *rest: object) -> None:
        if folder.name == "two":
            raise error

    monkeypatch.setattr(verify, "check_shard", failing)
    check = BackgroundCheck([make_dataset(ROWS, "one"), make_dataset(ROWS, "two")])
    kind = type(error).__name__
    with pytest.raises(RunError, match=rf"failed at .*two/data-00000-of-00001\.arrow \({kind}: .*two --verify"):
        check.finish()
    with pytest.raises(RunError, match=kind):
        list(watched(iter([batch_of(0)]), check, cut_short=True))


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [("largest_id", 12, "largest_id is 12 and they have 11"), ("supervised_tokens", 4, "is 4 and they have 5")],
)
def test_counts_are_held_against_ids_and_masks(
    make_dataset: Callable[..., CompletionDataset], key: str, value: int, said: str
) -> None:
    folder = make_dataset(ROWS).folder
    check_counts(open_dataset(folder))
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(UserError, match=rf"manifest of .*dataset must say .*{said}"):
        check_counts(open_dataset(folder))


def test_a_negative_id_is_told(make_dataset: Callable[..., CompletionDataset]) -> None:
    with pytest.raises(UserError, match=r"must not be negative, but .*dataset holds -2"):
        check_counts(make_dataset([([5, -2, 7], 1)]))
    check_counts(make_dataset([], "empty"))


def batch_of(epoch: int) -> Any:
    return SimpleNamespace(epoch=epoch)


@pytest.fixture
def held(make_dataset: Callable[..., CompletionDataset], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A check of two shards whose second one takes until `go` is set, and is damaged if `bad` is."""
    found = SimpleNamespace(go=threading.Event(), bad=False, told=[])

    def checked(folder: Path, *rest: object) -> None:
        if folder.name == "two":
            assert found.go.wait(10)
            if found.bad:
                raise UserError("two is damaged")

    monkeypatch.setattr(verify, "check_shard", checked)
    found.check = BackgroundCheck([make_dataset(ROWS, "one"), make_dataset(ROWS, "two")])
    yield found
    found.go.set()
    found.check.close()


def reading(held: Any, epochs: list[int], *, cut_short: bool) -> tuple[list[object], threading.Thread]:
    """Return what has come through so far, and the thread in which it comes."""
    got: list[object] = []

    def take() -> None:
        try:
            for batch in watched(map(batch_of, epochs), held.check, cut_short=cut_short, on_whole=held.told.append):
                got.append(batch.epoch)
        except RunError as error:
            got.append(str(error))
        got.append("end")

    thread = threading.Thread(target=take)
    thread.start()
    return got, thread


@pytest.mark.parametrize("bad", [False, True])
def test_a_second_epoch_waits_for_the_checksums(held: Any, bad: bool) -> None:
    held.bad = bad
    got, thread = reading(held, [3, 3, 4, 4], cut_short=True)
    thread.join(0.3)
    assert thread.is_alive()
    assert (got, held.told) == ([3, 3], [])
    held.go.set()
    thread.join(10)
    assert got == ([3, 3, "two is damaged", "end"] if bad else [3, 3, 4, 4, "end"])
    assert held.told == ([] if bad else [2])


@pytest.mark.parametrize("cut_short", [False, True])
def test_the_end_waits_for_them_unless_the_run_is_cut_short(held: Any, cut_short: bool) -> None:
    got, thread = reading(held, [0, 0], cut_short=cut_short)
    thread.join(10 if cut_short else 0.3)
    assert thread.is_alive() != cut_short
    assert got[:2] == [0, 0]
    held.go.set()
    thread.join(10)
    assert got == [0, 0, "end"]
    assert held.told == ([] if cut_short else [2])


def test_without_checksums_there_is_nothing_to_verify(make_dataset: Callable[..., CompletionDataset]) -> None:
    folder = make_dataset(ROWS).folder
    (folder / "manifest.json").unlink()
    with pytest.raises(UserError, match="has no checksum"):
        verify_datasets([folder])
    assert open_dataset(folder).manifest.rows == 2


def test_closing_ends_the_background_check(
    make_dataset: Callable[..., CompletionDataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "_READ", 1)
    dataset = make_dataset([(list(range(5, 100_000)), 1)])
    check = BackgroundCheck([dataset])
    check.close()
    assert "checksum" not in {thread.name for thread in threading.enumerate()}
    check.look()


def test_rows_without_anchors_are_counted(make_dataset: Callable[..., CompletionDataset]) -> None:
    """Also where a chunk begins and ends with empty rows, or holds nothing else."""
    rows = [([], 0), ([5, 6, 7], 1), ([], 0), ([5, 6, 7], 3), ([5, 6, 7, 8], 1), ([], 0)]
    summary = verify_datasets([make_dataset(rows).folder, make_dataset([([], 0)], "empty").folder])
    assert (summary["rows"], summary["rows_without_anchors"]) == (7, 5)
