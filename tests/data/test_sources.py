"""Input files are cut into pieces whose rows, read in any order, are the file's."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data import sources
from paceline.data.sources import find_files, inspect_file, read_rows
from paceline.records import UserError


def all_rows(path: Path) -> list[tuple[int, Any]]:
    """Rows of the pieces, the last piece first, in order again."""
    pieces = inspect_file(path).pieces
    return sorted((row for piece in reversed(pieces) for row in read_rows(piece)), key=lambda row: row[0])


@pytest.fixture(params=[1, 40, 1 << 20], ids=["a piece a line", "small pieces", "one piece"])
def piece_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sources, "_SMALLEST", request.param)
    monkeypatch.setattr(sources, "_LARGEST", request.param)
    return int(request.param)


@pytest.mark.parametrize("end", ["\n", ""])
def test_json_lines(tmp_path: Path, piece_bytes: int, end: str) -> None:
    lines = [json.dumps({"text": "é" * (i % 23)}) for i in range(100)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines) + end, encoding="utf-8")
    assert [(number, row.decode().rstrip("\n")) for number, row in all_rows(path)] == list(enumerate(lines, 1))
    file = inspect_file(path)
    assert (file.rows, file.sha256) == (100, hashlib.sha256(path.read_bytes()).hexdigest())
    assert sum(piece.rows for piece in file.pieces) == 100
    if piece_bytes == 1:
        assert len(file.pieces) == 100
    for piece in file.pieces:
        assert piece.sha256 == hashlib.sha256(path.read_bytes()[piece.start : piece.end]).hexdigest()


@given(
    st.lists(st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"-")), max_size=12),
    st.integers(1, 30),
    st.booleans(),
)
def test_any_lines_and_any_piece_size(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], step: int, ended: bool
) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes(b"\n".join(lines) + (b"\n" if ended and lines else b""))
    want = path.read_bytes().split(b"\n")
    want = want[:-1] if want[-1] == b"" else want
    file = sources._inspect_lines(path, step)
    got = [row for piece in file.pieces for row in read_rows(piece)]
    assert [(number, row.rstrip(b"\n")) for number, row in got] == [
        (number, row) for number, row in enumerate(want, 1) if row.strip()
    ]
    assert file.rows == len(want)


KINDS = ["parquet", "stream", "file"]


def table_rows(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"p{i}", "input_ids": list(range(i % 5)), "messages": [{"a": i} if i % 2 else {"b": "x"}]}
        for i in range(count)
    ]


def plain(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in row.items()}


def write_table(folder: Path, kind: str, rows: list[dict[str, Any]], group: int) -> Path:
    table = pa.Table.from_pylist(rows)
    path = folder / ("a.parquet" if kind == "parquet" else "a.arrow")
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=group)
    else:
        with (pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file)(str(path), table.schema) as out:
            out.write_table(table, max_chunksize=group)
    return path


@pytest.mark.usefixtures("piece_bytes")
@pytest.mark.parametrize("group", [7, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_tables(tmp_path: Path, kind: str, group: int) -> None:
    rows = table_rows(100)
    path = write_table(tmp_path, kind, rows, group)
    got = all_rows(path)
    assert [number for number, _ in got] == list(range(1, 101))
    assert [plain(row) for _, row in got] == rows
    assert isinstance(got[3][1]["input_ids"], np.ndarray), "no Python object a token"


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_of_one_group_is_cut_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(sources, "_TABLE_ROWS", 16)
    path = write_table(tmp_path, kind, table_rows(1000), 1000)
    monkeypatch.setattr(sources, "_SMALLEST", path.stat().st_size // 4 + 1)
    assert [(piece.first_line, piece.rows) for piece in inspect_file(path).pieces] == [(1, 333), (334, 333), (667, 334)]
    assert [number for number, _ in all_rows(path)] == list(range(1, 1001))
    monkeypatch.setattr(sources, "_SMALLEST", 1)
    monkeypatch.setattr(sources, "_LARGEST", 1)
    assert len(inspect_file(path).pieces) == 32, "each of them decodes the group from its start"


def test_a_large_group_is_not_read_at_once(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    table = pa.table({"text": [rng.bytes(4000).hex() for _ in range(4000)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=4000, use_dictionary=False)
    del table
    pieces = inspect_file(tmp_path / "a.parquet").pieces
    assert len(pieces) > 1
    before = pa.total_allocated_bytes()
    held = max(pa.total_allocated_bytes() for _ in read_rows(pieces[-1])) - before
    assert held < (tmp_path / "a.parquet").stat().st_size / 2


def test_small_groups_are_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_table(tmp_path, "parquet", table_rows(1000), 9)
    monkeypatch.setattr(sources, "_SMALLEST", path.stat().st_size // 5)
    assert {piece.start % 9 for piece in inspect_file(path).pieces} == {0}


def test_blank_lines_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\n{"a": 1}\n \t\r\n{"a": 2}\n\n')
    assert all_rows(tmp_path / "a.jsonl") == [(2, b'{"a": 1}\n'), (4, b'{"a": 2}\n')]


@pytest.mark.parametrize("change", ["shorter", "other", "longer"])
def test_lines_that_change_while_they_are_read(tmp_path: Path, change: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n' * 9 + '{"a": 2}')
    (piece,) = inspect_file(path).pieces
    text = path.read_text()
    path.write_text({"shorter": text[:40], "other": text.replace("1", "3"), "longer": f"{text}0"}[change])
    rows = read_rows(piece)
    with pytest.raises(
        UserError, match=r"a\.jsonl changed while it was read \(rows 1 to 10\); run the command again\."
    ):
        for _ in range(100):
            next(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_that_loses_rows_while_it_is_read(tmp_path: Path, kind: str) -> None:
    (piece,) = inspect_file(write_table(tmp_path, kind, table_rows(20), 10)).pieces
    write_table(tmp_path, kind, table_rows(15), 10)
    with pytest.raises(UserError, match=r"changed while it was read \(rows 1 to 20\); run the command again\."):
        list(read_rows(piece))


def test_arrow_files_are_mapped_without_reading_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pa.memory_map asks the system for every batch that is looked at, also while rows are only counted."""
    path = write_table(tmp_path, "stream", table_rows(20), 10)
    monkeypatch.setattr(pa, "memory_map", None)
    assert len(all_rows(path)) == 20


@pytest.mark.usefixtures("piece_bytes")
def test_lists_with_a_null_stay_lists(tmp_path: Path) -> None:
    rows = [{"prompt_ids": [1, None], "completion_ids": [3]}, {"prompt_ids": [2]}, {"completion_ids": [4]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert [row for _, row in all_rows(tmp_path / "a.parquet")] == rows


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_value_that_cannot_be_read_spoils_its_row_alone(tmp_path: Path, kind: str) -> None:
    """And nothing where no row needs it: bad UTF-8, times that Python does not know."""
    texts = pa.array([b"a", b"\xff", b"c"])
    table = pa.table(
        {
            "text": pa.Array.from_buffers(pa.string(), 3, texts.buffers()),
            "note": pa.Array.from_buffers(pa.string(), 3, texts.buffers()),
            "far": pa.array([2**50] * 3, pa.timestamp("ms")),
            "where": pa.array([0] * 3, pa.timestamp("s", tz="Mars/Olympus")),
            "system": ["s"] * 3,
        }
    )
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_stream(str(path), table.schema) as out:
            out.write_table(table)
    first, second, third = [row for _, row in all_rows(path)]
    assert (first, third) == ({"text": "a", "system": "s"}, {"text": "c", "system": "s"})
    assert (second.row, second.error.reason) == ({"system": "s"}, "unreadable value")
    assert str(second.error).startswith("Column text cannot be read: UnicodeDecodeError, 'utf-8' codec can't decode")


def test_a_table_without_usable_columns_names_those_that_it_has(tmp_path: Path) -> None:
    for columns in ({"question": ["a", "b"], "answer": ["c", "d"]}, {"prompt": ["a", "b"], "answer": ["c", "d"]}):
        pq.write_table(pa.table(columns), tmp_path / "a.parquet")
        ends = all_rows(tmp_path / "a.parquet")
        assert [(number, row.error.reason) for number, row in ends] == [(1, "unknown form"), (2, "unknown form")]
        assert str(ends[0][1].error).endswith(f"got the keys {', '.join(columns)}.")


def test_folders(tmp_path: Path) -> None:
    datasets.Dataset.from_list(table_rows(10)).save_to_disk(tmp_path / "saved", num_shards=2)
    assert [path.name[:10] for path in find_files([tmp_path / "saved"])] == ["data-00000", "data-00001"]
    loose = tmp_path / "loose"
    (loose / "pictures").mkdir(parents=True)
    names = ("a.jsonl", "b.parquet", "c.JSONL", "d.arrow", "e.Parquet")
    for name in (*reversed(names), "notes.txt", "README.md", ".hidden.json", "dataset_info.json", "pictures/a.png"):
        (loose / name).write_text(name)
    assert find_files([loose]) == [loose / name for name in names]
    (tmp_path / "upper.JSONL").write_text('{"text": "x"}')
    assert all_rows(find_files([tmp_path / "upper.JSONL"])[0]) == [(1, b'{"text": "x"}')]


@pytest.mark.parametrize("other", ["a.json", "a.jsonl.gz", "b.CSV", "a.tsv", "a.zst", "a.zip", "in/x/a.parquet"])
def test_a_folder_with_data_of_other_kinds_is_one_sentence(tmp_path: Path, other: str) -> None:
    for name in ("a.jsonl", other):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match=rf"are read, and .* holds {other} too\. Convert it or move it away"):
        find_files([tmp_path])


def test_inputs_are_regular_files_given_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text("{}")
    Path("link.jsonl").symlink_to("a.jsonl")
    for other in ("a.jsonl", "./a.jsonl", "link.jsonl", "."):
        with pytest.raises(UserError, match=r"must be given once, got \S+ and \S+\.jsonl, which are one file\. Leave"):
            find_files([Path("a.jsonl"), Path(f"{tmp_path}/{other}")])
    Path("link.jsonl").unlink()
    os.mkfifo("pipe.jsonl")
    Path("null.jsonl").symlink_to("/dev/null")
    for name in ("pipe.jsonl", "null.jsonl"):
        with pytest.raises(UserError, match=f"Input {name} must be a regular file, got a pipe or a device"):
            find_files([Path(name)])
    with pytest.raises(UserError, match=r"Input null\.jsonl must be a regular file"):
        find_files([Path()])
    odd = Path(os.fsdecode(b"\xff.jsonl"))
    odd.write_text("{}")
    with pytest.raises(UserError, match=r"The name of input '\\udcff.jsonl' must be UTF-8"):
        find_files([odd])


def test_an_arrow_stream_that_was_cut_between_two_batches(tmp_path: Path) -> None:
    path = write_table(tmp_path, "stream", table_rows(20), 10)
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])  # as a writer leaves it that was killed
    with pytest.raises(
        UserError, match=r"must end with its end-of-stream mark, and .*a\.arrow does not, .* Write it ag"
    ):
        inspect_file(path)
    path.write_bytes(whole)
    assert inspect_file(path).rows == 20
    table = pa.Table.from_pylist(table_rows(20))
    old = pa.ipc.IpcWriteOptions(use_legacy_format=True)
    with pa.ipc.new_stream(str(path), table.schema, options=old) as out:
        out.write_table(table)
    assert inspect_file(path).rows == 20


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "no input file"),
        ("a.csv", b"x", r"must end in \.jsonl, \.parquet or \.arrow or be a folder, got '\.csv'"),
        ("a.parquet", b"PAR1 nonsense", r"a\.parquet cannot be read"),
        ("a.arrow", b"nonsense that is no Arrow", r"a\.arrow cannot be read"),
        ("a.arrow", b"", r"a\.arrow cannot be read: it is empty\."),
    ],
)
def test_unreadable_files_are_one_sentence(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        inspect_file(find_files([tmp_path / name])[0])


def test_a_folder_of_nothing_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no \.jsonl, \.parquet or \.arrow files"):
        find_files([tmp_path])


@pytest.mark.parametrize(("text", "rows"), [("", 0), ("{}", 1), ("{}\n", 1), ("{}\n\n{}", 3)])
def test_inspect_counts_rows(tmp_path: Path, text: str, rows: int) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    assert inspect_file(tmp_path / "a.jsonl").rows == rows
