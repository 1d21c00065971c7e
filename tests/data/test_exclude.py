"""Contained evaluation prompts against a plain restatement of the rule, and the files they are read from."""

import gzip
import json
import os
import pickle
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.exclude import EvalPrompts, read_eval_sets
from paceline.records import UserError


def words(count: int, first: int = 0) -> str:
    return " ".join(f"w{i}" for i in range(first, first + count))


def plain_words(text: str) -> list[str]:
    cased = unicodedata.normalize("NFKC", text).casefold()
    return "".join(letter if letter.isalnum() else " " for letter in cased).split()


def plain_find(prompts: list[str], text: str) -> str | None:
    """Quadratic: every run of 13 words (or all of them) of every prompt at every place of the text."""
    mine = plain_words(text)
    for index, prompt in enumerate(prompts):
        its = plain_words(prompt)
        if not its:
            continue
        if len(its) < 5:
            if its == mine:
                return str(index)
            continue
        size = min(13, len(its))
        runs = [its[i : i + size] for i in range(len(its) - size + 1)]
        if any(mine[i : i + size] in runs for i in range(len(mine) - size + 1)):
            return str(index)
    return None


def made_of(prompts: list[str]) -> EvalPrompts:
    return EvalPrompts([(str(index), prompt) for index, prompt in enumerate(prompts)])


# Few words, so that runs of them repeat; several spellings of one word, and signs that part words or do not.
spoken = st.lists(st.sampled_from(["a", "A", "ﬁ", "fi", "ß", "SS", "é", "e\u0301", "7"]), max_size=40).map(" ".join)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(prompts=st.lists(spoken, max_size=6), text=spoken, place=st.integers(0, 40), size=st.integers(0, 40))
def test_as_the_plain_rule_says(prompts: list[str], text: str, place: int, size: int) -> None:
    found = made_of(prompts)
    assert found.find(text) == plain_find(prompts, text)
    for prompt in prompts:  # and with a piece of the prompt inside, so that hits are not rare
        holding = f"{text} {' '.join(prompt.split()[place % 7 : place % 7 + size])} {text}"
        assert found.find(holding) == plain_find(prompts, holding)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(prompts=st.lists(st.text(max_size=60), max_size=4), text=st.text(max_size=60))
def test_any_unicode(prompts: list[str], text: str) -> None:
    found = made_of(prompts)
    for candidate in (text, *prompts, " ".join(prompts)):
        assert found.find(candidate) == plain_find(prompts, candidate)


@pytest.mark.parametrize(
    ("prompt", "text", "contained"),
    [
        (words(13), f"x {words(13)} y", True),
        (words(13), f"x {words(12)} y", False),
        (words(20), f"x {words(13, 7)} y", True),
        (words(20), f"x {words(12, 8)} y", False),
        (words(20), f"{words(7)} x {words(12, 8)}", False),
        (words(12), f"x {words(12)} y", True),
        (words(12), f"x {words(11)} y", False),
        (words(12), words(12), True),
        (words(5), f"x {words(5)} y", True),
        (words(4), f"x {words(4)} y", False),
        (words(4), words(4), True),
        (words(4), words(3), False),
        ("hi", "Hi!", True),
        ("hi", "Say hi to all of them", False),
        ("Straße, groß und weiß!", "STRASSE GROSS UND WEISS", True),
        ("snake_case splits in two", "snake case splits in two.", True),
        ("fünf Wörter in dieser Zeile", "u\u0308brigens: FU\u0308NF W\u00d6RTER, in dieser Zeile", True),
    ],
)
def test_boundaries(prompt: str, text: str, contained: bool) -> None:
    assert made_of([prompt]).find(text) == ("0" if contained else None)
    assert plain_find([prompt], text) == ("0" if contained else None)


def test_runs_do_not_cross_from_one_prompt_into_the_next() -> None:
    assert made_of([words(13), words(13, 13)]).find(words(13, 6)) is None


def test_the_first_contained_prompt_is_named() -> None:
    prompts = ["x y z", words(5, 3), words(30), words(13)]
    assert made_of(prompts).find(words(30)) == "1"
    assert made_of(prompts[2:]).find(words(13)) == "0"


def test_equal_hashes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes of the last word alone: most are equal, and only the comparison of the words tells n-grams apart."""
    import numpy as np

    from paceline.data import exclude

    monkeypatch.setattr(exclude, "_BASE", np.uint64(0))
    found = made_of([words(13)])
    assert found.find("x x x x w4 x x x x x x x w12") is None
    assert found.find(words(13)) == "0"


def test_prompts_without_words_are_counted_and_never_found() -> None:
    found = made_of(["?!", words(13), " ∑ "])
    assert found.counts == {"compared": 1, "wordless": 2}
    assert found.counted == "Rows are compared with 1 of 3 evaluation prompts; left out, without words: 2."
    assert made_of([words(13)]).counted == "Rows are compared with 1 of 1 evaluation prompt."
    assert found.find("?!") is None
    assert found.find("") is None
    assert made_of([]).find(words(20)) is None


def test_a_pickled_copy_finds_the_same_in_a_process_that_hashes_otherwise(tmp_path: Path) -> None:
    found = made_of(["hi there", words(7, 3), words(30)])
    (tmp_path / "found.pickle").write_bytes(pickle.dumps(found))
    code = (
        "import pickle, sys\n"
        f"found = pickle.load(open({str(tmp_path / 'found.pickle')!r}, 'rb'))\n"
        f"print(found.find('HI THERE'), found.find({words(40)!r}), found.find('no such words are here'), found.digest)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}
    )
    assert done.stdout.split() == ["0", "1", "None", found.digest]


def test_the_digest_follows_the_normalised_content() -> None:
    assert made_of(["One two", "three"]).digest == made_of(["ONE, two!", "Three"]).digest
    assert made_of(["One two", "three"]).digest != made_of(["One", "two three"]).digest
    assert made_of(["One two", "three"]).digest != made_of(["three", "One two"]).digest, "the first is named"


def write(path: Path, *rows: object) -> Path:
    data = "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["set.jsonl", "set.jsonl.gz"])
def test_every_form_of_a_line(tmp_path: Path, name: str) -> None:
    turns = [{"role": "system", "content": words(9, 90)}, {"role": "user", "content": words(9, 20)}]
    shared = [{"from": "human", "value": words(9, 30)}, {"from": "gpt", "value": words(9, 40)}]
    path = write(
        tmp_path / name,
        {"task_id": 1, "prompt": words(9)},
        {"question": words(9, 10), "answer": words(9, 50)},
        "",
        {"messages": turns},
        {"conversations": [*shared, {"from": "human", "value": words(9, 60)}]},
        {"text": words(9, 70)},
        {"turns": [words(9, 80), words(9, 100)]},
        {"prompt": None, "problem": words(9, 110)},
    )
    found = read_eval_sets([path])
    lines = {0: 1, 10: 2, 20: 4, 30: 5, 60: 5, 70: 6, 80: 7, 100: 7, 110: 8}
    for first, line in lines.items():
        assert found.find(f"so {words(9, first)} then") == f"{path}:{line}"
    for first in (40, 50, 90):
        assert found.find(words(9, first)) is None
    assert found.prompts == len(lines)


def test_sets_are_read_in_order(tmp_path: Path) -> None:
    one = write(tmp_path / "one.jsonl", {"text": words(6, 50)})
    two = write(tmp_path / "two.jsonl", {"text": "\u2028 other"}, {"text": words(6)})
    assert read_eval_sets([one, two]).find(f"{words(6)} {words(6, 50)}") == f"{one}:1"
    assert read_eval_sets([two, one]).find(f"{words(6)} {words(6, 50)}") == f"{two}:2"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["not json"], "set.jsonl:1 is not JSON"),
        (["[" * 100_000], "set.jsonl:1 is not JSON"),
        ([{"text": "x"}, [1]], "set.jsonl:2 must be a JSON object with a prompt, found list"),
        ([{"text": "x"}, "", {"answer": 1}], "set.jsonl:3 must have one of the keys .*found answer"),
        ([{}], r"found \(none\)"),
        ([{"prompt": None, "id": 3}], "set.jsonl:1: prompt must hold a prompt, but its value is null"),
        ([{"prompt": 3}], "set.jsonl:1: prompt must be a text, .*found 3"),
        ([{"messages": [{"role": "assistant", "content": "x"}]}], "messages must be"),
        ([{"messages": [{"role": "user", "content": None}]}], "messages must be"),
        ([""], "holds no prompt"),
    ],
)
def test_malformed_sets(tmp_path: Path, rows: list[object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_eval_sets([write(tmp_path / "set.jsonl", *rows)])


def test_unreadable_sets(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="There is no evaluation set .*gone.jsonl"):
        read_eval_sets([tmp_path / "gone.jsonl"])
    with pytest.raises(UserError, match=re.escape("must end in .jsonl or .jsonl.gz")):
        read_eval_sets([tmp_path / "set.csv"])
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UserError, match=r"Evaluation set .*pipe\.jsonl must be a regular file"):
        read_eval_sets([tmp_path / "pipe.jsonl"])
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xe9"}\n')
    with pytest.raises(UserError, match="latin.jsonl:2 is not UTF-8 \\(byte 0xe9\\)"):
        read_eval_sets([tmp_path / "latin.jsonl"])
    (tmp_path / "plain.jsonl.gz").write_bytes(b'{"text": "a"}\n')
    with pytest.raises(UserError, match="plain.jsonl.gz:1 cannot be read"):
        read_eval_sets([tmp_path / "plain.jsonl.gz"])
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 9000)[:-20])
    with pytest.raises(UserError, match="cut.jsonl.gz:.* cannot be read"):
        read_eval_sets([tmp_path / "cut.jsonl.gz"])


def test_nothing_of_torch_is_loaded() -> None:
    code = "import sys, paceline.data.exclude; print({'torch', 'transformers', 'pyarrow'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
