"""What drafters cannot follow is found by trying the architecture, and refused before a model is loaded."""

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES, save
from target_matrix import batch_of

from paceline.config import DataSettings, RunSettings
from paceline.config_file import dump_settings
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.loss import head_loss
from paceline.observe.console import Console
from paceline.recipes.init import drafter_for, init
from paceline.recipes.plan import plan_epoch
from paceline.recipes.target_checks import check_data
from paceline.records import UserError
from paceline.runtime.gate import Gate
from paceline.target import model as model_module
from paceline.target import self_check
from paceline.target.conventions import BUILDING, Conventions, find_conventions
from paceline.target.feature_cache import NoCache
from paceline.target.load import TargetFacts, describe
from paceline.target.model import DecodingTarget, FeatureTarget
from paceline.target.replica import TargetReplica

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": None,
}
REFUSED = {
    "Cohere": ({"logit_scale": 0.25}, "more than to multiply by its head"),
    "Granite": ({"logits_scaling": 8.0}, "more than to multiply by its head"),
    "Phi": ({}, "more than to multiply by its head"),  # a bias
    "NanoChat": ({}, "does more to them than to scale them"),  # a norm
    "OPT": ({"ffn_dim": 96, "word_embed_proj_dim": 64}, "does more to them than to scale them"),  # positions
    "Rwkv": ({}, "recurrent layers config.json must list them"),
    "GPT2": ({}, "model_type gpt2 of x does not"),  # layers under another name
}


def config_of(kind: str, **changes: Any) -> Any:
    return getattr(transformers, f"{kind}Config")(**SMALL | changes)


@pytest.mark.parametrize("kind", REFUSED)
def test_an_architecture_that_drafters_do_not_follow_is_refused(kind: str) -> None:
    changes, why = REFUSED[kind]
    with pytest.raises(UserError, match=why):
        find_conventions(config_of(kind, **changes), "x")


def test_a_multiplier_of_embeddings_is_found_whatever_its_name() -> None:
    """Granite's configuration calls it embedding_multiplier, Gemma's has no key for it."""
    assert find_conventions(config_of("Granite", embedding_multiplier=12.0), "x").embed_scale == pytest.approx(12.0)
    assert find_conventions(config_of("Gemma", head_dim=16), "x").embed_scale == pytest.approx(8.0)
    assert find_conventions(config_of("Llama"), "x") == Conventions()


@pytest.fixture
def cohere(tiny_folder: Path, tmp_path: Path) -> Path:
    """A target that multiplies its logits, with a tokenizer."""
    folder = tmp_path / "cohere"
    transformers.AutoModelForCausalLM.from_config(config_of("Cohere")).save_pretrained(folder)
    for path in tiny_folder.glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


def test_init_plan_and_train_refuse_it_before_anything_is_written(cohere: Path, tmp_path: Path, shape: Any) -> None:
    asked = {"revision": None, "dataset": "d", "run_dir": "r", "mask_token_id": None, "overwrite": False}
    with pytest.raises(UserError, match="more than to multiply by its head"):
        init(str(cohere), tmp_path / "RUN.yaml", **asked)
    assert not (tmp_path / "RUN.yaml").exists()
    tree = {"run_dir": "r", "target": {"model": str(cohere)}, "drafter": shape.model_dump(), "data": {"dataset": "d"}}
    planned = tmp_path / "planned.yaml"
    planned.write_text(dump_settings(RunSettings.model_validate(tree)))
    with pytest.raises(UserError, match="more than to multiply by its head"):
        plan_epoch(planned, [], seed=None, console=Console(json=False))
    with pytest.raises(UserError, match="more than to multiply by its head"):
        describe(str(cohere))  # which `train` calls first


def test_layers_with_a_state_are_not_packed_and_long_samples_not_taken_where_they_turn_the_others() -> None:
    packed, trimmed = (DataSettings(dataset="d", layout=layout) for layout in ("packed", "trimmed"))
    check_data(Conventions(memory=("conv",)), trimmed, "x")
    with pytest.raises(UserError, match=r"x has layers \(conv\) that may carry one over .* Set data.layout to trimmed"):
        check_data(Conventions(memory=("conv",)), packed, "x")
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    turned = find_conventions(
        config_of(
            "Phi3", rope_parameters={**longrope, "rope_theta": 1e4}, original_max_position_embeddings=100,
            max_position_embeddings=400,
        ),
        "x",
    )  # fmt: skip
    assert turned.rope_limit == 100
    check_data(turned, DataSettings(dataset="d", max_length=96), "x")
    check_data(turned, DataSettings(dataset="d", max_length=100, layout="packed"), "x")
    with pytest.raises(UserError, match=r"^data.max_length must not exceed 100 for x, .* got 97 \(rows of 128\)"):
        check_data(turned, DataSettings(dataset="d", max_length=97), "x")
    with pytest.raises(UserError, match=r"got 80 \(rows of 120\)"):
        check_data(turned, DataSettings(dataset="d", max_length=80, layout="bucketed", align=120), "x")


# ------------------------------------------------------------------------------------------ what a load is tried for


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    wanted = ("Qwen3", "LFM2", "gpt-oss")
    return {f.name: save(f, tmp_path_factory.mktemp("target")) for f in FAMILIES if f.name in wanted}


def features_of(folder: Path) -> FeatureTarget:
    return FeatureTarget(describe(str(folder)), (0, 2), dtype=torch.float32, device="cpu")


def test_samples_that_see_one_another_are_found_without_a_word_of_the_configuration(places: dict[str, Path]) -> None:
    target = features_of(places["LFM2"])
    self_check.check_features(target, "x", packed=False)
    with pytest.raises(UserError, match=r"the same alone and in a batch \(data.layout packed\)"):
        self_check.check_features(target, "x", packed=True)


def test_a_replica_tries_what_it_loads(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of their own when it loads, a shared row when the first one comes."""
    samples = [torch.arange(5, 15), torch.arange(20, 26)]
    replica = TargetReplica(
        0,
        "cpu",
        facts=describe(str(places["LFM2"])),
        taps=(0, 2),
        dtype=torch.float32,
        wire=torch.float32,
        largest=batch_of(samples, packed=True),
        source=iter(()),
        cache=NoCache(),
        deliver=lambda _batch: True,
        gate=Gate(),
        on_split=lambda *_: None,
    )
    replica.load()
    with pytest.raises(UserError, match=r"alone and in a batch \(data.layout packed\)"):
        replica.warm()
    monkeypatch.setattr(FeatureTarget, "captured_and_listed", lambda *_: (torch.zeros(2, 2), torch.ones(2, 2)))
    with pytest.raises(UserError, match="Features must be the hidden states"):
        replica.load()


def test_what_is_loaded_is_tried_while_nobody_builds(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who builds switches the process's default dtype."""
    target = features_of(places["Qwen3"])
    read, held = target.read, []
    monkeypatch.setattr(target, "read", lambda tokens: (held.append(BUILDING.locked()), read(tokens))[1])
    thread = threading.Thread(target=self_check.check_features, args=(target, "x"), kwargs={"packed": True})
    with BUILDING:
        thread.start()
        thread.join(0.2)
        assert not held
    thread.join()
    assert held == [True] * 3


def test_an_eager_architecture_that_does_not_keep_samples_apart_is_made_to(
    places: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = features_of(places["gpt-oss"])
    self_check.check_features(target, "x", packed=True)
    monkeypatch.setattr(FeatureTarget, "_samples_apart", lambda *_: None)
    with pytest.raises(UserError, match=r"the same alone and in a batch \(data.layout packed\)"):
        self_check.check_features(target, "x", packed=True)


def test_tokens_that_see_what_follows_are_found(places: dict[str, Path]) -> None:
    target = features_of(places["Qwen3"])
    for layer in target._trunk.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(UserError, match=r"the same alone and in a batch \(data.layout trimmed\)"):
        self_check.check_features(target, "x", packed=False)


def test_outputs_that_are_no_hidden_states_are_found(places: dict[str, Path]) -> None:
    target = features_of(places["Qwen3"])
    target._trunk.layers[2].register_forward_hook(lambda _module, _args, output: output * 1.0001)
    with pytest.raises(UserError, match="Features must be the hidden states that transformers lists"):
        self_check.check_features(target, "x", packed=False)


def test_decoding_that_says_something_else_is_found(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """As an architecture whose window the configuration calls by a name that nobody knows."""
    facts = describe(str(places["gpt-oss"]))
    DecodingTarget(facts, (), dtype=torch.float32, device="cpu")
    monkeypatch.setattr(model_module, "attention_kinds", lambda _config: (("full_attention",), 0))
    with pytest.raises(UserError, match="Decoding must give the logits that transformers gives"):
        DecodingTarget(facts, (), dtype=torch.float32, device="cpu")


# ----------------------------------------------------------------------------------------------- ends and head shape


def test_the_loss_of_capped_logits_and_its_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 8, dtype=torch.float64, generator=generator) for n in (6, 20))
    labels, weights = torch.randint(0, 20, (6,), generator=generator), torch.rand(6, generator=generator).double()
    leaf = hidden.clone().requires_grad_()
    logits = 1.5 * torch.tanh(leaf @ head.T / 1.5)
    wanted = (torch.nn.functional.cross_entropy(logits, labels, reduction="none") * weights).sum()
    loss, hits, gradient = head_loss(hidden, head, labels, weights, 1.5)
    torch.testing.assert_close(loss, wanted.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted, leaf)[0])
    assert torch.equal(hits, logits.argmax(-1) == labels)
    torch.testing.assert_close(FrozenEnds(head, head, 1.0, 1.5).logits(hidden), logits.detach())


@pytest.mark.parametrize(
    ("width", "heads"), [(5120, (32, 8)), (2560, (32, 8)), (1024, (16, 4)), (640, (8, 2)), (64, (1, 1))]
)
def test_heads_where_the_targets_are_of_another_kind(tiny: TargetFacts, width: int, heads: tuple[int, int]) -> None:
    """Published drafters of Qwen3.5-4B and Qwen3.6-27B (widths 2560 and 5120) have 32 heads of 128, 8 for keys."""
    changes = {"hidden_size": width, "own_head_shape": False}
    facts = TargetFacts(**{name: getattr(tiny, name) for name in tiny.__slots__} | changes)
    shape = drafter_for(facts, mask_token_id=3)
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (*heads, 128)


@pytest.mark.parametrize(
    ("change", "own"),
    [
        ({}, True),
        ({"head_dim": 256}, False),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, False),
    ],
)
def test_heads_are_inherited_only_where_drafters_can_have_them(
    tiny_folder: Path, tmp_path: Path, change: dict[str, Any], own: bool
) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "copy")
    tree = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(tree | change))
    assert describe(str(folder)).own_head_shape == own
