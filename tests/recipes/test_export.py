"""`paceline export`: what is never lost, what is refused before anything is written, and what the card may say."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from paceline.config import DrafterSettings
from paceline.drafter.model import Drafter
from paceline.observe.console import Console
from paceline.recipes.evaluate import evaluate
from paceline.recipes.evaluate_asked import Asking
from paceline.recipes.export import export, export_all
from paceline.recipes.texts import exported_text
from paceline.records import UserError
from paceline.target.load import TargetFacts

Run = Callable[..., Path]
SAID: dict[str, Any] = {"dtype": "float32", "overwrite": True}
NOT_MEASURED = "Not measured: `paceline evaluate` had not been run on these weights"


def measured(run: Path, prompts: Path) -> dict[str, Any]:
    return evaluate(
        run, prompts, Asking(8), device="cpu", dtype="float32", rows=4, timed_prompts=0, untrained_prompts=0,
        console=Console(json=True),
    )  # fmt: skip


def test_the_card_has_the_evaluation_of_its_own_weights_only(
    run: Run, prompts: Path, shape: DrafterSettings, tiny: TargetFacts
) -> None:
    """A run that goes back trains other weights under the same number of steps."""
    folder = run()
    told = measured(folder, prompts)
    written = export(folder, None, **SAID)
    assert f"τ, mean over prompts | {told['tau_trained']:.4g} |" in (folder / "export/README.md").read_text()
    assert written["evaluation"] == "run/evaluation.json"
    assert "gives no acceptance" not in exported_text(written)
    fresh = Drafter(shape, tiny.hidden_size).initialise(7)
    save_file({name: p.detach() for name, p in fresh.named_parameters()}, folder / "drafter/model.safetensors")
    written = export(folder, None, **SAID)
    assert NOT_MEASURED in (folder / "export/README.md").read_text()
    assert written["evaluation"] is None
    assert "The model card gives no acceptance" in exported_text(written)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("evaluation.json", {"per_slot_acceptance": "abc"}),
        ("evaluation.json", {"per_slot_acceptance": [1.0, None]}),
        ("evaluation.json", {"per_slot_acceptance": 5}),
        ("provenance.json", {"dataset": [1]}),
        ("provenance.json", {"dataset": {"folder": "x"}}),
        ("provenance.json", {"packages": "abc"}),
        ("provenance.json", {"init": {"folder": "x"}}),
    ],
)
def test_records_of_other_types(run: Run, prompts: Path, name: str, change: dict[str, Any]) -> None:
    measured(run(), prompts)
    place = Path("run") / name
    tree = json.loads(place.read_text()) if place.exists() else {}
    place.write_text(json.dumps(tree | change))
    with pytest.raises(UserError, match=r"evaluation\.json in run is not as paceline writes it"):
        export(Path("run"), None, **SAID)
    place.write_text("[" * 100_000)
    with pytest.raises(UserError, match="cannot be read as JSON"):
        export(Path("run"), None, **SAID)
    assert not Path("run/export").exists()


def test_folders_that_are_called_like_an_exports_files_are_no_export(run: Run) -> None:
    run()
    export(Path("run"), Path("e"), **SAID)
    Path("e/README.md").unlink()
    Path("e/README.md").mkdir()
    Path("e/README.md/thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="is no export, so it is never replaced"):
        export(Path("run"), Path("e"), **SAID)
    assert Path("e/README.md/thesis.txt").read_text() == "years of work"


def test_places_that_have_no_name(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run()
    os.symlink("loop", "loop")
    os.symlink("nowhere", "dangling")
    for link in ("loop", "dangling"):
        with pytest.raises(UserError, match=rf"^{link} \(--out\) is a link that leads nowhere. Choose another place.$"):
            export(Path("run"), Path(link), **SAID)
    Path("here").mkdir()
    monkeypatch.chdir("here")
    for write in (export, export_all):
        with pytest.raises(UserError, match=r"\. \(--out\) is the working folder"):
            write(tmp_path / "run", Path(), **SAID)
    assert not list(Path().iterdir())


def test_no_layout_is_written_if_the_target_of_another_is_gone(run: Run) -> None:
    folder = run()
    place = folder / "drafter/drafter.json"
    tree = json.loads(place.read_text())
    for change in ({"target": "/gone"}, {"target_revision": "0" * 16}):
        place.write_text(json.dumps(tree | change))
        with pytest.raises(UserError):
            export_all(folder, Path("e"), **SAID)
        assert not Path("e").exists()
        export(folder, Path("f"), **SAID)  # this one needs no target
        shutil.rmtree("f")


def test_weights_that_are_not_finite_are_not_exported(run: Run) -> None:
    place = run() / "drafter/model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(place).items()}
    weights["fc.weight"][0, 0] = float("nan")
    save_file(weights, place)
    with pytest.raises(UserError, match=r"holds values that are not finite in fc\.weight\."):
        export(Path("run"), None, **SAID)


@pytest.mark.parametrize("size", ["9" * 400 + "TB", "\N{ARABIC-INDIC DIGIT FIVE}KB", "0KB", "5", "-1KB", "1e3KB"])
def test_sizes_that_are_none(run: Run, size: str) -> None:
    with pytest.raises(UserError, match="must be a size such as 5GB or 500MB"):
        export(run(), None, max_shard_size=size, **SAID)


def test_a_layout_without_a_key_for_the_targets_scale_is_refused_before_anything_is_written(run: Run) -> None:
    """A target that scales its embeddings, as Gemma does; the z-lab layout says so."""
    folder = run(embed_scale=8.0, logit_cap=30.0)
    for write in (lambda: export(folder, None, layout="speculators", **SAID), lambda: export_all(folder, None, **SAID)):
        with pytest.raises(UserError, match=r"embeddings times 8, logits capped at 30; 0: not\).* --format zlab\.$"):
            write()
    assert not list(folder.glob("export*"))
    export(folder, None, layout="zlab", **SAID)
    told = json.loads((folder / "export" / "config.json").read_text())["dflash_config"]
    assert (told["input_embedding_scale"], told["final_logit_softcapping"]) == (8.0, 30.0)
