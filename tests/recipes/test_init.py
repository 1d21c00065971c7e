"""`init` writes a file that `train` takes, or nothing."""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GptOssConfig, MixtralConfig, Qwen3_5MoeTextConfig, Qwen3Config, Qwen3MoeConfig

from paceline.config import PipelineSettings
from paceline.config_file import load_settings
from paceline.observe.console import Console
from paceline.pipeline.cards import CONTEXT, usable_of
from paceline.recipes.init import data_for, drafter_for, init, pipeline_for
from paceline.recipes.init_outlook import outlook
from paceline.recipes.mask_token import choose_mask_token
from paceline.recipes.plan import plan_epoch
from paceline.recipes.plan_gpus import Asked, plan_gpus
from paceline.recipes.target_checks import check_data
from paceline.recipes.target_memory import replica_memory
from paceline.records import UserError
from paceline.runtime.profile import Rates, make_profile, save_profile, this_machine
from paceline.target.load import TargetFacts, describe
from paceline.target.model import check_taps
from paceline.train.memory import USABLE, gib, step_memory

OPTIONS: dict[str, Any] = {
    "revision": None,
    "dataset": "data set",
    "run_dir": "runs/a",
    "mask_token_id": None,
    "overwrite": False,
}


def copy_of(folder: Path, place: Path, **changes: Any) -> Path:
    """A target with another config.json."""
    shutil.copytree(folder, place)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | changes))
    return place


def test_the_file_holds_what_is_returned(tmp_path: Path, tiny_folder: Path, tiny: TargetFacts) -> None:
    out = tmp_path / "new" / "RUN.yaml"
    settings = init(str(tiny_folder), out, **OPTIONS)
    assert load_settings(out) == settings
    assert (settings.run_dir, settings.data.dataset) == ("runs/a", "data set")
    assert (settings.target.model, settings.target.revision) == (str(tiny_folder), None)
    drafter = settings.drafter
    assert (drafter.heads, drafter.kv_heads, drafter.head_dim, drafter.intermediate_size) == (4, 2, 16, 128)
    assert (drafter.rope_theta, drafter.mask_token_id, drafter.taps) == (tiny.rope_theta, 3, (1, 2, 3))
    assert settings.pipeline == pipeline_for([f"cuda:{i}" for i in range(torch.cuda.device_count())])


def test_a_file_is_replaced_only_when_asked(tmp_path: Path, tiny_folder: Path) -> None:
    out = tmp_path / "RUN.yaml"
    out.write_text("mine")
    with pytest.raises(UserError, match=r"RUN.yaml exists. Choose another --out or add --overwrite.$"):
        init(str(tiny_folder), out, **OPTIONS)
    assert out.read_text() == "mine"
    settings = init(str(tiny_folder), out, **{**OPTIONS, "overwrite": True})
    assert load_settings(out) == settings
    with pytest.raises(UserError, match=r" exists. Choose another --out.$"):
        init(str(tiny_folder), tmp_path, **{**OPTIONS, "overwrite": True})


def test_settings_that_no_run_can_have(tmp_path: Path, tiny_folder: Path) -> None:
    with pytest.raises(UserError, match=r"^run_dir must not be empty, got '' \(in the options or target .*\).$"):
        init(str(tiny_folder), tmp_path / "RUN.yaml", **{**OPTIONS, "run_dir": ""})
    odd = copy_of(tiny_folder, tmp_path / "odd", num_attention_heads=3)
    with pytest.raises(UserError, match=r"^kv_heads must divide heads, got 2 and 3 \(in the options .*odd\).$"):
        init(str(odd), tmp_path / "RUN.yaml", **OPTIONS)
    assert not (tmp_path / "RUN.yaml").exists()


def test_a_target_without_a_tap(tmp_path: Path, tiny_folder: Path) -> None:
    """The last layer cannot be tapped, so one of two layers is left, and the formula names the other."""
    flat = copy_of(tiny_folder, tmp_path / "flat", num_hidden_layers=2, layer_types=["full_attention"] * 2)
    with pytest.raises(UserError, match=r"^drafter.taps must lie in 0..0 for .*flat \(2 layers\), got \[1\]."):
        init(str(flat), tmp_path / "RUN.yaml", **OPTIONS)
    assert not (tmp_path / "RUN.yaml").exists()


@pytest.mark.parametrize("layers", range(3, 65))
def test_taps_fit_targets_of_any_depth(tiny: TargetFacts, layers: int) -> None:
    facts = TargetFacts(**{name: getattr(tiny, name) for name in tiny.__slots__} | {"num_layers": layers})
    taps = drafter_for(facts, mask_token_id=3).taps
    check_taps(taps, facts)
    assert len(taps) == (5 if layers >= 9 else 3 if layers >= 6 else 1)


def test_devices() -> None:
    assert pipeline_for([]) == PipelineSettings(targets=("cpu",), drafters=("cpu",))
    assert pipeline_for(["cuda:0"]) == PipelineSettings(targets=("cuda:0",), drafters=("cuda:0",))
    four = [f"cuda:{i}" for i in range(4)]
    assert pipeline_for(four) == PipelineSettings(targets=("cuda:0", "cuda:1", "cuda:2"), drafters=("cuda:3",))


def without_mask_token(folder: Path, place: Path, **changes: Any) -> TargetFacts:
    """The target with a tokenizer that names no mask token; <mask> is still one of its special tokens."""
    shutil.copytree(folder, place)
    tree = json.loads((place / "tokenizer_config.json").read_text())
    tree.pop("mask_token")
    (place / "tokenizer_config.json").write_text(json.dumps(tree))
    facts = describe(str(place))
    return TargetFacts(**{name: getattr(facts, name) for name in facts.__slots__} | changes)


def test_the_mask_token_asked_for(tiny: TargetFacts) -> None:
    assert choose_mask_token(tiny, 0) == 0
    assert choose_mask_token(tiny, 127) == 127
    for wrong in (-1, 128):
        with pytest.raises(UserError, match=rf"^--mask-token-id must be .* \(0..127\), got {wrong}.$"):
            choose_mask_token(tiny, wrong)


def test_the_mask_token_of_the_tokenizer(tiny: TargetFacts) -> None:
    assert choose_mask_token(tiny, None) == 3


def test_an_embedding_row_without_a_token(tiny_folder: Path, tmp_path: Path) -> None:
    assert choose_mask_token(without_mask_token(tiny_folder, tmp_path / "t", vocab_size=130), None) == 128


def test_an_unused_special_token(tiny_folder: Path, tmp_path: Path) -> None:
    assert choose_mask_token(without_mask_token(tiny_folder, tmp_path / "t"), None) == 3


def test_no_token_is_left_for_the_mask(tiny_folder: Path, tmp_path: Path) -> None:
    facts = without_mask_token(tiny_folder, tmp_path / "t")
    (tmp_path / "t" / "chat_template.jinja").write_text("<mask>{{ messages[0]['content'] }}")
    with pytest.raises(UserError, match=r"has no spare embedding row .* with --mask-token-id.$"):
        choose_mask_token(facts, None)


def test_a_mask_token_that_the_data_holds_is_not_taken(
    tiny: TargetFacts, tiny_folder: Path, tmp_path: Path, write_dataset: Callable[..., Path]
) -> None:
    data = str(write_dataset([([5, 6, 8, 9], 1), ([7, 11, 12, 9, 8], 2)]))
    with pytest.raises(UserError, match=rf"^--mask-token-id must never occur .* token 11 is in row 1 of {data} "):
        choose_mask_token(tiny, 11, data)
    assert choose_mask_token(tiny, 13, data) == 13
    assert choose_mask_token(tiny, 3, data) == 3  # for which it was prepared
    assert choose_mask_token(tiny, None, data) == 3
    nowhere = str(tmp_path / "not yet")
    assert choose_mask_token(tiny, 11, nowhere) == 11


def test_the_next_mask_token_is_taken_where_the_data_holds_the_first(
    tiny_folder: Path, tmp_path: Path, write_dataset: Callable[..., Path]
) -> None:
    """The tokenizer names <mask>, which a row holds; behind it there is a row without a token, which another holds."""
    shutil.copytree(tiny_folder, tmp_path / "t")
    facts = describe(str(tmp_path / "t"))

    def wide(vocab_size: int) -> TargetFacts:
        return TargetFacts(**{name: getattr(facts, name) for name in facts.__slots__} | {"vocab_size": vocab_size})

    data = write_dataset([([5, 3, 8, 9], 1)])
    manifest = data / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"mask_token_id": 3', '"mask_token_id": null'))
    assert choose_mask_token(wide(130), None) == 3
    assert choose_mask_token(wide(130), None, str(data)) == 128
    with pytest.raises(UserError, match=rf"no unused special token for the mask that {data} \(--dataset\) never uses."):
        choose_mask_token(wide(128), None, str(data))


def test_ids_with_a_gap_leave_no_used_row_for_the_mask(tiny_folder: Path, tmp_path: Path) -> None:
    """127 tokens of which one has id 127: their number is an id in use."""
    facts = without_mask_token(tiny_folder, tmp_path / "t", vocab_size=140)
    path = tmp_path / "t" / "tokenizer.json"
    tree = json.loads(path.read_text())
    del tree["model"]["vocab"]["w50"]
    tree["model"]["vocab"]["w128"] = 129
    path.write_text(json.dumps(tree))
    assert choose_mask_token(facts, None) == 130


def test_samples_are_no_longer_than_a_target_turns_them_alike(tiny: TargetFacts) -> None:
    def limited(limit: int) -> int:
        conventions = dataclasses.replace(tiny.conventions, rope_limit=limit)
        facts = dataclasses.replace(tiny, conventions=conventions)
        settings = data_for(facts, "dataset")
        check_data(conventions, settings, facts.name)
        return settings.max_length

    assert [limited(limit) for limit in (0, 2048, 1000, 4096, 10_000)] == [4096, 2048, 992, 4096, 4096]


@pytest.mark.parametrize(
    ("config", "width"),
    [
        (Qwen3Config(hidden_size=64, intermediate_size=128), 128),
        (Qwen3MoeConfig(hidden_size=64, intermediate_size=160, moe_intermediate_size=32), 160),
        (GptOssConfig(hidden_size=64, intermediate_size=64), 192),  # an expert's
        (MixtralConfig(hidden_size=64, intermediate_size=224), 224),  # an expert's, wide enough
        (Qwen3_5MoeTextConfig(hidden_size=64, moe_intermediate_size=16), 192),
    ],
)
def test_the_mlp_of_a_target_of_experts(config: Any, width: int, tmp_path: Path, tiny_folder: Path) -> None:
    config.eos_token_id = None
    config.save_pretrained(tmp_path)
    shutil.copy(tiny_folder / "model.safetensors", tmp_path)
    assert describe(str(tmp_path)).intermediate_size == width


@pytest.fixture
def outlook_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[dict[str, Any], str]]:
    """Return a function that writes tmp_path/RUN.yaml and gives its outlook, as data and as it is said."""

    def look(folder: Path, dataset: object) -> tuple[dict[str, Any], str]:
        out = tmp_path / "RUN.yaml"
        settings = init(str(folder), out, **{**OPTIONS, "dataset": str(dataset), "overwrite": True})
        capsys.readouterr()
        told = outlook(settings, Console())
        return told, capsys.readouterr().out

    return look


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that writes the machine's profile, with rates of its GPU or without."""
    monkeypatch.setattr("paceline.recipes.machine_rates.profile_path", lambda: tmp_path / "machine.json")

    def save(**rates: Rates) -> None:
        made = make_profile(this_machine(), compiles=True, captures=False, flex_attention={}, rates=rates)
        save_profile(made, tmp_path / "machine.json")

    return save


def test_the_outlook_counts_work_and_guesses_no_hours(
    tmp_path: Path,
    tiny_folder: Path,
    write_dataset: Callable[..., Path],
    profile: Callable[..., None],
    outlook_of: Callable[..., Any],
) -> None:
    data = write_dataset([([5, 6, 8, 9], 1), ([7, 11, 12, 9, 8], 2)])
    told, said = outlook_of(tiny_folder, data)
    # A block begins at a token that is learnt and followed by one that is: 2 of the first row, 2 of the second.
    assert told["work"] == {"epochs": 6, "tokens": 9, "blocks": 4, "gpu_hours": None}
    assert "work: 6 epochs of 9 tokens through the target and of 4 blocks through the drafter" in said
    assert f"There is no machine profile at {tmp_path / 'machine.json'}." in said
    profile()
    assert f"but the machine profile {tmp_path / 'machine.json'} has none of a GPU" in outlook_of(tiny_folder, data)[1]


def test_the_outlook_predicts_gpu_hours_from_the_machine_s_rates(
    tmp_path: Path,
    tiny_folder: Path,
    write_dataset: Callable[..., Path],
    profile: Callable[..., None],
    outlook_of: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = write_dataset([([5 + at % 90 for at in range(40)], 2) for _ in range(50)])
    profile(H200=Rates(bf16_tflops=797.0, fp8_tflops=None, memory_gb_s=4000.0))
    told, said = outlook_of(tiny_folder, data)
    run = tmp_path / "RUN.yaml"
    asked = partial(plan_gpus, Asked(1, None, None, None))
    best = plan_epoch(run, [], seed=None, console=Console(), asked=asked)["gpus"]["best"]
    capsys.readouterr()
    assert told["work"]["gpu_hours"] == pytest.approx(6 * 50 / best["samples_per_s"] / 3600)
    assert re.search(
        r"GPU hours: about \d+\.\d\d, that is \d+\.\d\d hours with target and drafter on the one GPU", said
    )
    assert "(predicted from the machine profile, targets on the fast path, compiled; limited by" in said


def test_the_outlook_counts_memory(tmp_path: Path, tiny_folder: Path, outlook_of: Callable[..., Any]) -> None:
    told, said = outlook_of(tiny_folder, "nowhere")
    facts = describe(str(tiny_folder))
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64 + 2 * 16  # q and o, k and v, MLP, norms
    assert told["memory"]["target_weights"] == 2 * (128 * 64 + 4 * layer + 64)  # layers 0 to 3, the file's last norm
    settings = load_settings(tmp_path / "RUN.yaml")
    rank = step_memory(settings.drafter, settings.train, hidden_size=64, vocab_size=facts.vocab_size, tied=False)
    assert told["memory"]["drafter_rank"] == rank.total
    assert told["work"] is None
    assert "GPU hours not estimated: there is no dataset in nowhere yet" in said


def test_a_target_that_no_gpu_here_holds_is_split(
    tmp_path: Path, tiny_folder: Path, outlook_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against each number of devices by itself; where there are too few, it is said how many it takes."""
    told, said = outlook_of(tiny_folder, "nowhere")
    settings, facts = load_settings(tmp_path / "RUN.yaml"), describe(str(tiny_folder))
    (alone,) = replica_memory(settings, facts)
    assert told["memory"]["devices_per_replica"] is None
    assert f"no GPU here to compare with: a replica needs {gib(alone.total)} of one" in said
    needs = {}
    for each in (1, 2, 3, 4):
        target = settings.target.model_copy(update={"devices_per_replica": each})
        parts = replica_memory(settings.model_copy(update={"target": target}), facts)
        needs[each] = max(part.total for part in parts)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for gpus, most in product((1, 2, 4, 8), needs.values()):
        card = int(most / USABLE) + CONTEXT + 2
        monkeypatch.setattr("torch.cuda.device_count", lambda gpus=gpus: gpus)
        monkeypatch.setattr("paceline.recipes.evaluator_memory.device_bytes", lambda name, card=card: card)
        fewest = min(each for each, size in needs.items() if size <= usable_of(card))
        told, said = outlook_of(tiny_folder, "nowhere")
        written = load_settings(tmp_path / "RUN.yaml")
        assert told["memory"]["devices_per_replica"] == fewest
        enough = fewest > 1 and gpus > fewest
        assert written.target.devices_per_replica == (fewest if enough else 1)
        assert written.pipeline.drafters == (f"cuda:{gpus - 1}",)
        if enough:
            assert len(written.replicas) == (gpus - 1) // fewest
            assert f"each replica is on {fewest} (target.devices_per_replica)" in said
        else:
            assert written.pipeline == pipeline_for([f"cuda:{at}" for at in range(gpus)])
            assert (f"set target.devices_per_replica to {fewest} and name so many" in said) == (fewest > 1)
    monkeypatch.setattr("paceline.recipes.evaluator_memory.device_bytes", lambda name: CONTEXT)
    told, said = outlook_of(tiny_folder, "nowhere")
    assert told["memory"]["devices_per_replica"] is None
    assert "the target fits no number of GPUs of 0.5 GiB" in said


@pytest.mark.parametrize(
    ("template", "thinking", "words"),
    [
        (
            "{% if enable_thinking %}<think>{% endif %}{{ messages }}",
            True,
            "`paceline generate --thinking on` (or off)",
        ),
        ("{{ messages }}", False, "has no switch for it"),
        ("", None, "has no chat template"),
    ],
)
def test_the_outlook_knows_whether_a_target_can_think(
    tmp_path: Path,
    tiny_folder: Path,
    template: str,
    thinking: bool | None,
    words: str,
    outlook_of: Callable[..., Any],
) -> None:
    shutil.copytree(tiny_folder, tmp_path / "t")
    (tmp_path / "t" / "chat_template.jinja").write_text(template)
    if not template:
        (tmp_path / "t" / "chat_template.jinja").unlink()
    told, said = outlook_of(tmp_path / "t", "nowhere")
    assert told["thinking"] is thinking
    assert words in said
