"""The recipe `prepare` from files to a dataset, with a stand-in for the target's folder."""

import fcntl
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import datasets
import pytest

from paceline.data import pieces, sources
from paceline.data.chat import ChatOptions
from paceline.data.manifest import check_fits, tokenizer_fingerprint
from paceline.data.store import open_dataset
from paceline.recipes.prepare import prepare_dataset
from paceline.records import UserError
from paceline.target import load

GOOD = {"prompt": "what is it?", "completion": "the sum of two numbers"}


@pytest.fixture
def run(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Return prepare_dataset() with a target that has the test tokenizer; its rows come from `rows`."""
    facts = SimpleNamespace(name="tiny", revision="r1", vocab_size=400)
    monkeypatch.setattr(load, "describe", lambda model, revision: facts)
    monkeypatch.setattr(load, "load_tokenizer", lambda model, revision: tokenizer)

    def call(rows: list[Any], **options: Any) -> dict[str, Any]:
        source = tmp_path / "in.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        defaults = {"target": "tiny", "revision": None, "max_length": 100, "max_quarantined": 1.0}
        return prepare_dataset([source], tmp_path / "out", **{**defaults, **options})

    return call


def test_every_row_is_accounted_for(run: Callable[..., dict[str, Any]], tmp_path: Path, tokenizer: Any) -> None:
    seen: list[tuple[int, int | None]] = []
    summary = run([GOOD, [1], GOOD, {"x": 1}], on_progress=lambda *counts: seen.append(counts), mask_token_id=2)
    assert (summary["rows_read"], summary["rows"]) == (4, 2)
    assert summary["quarantined"] == {"not an object": 1, "unknown form": 1}
    assert len(Path(summary["quarantine"]).read_text().splitlines()) == 2
    assert seen[-1] == (4, 4)
    dataset = open_dataset(tmp_path / "out")
    origin = dataset.manifest.origin
    assert (len(dataset), origin.mask_rule, origin.mask_token_id) == (2, "turn prefixes", 2)
    assert origin.quarantined == summary["quarantined"]
    assert origin.sources[0]["rows"] == 4
    assert dataset.fingerprint == summary["fingerprint"]
    check_fits(dataset.manifest, tokenizer_fingerprint(tokenizer), "tiny")
    json.dumps(summary)


def test_no_row_left_is_an_error_with_reasons(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"No row of .*in\.jsonl .*not an object: 2.*out\.quarantine\.jsonl"):
        run([[1], [2]])
    assert not (tmp_path / "out").exists()
    assert len((tmp_path / "out.quarantine.jsonl").read_text().splitlines()) == 2
    with pytest.raises(UserError, match="holds no rows"):
        run([])


def test_stop_leaves_no_dataset(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"in\.jsonl:2:"):
        run([GOOD, [1]], on_bad="stop")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]


def test_a_dataset_is_replaced_only_when_asked(run: Callable[..., dict[str, Any]]) -> None:
    first = run([GOOD, [1]])
    with pytest.raises(UserError, match="There is a dataset"):
        run([GOOD, GOOD])
    assert Path(first["quarantine"]).exists(), "a refused command touches nothing"
    again = run([GOOD, GOOD], overwrite=True)
    assert (again["rows"], again["quarantine"]) == (2, None)
    assert not Path(first["quarantine"]).exists()


def test_long_rows_are_refused_or_cut(run: Callable[..., dict[str, Any]]) -> None:
    long = {"prompt": "x", "completion": "y" * 200}
    assert run([GOOD, long])["quarantined"] == {"too long": 1}
    cut = run([GOOD, long], on_long="truncate", overwrite=True)
    assert (cut["truncated"], cut["longest"], cut["quarantined"]) == (1, 100, {})


def lines(count: int) -> list[Any]:
    """Good rows with a bad one now and then."""
    return [[i] if i % 10 == 9 else {**GOOD, "completion": f"the sum is {i}"} for i in range(count)]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_SMALLEST", 500)
    monkeypatch.setattr(sources, "_LARGEST", 500)


def contents(place: Path) -> dict[str, bytes]:
    files = [*place.iterdir(), place.with_name(f"{place.name}.quarantine.jsonl")]
    return {path.name: path.read_bytes() for path in files if path.exists()}


@pytest.mark.usefixtures("small_pieces")
def test_processes_make_what_one_makes(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    one = run(lines(60))
    want = contents(tmp_path / "out")
    assert one["shards"] > 3
    two = run(lines(60), workers=2, overwrite=True)
    assert contents(tmp_path / "out") == want
    assert one == two
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.usefixtures("small_pieces")
def test_what_a_killed_command_finished_is_used_again(
    run: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(lines(60))
    want = contents(tmp_path / "out")
    made: list[int] = []
    real = pieces.encode_rows

    def dies(rows: Any, *rest: Any) -> Any:
        made.append(rows[0][0])
        if len(made) == 3:
            raise KeyboardInterrupt
        return real(rows, *rest)

    monkeypatch.setattr(pieces, "encode_rows", dies)
    with pytest.raises(KeyboardInterrupt):
        run(lines(60), overwrite=True)
    assert contents(tmp_path / "out") == want, "the old dataset is still there"
    left = sorted(path.suffix for path in (tmp_path / "out.partial").iterdir())
    assert left.count(".json") == 2
    summary = run(lines(60), overwrite=True)
    assert contents(tmp_path / "out") == want
    assert len(made) == len(set(made)) + 1, "only the piece that was under way is made twice"
    assert re.search(r"out\.partial holds 2 of \d+ pieces \([\d,]+ rows, made \d+ s ago\)", summary["notes"][0])
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.usefixtures("small_pieces")
def test_a_damaged_piece_is_made_again(
    run: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(lines(60))
    want = contents(tmp_path / "out")
    with pytest.raises(UserError, match=r"At most 1\.00%.*6 of 60 are \(not an object: 6\).*--max-quarantined 0\.1\."):
        run(lines(60), overwrite=True, max_quarantined=0.01)
    workshop = tmp_path / "out.partial"
    shard = sorted(workshop.glob("*.arrow"))[1]
    shard.write_bytes(shard.read_bytes()[:-9])
    sorted(workshop.glob("*.json"))[2].write_text("{")
    monkeypatch.setattr(pieces, "ShardWriter", watched := Mock(wraps=pieces.ShardWriter))
    run(lines(60), overwrite=True)
    assert contents(tmp_path / "out") == want
    assert watched.call_count in (1, 2), "the damaged ones and no other"


def test_too_many_bad_rows_fail_and_a_second_try_is_quick(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"3 of 30 are .*out\.quarantine\.jsonl"):
        run(lines(30), max_quarantined=0.099)
    assert not (tmp_path / "out").exists()
    assert len((tmp_path / "out.quarantine.jsonl").read_text().splitlines()) == 3
    summary = run(lines(30), max_quarantined=0.1)
    assert (summary["rows"], summary["quarantined"]) == (27, {"not an object": 3})
    assert "1 of 1 pieces" in summary["notes"][0]


def test_the_same_command_again_finds_its_dataset(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    first = run(lines(30))
    before = (tmp_path / "out" / "manifest.json").stat().st_mtime_ns
    again = run(lines(30))
    assert again == {**first, "found": True, "notes": again["notes"]}
    assert re.fullmatch(r".*out holds this very dataset already \(made \d+ s ago: .*\)\.", again["notes"][0])
    assert (tmp_path / "out" / "manifest.json").stat().st_mtime_ns == before
    with pytest.raises(UserError, match="At most 5"):
        run(lines(30), max_quarantined=0.05)
    for change in ({"max_length": 99}, {"mask_token_id": 2}, {"options": ChatOptions(turns="last")}):
        with pytest.raises(UserError, match="There is a dataset"):
            run(lines(30), **change)


def test_a_damaged_dataset_is_not_found(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    run(lines(30))
    shard = tmp_path / "out" / "data-00000-of-00001.arrow"
    shard.write_bytes(shard.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"data-00000-of-00001\.arrow must have.*With --overwrite it is made anew"):
        run(lines(30))


def test_two_commands_do_not_share_a_place(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    with (tmp_path / "out.partial" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="Another process is preparing"):
            run(lines(3))


def test_rows_lead_back_to_their_lines(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    run(lines(30))
    table = datasets.load_from_disk(tmp_path / "out")
    assert table["line"][:] == [i + 1 for i in range(30) if i % 10 != 9]
    assert set(table["source"][:]) == {0}


def test_a_mask_that_covers_everything_is_told(run: Callable[..., dict[str, Any]]) -> None:
    whole = {"input_ids": [5, 6, 7], "loss_mask": [1, 1, 1]}
    assert "100 % of the tokens are supervised" in run([whole])["notes"][0]
    assert run([whole, GOOD], overwrite=True)["notes"] == []
    with pytest.raises(UserError, match="Where 0 % of the tokens are supervised"):
        run([{**whole, "loss_mask": [0, 0, 0]}], overwrite=True)


def test_an_input_inside_the_output_is_refused(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    run([GOOD])
    with pytest.raises(UserError, match="lies in"):
        prepare_dataset(
            [tmp_path / "out"], tmp_path / "out", target="tiny", revision=None, max_length=9, overwrite=True
        )


def test_a_dataset_made_of_a_dataset_is_the_same(run: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    first = run(lines(30))
    again = prepare_dataset([tmp_path / "out"], tmp_path / "copy", target="tiny", revision=None, max_length=100)
    assert {key: again[key] for key in ("rows", "tokens", "supervised_tokens", "fingerprint")} == {
        key: first[key] for key in ("rows", "tokens", "supervised_tokens", "fingerprint")
    }
