"""The dataset against the rows that went in, and against `datasets`."""

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest

from paceline.data import writer
from paceline.data.manifest import check_fits, tokenizer_fingerprint
from paceline.data.store import CompletionDataset, find_token, open_dataset
from paceline.data.writer import check_place, writing
from paceline.records import UserError

Make = Callable[..., CompletionDataset]


@pytest.fixture
def rows() -> list[tuple[list[int], int]]:
    rng = np.random.default_rng(0)
    return [(rng.integers(10, 300, rng.integers(4, 40)).tolist(), int(rng.integers(1, 3))) for _ in range(50)]


@pytest.fixture(params=[1 << 20, 60], ids=["one chunk", "many chunks"])
def flush(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "_FLUSH_TOKENS", request.param)


def assert_holds(dataset: CompletionDataset, rows: list[tuple[list[int], int]]) -> None:
    assert dataset.lengths.tolist() == [len(ids) for ids, _ in rows]
    assert dataset.lengths.dtype == dataset.candidates.dtype == np.int32
    assert dataset.candidates.tolist() == [len(ids) - prompt - 1 for ids, prompt in rows]
    for i, (ids, prompt) in enumerate(rows):
        got, mask = dataset.row(i)
        assert got.tolist() == ids
        assert mask.tolist() == [False] * prompt + [True] * (len(ids) - prompt)
        assert mask.dtype == np.bool_
        assert not got.flags.writeable, "a view of the mapped file"


@pytest.mark.usefixtures("flush")
def test_rows_come_back(make_dataset: Make, rows: list[tuple[list[int], int]]) -> None:
    dataset = make_dataset(rows)
    assert_holds(dataset, rows)
    manifest = dataset.manifest
    assert (manifest.rows, manifest.tokens) == (50, sum(len(ids) for ids, _ in rows))
    assert manifest.supervised_tokens == sum(len(ids) - prompt for ids, prompt in rows)
    assert manifest.longest == max(len(ids) for ids, _ in rows)
    assert json.loads((dataset.folder / "manifest.json").read_text())["origin"]["target"] == "tiny"


@pytest.mark.usefixtures("flush")
def test_datasets_opens_the_folder(make_dataset: Make, rows: list[tuple[list[int], int]]) -> None:
    loaded = datasets.load_from_disk(make_dataset(rows).folder)
    assert loaded["input_ids"][:] == [ids for ids, _ in rows]
    assert loaded["loss_mask"][7] == [False] * rows[7][1] + [True] * (len(rows[7][0]) - rows[7][1])
    assert set(loaded.column_names) == {"input_ids", "loss_mask", "candidates", "source", "line", "tokens_cut"}
    assert loaded["line"][:] == list(range(1, 51))


@pytest.mark.usefixtures("flush")
def test_a_folder_saved_by_datasets_opens(make_dataset: Make, rows: list[tuple[list[int], int]]) -> None:
    """Several files, each cut out of a larger table; nobody says whose ids they are."""
    made = make_dataset(rows)
    again = made.folder.with_name("again")
    datasets.load_from_disk(made.folder).save_to_disk(again, num_shards=3)
    dataset = open_dataset(again)
    assert_holds(dataset, rows)
    for field in ("rows", "tokens", "supervised_tokens", "longest", "largest_id"):
        assert getattr(dataset.manifest, field) == getattr(made.manifest, field)
    with pytest.raises(UserError, match=r"no manifest\.json.*target other.*needs its own \(aaaa"):
        check_fits(dataset.manifest, "a" * 64, "other")


def foreign(rows: list[tuple[list[int], int]]) -> datasets.Dataset:
    """Rows as `datasets` infers them from lists: 64-bit ids, a mask of numbers, a column that nobody needs."""
    ids = [ids for ids, _ in rows]
    masks = [[0] * prompt + [1] * (len(ids) - prompt) for ids, prompt in rows]
    return datasets.Dataset.from_dict({"id": list(range(len(rows))), "loss_mask": masks, "input_ids": ids})


def test_columns_of_other_types_open(tmp_path: Path, rows: list[tuple[list[int], int]]) -> None:
    foreign(rows).save_to_disk(tmp_path / "foreign", num_shards=2)
    assert_holds(open_dataset(tmp_path / "foreign"), rows)


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_plain_arrow_shards_open(tmp_path: Path, rows: list[tuple[list[int], int]], kind: str) -> None:
    table = foreign(rows).data.table
    new = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    for i in range(2):
        with new(str(tmp_path / f"part{i}.arrow"), table.schema) as out:
            out.write_table(table.slice(25 * i, 25), max_chunksize=7)
    assert_holds(open_dataset(tmp_path), rows)


def test_foreign_files_without_the_columns_are_one_sentence(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "texts")
    with pytest.raises(UserError, match=r"must have the columns input_ids .*, got text: string"):
        open_dataset(tmp_path / "texts")
    datasets.DatasetDict({"a": datasets.Dataset.from_dict({"x": [1]})}).save_to_disk(tmp_path / "dict")
    with pytest.raises(UserError, match=r"holds the splits a and not one dataset"):
        open_dataset(tmp_path / "dict")


@pytest.mark.usefixtures("flush")
def test_find_token(make_dataset: Make, rows: list[tuple[list[int], int]]) -> None:
    dataset = make_dataset(rows)
    for token in (5, *range(10, 300)):
        holders = [i for i, (ids, _) in enumerate(rows) if token in ids]
        assert find_token(dataset, token) == (holders[0] if holders else None)


def test_fingerprint_follows_the_rows_alone(
    make_dataset: Make, rows: list[tuple[list[int], int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make_dataset(rows, "a").fingerprint
    monkeypatch.setattr(writer, "_FLUSH_TOKENS", 60)
    assert make_dataset(rows, "b").fingerprint == first
    ids, prompt = rows[3]
    assert make_dataset([*rows[:3], (ids, prompt + 1), *rows[4:]], "c").fingerprint != first


def test_threads_read_the_same_rows(make_dataset: Make, rows: list[tuple[list[int], int]]) -> None:
    dataset = make_dataset(rows)
    wrong: list[int] = []

    def check(offset: int) -> None:
        for i in range(2000):
            at = (i * 7 + offset) % len(rows)
            if dataset.row(at)[0].tolist() != rows[at][0]:
                wrong.append(at)

    threads = [threading.Thread(target=check, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_interrupted_writing_leaves_nothing(tmp_path: Path) -> None:
    place = tmp_path / "dataset"
    with pytest.raises(KeyboardInterrupt), writing(place) as made:
        made.add(np.array([1, 2, 3]), np.array([False, True, True]), 1)
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_interrupted_overwriting_keeps_the_old(make_dataset: Make, rows: list[tuple[list[int], int]]) -> None:
    folder = make_dataset(rows).folder
    with pytest.raises(KeyboardInterrupt), writing(folder, overwrite=True):
        raise KeyboardInterrupt
    assert_holds(open_dataset(folder), rows)


def test_a_taken_place_is_refused(make_dataset: Make, rows: list[tuple[list[int], int]], tmp_path: Path) -> None:
    folder = make_dataset(rows).folder
    with pytest.raises(UserError, match="There is a dataset at"), writing(folder):
        pass
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match="never replaced"), writing(tmp_path / "home", overwrite=True):
        pass


def test_an_unwritable_place_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot be written"), writing(tmp_path / "file" / "dataset"):
        pass


def damage(folder: Path, kind: str) -> None:
    data, manifest = folder / "data-00000-of-00001.arrow", folder / "manifest.json"
    if kind == "nothing":
        manifest.unlink()
        data.unlink()
        (folder / "state.json").unlink()
    elif kind == "cut manifest":
        manifest.write_text(manifest.read_text()[:50])
    elif kind == "newer manifest":
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 99}))
    elif kind == "other count":
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "rows": 49}))
    elif kind == "shard elsewhere":
        tree = json.loads(manifest.read_text())
        tree["shards"][0]["file"] = "../other.arrow"
        manifest.write_text(json.dumps(tree))
    elif kind == "same size, no end":
        whole = data.read_bytes()
        data.write_bytes(whole[:-100] + bytes(100))
    elif kind == "cut data":
        data.write_bytes(data.read_bytes()[:-900])
    else:
        data.unlink()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("nothing", "has no manifest.json"),
        ("cut manifest", "cannot be understood"),
        ("newer manifest", "version 99"),
        ("other count", "holds 50 rows, its manifest says 49"),
        ("cut data", r"data-00000-of-00001\.arrow must have the [\d,]+ bytes that the manifest lists"),
        ("same size, no end", r"data-00000-of-00001\.arrow must have"),
        ("no data", r"data-00000-of-00001\.arrow cannot be read: No such file"),
        ("shard elsewhere", "a shard lies outside the folder"),
    ],
)
def test_damage_is_one_sentence(make_dataset: Make, rows: list[tuple[list[int], int]], kind: str, message: str) -> None:
    folder = make_dataset(rows).folder
    damage(folder, kind)
    with pytest.raises(UserError, match=message):
        open_dataset(folder)


def test_tokenizer_fingerprint(make_tokenizer: Callable[..., Any]) -> None:
    one, two = make_tokenizer(), make_tokenizer()
    made = tokenizer_fingerprint(one)
    two(["a", "b b b"], padding="longest", truncation=True, max_length=2)
    assert tokenizer_fingerprint(two) == made, "padding is the state of a call"
    two.add_tokens(["<new>"])
    assert tokenizer_fingerprint(two) != made


def test_another_tokenizer_is_refused_naming_both(make_dataset: Make, rows: list[tuple[list[int], int]]) -> None:
    manifest = make_dataset(rows).manifest
    check_fits(manifest, "f" * 64, "other/target")
    with pytest.raises(UserError, match="ffff.*other/target.*aaaa"):
        check_fits(replace(manifest, origin=replace(manifest.origin, target="tiny")), "a" * 64, "other/target")


def test_a_folder_that_holds_more_is_never_replaced(
    make_dataset: Callable[..., CompletionDataset],
) -> None:
    dataset = make_dataset([([5, 6, 7], 1)])
    (dataset.folder / "run").mkdir()
    with pytest.raises(UserError, match=r"holds more than a dataset \(run\)"):
        check_place(dataset.folder, overwrite=True)


def test_the_largest_id_is_written_down(make_dataset: Make) -> None:
    assert make_dataset([([5, 60, 7], 1), ([8, 9, 99, 4], 2)]).manifest.largest_id == 99


@pytest.mark.parametrize("change", [{"rows": "2"}, {"tokens": None}, {"longest": 1.5}])
def test_a_manifest_with_wrong_types_is_refused(
    make_dataset: Callable[..., CompletionDataset], change: dict[str, object]
) -> None:
    folder = make_dataset([([5, 6, 7], 1)]).folder
    tree = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(tree | change))
    with pytest.raises(UserError, match="cannot be understood"):
        open_dataset(folder)
