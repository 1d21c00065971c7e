"""Damaged bytes are found, by command and in the background."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.data import verify
from paceline.data.store import CompletionDataset, open_dataset
from paceline.data.verify import BackgroundCheck
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
