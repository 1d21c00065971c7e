"""What `plan` prints and returns."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from paceline.config import DataSettings, RunSettings, TargetSettings
from paceline.config_file import dump_settings, load_settings
from paceline.data.mixture import Mixture, coverage, first_table, open_mixture
from paceline.observe.console import Console
from paceline.recipes import plan as recipe
from paceline.recipes.plan import plan_epoch
from paceline.recipes.plan_memory import plan_memory
from paceline.recipes.target_memory import plan_target
from paceline.train.memory import step_memory
from tests.support.families import FAMILIES, save

ROWS = [([5] * length, 2) for length in (10, 20, 33, 60, 61, 62, 7, 40)]


@pytest.fixture
def run_yaml(tmp_path: Path, shape: Any, write_dataset: Callable[..., Path]) -> Path:
    """A RUN.yaml of two datasets, one of which truncation has cut."""
    folders = [str(write_dataset(ROWS, "one")), str(write_dataset(ROWS[:3], "two"))]
    tree = {
        "run_dir": str(tmp_path / "run"),
        "target": {"model": "t"},
        "drafter": shape.model_dump(),
        "data": {"dataset": folders, "weights": [1, 2], "token_budget": 128, "align": 32},
        "train": {"anchors_per_sample": 4, "epochs": 3},
    }
    path = tmp_path / "RUN.yaml"
    path.write_text(dump_settings(RunSettings.model_validate(tree)))
    return path


@pytest.mark.parametrize("layout", ["bucketed", "trimmed", "packed"])
def test_it_tells_of_batches_truncation_and_anchors(
    run_yaml: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], layout: str
) -> None:
    def cut(settings: DataSettings) -> Mixture:
        mixture = open_mixture(settings)
        for dataset, lost in zip(mixture.datasets, (30, 10), strict=True):
            origin = replace(dataset.manifest.origin, truncated=2, tokens_cut=lost, supervised_cut=lost // 2)
            dataset.manifest = replace(dataset.manifest, origin=origin)
        return mixture

    monkeypatch.setattr(recipe, "open_mixture", cut)
    monkeypatch.setenv("COLUMNS", "80")
    report = plan_epoch(run_yaml, [f"data.layout={layout}"], seed=None, console=Console(json=False))
    shown = capsys.readouterr()
    text = shown.out + shown.err
    assert max(map(len, text.splitlines())) <= 80
    tokens = sum(len(ids) for ids, _ in ROWS) + 2 * 63
    supervised = sum(len(ids) - 2 for ids, _ in [*ROWS, *ROWS[:3]])
    assert (report["layout"], report["samples"], report["tokens"]) == (layout, 14, tokens)
    assert report["truncation"] == {
        "rows": 4,
        "tokens": 40,
        "token_share": pytest.approx(40 / (40 + tokens - 63)),
        "supervised": 20,
        "supervised_share": pytest.approx(20 / (20 + supervised)),
    }
    settings = DataSettings(dataset=(str(run_yaml.parent / "one"), str(run_yaml.parent / "two")), weights=(1.0, 2.0))
    share = coverage(open_mixture(settings), anchors_per_sample=4, epochs=3)
    assert report["anchors"] == {
        "candidates": share.candidates,
        "per_sample": 4,
        "epochs": 3,
        "epoch_share": share.epoch_share,
        "run_share": share.run_share,
    }
    assert report["open_s"] >= 0
    assert report["plan_s"] >= 0
    assert bool(report["buckets"]) == (layout != "packed") == ("lengths" in text)
    assert report["fill"] == pytest.approx(tokens / report["batches"] / 128)
    for said in (
        f"{report['batches']} batches an epoch ({layout})",
        f"padding {report['padding_share']:.1%}",
        "4 rows cut, 40 tokens lost",
        "supervised tokens lost: 20",
        f"an epoch draws {share.epoch_share:.1%}",
        f"3 epochs {share.run_share:.1%}",
    ):
        assert said in text


def test_a_folder_is_planned_with_the_defaults(write_dataset: Callable[..., Path]) -> None:
    folder = write_dataset(ROWS)
    report = plan_epoch(folder, [], seed=None, console=Console(json=True))
    settings = DataSettings(dataset=str(folder))
    assert settings.layout == report["layout"] == "trimmed"
    want = first_table(open_mixture(settings), settings, seed=0).as_dict()
    assert {key: report[key] for key in want} == want


def test_a_dataset_that_an_epoch_passes_over_is_told(run_yaml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (str(run_yaml.parent / name) for name in ("one", "two"))
    report = plan_epoch(run_yaml, ["data.weights=[1, 1e-5]"], seed=None, console=Console(json=False))
    assert report["datasets"] == [
        {"folder": one, "rows": 8, "epoch_rows": 8},
        {"folder": two, "rows": 3, "epoch_rows": 0},
    ]
    said = " ".join(capsys.readouterr().out.split()).replace(" /", "/")
    assert "none of the 3 rows" in said
    assert "its weight is 1e-05 (data.weights)" in said
    report = plan_epoch(run_yaml, ["data.weights=[1, 2]"], seed=None, console=Console(json=False))
    assert [made["epoch_rows"] for made in report["datasets"]] == [8, 6]
    assert "none of the" not in capsys.readouterr().out


@pytest.mark.parametrize("layout", ["bucketed", "trimmed"])
def test_the_largest_settings_are_planned(run_yaml: Path, layout: str) -> None:
    most = 2**31 - 1
    large = [f"data.{key}={most}" for key in ("max_batch", "min_batch", "buckets", "max_length", "prefetch")]
    large += [f"data.layout={layout}", f"data.align={2**24}", f"data.token_budget={2**24}", "data.weights=[1000, 1e-6]"]
    large += [f"train.{key}={2**24}" for key in ("context_slots", "anchor_slots", "anchors_per_sample")]
    report = plan_epoch(run_yaml, [*large, "train.epochs=1000000"], seed=None, console=Console(json=True))
    assert report["batches"] == 1
    assert report["samples"] == 8000


# --- memory


def test_moments_in_host_memory_are_told_beside_the_device(
    run_yaml: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = [f"target.model={tiny_folder}", "train.moments=8bit", "train.offload=moments", "train.recompute=layers"]
    report = plan_epoch(run_yaml, changes, seed=None, console=Console(json=False))
    told = capsys.readouterr().out
    assert "chunks of moments" in told
    assert "GiB of page-locked host memory for its moments (train.offload)" in told
    assert report["memory"]["host"] > 0


@pytest.mark.parametrize("name", ["tiny", "tied"])
def test_memory_is_told_for_the_targets_own_sizes(
    run_yaml: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    facts = request.getfixturevalue(name)
    run = load_settings(run_yaml, [f"target.model={facts.folder}", "train.optimizer=muon"])
    sizes = {"hidden_size": facts.hidden_size, "vocab_size": facts.vocab_size, "tied": name == "tied"}
    want = step_memory(run.drafter, run.train, **sizes)
    C, width = run.train.context_slots, len(run.drafter.taps) * facts.hidden_size
    slots = 16 * C * (2 * width + 8)  # features in bfloat16 and positions; the credit would pay for more
    total = want.total + slots
    told = plan_memory(run, Console(json=False))
    assert told == {**want.as_dict(), "slots": slots, "total": total, "ranks": {"cpu": 1}}
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = {line.rsplit(maxsplit=1)[0].strip(): line.rsplit(maxsplit=1)[1] for line in lines if line.strip()}
    assert rows["embedding and head"] == f"{want.ends / 2**30:.2f}"
    assert rows["slots for features"] == f"{slots / 2**30:.2f}"
    assert rows["total"] == f"{total / 2**30:.2f}"


def test_memory_is_part_of_a_runs_plan_alone(run_yaml: Path, tiny_folder: Path) -> None:
    report = plan_epoch(run_yaml, [f"target.model={tiny_folder}"], seed=None, console=Console(json=True))
    parts = {key: value for key, value in report["memory"].items() if key not in ("total", "peak", "ranks")}
    assert sum(parts.values()) == report["memory"]["total"] > 0
    target = {key: value for key, value in report["target"].items() if key not in ("total", "replicas")}
    assert sum(target.values()) == report["target"]["total"] > 0
    assert report["target"]["replicas"] == {"cpu": 1}
    alone = plan_epoch(run_yaml.parent / "one", [], seed=None, console=Console(json=True))
    assert not {"memory", "target"} & alone.keys()


@pytest.mark.parametrize(
    "target",
    [
        TargetSettings(model="./nowhere"),
        TargetSettings(model="a/b"),
        TargetSettings(model="a/b", revision="0" * 40),
        TargetSettings(model="./no/where", revision="0" * 40),
    ],
)
def test_a_target_that_is_not_here_is_not_fetched_and_no_error(
    run_yaml: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], target: TargetSettings
) -> None:
    def never(*arguments: object, **more: object) -> None:
        raise AssertionError("something was fetched")

    monkeypatch.setattr("huggingface_hub.snapshot_download", never)
    run = load_settings(run_yaml).model_copy(update={"target": target})
    assert plan_memory(run, Console(json=False)) is None
    assert "memory of a drafter rank not estimated: target.model is not on this machine" in capsys.readouterr().out


def test_a_hub_target_in_the_cache_is_found_there(
    run_yaml: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "hub" / "models--a--b" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_bytes((tiny_folder / "config.json").read_bytes())  # no weights are needed
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    run = load_settings(run_yaml).model_copy(update={"target": TargetSettings(model="a/b", revision=commit)})
    here = run.model_copy(update={"target": TargetSettings(model=str(tiny_folder))})
    assert plan_memory(run, Console(json=True)) == plan_memory(here, Console(json=True)) is not None


def test_ranks_that_share_a_device_are_told(
    run_yaml: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = f"target.model={tiny_folder}"
    one = plan_memory(load_settings(run_yaml, [here]), Console(json=False))
    assert "share" not in capsys.readouterr().out
    three = load_settings(run_yaml, [here, 'pipeline.drafters=["cuda:0", "cuda:1", "cuda:0"]'])
    assert one is not None
    assert plan_memory(three, Console(json=False)) == {**one, "ranks": {"cuda:0": 2, "cuda:1": 1}}
    said = capsys.readouterr().out
    assert "2 ranks share cuda:0 (pipeline.drafters): each needs that much of it" in said
    assert "share cuda:1" not in said


@pytest.mark.parametrize("policy", ["auto", "eager", "compiled", "captured"])
@pytest.mark.parametrize(
    ("changes", "rules"),
    [
        (["train.context_slots=1000"], "train.context_slots (1,000) must be a multiple of 128"),
        (["train.anchor_slots=100"], "train.anchor_slots (100) must be a multiple of 32"),
        (["drafter.block_size=6"], "drafter.block_size (6) must divide 128"),
    ],
)
def test_dense_attention_is_not_estimated(
    run_yaml: Path,
    tiny_folder: Path,
    capsys: pytest.CaptureFixture[str],
    changes: list[str],
    rules: str,
    policy: str,
) -> None:
    run = load_settings(run_yaml, [f"target.model={tiny_folder}", f"train.policy={policy}", *changes])
    assert plan_memory(run, Console(json=False)) is None
    said = capsys.readouterr().out
    assert said.startswith("  memory of a drafter rank not estimated: attention on a GPU would be dense.")
    assert said.endswith(f"If compiled or captured there, {rules}\n")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (None, r"config\.json cannot be read as a model configuration"),
        ("{", r"config\.json cannot be read as a model configuration"),
        ('{"model_type": "nothing-known"}', r"config\.json cannot be read as a model configuration"),
        ('{"model_type": "encodec"}', r"transformers knows none of the model_type encodec in .*config\.json"),
    ],
)
def test_a_plan_does_not_fail_for_a_target_that_cannot_be_read(
    run_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str | None, reason: str
) -> None:
    (tmp_path / "target").mkdir()
    if config is not None:
        (tmp_path / "target" / "config.json").write_text(config)
    report = plan_epoch(run_yaml, [f"target.model={tmp_path / 'target'}"], seed=None, console=Console(json=False))
    assert report["memory"] is None
    assert report["batches"] > 0
    assert re.search(f"memory of a drafter rank not estimated: .*{reason}", capsys.readouterr().out)


def test_a_head_in_the_files_counts_although_the_configuration_ties_it(
    run_yaml: Path, tied_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "target"
    shutil.copytree(tied_folder, folder)
    run = load_settings(run_yaml, [f"target.model={folder}"])
    tied = plan_memory(run, Console(json=False))
    (folder / "model-2.safetensors").write_bytes(b"damaged")  # is for those who load it
    assert plan_memory(run, Console(json=False)) == tied
    assert "lm_head.weight" not in capsys.readouterr().out
    save_file({"lm_head.weight": torch.zeros(1)}, folder / "model-3.safetensors")
    both = plan_memory(run, Console(json=False))
    assert tied is not None
    assert both is not None
    assert both["ends"] == 2 * tied["ends"]
    assert "the files hold a head" in capsys.readouterr().out


def test_an_eager_step_is_said_to_need_more(
    run_yaml: Path, tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = f"target.model={tiny_folder}"
    plan_memory(load_settings(run_yaml, [here, "train.policy=eager"]), Console(json=False))
    assert "train.policy eager needs more" in capsys.readouterr().out
    plan_memory(load_settings(run_yaml, [here]), Console(json=False))
    assert "eager" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("Qwen3", [], "on a GPU at its peak, on the fast path:"),
        ("Qwen3", ["target.fast=off"], "on a GPU, at least:"),
        ("Qwen3-MoE", [], "on a GPU, at least:"),
    ],
)
def test_a_replicas_peak_is_told_of_targets_on_the_fast_path_alone(
    run_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, change: list[str], said: str
) -> None:
    folder = save(next(family for family in FAMILIES if family.name == name), tmp_path / "target")
    assert plan_target(load_settings(run_yaml, change), folder, Console(json=False)) is not None
    told = capsys.readouterr().out
    assert said in told
    assert ("which is not estimated" in told) == ("at least" in said)
    assert ("qwen3_moe is not known to the fast path" in told) == (name == "Qwen3-MoE")
