"""The table of contents, what it expects of a version, and how a finding is judged."""

import importlib
import inspect
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.probe import expected
from paceline.probe.entries import BY_NAME, ENTRIES, Entry
from paceline.probe.examine import batches, judge
from paceline.probe.finding import Finding

GRAPH_MODES = ("mode-reduce-overhead", "mode-max-autotune")


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_an_entry_names_a_function_and_speaks_in_sentences(entry: Entry) -> None:
    module, _, name = entry.function.partition(":")
    function = getattr(importlib.import_module(f"paceline.probe.{module}"), name)
    inspect.signature(function).bind("bench", *entry.arguments)
    assert function.__doc__
    for words in (entry.meaning, entry.remedy, *(text for pair in entry.others.values() for text in pair)):
        assert words[0].isupper() or words.startswith("torch.")
        assert words.endswith(".")


def test_names_are_unique_and_the_first_probe_is_torch() -> None:
    assert len(BY_NAME) == len(ENTRIES)
    assert ENTRIES[0].name == "torch"


@pytest.mark.parametrize("name", GRAPH_MODES)
@pytest.mark.parametrize(
    ("version", "wanted"), [((2, 11), "fails"), ((2, 12), "fails"), ((2, 13), "works"), ((2, 14), "works")]
)
def test_named_modes_with_graphs_need_torch_2_13_in_a_worker(name: str, version: tuple[int, int], wanted: str) -> None:
    assert BY_NAME[name].expected(version, True) == wanted
    assert BY_NAME[name].expected(version, False) == "works"  # a CPU has no graphs


@pytest.mark.parametrize("name", ["mode-default", "mode-max-autotune-no-cudagraphs"])
def test_named_modes_without_graphs_always_work(name: str) -> None:
    assert all(BY_NAME[name].expected((2, minor), True) == "works" for minor in (11, 12, 13, 14))


def test_what_changed_between_versions() -> None:
    seen = [(BY_NAME["settings-in-threads"].expected(v, False), BY_NAME["is-compiling"].expected(v, False))
            for v in ((2, 11), (2, 12), (2, 13))]  # fmt: skip
    assert seen == [("inherited", "does not leak"), ("not inherited", "does not leak"), ("not inherited", "leaks")]


@pytest.mark.parametrize(
    ("text", "version"), [("2.13.0+cpu", (2, 13)), ("2.11.0+cu130", (2, 11)), ("2.9.0a0+gitabc", (2, 9)), ("", None)]
)
def test_parsing_a_version(text: str, version: tuple[int, int] | None) -> None:
    assert expected.parse(text) == version


def names(batched: Sequence[Sequence[Entry]]) -> list[list[str]]:
    return [[entry.name for entry in batch] for batch in batched]


def test_a_group_shares_a_process_on_a_cpu() -> None:
    batched = names(list(batches(ENTRIES[1:], 0)))
    assert ["cores-and-memory", "limits", "compiler", "python-modules", "disk", "ports"] in batched
    assert ["reset-under-warm-code"] in batched
    assert any("compile-main" in batch and "mode-max-autotune" in batch for batch in batched)
    assert [name for batch in batched for name in batch] == [entry.name for entry in ENTRIES[1:]]


def test_on_a_gpu_what_may_spoil_cuda_is_alone() -> None:
    batched = names(list(batches(ENTRIES[1:], 2)))
    for name in (*GRAPH_MODES, "capture-worker", "capture-while-drawing-default", "nccl"):
        assert [name] in batched
    assert [name for batch in batched for name in batch] == [entry.name for entry in ENTRIES[1:]]


def test_an_expected_refusal_says_so() -> None:
    found = Finding("refused", "AssertionError: <empty message>", saw="fails")
    result = judge(BY_NAME["mode-reduce-overhead"], found, 1.0, (2, 11), True)
    assert result.verdict == "refused"
    assert result.observed == "AssertionError: <empty message>; expected of torch 2.11: fails"
    assert "no policy uses a named mode" in result.meaning
    assert result.remedy


def test_a_surprise_says_so() -> None:
    result = judge(BY_NAME["mode-reduce-overhead"], Finding("refused", "no", saw="fails"), 1.0, (2, 13), True)
    assert result.observed == "no; NOT expected, torch 2.13 should: works"


def test_a_crash_counts_as_the_failure_that_was_expected() -> None:
    result = judge(BY_NAME["mode-max-autotune"], Finding("died", "died with SIGSEGV", saw="died"), 1.0, (2, 12), True)
    assert (result.verdict, result.observed) == ("died", "died with SIGSEGV; expected of torch 2.12: fails")


def test_a_hazard_that_crashes_is_ok_and_is_explained() -> None:
    died = judge(
        BY_NAME["reset-under-warm-code"], Finding("died", "died with SIGSEGV", saw="died"), 1.0, (2, 13), False
    )
    assert (died.verdict, died.observed) == ("ok", "died with SIGSEGV")
    assert died.meaning
    broken = judge(BY_NAME["is-compiling"], Finding("refused", "ModuleNotFoundError: …", saw="fails"), 1.0, None, False)
    assert broken.verdict == "refused"


def test_what_is_ok_or_skipped_needs_no_words() -> None:
    for finding in (Finding("ok", "all right"), Finding("skipped", "needs a CUDA device")):
        result = judge(BY_NAME["compile-worker"], finding, 1.0, (2, 13), False)
        assert (result.meaning, result.remedy) == ("", "")


def test_the_words_of_a_verdict() -> None:
    result = judge(BY_NAME["nccl"], Finding("hung", "no answer within 120 s", saw="hung"), 120.0, (2, 13), True)
    assert (result.meaning, result.remedy) == BY_NAME["nccl"].others["hung"]
    own = Finding("degraded", "slow", meaning="It is slow.", remedy="Wait.")
    assert judge(BY_NAME["nccl"], own, 1.0, (2, 13), True).remedy == "Wait."


def test_every_probe_is_explained() -> None:
    text = Path(__file__).parents[2].joinpath("docs", "doctor.md").read_text(encoding="utf-8")
    explained = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}
    assert {entry.name for entry in ENTRIES if not entry.name.startswith("mode-")} <= explained
    assert "mode-…" in explained
