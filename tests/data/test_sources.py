"""Input files are cut into pieces whose rows, read in any order, are the file's."""

import hashlib
import json
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
    assert [row.rstrip(b"\n") for _, row in got] == want
    assert [number for number, _ in got] == list(range(1, len(want) + 1))
    assert file.rows == len(want)


def table_rows(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"p{i}", "ids": list(range(i % 5)), "m": [{"a": i} if i % 2 else {"b": "x"}]} for i in range(count)
    ]


def plain(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in row.items()}


@pytest.mark.usefixtures("piece_bytes")
@pytest.mark.parametrize("kind", ["parquet", "stream", "file"])
def test_tables(tmp_path: Path, kind: str) -> None:
    rows = table_rows(100)
    table = pa.Table.from_pylist(rows)
    path = tmp_path / ("a.parquet" if kind == "parquet" else "a.arrow")
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=7)
    else:
        with (pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file)(str(path), table.schema) as out:
            out.write_table(table, max_chunksize=7)
    got = all_rows(path)
    assert [number for number, _ in got] == list(range(1, 101))
    assert [plain(row) for _, row in got] == rows
    assert isinstance(got[3][1]["ids"], np.ndarray), "no Python object a token"


@pytest.mark.usefixtures("piece_bytes")
def test_lists_with_a_null_stay_lists(tmp_path: Path) -> None:
    rows = [{"ids": [1, None]}, {"ids": [2]}, {"other": 3}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert [row for _, row in all_rows(tmp_path / "a.parquet")] == [{"ids": [1, None]}, {"ids": [2]}, {}]


def test_folders(tmp_path: Path) -> None:
    datasets.Dataset.from_list(table_rows(10)).save_to_disk(tmp_path / "saved", num_shards=2)
    assert [path.name[:10] for path in find_files([tmp_path / "saved"])] == ["data-00000", "data-00001"]
    loose = tmp_path / "loose"
    loose.mkdir()
    for name in ("b.jsonl", "a.jsonl", "notes.txt"):
        (loose / name).write_text("{}")
    assert find_files([loose]) == [loose / "a.jsonl", loose / "b.jsonl"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "no input file"),
        ("a.csv", b"x", r"must end in \.jsonl, \.parquet or \.arrow or be a folder, got '\.csv'"),
        ("a.parquet", b"PAR1 nonsense", r"a\.parquet cannot be read"),
        ("a.arrow", b"nonsense that is no Arrow", r"a\.arrow cannot be read"),
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
