"""`plan --memory` names the cheapest that fits, by the whole grid; where nothing does, it says the least."""

import dataclasses
import json
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.bench.shapes import SHAPES
from paceline.cli import app
from paceline.config import RunSettings
from paceline.config_file import dump_settings, load_settings
from paceline.drafter.float8 import check_sizes, product_sizes
from paceline.pipeline.cards import card_for, read_memory, usable_of
from paceline.pipeline.fit_search import Fit, Shape, candidates, changed, search
from paceline.pipeline.slots import slots_bytes
from paceline.recipes.plan_fit import overrides
from paceline.records import UserError
from paceline.runtime.profile import Device, MachineKey, Rates, make_profile, save_profile
from paceline.train.memory import gib, step_memory

GIB = 2**30
QWEN = SHAPES["qwen3-8b"]
SIZES: dict[str, Any] = {"hidden_size": 4096, "vocab_size": 151_936, "tied": False}


def tree_of(**changes: Any) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "run_dir": "run",
        "target": {"model": "target"},
        "drafter": QWEN.drafter.model_dump(),
        "data": {"dataset": "data", "max_length": 3000},
        "train": {"context_slots": 8192, "anchor_slots": 1024, "anchors_per_sample": 256, "logits_mib": 512},
        "pipeline": {"credit_gib": 0.25},
    }
    for section, values in changes.items():
        tree[section] = tree.get(section, {}) | values
    return tree


def replica(run: RunSettings) -> list[int]:
    """20 GiB in all, a little more on the last of several cards, and more with longer micro-batches."""
    each = run.target.devices_per_replica
    own = [20 * GIB // each] * each
    own[-1] += run.train.context_slots << 16
    return own


SHAPE = Shape(**SIZES, layers=2, replica=replica)

# What may be changed, by hand: the dearest first, as it is and then what it becomes.
GRID: list[list[dict[str, Any]]] = [
    [
        {},
        *(
            {
                "pipeline": {"targets": [f"cuda:{at}" for at in range(each)], "drafters": [f"cuda:{each}"]},
                "target": {"devices_per_replica": each},
            }
            for each in (1, 2)
        ),
    ],
    [
        {},
        {"train": {"anchor_slots": 512, "context_slots": 4096}},
        {"train": {"anchor_slots": 256, "context_slots": 3072}},
    ],
    [{}, {"train": {"offload": "moments"}}],
    [{}, {"train": {"recompute": "layers"}}],
    [{}, {"train": {"moments": "8bit"}}],
    [{}, {"target": {"features": "fp8"}}],
    [{}, *({"pipeline": {"credit_gib": gib}} for gib in (0.125, 0.0625))],
    [{}, *({"train": {"logits_mib": mib}} for mib in (256, 128, 64))],
]


@pytest.fixture(scope="module")
def everything() -> list[tuple[tuple[int, ...], RunSettings, int]]:
    """Every combination: its cost, dearest part first, its settings, and what the fullest device needs."""
    found = []
    step = cache(lambda train: step_memory(QWEN.drafter, train, **SIZES).total)
    for places in product(*(range(len(choices)) for choices in GRID)):
        tree = tree_of()
        for choices, place in zip(GRID, places, strict=True):
            for section, values in choices[place].items():
                tree[section] = tree[section] | values
        run = RunSettings.model_validate(tree)
        needs: Counter[str] = Counter()
        for device in run.pipeline.drafters:
            needs[device] += step(run.train) + slots_bytes(run, 4096)
        for device, size in zip(run.pipeline.targets, replica(run), strict=True):
            needs[device] += size
        found.append((places, run, max(needs.values())))
    return found


@pytest.mark.parametrize("memory", [60, 50, 44, 40, 36, 32, 30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 4])
def test_what_is_named_is_the_cheapest_that_fits(everything: Any, memory: int) -> None:
    usable = usable_of(memory * GIB)
    found = search(RunSettings.model_validate(tree_of()), SHAPE, usable)
    fitting = [(cost, run, most) for cost, run, most in everything if most <= usable]
    if fitting:
        _, run, most = min(fitting, key=lambda one: one[0])
        assert (found.settings, found.most) == (run, most)
    else:
        assert found.most == min(most for *_, most in everything) > usable


def test_all_of_the_grid_matters(everything: Any) -> None:
    """Else the test above would hold of a search that looks at less."""
    named = set[str]()
    for usable in sorted({most for *_, most in everything})[::12]:
        found = search(RunSettings.model_validate(tree_of()), SHAPE, usable)
        cost, run, most = min((one for one in everything if one[2] <= usable), key=lambda one: one[0])
        assert (found.settings, found.most) == (run, most), cost
        named |= set(found.changes)
    changed = {f"{section}.{key}" for choices in GRID for one in choices for section in one for key in one[section]}
    assert named == changed


def test_what_is_changed_already_is_left() -> None:
    """And what goes with AdamW alone is no way out for Muon."""
    small = {"train": {"moments": "8bit", "recompute": "layers", "offload": "moments"}, "target": {"features": "fp8"}}
    found = search(RunSettings.model_validate(tree_of(**small)), SHAPE, 0)
    assert not {"train.moments", "train.recompute", "train.offload", "target.features"} & set(found.changes)
    muon = search(RunSettings.model_validate(tree_of(train={"optimizer": "muon"})), SHAPE, 0)
    assert not {"train.moments", "train.offload"} & set(muon.changes)


def test_packed_rows_get_shorter_and_a_step_takes_more_of_them() -> None:
    packed = {"layout": "packed", "token_budget": 8000, "max_length": 1000}
    run = RunSettings.model_validate(tree_of(data=packed, train={"batches_per_step": 3}))
    found = search(run, SHAPE, 0).settings
    assert (found.train.context_slots, found.data.token_budget, found.train.batches_per_step) == (1024, 1024, 24)
    assert 23 * 1024 < 3 * 8000 <= 24 * 1024, "a step has its samples"


def test_sizes_that_are_named_are_some_that_products_in_fp8_take() -> None:
    train = {"fp8": "on", "anchor_slots": 1024, "anchors_per_sample": 200}
    run = RunSettings.model_validate(tree_of(train=train))
    slots = set[int]()
    for changes in candidates(run, SHAPE):
        found = changed(run, changes)
        check_sizes(product_sizes(found.drafter, found.train, SHAPE.hidden_size))
        slots.add(found.train.anchor_slots)
    assert slots == {1024, 512, 256, 208}


def test_roles_that_share_cards_are_counted_together() -> None:
    two = {"targets": ["cuda:0", "cuda:1"], "drafters": ["cuda:1", "cuda:1"]}
    run = RunSettings.model_validate(tree_of(pipeline=two, evaluate={"device": "cuda:0", "prompts": "p"}))
    shape = Shape(**SIZES, layers=3, replica=replica, evaluator=5 * GIB)
    found = search(run, shape, 500 * GIB)
    rank = step_memory(run.drafter, run.train, **SIZES).total + slots_bytes(run, 4096)
    assert found.needs == {
        "cuda:1": {"drafter rank 0": rank, "drafter rank 1": rank, "target replica 1": sum(replica(run))},
        "cuda:0": {"target replica 0": sum(replica(run)), "evaluator": 5 * GIB},
    }
    apart = search(run, shape, rank).settings  # but no more on any card
    assert len({*apart.devices}) == len(apart.devices) == 5


def test_a_target_larger_than_a_card_gets_several() -> None:
    def large(run: RunSettings) -> list[int]:
        each = run.target.devices_per_replica
        return [90 * GIB // each] * each

    run = RunSettings.model_validate(tree_of())
    found = search(run, Shape(**SIZES, layers=34, replica=large), 35 * GIB)
    assert found.changes == {
        "target.devices_per_replica": 3,
        "pipeline.targets": ("cuda:0", "cuda:1", "cuda:2"),
        "pipeline.drafters": ("cuda:3",),
    }


@pytest.mark.parametrize(
    ("text", "size"), [("24GiB", 24 * GIB), ("24 GiB", 24 * GIB), ("80GB", 80 * 10**9), ("24564MiB", 24564 << 20)]
)
def test_memory_has_a_unit(text: str, size: int) -> None:
    assert read_memory(text) == size


@pytest.mark.parametrize("text", ["24", "GiB", "24gb", "-1GiB", "0GiB", "1e9GiB", "٢٤GiB", ""])
def test_what_is_no_memory_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"such as 24GiB or 80GB, got {text!r}.")):
        read_memory(text)


@pytest.mark.parametrize("text", ["9" * 320 + "GiB", "9" * 290 + "GiB", "1048577GiB"])
def test_what_is_more_than_any_card_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"^--memory is one card's memory, at most 1,024 TiB, got '.{1,30}'\."):
        read_memory(text)
    assert read_memory("1048576GiB") == 1 << 50


def test_a_card_that_is_named_is_the_smallest_that_does() -> None:
    for size in range(1, 100 * GIB, 1_234_567_891):
        card = card_for(size)
        less = f"{float(card.removesuffix(' GiB')) - 0.1:.1f} GiB"
        assert usable_of(read_memory(card)) >= size > usable_of(read_memory(less)), card


@pytest.fixture
def run_yaml(tmp_path: Path, tiny_folder: Path, shape: Any, write_dataset: Callable[..., Path]) -> Path:
    """A wide drafter of a tiny target, which needs some GiB."""
    rows = [([5 + at % 100 for at in range(length)], 2) for length in (20, 24, 28, 32) * 4]
    wide = {"block_size": 16, "intermediate_size": 16_384, "layers": 3}
    tree = {
        "run_dir": str(tmp_path / "run"),
        "target": {"model": str(tiny_folder)},
        "drafter": shape.model_dump() | wide,
        "data": {"dataset": str(write_dataset(rows)), "token_budget": 2048, "max_length": 1024},
        "train": {"anchors_per_sample": 64, "context_slots": 4096, "anchor_slots": 1024},
    }
    path = tmp_path / "RUN.yaml"
    path.write_text(dump_settings(RunSettings.model_validate(tree)))
    return path


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    gpu = Device(name="NVIDIA GeForce RTX 4090", capability="8.9", memory_gib=24.0)
    rates = Rates(bf16_tflops=160.0, fp8_tflops=300.0, memory_gb_s=900.0)
    made = make_profile(
        MachineKey(torch="2.11.0", driver="580", devices=(gpu,)),
        compiles=True,
        captures=True,
        flex_attention={},
        rates={gpu.name: rates},
    )
    save_profile(made, tmp_path / "machine.json")
    return tmp_path / "machine.json"


def plan(*arguments: object, status: int = 0) -> Any:
    done = CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": "80"})
    assert (done.exit_code == 0) == (status == 0), done.output
    return done if status == 0 else str(done.exception)


def test_what_is_named_can_be_pasted_and_then_fits_as_it_is(run_yaml: Path, profile: Path) -> None:
    asked = ("--memory", "4GiB", "--profile", profile)
    found = json.loads(plan(run_yaml, *asked, "--json").stdout)["fit"]
    assert found["changes"]
    assert max(sum(parts.values()) for parts in found["needs_now"].values()) > found["usable"]
    again = json.loads(plan(run_yaml, *found["overrides"], *asked, "--json").stdout)["fit"]
    assert (again["changes"], again["needs"]) == ({}, found["needs"])
    assert again["needs_now"] == found["needs"]
    text = plan(run_yaml, *asked).output
    words = " ".join(text.split())
    assert "on cards of 4.0 GiB, of which about 3.2 GiB can be used" in words
    assert " ".join(found["overrides"]) in words
    assert "the target fits on the drafter's card" in words
    # The lines of YAML, in the place of those of the file.
    lines = re.search(r"for RUN\.yaml:\n((?:    .*\n)+)  or behind", text)
    pasted = run_yaml.with_name("PASTED.yaml")
    left = run_yaml.read_text().splitlines()
    section = ""
    for line in lines[1].splitlines():  # type: ignore[index]
        line = line[4:]
        section = section if line.startswith(" ") else line
        if line.startswith(" "):
            at = next(n for n in range(left_index(left, section), len(left)) if left[n].startswith(line.split(":")[0]))
            left[at] = line
    pasted.write_text("\n".join(left) + "\n")
    assert load_settings(pasted) == load_settings(run_yaml, found["overrides"])


def left_index(lines: list[str], section: str) -> int:
    return next(at for at, line in enumerate(lines) if line.startswith(section))


def test_rates_are_those_of_the_profile_or_unknown(
    run_yaml: Path, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rate = json.loads(plan(run_yaml, "--memory", "40GiB", "--profile", profile, "--json").stdout)["fit"]["rate"]
    assert (rate["colocated"], rate["gpus"]) == (True, ["NVIDIA GeForce RTX 4090"])
    assert 0 < rate["samples_per_s"] < rate["drafter_side"]
    split = json.loads(plan(run_yaml, "--gpus", 1, "--profile", profile, "--json").stdout)["gpus"]["best"]
    assert rate["samples_per_s"] == split["samples_per_s"], "as `plan --gpus` has it"
    text = " ".join(plan(run_yaml, "--memory", "40GiB", "--profile", profile).output.split())
    assert "the settings fit as they are" in text
    assert re.search(r"expected: about [\d,.]+ samples/s, limited by both in turn; of the drafter alone about", text)
    assert "targets on the fast path, compiled" in text
    plain = plan(run_yaml, "target.fast=off", "--memory", "40GiB", "--profile", profile).output
    assert "  targets by transformers' own forward: target.fast is off\n" in plain
    monkeypatch.setattr("paceline.recipes.machine_rates.profile_path", lambda: run_yaml.with_name("none.json"))
    text = " ".join(plan(run_yaml, "--memory", "40GiB").output.split())
    assert "rate unknown: What a run makes is predicted from measured rates. There is no machine profile" in text
    assert "`paceline bench step` measures" in text


def test_the_rate_is_that_of_the_packed_rows_that_are_named(
    run_yaml: Path, profile: Path, write_dataset: Callable[..., Path]
) -> None:
    rows = [([5 + at % 50 for at in range(length)], 2) for length in (20, 24, 28, 60) * 80]
    packed = ("data.layout=packed", "data.token_budget=4096", "data.max_length=64", "train.anchors_per_sample=8")
    smaller = ("train.moments=8bit", "train.recompute=layers", "train.offload=moments", "train.logits_mib=64")
    settings = (f"data.dataset={write_dataset(rows, name='many')}", *packed, *smaller)
    asked = ("--memory", "1.8GiB", "--profile", profile, "--json")
    found = json.loads(plan(run_yaml, *settings, *asked).stdout)["fit"]
    assert found["changes"]["data.token_budget"] < 4096
    pasted = json.loads(plan(run_yaml, *settings, *found["overrides"], *asked).stdout)["fit"]
    assert (pasted["changes"], pasted["rate"]) == ({}, found["rate"])


def test_a_profile_that_is_named_has_to_be_there(run_yaml: Path, tmp_path: Path) -> None:
    """Else a slip of the pen would go unseen; nothing is printed before it is told."""
    nowhere, broken = tmp_path / "nowhere.json", tmp_path / "broken.json"
    broken.write_text("{")
    for named, said in ((nowhere, "There is no machine profile at"), (broken, "cannot be read")):
        asked = ["plan", str(run_yaml), "--memory", "40GiB", "--profile", str(named)]
        done = CliRunner().invoke(app, asked)
        assert isinstance(done.exception, UserError)
        assert said in str(done.exception)
        assert not done.output
    assert "goes with --gpus or --memory" in plan(run_yaml, "--profile", nowhere, status=2)


def test_computing_again_is_slower(run_yaml: Path, profile: Path) -> None:
    def blocks(*changes: str) -> float:
        done = plan(run_yaml, *changes, "--memory", "80GiB", "--profile", profile, "--json")
        return float(json.loads(done.stdout)["fit"]["rate"]["blocks_per_s"])

    assert 0.7 < blocks("train.recompute=layers") / blocks() < 0.9


def test_where_nothing_fits_the_least_is_said(run_yaml: Path) -> None:
    quick = ("train.logits_mib=64", "pipeline.credit_gib=0.0625")  # nothing to lower there
    said = plan(run_yaml, *quick, "--memory", "600MiB", status=2)
    wanted = (
        r"fit cards of 0\.6 GiB: at least, with (.*), \S+ needs .* GiB \(.*\), that is a card of ([\d.]+ GiB)\. Use"
    )
    found = re.search(wanted, said)
    assert found, said
    assert json.loads(plan(run_yaml, *quick, "--memory", found[2], "--json").stdout)["fit"]["changes"]


@pytest.mark.parametrize(
    ("who", "changes", "advice"),
    [
        ("drafter rank 0", (), "lower drafter.layers, drafter.intermediate_size or train.anchors_per_sample."),
        ("target replica 0", (), "set target.fp8 to on, or take a smaller target, or taps of earlier layers (drafter."),
        ("target replica 0", ("target.fast=off",), "or take a smaller target, or taps"),
        ("evaluator", (), "set evaluate.device to another one, or to null."),
    ],
)
def test_what_to_lower_is_that_of_the_role_that_needs_most(
    run_yaml: Path, monkeypatch: pytest.MonkeyPatch, who: str, changes: tuple[str, ...], advice: str
) -> None:
    def tells(run: RunSettings, *given: Any) -> Fit:
        found = search(run, *given)
        return dataclasses.replace(found, needs={"cuda:0": {"drafter rank 0": 2 * GIB, who: 90 * GIB}})

    monkeypatch.setattr("paceline.recipes.plan_fit.search", tells)
    said = plan(run_yaml, *changes, "--memory", "24GiB", status=2)
    assert f"Use such cards, or {advice.removeprefix('or ')}" in said, said


def test_a_profile_of_another_machine_is_not_had_by_a_doctor_here(run_yaml: Path) -> None:
    said = plan(run_yaml, "--memory", "24GiB", "--profile", run_yaml.with_name("none.json"), status=2)
    assert said.endswith("none.json. Name one that `paceline doctor` wrote on that machine.")


@pytest.mark.parametrize(("size", "said"), [(2**30, "1.0 GiB"), (2**27, "0.1 GiB"), (2**26, "64.0 MiB")])
def test_small_sizes_are_not_said_to_be_nothing(size: int, said: str) -> None:
    assert gib(size) == said


@pytest.mark.parametrize("memory", ["40GiB", "4GiB"])
def test_of_a_target_off_the_fast_path_no_more_is_said_than_is_known(run_yaml: Path, memory: str) -> None:
    def said(*changes: str) -> str:
        return " ".join(plan(run_yaml, *changes, "--memory", memory).output.split())

    kept, off = said(), said("target.fast=off")
    fit = "the settings fit as they are" if memory == "40GiB" else "changes that fit"
    assert fit in kept
    assert "then needs about" in kept
    assert "estimated" not in kept
    assert "of a target only what it needs at least is counted: target.fast is off, so it needs more" in off
    assert f"{fit} as far as is estimated" in off
    assert "the target fits on the drafter's card as far as is estimated" in off
    assert "then needs at least" in off
    assert "then needs about" not in off
    config = Path(load_settings(run_yaml).target.model) / "config.json"
    other = run_yaml.with_name("other")
    shutil.copytree(config.parent, other)
    (other / "config.json").write_text(config.read_text().replace('"model_type": "qwen3"', '"model_type": "olmo2"'))
    if memory == "40GiB":
        assert "counted: olmo2 is not known to the fast path, so it needs more" in said(f"target.model={other}")


def test_what_cannot_be_planned_is_refused(run_yaml: Path) -> None:
    folder = json.loads(plan(run_yaml, "--json").stdout)["datasets"][0]["folder"]
    assert "--memory needs the shapes" in plan(folder, "--memory", "24GiB", status=2)
    assert "needs the target's shape" in plan(run_yaml, "target.model=nobody/nothing", "--memory", "24GiB", status=2)
    assert "got train.policy eager" in plan(run_yaml, "train.policy=eager", "--memory", "24GiB", status=2)
    assert "attention over tiles, for which train.context_slots (100) must be a multiple of 128. Set it so." in plan(
        run_yaml, "train.context_slots=100", "--memory", "24GiB", status=2
    )
    assert "Set evaluate.device to null" in plan(
        run_yaml, "evaluate.device=cpu", "evaluate.prompts=nowhere.jsonl", "--memory", "24GiB", status=2
    )


def test_sizes_that_train_refuses_in_fp8_are_refused(run_yaml: Path) -> None:
    said = plan(run_yaml, "train.fp8=on", "train.anchor_slots=1000", "--memory", "80GiB", status=2)
    assert "train.anchor_slots × (drafter.block_size - 1) must be a multiple of 16, got 15,000" in said
    plan(run_yaml, "train.anchor_slots=1000", "--memory", "80GiB")


def test_overrides_are_written_as_the_command_line_takes_them(run_yaml: Path) -> None:
    changes: dict[str, Any] = {
        "pipeline.targets": ("cuda:0", "cuda:1"),
        "train.logits_mib": 64,
        "pipeline.credit_gib": 0.0625,
    }
    assert overrides(changes) == [
        "pipeline.targets=[cuda:0, cuda:1]",
        "train.logits_mib=64",
        "pipeline.credit_gib=0.0625",
    ]
    settings = load_settings(run_yaml, [*shlex.split(shlex.join(overrides(changes))), "target.devices_per_replica=2"])
    assert settings.pipeline.targets == ("cuda:0", "cuda:1")
    assert (settings.train.logits_mib, settings.pipeline.credit_gib) == (64, 0.0625)
