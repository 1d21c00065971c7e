"""What training refuses of several datasets, and that it reads ids only where a manifest does not say enough."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.config import DrafterSettings, RunSettings
from paceline.data.mixture import Mixture, open_mixture
from paceline.data.store import CompletionDataset, open_dataset
from paceline.observe.console import Console
from paceline.recipes import train_checks
from paceline.recipes.train_checks import check_inputs, check_run_folder
from paceline.records import UserError
from paceline.target.conventions import Conventions
from paceline.target.load import TargetFacts

Check = Callable[..., None]


@pytest.fixture
def settings(tmp_path: Path, tiny_folder: Path, shape: DrafterSettings, write_dataset: Callable[..., Path]) -> Any:
    folders = [str(write_dataset([([5, 6, 7, token], 1)], name)) for name, token in (("one", 8), ("two", 9))]
    tree = {
        "run_dir": str(tmp_path / "run"),
        "target": {"model": str(tiny_folder)},
        "drafter": shape.model_dump(),
        "data": {"dataset": folders},
    }
    return RunSettings.model_validate(tree)


@pytest.fixture
def check(settings: RunSettings, tiny: TargetFacts, tmp_path: Path) -> Check:
    """Return a check of the settings with another mask token or another manifest of the second dataset."""

    def run(
        mask: int = 3,
        origin: dict[str, Any] | None = None,
        held_out: CompletionDataset | None = None,
        conventions: Conventions | None = None,
        layout: str = "trimmed",
        **manifest: Any,
    ) -> None:
        drafter = settings.drafter.model_copy(update={"mask_token_id": mask})
        mixture: Mixture = open_mixture(settings.data)
        second = mixture.datasets[1]
        second.manifest = replace(second.manifest, origin=replace(second.manifest.origin, **origin or {}), **manifest)
        data = settings.data.model_copy(update={"layout": layout})
        changed = settings.model_copy(update={"drafter": drafter, "data": data})
        facts = replace(tiny, conventions=conventions or tiny.conventions)
        # Named as the settings do: the facts of the fixture carry the same folder.
        check_inputs(changed, facts, mixture, Console(json=False), held_out)

    return run


def test_ids_are_not_read_where_the_manifest_says_enough(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError("the ids were read")

    monkeypatch.setattr(train_checks, "find_token", never)
    check()


def test_a_layout_in_which_samples_would_change_one_another(check: Check) -> None:
    check(layout="packed")
    check(conventions=Conventions(memory=("conv",)))
    with pytest.raises(UserError, match=r"data.layout packed lays samples end to end, and .* has layers \(conv\)"):
        check(conventions=Conventions(memory=("conv",)), layout="packed")


def test_another_mask_token_is_looked_for_in_every_dataset(
    check: Check, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check(mask=10)
    assert capsys.readouterr().out == ""
    with pytest.raises(UserError, match=r"token 9 is in row 0 of .*two\. Choose another id"):
        check(mask=9)
    with pytest.raises(UserError, match=r"token 8 is in row 0 of .*one\. Choose another id"):
        check(mask=8)
    monkeypatch.setattr(train_checks, "LONG_SCAN", 1)
    check(mask=10)
    told = " ".join(capsys.readouterr().out.split())
    assert "looking for token 10 (drafter.mask_token_id) in 4 tokens of" in told
    assert "two, which was prepared for token 3" in told


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"longest": 5000}, r"data\.max_length \(4,096\) tokens, but .*two has one of 5,000"),
        ({"origin": {"tokenizer": "a" * 64}}, r"^Dataset .*two was prepared with the tokenizer of "),
    ],
)
def test_every_dataset_of_a_mixture_is_checked(check: Check, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check(**changes)


def test_ids_beyond_the_vocabulary_are_looked_for_where_the_manifest_says_that_there_are(
    settings: RunSettings, tiny: TargetFacts, write_dataset: Callable[..., Path]
) -> None:
    """Few such rows are set aside when they are read; more are known before anything is loaded."""
    write_dataset([([5, 6, 7], 1)] * 150 + [([5, 128, 7], 1), ([5, 6, 999, 7], 1)] + [([5, 6, 7], 1)] * 48, "two")
    for share in (0.01, 0.009):
        tree = settings.model_copy(update={"data": settings.data.model_copy(update={"bad_rows": share})})
        mixture = open_mixture(tree.data, vocab_size=tiny.vocab_size)
        if share == 0.01:
            check_inputs(tree, tiny, mixture, Console(json=False))
            continue
        said = r"0\.90% .* 2 of the 200 of .*two are, row 150 because it holds the id 128, and ids lie in 0\.\.127:"
        with pytest.raises(UserError, match=said):
            check_inputs(tree, tiny, mixture, Console(json=False))


def test_too_many_rows_without_anchors_are_refused_at_opening(
    settings: RunSettings, write_dataset: Callable[..., Path]
) -> None:
    write_dataset([([5, 6, 7], 1)] * 97 + [([], 0), ([5, 6, 7], 3), ([5, 6, 7], 2)], "two")
    for share, row in ((0.03, None), (0.02, 97)):
        data = settings.data.model_copy(update={"bad_rows": share})
        if row is None:
            assert [left.tolist() for left in open_mixture(data).left_out] == [[], [97, 98, 99]]
            continue
        with pytest.raises(UserError, match=r"2\.00% .* 3 of the 100 of .*two are, row 97 because it has no tokens"):
            open_mixture(data)


def test_a_run_lies_in_none_of_its_datasets(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with pytest.raises(UserError, match=rf"run_dir must not lie in the dataset .*{name} \(data\.dataset\)"):
            check_run_folder(tmp_path / name / "run", [str(tmp_path / "one"), str(tmp_path / "two")], resume=False)
    check_run_folder(tmp_path / "run", [str(tmp_path / "one"), str(tmp_path / "two")], resume=False)


def test_the_held_out_dataset_is_checked_like_the_others(check: Check, write_dataset: Callable[..., Path]) -> None:
    def held(token: int, **changes: Any) -> CompletionDataset:
        made = open_dataset(write_dataset([([5, 6, 7, token], 1)], "held"))
        made.manifest = replace(made.manifest, **changes)
        return made

    check(held_out=held(10))
    for changes, sentence in (
        ({"longest": 5000}, r"data\.max_length \(4,096\) tokens, but .*held has one of 5,000"),
        (
            {"origin": replace(held(10).manifest.origin, tokenizer="a" * 64)},
            r"^Dataset .*held was prepared with the tok",
        ),
    ):
        with pytest.raises(UserError, match=sentence):
            check(held_out=held(10, **changes))
    with pytest.raises(UserError, match=r"1\.00% .* of .*held are, row 0 because it holds the id 128, .* 0\.\.127:"):
        check(held_out=held(128))
    with pytest.raises(UserError, match=r"token 12 is in row 0 of .*held\. Choose another id"):
        check(held_out=held(12), mask=12)


def test_a_copy_of_a_training_dataset_holds_nothing_out(check: Check, write_dataset: Callable[..., Path]) -> None:
    copy = open_dataset(write_dataset([([5, 6, 7, 9], 1)], "copy"))
    with pytest.raises(
        UserError, match=r"must hold other rows than data\.dataset, but .*copy holds those of .*two\. Pre"
    ):
        check(held_out=copy)


def test_a_run_does_not_lie_in_its_held_out_dataset(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"must not lie in the dataset .*two \(evaluate\.held_out\), got"):
        check_run_folder(
            tmp_path / "two" / "run", [str(tmp_path / "one")], resume=False, held_out=str(tmp_path / "two")
        )
