"""Rows that would do harm, 0.5 % of each kind: quarantined with their numbers, and the command completes."""

import json
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.data.store import open_dataset
from paceline.recipes.prepare import prepare_dataset

pytestmark = pytest.mark.faults

ROWS, EACH = 400, 2  # 0.5 %
EOS = 2
KINDS: dict[str, Any] = {
    "trimmed": {},
    "packed": {"data": {"layout": "packed", "token_budget": 100}},
    "bucketed, features on disk": {
        "data": {"layout": "bucketed", "reshuffle": "batches"},
        "pipeline": {"feature_cache": "disk", "targets": ["cpu"] * 2},
    },
}
Rows = list[tuple[list[int], int]]  # ids, and how many of them are the prompt


def poison(seed: int) -> tuple[Rows, dict[int, str], Rows, list[int]]:
    """Return rows, what is wrong with which, these rows without the empty and the masked ones and with ids that are
    right, and which of those had wrong ids.
    """
    draw = np.random.default_rng(seed)
    good: Rows = [(draw.integers(4, 128, draw.integers(8, 20)).tolist(), int(draw.integers(2, 5))) for _ in range(ROWS)]
    places = draw.permutation(ROWS)[: 3 * EACH].tolist()
    rows, wrong = [(list(ids), prompt) for ids, prompt in good], {}
    for place, value in zip(places[:EACH], (128, 2**31 - 1), strict=True):
        rows[place][0][int(draw.integers(0, 8))] = value
        wrong[place] = "out of vocabulary"
    for place in places[EACH : 2 * EACH]:
        rows[place], wrong[place] = ([], 0), "no tokens"
    for place in places[2 * EACH :]:
        rows[place], wrong[place] = (rows[place][0], len(rows[place][0])), "no two supervised tokens"
    left = [place for place in range(ROWS) if wrong.get(place, "out of vocabulary") == "out of vocabulary"]
    return rows, wrong, [good[place] for place in left], [i for i, place in enumerate(left) if place in wrong]


def quarantined(run: Path) -> dict[int, str]:
    entries = [json.loads(line) for line in (run / "quarantine.jsonl").read_text().splitlines()]
    assert len({entry["row"] for entry in entries}) == len(entries), "every row is told once"
    return {entry["row"]: entry["reason"] for entry in entries}


@pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for seed, kind in enumerate(KINDS)])
def test_a_run_completes_without_poisoned_rows(
    lab: Any, survival: Any, write_dataset: Callable[..., Path], kind: str, seed: int
) -> None:
    rows, wrong, good, stripped = poison(seed)
    every = {"train": {"batches_per_step": 4, "anchors_per_sample": 16, "anchor_slots": 40}}  # all anchors of a row
    poisoned, clean = (
        {**KINDS[kind], **every, "data": {**KINDS[kind].get("data", {}), "dataset": str(folder), "bad_rows": 0.02}}
        for folder in (write_dataset(rows, "poisoned"), write_dataset(good, "clean"))
    )
    with survival.trial("poisoned rows in train", seed):
        whole = lab.settings("clean-run", clean)
        child = lab.train(whole, fault=("strip", {"rows": stripped}))
        assert child.status() == 0, child.text()
        run = lab.settings("poisoned-run", poisoned)
        child = lab.train(run, "--json")
        assert child.status() == 0, child.text()
        assert f'"quarantined_rows": {3 * EACH}' in child.text()
        assert child.text().count("is set aside: it") == 3 * EACH
        assert quarantined(run) == wrong
        assert lab.told(run, "quarantined") == 3 * EACH
        lab.assert_equal(run, whole, besides={"quarantine.jsonl"})

        # Killed on the way and resumed it is the same, and nothing is quarantined twice.
        killed, draw = lab.settings("killed", poisoned), random.Random(seed)
        child = lab.train(killed, slow_s=0.005)
        child.moment(draw)
        if child.process.is_alive():
            child.send(signal.SIGKILL)
        child.status()
        if not (killed / "drafter").exists():
            lab.finished(killed)
        assert quarantined(killed) == wrong
        lab.assert_equal(killed, whole, besides={"quarantine.jsonl"})


def test_too_many_poisoned_rows_end_a_run_and_say_so(
    lab: Any, write_dataset: Callable[..., Path], random_rows: Rows
) -> None:
    """No shard differs from its checksum: the rows came into the dataset like this."""
    random_rows[7][0][3] = 5000
    child = lab.train(lab.settings("run", {"data": {"dataset": str(write_dataset(random_rows, "bad"))}}))
    assert child.status() == 2
    assert "1.00% of a dataset's rows may be set aside (data.bad_rows), but 1 of the 24 of" in child.text()
    assert "row 7 because it holds the id 5,000, and ids lie in 0..127: the dataset is damaged." in child.text()


def write_ids(path: Path, rows: Rows) -> None:
    tree = [{"input_ids": ids, "loss_mask": [int(i >= prompt) for i in range(len(ids))]} for ids, prompt in rows]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in tree))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(tree), path)
    else:
        table = pa.Table.from_pylist(tree)
        with pa.ipc.new_stream(path, table.schema) as out:
            out.write_table(table)


def talk(ids: list[int], prompt: int) -> dict[str, Any]:
    """The row as a conversation."""
    question, answer = (" ".join(f"w{token}" for token in part) for part in (ids[:prompt], ids[prompt:]))
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.mark.parametrize(("kind", "seed"), [("jsonl", 10), ("parquet", 11), ("arrow", 12), ("text", 13)])
def test_prepare_refuses_poisoned_rows_and_keeps_the_rest(
    survival: Any, tmp_path: Path, tiny_folder: Path, kind: str, seed: int
) -> None:
    rows, wrong, *_ = poison(seed)
    good = [ids for place, (ids, _) in enumerate(rows) if place not in wrong]
    target = tiny_folder
    path, out = tmp_path / f"rows.{'jsonl' if kind == 'text' else kind}", tmp_path / "dataset"
    if kind == "text":  # which can hold no id that is wrong
        wrong = {place: reason for place, reason in wrong.items() if reason != "out of vocabulary"}
        rows = [row if place in wrong else ([i % 120 + 4 for i in row[0]], row[1]) for place, row in enumerate(rows)]
        good = [[*ids[:n], EOS, *ids[n:], EOS] for place, (ids, n) in enumerate(rows) if place not in wrong]
        target = shutil.copytree(tiny_folder, tmp_path / "target")
        template = "{% for m in messages %}{{ m['content'] + ' <eos> ' }}{% endfor %}"
        (target / "chat_template.jinja").write_text(template)
        path.write_text("".join(json.dumps(talk(*row)) + "\n" for row in rows))
    else:
        write_ids(path, rows)
    with survival.trial("poisoned rows in prepare", seed):
        summary = prepare_dataset(
            [path], out, target=str(target), revision=None, max_length=100, max_quarantined=0.02, mask_token_id=3
        )
        listed = [json.loads(line) for line in Path(summary["quarantine"]).read_text().splitlines()]
        assert sorted(entry["line"] for entry in listed) == sorted(place + 1 for place in wrong)
        assert all(entry["reason"] and entry["detail"] for entry in listed)
        assert (summary["rows_read"], summary["rows"]) == (ROWS, ROWS - len(wrong))
        dataset = open_dataset(out)
        assert [dataset.row(i)[0].tolist() for i in range(len(dataset))] == good
