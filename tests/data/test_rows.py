"""Every row ends as a sample or in the quarantine; files that cannot be read stop the command."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.data.chat import ChatEncoder
from paceline.data.rows import Quarantine, RowLimits, Sample, read_samples
from paceline.data.sources import find_files, inspect_file
from paceline.records import UserError

LIMITS = RowLimits(max_length=40, on_long="refuse", mask_token_id=2, vocab_size=300)
IDS = {"prompt_ids": [5, 6, 7], "completion_ids": [8, 9, 1]}
PAIR = {"prompt": "what is it?", "completion": "the sum"}
TALK = {"messages": [{"role": "user", "content": "what is it?"}, {"role": "assistant", "content": "the sum"}]}


def read(
    sources: list[Path], tokenizer: Any, *, limits: RowLimits = LIMITS, stop: bool = False
) -> tuple[list[Sample], dict[str, int], list[dict[str, Any]]]:
    place = sources[0].parent / "q.jsonl"
    seen: list[tuple[int, int | None]] = []
    with closing(Quarantine(place, stop=stop)) as quarantine:
        files = [inspect_file(path) for path in find_files(sources)]
        samples = list(
            read_samples(files, ChatEncoder(tokenizer), limits, quarantine, lambda *counts: seen.append(counts))
        )
    entries = [json.loads(line) for line in place.read_text().splitlines()] if place.exists() else []
    total = len(samples) + quarantine.counts.total()
    assert seen[-1] == (total, total), "the counted rows are all accounted for"
    return samples, dict(quarantine.counts), entries


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def test_three_forms(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "a.jsonl", *map(json.dumps, (IDS, PAIR, TALK)))
    (ids, pair, talk), counts, _ = read([file], tokenizer)
    assert ids.input_ids.tolist() == [5, 6, 7, 8, 9, 1]
    assert ids.loss_mask.tolist() == [False] * 3 + [True] * 3
    assert ids.candidates == 2
    assert pair.input_ids.tolist() == talk.input_ids.tolist()
    assert tokenizer.decode(pair.input_ids[pair.loss_mask]) == "the sum<|im_end|>"
    assert counts == {}


def test_ids_go_before_messages(tmp_path: Path, tokenizer: Any) -> None:
    """`paceline generate` writes both; its ids are what the target said."""
    file = write(tmp_path / "a.jsonl", json.dumps({**TALK, **IDS, "finish": "stop"}))
    (sample,), _, _ = read([file], tokenizer)
    assert sample.input_ids.tolist() == [5, 6, 7, 8, 9, 1]


BAD = [
    ("{not json", "not JSON"),
    ("", "not JSON"),
    ("[1, 2]", "not an object"),
    ('{"text": "x"}', "unknown form"),
    ('{"messages": [{"role": "user", "content": "x"}], "tools": [{}]}', "unknown form"),
    ('{"prompt": "x", "completion": ""}', "empty completion"),
    ('{"prompt": "x", "completion": null}', "malformed messages"),
    ('{"prompt_ids": [4], "completion_ids": []}', "empty completion"),
    ('{"prompt_ids": [], "completion_ids": [4, 5]}', "empty prompt"),
    ('{"prompt_ids": [4], "completion_ids": [4, "5"]}', "malformed ids"),
    ('{"prompt_ids": [4], "completion_ids": [4, true]}', "malformed ids"),
    ('{"prompt_ids": [4], "completion_ids": [4, 300]}', "id outside the vocabulary"),
    ('{"prompt_ids": [-4], "completion_ids": [4, 5]}', "id outside the vocabulary"),
    ('{"prompt_ids": [4], "completion_ids": [4]}', "no two supervised tokens"),
    ('{"prompt_ids": [4, 2], "completion_ids": [4, 5]}', "contains the mask token"),
    ('{"messages": [{"role": "human", "content": "x"}]}', "unknown role"),
    (json.dumps({"prompt_ids": [4], "completion_ids": [4] * 40}), "too long"),
]


def test_bad_rows_are_quarantined_with_reason_file_and_line(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "a.jsonl", json.dumps(IDS), *(line for line, _ in BAD), json.dumps(IDS))
    samples, counts, entries = read([file], tokenizer)
    assert len(samples) == 2
    assert [(entry["line"], entry["reason"]) for entry in entries] == [(i, r) for i, (_, r) in enumerate(BAD, 2)]
    assert all(entry["file"] == str(file) and entry["detail"] for entry in entries)
    assert entries[0]["row"] == "{not json"
    assert entries[2]["row"] == [1, 2]
    assert counts == {reason: [r for _, r in BAD].count(reason) for _, reason in BAD}


def test_stop_names_file_and_line_of_the_first_bad_row(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "a.jsonl", json.dumps(IDS), "[1]", "[2]")
    with pytest.raises(UserError, match=r"a\.jsonl:2: A row must be an object, got list"):
        read([file], tokenizer, stop=True)


def test_truncation_cuts_at_the_right_and_is_counted(tmp_path: Path, tokenizer: Any) -> None:
    limits = RowLimits(max_length=5, on_long="truncate", mask_token_id=None, vocab_size=300)
    late = {"prompt_ids": [4] * 4, "completion_ids": [4] * 4}
    file = write(tmp_path / "a.jsonl", *map(json.dumps, (IDS, late)))
    (sample,), counts, entries = read([file], tokenizer, limits=limits)
    assert sample.truncated
    assert sample.input_ids.tolist() == [5, 6, 7, 8, 9]
    assert counts == {"no two supervised tokens": 1}
    assert "after truncation" in entries[0]["detail"]


def test_an_earlier_quarantine_does_not_stay(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "a.jsonl", json.dumps(IDS))
    write(tmp_path / "q.jsonl", "{}")
    read([file], tokenizer)
    assert not (tmp_path / "q.jsonl").exists()


def test_parquet_and_datasets_folder_equal_jsonl(tmp_path: Path, tokenizer: Any) -> None:
    rows = [TALK, {"messages": [{"role": "user", "content": "x"}, {"role": "assistant"}]}, TALK]
    jsonl = write(tmp_path / "a.jsonl", *map(json.dumps, rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "folder", num_shards=2)
    want, want_counts, _ = read([jsonl], tokenizer)
    for source in (tmp_path / "a.parquet", tmp_path / "folder"):
        got, counts, entries = read([source], tokenizer)
        assert [s.input_ids.tolist() for s in got] == [s.input_ids.tolist() for s in want]
        assert counts == want_counts == {"malformed messages": 1}
        assert entries[0]["line"] == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "no input file"),
        ("a.csv", b"x", r"must end in \.jsonl or \.parquet"),
        ("a.jsonl", json.dumps(IDS).encode() + b"\n\xff\xfe\n", r"a\.jsonl:2 is not UTF-8 \(byte 0xff\)"),
        ("a.parquet", b"PAR1 nonsense", r"a\.parquet cannot be read"),
    ],
)
def test_unreadable_files_are_one_sentence(
    tmp_path: Path, tokenizer: Any, name: str, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read([tmp_path / name], tokenizer)


def test_folder_without_state_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no readable state.json"):
        find_files([tmp_path])


@pytest.mark.parametrize(("text", "rows"), [("", 0), ("{}", 1), ("{}\n", 1), ("{}\n\n{}", 3)])
def test_inspect_counts_rows(tmp_path: Path, text: str, rows: int) -> None:
    (tmp_path / "a.jsonl").write_text(text)
    assert inspect_file(tmp_path / "a.jsonl").rows == rows


def test_samples_are_arrays_of_the_same_length(tmp_path: Path, tokenizer: Any) -> None:
    (sample,), _, _ = read([write(tmp_path / "a.jsonl", json.dumps(PAIR))], tokenizer)
    assert sample.loss_mask.dtype == np.bool_
    assert sample.input_ids.shape == sample.loss_mask.shape
