"""The recipe `prepare` from files to a dataset, with a stand-in for the target's folder."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.data import store
from paceline.recipes.prepare import prepare
from paceline.records import UserError
from paceline.target import load

GOOD = {"prompt": "what is it?", "completion": "the sum of two numbers"}


@pytest.fixture
def run(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Return prepare() with a target that has the test tokenizer; its rows come from `rows`."""
    facts = SimpleNamespace(name="tiny", revision="r1", vocab_size=400)
    monkeypatch.setattr(load, "describe", lambda model, revision: facts)
    monkeypatch.setattr(load, "load_tokenizer", lambda model, revision: tokenizer)

    def call(rows: list[Any], **options: Any) -> dict[str, Any]:
        source = tmp_path / "in.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        defaults = {"target": "tiny", "revision": None, "max_length": 100}
        return prepare([source], tmp_path / "out", **{**defaults, **options})

    return call


def test_every_row_is_accounted_for(run: Callable[..., dict[str, Any]], tmp_path: Path, tokenizer: Any) -> None:
    seen: list[tuple[int, int | None]] = []
    summary = run([GOOD, [1], GOOD, {"x": 1}], on_progress=lambda *counts: seen.append(counts), mask_token_id=2)
    assert (summary["rows_read"], summary["rows"]) == (4, 2)
    assert summary["quarantined"] == {"not an object": 1, "unknown form": 1}
    assert len(Path(summary["quarantine"]).read_text().splitlines()) == 2
    assert seen[-1] == (4, 4)
    dataset = store.open_dataset(tmp_path / "out")
    origin = dataset.manifest.origin
    assert (len(dataset), origin.mask_rule, origin.mask_token_id) == (2, "turn prefixes", 2)
    assert origin.quarantined == summary["quarantined"]
    assert origin.sources[0]["rows"] == 4
    assert dataset.fingerprint == summary["fingerprint"]
    store.check_fits(dataset.manifest, store.tokenizer_fingerprint(tokenizer), "tiny")
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
