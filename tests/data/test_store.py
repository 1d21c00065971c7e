"""The dataset against the rows that went in, and against `datasets`."""

import json
import mmap
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.blocks import anchor_candidates
from paceline.data import chunks, columns, store, writer
from paceline.data.chunks import Chunks
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


class Advised(mmap.mmap):
    """A mapping that keeps what it was advised, and refuses what the system would."""

    given: ClassVar[list[tuple[int, ...]]] = []

    def madvise(self, advice: int, start: int = 0, length: int | None = None) -> None:
        Advised.given.append((advice, start))
        super().madvise(advice, start, len(self) - start if length is None else length)


class Unadvisable(mmap.mmap):
    def madvise(self, *advice: int) -> None:
        raise OSError(22, "Invalid argument")


@pytest.fixture
def advice(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    monkeypatch.setattr(store.mmap, "mmap", Advised)
    Advised.given = []
    return Advised.given


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compressed_files_open(
    tmp_path: Path, rows: list[tuple[list[int], int]], codec: str, advice: list[tuple[int, ...]]
) -> None:
    table = foreign(rows * 20).data.table
    with pa.ipc.new_stream(
        tmp_path / "a.arrow", table.schema, options=pa.ipc.IpcWriteOptions(compression=codec)
    ) as out:
        out.write_table(table, max_chunksize=90)
    assert_holds(open_dataset(tmp_path), rows * 20)
    assert [kind for kind, _ in advice] == [mmap.MADV_RANDOM, mmap.MADV_NORMAL], "decompressed parts are in no file"


def test_a_mapping_that_takes_no_advice_opens(
    make_dataset: Make, rows: list[tuple[list[int], int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store.mmap, "mmap", Unadvisable)
    assert_holds(make_dataset(rows), rows)


@pytest.mark.usefixtures("flush")
def test_a_mapping_is_read_at_random_while_it_is_opened_and_with_reading_ahead_from_then_on(
    make_dataset: Make, rows: list[tuple[list[int], int]], advice: list[tuple[int, ...]]
) -> None:
    dataset = make_dataset(rows)
    kinds = [kind for kind, _ in advice]
    assert (kinds[0], kinds[-1]) == (mmap.MADV_RANDOM, mmap.MADV_NORMAL)
    chunks = len(list(dataset.chunks()))
    assert kinds[1:-1] == [mmap.MADV_WILLNEED] * 3 * chunks, "ends of ids and of masks, candidates"
    assert all(start % mmap.PAGESIZE == 0 for _, start in advice)


def marked(count: int, seed: int) -> tuple[list[list[int]], list[list[bool]]]:
    """Rows of 1 to 40 ids with any mask."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 41, count).tolist()
    return [rng.integers(4, 90, n).tolist() for n in lengths], [(rng.random(n) < 0.6).tolist() for n in lengths]


@pytest.mark.parametrize("counted", [1, 64, 1 << 20])
@pytest.mark.parametrize("kind", [pa.bool_(), pa.int8(), pa.int64()])
@pytest.mark.parametrize("large", [False, True])
def test_foreign_masks_are_counted_once_and_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: int, kind: pa.DataType, large: bool
) -> None:
    ids, masks = marked(150, seed=2)
    new = pa.large_list if large else pa.list_
    table = pa.table({"input_ids": pa.array(ids), "loss_mask": pa.array(masks).cast(pa.list_(kind)).cast(new(kind))})
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as out:
        out.write_table(table.slice(0, 70), max_chunksize=33)
        out.write_table(table.slice(70))
    read: list[int] = []
    whole = Chunks._read_marks

    def counting(self: Any, chunk: int, first: int, behind: int) -> np.ndarray:
        read.append(behind - first)
        return whole(self, chunk, first, behind)

    monkeypatch.setattr(chunks, "_COUNTED", counted)
    monkeypatch.setattr(Chunks, "_read_marks", counting)
    dataset = open_dataset(tmp_path)
    assert sum(read) == sum(map(len, ids)), "every mask once"
    assert max(read) <= max(counted, 40)
    assert dataset.manifest.supervised_tokens == sum(map(sum, masks))
    assert dataset.candidates.tolist() == [len(anchor_candidates(np.array(mask))) for mask in masks]
    assert dataset.candidates_of(np.array([149, 0, 70])).tolist() == dataset.candidates[[149, 0, 70]].tolist()
    assert all(dataset.row(i)[1].tolist() == mask for i, mask in enumerate(masks))


@pytest.mark.parametrize("values", [["a", "b"], [1, None], [[1], [2]], [None, None], [1.0, 2.0], [7, 8]])
def test_a_column_that_is_only_called_candidates(tmp_path: Path, values: list[object]) -> None:
    ids = [[5, 6, 7], [8, 9, 10, 11]]
    columns = {"input_ids": ids, "loss_mask": [[0, 1, 1], [0, 1, 1, 1]], "candidates": values}
    table = pa.table(columns)
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as out:
        out.write_table(table)
    assert open_dataset(tmp_path).candidates.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("ids", "mask", "found"), [([5, 6], [1], "2 and 1"), ([5], [1, 1], "1 and 2"), ([], [], "0 and 0")]
)
def test_a_foreign_row_that_cannot_be_used_is_told_with_its_place(
    tmp_path: Path, ids: list[int], mask: list[int], found: str
) -> None:
    good = foreign([([5, 6, 7], 1)] * 9)
    bad = pa.table({"input_ids": [[5], ids, []], "loss_mask": [[1], mask, []]}, good.data.table.select([2, 1]).schema)
    for name, table in (("a", good.data.table.select([2, 1])), ("b", pa.concat_tables([bad.slice(0, 1)] * 4 + [bad]))):
        with pa.ipc.new_stream(tmp_path / f"{name}.arrow", table.schema) as out:
            out.write_table(table)
    with pytest.raises(UserError, match=rf"one or more input_ids .* got {found} in row 5 of .*b\.arrow"):
        open_dataset(tmp_path)


def test_parquet_shards_open_through_a_copy_that_is_made_once(
    tmp_path: Path, rows: list[tuple[list[int], int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    table = foreign(rows).data.table
    (tmp_path / "shards").mkdir()
    for i in range(2):
        pq.write_table(table.slice(25 * i, 25), tmp_path / "shards" / f"part{i}.parquet", row_group_size=7)
    assert_holds(open_dataset(tmp_path / "shards"), rows)
    copies = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache" / "arrow").iterdir()}
    assert_holds(open_dataset(tmp_path / "shards"), rows)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache" / "arrow").iterdir()} == copies
    pq.write_table(table.slice(0, 25), tmp_path / "shards" / "part1.parquet")
    assert_holds(open_dataset(tmp_path / "shards"), [*rows[:25], *rows[:25]])


@pytest.mark.parametrize("kind", ["text", "garbage"])
def test_parquet_files_that_do_not_fit_are_one_sentence(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "shards").mkdir()
    path = tmp_path / "shards" / "a.parquet"
    if kind == "text":
        pq.write_table(pa.table({"text": ["a"]}), path)
    else:
        path.write_bytes(b"PAR1 nonsense")
    with pytest.raises(UserError, match=r"must have the columns|cannot be read as Arrow"):
        open_dataset(tmp_path / "shards")
    assert not list((tmp_path / "cache" / "arrow").iterdir())


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
        ("other count", "rows is 49, but its shards' sum up to 50"),
        ("cut data", r"data-00000-of-00001\.arrow must have the [\d,]+ bytes that the manifest lists"),
        ("same size, no end", r"data-00000-of-00001\.arrow must have"),
        ("no data", r"data-00000-of-00001\.arrow cannot be read: No such file"),
        ("shard elsewhere", r"'\.\./other\.arrow' names no file in the folder"),
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


def change_manifest(folder: Path, key: str, value: object) -> None:
    """Set a key such as shards.0.rows."""
    tree = json.loads((folder / "manifest.json").read_text())
    *way, last = [int(part) if part.isdigit() else part for part in key.split(".")]
    node = tree
    for part in way:
        node = node[part]
    node[last] = value
    (folder / "manifest.json").write_text(json.dumps(tree))


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("rows", "2", "rows: Input should be a valid integer, got '2'"),
        ("tokens", None, "tokens: Input should be a valid integer, got None"),
        ("longest", 1.5, "longest: Input should be a valid integer, got 1.5"),
        ("longest", -3, "longest: Input should be greater than or equal to 0, got -3"),
        ("largest_id", 10**30, "largest_id: Input should be less than"),
        ("supervised_tokens", True, "supervised_tokens: Input should be a valid integer, got True"),
        ("supervised_tokens", 4, "supervised_tokens is 4 of 3 tokens"),
        ("tokens", 4, "tokens is 4, but its shards' sum up to 3"),
        ("more", 1, "more: Unexpected keyword argument"),
        ("version", [], "version"),
        ("shards", {"a": 1}, "shards: Input should be a valid tuple"),
        ("shards.0.tokens", -1, r"shards\.0\.tokens: Input should be greater"),
        ("shards.0.sha256", 5, r"shards\.0\.sha256: Input should be a valid string, got 5"),
        ("shards.0.sha256", None, r"shards\.0\.sha256: .* got None"),
        ("shards.0.sha256", "", r"shards\.0\.sha256: .* got ''"),
        ("shards.0.file", "a\0b", "names no file in the folder"),
        ("shards.0.file", "\ud800", "surrogates not allowed"),
        ("shards.0.file", "..", "names no file in the folder"),
        ("shards.0.file", "", "names no file in the folder"),
        ("origin.tokens_cut", "x", r"origin\.tokens_cut: .* got 'x'"),
        ("origin.truncated", None, r"origin\.truncated: .* got None"),
        ("origin.supervised_cut", [1], r"origin\.supervised_cut: .* got \[1\]"),
        ("origin.quarantined", 5, r"origin\.quarantined: .* got 5"),
        ("origin.quarantined", {"a": "b"}, r"origin\.quarantined\.a: .* got 'b'"),
        ("origin.sources", [5], r"origin\.sources\.0: .* got 5"),
    ],
)
def test_a_manifest_with_wrong_values_is_refused(make_dataset: Make, key: str, value: object, reason: str) -> None:
    folder = make_dataset([([5, 6, 7], 1)]).folder
    change_manifest(folder, key, value)
    with pytest.raises(UserError, match=r"manifest\.json (cannot be understood|has version)") as caught:
        open_dataset(folder)
    assert re.search(reason, str(caught.value))
    assert "\n" not in str(caught.value)


def test_a_source_of_any_name_is_kept(make_dataset: Make) -> None:
    """A file name that is no UTF-8 is written down as Python has it."""
    folder = make_dataset([([5, 6, 7], 1)]).folder
    change_manifest(folder, "origin.sources", [{"path": "\udcff.jsonl"}])
    assert open_dataset(folder).manifest.origin.sources == [{"path": "\udcff.jsonl"}]


@pytest.mark.parametrize("text", ["[" * 50_000, "[]", "5", "null", "{}", '{"version": ' + "9" * 5000 + "}", "\xff"])
def test_what_is_no_manifest_is_one_sentence(make_dataset: Make, text: str) -> None:
    folder = make_dataset([([5, 6, 7], 1)]).folder
    (folder / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=r"^[^\n]*manifest\.json cannot be understood \([^\n]*\)\. Prepare it again\.$"):
        open_dataset(folder)


@pytest.mark.parametrize(
    "text",
    ["[" * 50_000, *(json.dumps({"_data_files": [{"filename": name}]}) for name in ("a\0b", "\ud800", "../a", "", 5))],
)
def test_a_damaged_state_is_one_sentence(tmp_path: Path, rows: list[tuple[list[int], int]], text: str) -> None:
    foreign(rows).save_to_disk(tmp_path / "foreign")
    (tmp_path / "foreign" / "state.json").write_text(text)
    with pytest.raises(UserError, match=r"has no readable state\.json"):
        open_dataset(tmp_path / "foreign")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"longest": 8}, "longest row of dataset .* has 4 tokens, its manifest says 8"),
        ({"shards.0.rows": 3, "rows": 3}, r"data-00000-of-00001\.arrow holds 2 rows, the manifest says 3"),
        ({"shards.0.tokens": 9, "tokens": 9}, r"data-00000-of-00001\.arrow holds 7 tokens, the manifest says 9"),
    ],
)
def test_counts_are_held_against_the_rows(make_dataset: Make, changes: dict[str, int], said: str) -> None:
    folder = make_dataset([([5, 6, 7, 8], 1), ([9, 10, 11], 1)]).folder
    for key, value in changes.items():
        change_manifest(folder, key, value)
    with pytest.raises(UserError, match=said):
        open_dataset(folder)


def overwrite(path: Path, old: list[int], new: list[int]) -> None:
    """Change these 32-bit numbers wherever a file holds them."""
    before, after = (np.array(numbers, np.int32).tobytes() for numbers in (old, new))
    data = path.read_bytes()
    assert before in data
    path.write_bytes(data.replace(before, after))


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ([0, 9, 7, 12], "row 1 of input_ids goes from 9 to 7"),
        ([0, 4, 7, 536_870_924], r".*list offsets .* larger than values array \(length 12\)"),
        ([0, 4, -7, 12], "row 1 of input_ids goes from 4 to -7"),
        ([-1, 4, 7, 12], ".*Negative offsets in list array"),
    ],
)
@pytest.mark.parametrize("manifest", [True, False])
def test_damaged_row_ends_name_the_shard(make_dataset: Make, ends: list[int], said: str, manifest: bool) -> None:
    folder = make_dataset([([5, 6, 7, 8], 1), ([9, 10, 11], 1), ([5, 6, 7, 8, 9], 1)]).folder
    overwrite(folder / "data-00000-of-00001.arrow", [0, 4, 7, 12], ends)
    advice = rf"paceline prepare {folder} --verify"
    if not manifest:
        (folder / "manifest.json").unlink()
        advice = "Write it again"
    with pytest.raises(UserError, match=rf"data-00000-of-00001\.arrow is damaged: {said}\..*{advice}"):
        open_dataset(folder)


def test_rows_and_masks_of_other_lengths_name_the_shard(make_dataset: Make) -> None:
    """Ends that ascend and still are wrong: of the ids alone, and more candidates than a row can have."""
    folder = make_dataset([([5, 6, 7, 8], 1), ([9, 10, 11], 1), ([5, 6, 7, 8, 9], 1)], "{0} {x}").folder
    path = folder / "data-00000-of-00001.arrow"
    whole = path.read_bytes()
    ends = np.array([0, 4, 7, 12], np.int32).tobytes()
    at = whole.index(ends)
    path.write_bytes(whole[:at] + np.array([0, 4, 5, 12], np.int32).tobytes() + whole[at + 16 :])
    with pytest.raises(
        UserError, match=r"arrow is damaged: row 1 has 1 token, 3 mask values, 1 candidate\. .*--verify"
    ):
        open_dataset(folder)
    for found in (-2, 6):
        path.write_bytes(whole)
        overwrite(path, [2, 1, 3], [2, 1, found])
        with pytest.raises(UserError, match=rf"is damaged: row 2 has 5 tokens, 5 mask values, {found} candidates"):
            open_dataset(folder)


def test_a_column_given_twice_is_one_sentence(tmp_path: Path) -> None:
    ids = pa.array([[5, 6, 7]])
    table = pa.Table.from_arrays([ids, ids, pa.array([[0, 1, 1]])], ["input_ids", "input_ids", "loss_mask"])
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as out:
        out.write_table(table)
    with pytest.raises(UserError, match=r"a\.arrow must have the columns .* got input_ids: list.*, input_ids: list"):
        open_dataset(tmp_path)


@pytest.mark.parametrize("value", [2, 3, -1, -100])
@pytest.mark.parametrize("counted", [1, 4, 1 << 20])
def test_a_mask_of_other_numbers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: int, counted: int
) -> None:
    monkeypatch.setattr(columns, "_LOOKED_AT", counted)
    rows = {"input_ids": [[5, 6, 7]] * 9, "loss_mask": [[0, 1, 1]] * 6 + [[0, 1, value]] + [[0, 1, 1]] * 2}
    table = pa.table(rows)
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as out:
        out.write_table(table, max_chunksize=4)
    with pytest.raises(UserError, match=rf"truth values or 0 and 1, got {value} in row 6 of .*a\.arrow"):
        open_dataset(tmp_path)
