"""Each convention right, and each deliberately wrong: what the probe says of it."""

import dataclasses
from typing import Any

import pytest
import torch

from paceline.config import DrafterSettings
from paceline.drafter.ends import FrozenEnds
from paceline.probe import parity
from paceline.probe.parity import Plain
from paceline.probe.parity_features import decoding_features, training_features
from paceline.target.load import TargetFacts, load_causal, load_ends
from paceline.target.model import DecodingTarget, FeatureTarget

PROMPTS = [[5, 6, 7, 8, 9], [40, 41, 42], [100] * 9]
TAPS = (0, 2, 4)
F32 = torch.float32


@pytest.fixture(scope="module")
def model(tiny: TargetFacts) -> Any:
    return load_causal(tiny, dtype=F32, device="cpu")


@pytest.fixture(scope="module")
def plain(model: Any) -> list[Plain]:
    return [parity.plain_forward(model, ids) for ids in PROMPTS]


@pytest.fixture(scope="module")
def ends(tiny: TargetFacts) -> FrozenEnds:
    return load_ends(tiny).to("cpu", F32)


def captured(facts: TargetFacts, taps: tuple[int, ...], how: str) -> list[torch.Tensor]:
    if how == "training":
        return training_features(FeatureTarget(facts, taps, dtype=F32, device="cpu"), PROMPTS)
    return decoding_features(DecodingTarget(facts, taps, dtype=F32, device="cpu"), PROMPTS)


@pytest.mark.parametrize("how", ["training", "decoding"])
def test_taps(tiny: TargetFacts, plain: list[Plain], how: str) -> None:
    assert parity.check_features("taps", TAPS, captured(tiny, TAPS, how), plain).state == "ok"
    found = parity.check_features("taps", (0, 2, 3), captured(tiny, (0, 2, 4), how), plain)
    assert (found.state, found.text) == ("off", "tap 3 gives hidden_states[5], not [4]: off by +1")
    found = parity.check_features("taps", (1, 2, 4), captured(tiny, (0, 2, 4), how), plain)
    assert found.text == "tap 1 gives hidden_states[1], not [2]: off by -1"


def test_a_feature_that_is_nothing_of_the_target(tiny: TargetFacts, plain: list[Plain]) -> None:
    features = [torch.zeros(len(ids), 3 * tiny.hidden_size) for ids in PROMPTS]
    found = parity.check_features("taps", TAPS, features, plain)
    assert (found.state, found.text) == ("off", "tap 0 is not hidden_states[1] of a plain forward (error 1)")
    features[0][:] = torch.nan
    assert parity.check_features("taps", TAPS, features, plain).state == "off"


@pytest.mark.parametrize("layer", TAPS)
def test_logprobs_follow_from_any_tap(
    tiny: TargetFacts, model: Any, plain: list[Plain], ends: FrozenEnds, layer: int
) -> None:
    rebuilt = [
        parity.rebuilt_logits(model, ids, one.hidden[layer + 1], layer, ends)
        for ids, one in zip(PROMPTS, plain, strict=True)
    ]
    for one, again in zip(plain, rebuilt, strict=True):
        torch.testing.assert_close(again, one.logits_TV)
    assert parity.check_logprobs(rebuilt, plain, layer).state == "ok"
    off_by_one = [
        parity.rebuilt_logits(model, ids, one.hidden[layer + 2], layer, ends)
        for ids, one in zip(PROMPTS, plain, strict=True)
    ]
    assert parity.check_logprobs(off_by_one, plain, layer).state == "off"


def test_the_probe_leaves_the_model_as_it_was(model: Any, plain: list[Plain], ends: FrozenEnds) -> None:
    parity.rebuilt_logits(model, PROMPTS[0], torch.zeros_like(plain[0].hidden[1]), 0, ends)
    torch.testing.assert_close(parity.plain_forward(model, PROMPTS[0]).logits_TV, plain[0].logits_TV)


def test_an_untied_head(tied: TargetFacts, tiny: TargetFacts, model: Any, plain: list[Plain], ends: FrozenEnds) -> None:
    assert parity.check_head(ends, plain, model).text == (
        "head and embedding are the target's, the head is a tensor of its own"
    )
    found = parity.check_head(FrozenEnds(ends.embed_VH, ends.embed_VH), plain, model)
    assert found.text == "the drafter's head is the embedding, the target's is a tensor of its own"
    found = parity.check_head(FrozenEnds(ends.embed_VH, ends.head_VH.flip(0)), plain, model)
    assert (found.state, found.text[:45]) == ("off", "the drafter's head gives other log-probabilit")
    found = parity.check_head(FrozenEnds(ends.embed_VH.flip(0), ends.head_VH), plain, model)
    assert found.text == "the drafter's embedding is not the target's"

    other = load_causal(tied, dtype=F32, device="cpu")
    own, shown = load_ends(tied).to("cpu", F32), [parity.plain_forward(other, PROMPTS[0])]
    assert parity.check_head(own, shown, other).text.endswith("the head is the embedding")
    found = parity.check_head(FrozenEnds(own.embed_VH, own.head_VH.flip(0)), shown, other)
    assert found.text == "the drafter's head is a tensor of its own, the target's is the embedding"


def test_rope(tiny: TargetFacts, tied: TargetFacts, shape: DrafterSettings, model: Any) -> None:
    found = parity.check_rope(shape, tiny, model)
    assert (found.state, found.text) == ("ok", "theta 10,000, the target's angles at positions 0..511")
    other = shape.model_copy(update={"rope_theta": 1e6})
    found = parity.check_rope(other, tiny, model)
    assert (found.state, found.text) == ("off", "the drafter has theta 1,000,000, the target 10,000")
    # A target that says one theta and turns by another.
    found = parity.check_rope(other, dataclasses.replace(tiny, rope_theta=1e6), model)
    assert (found.state, found.text[:65]) == (
        "off",
        "theta 1,000,000 as the target, but other angles from position 1 o",
    )


def test_rope_that_the_target_scales(tiny: TargetFacts, shape: DrafterSettings, model: Any) -> None:
    class Scaled:
        class config:
            rope_parameters = {"rope_type": "yarn", "factor": 4.0}  # noqa: RUF012

            @classmethod
            def get_text_config(cls) -> Any:
                return cls

    found = parity.check_rope(shape, tiny, Scaled())
    assert found.text == "theta 10,000 as the target; the target scales its angles (yarn), the drafter does not"
    kinds = ("sliding_attention", "full_attention")
    Scaled.config.rope_parameters = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in kinds}
    found = parity.check_rope(shape, tiny, Scaled())
    assert found.text == "theta 10,000 as the target's full attention layers; its other layers have their own"


@pytest.mark.parametrize(
    ("mask", "in_data", "text"),
    [
        (128, {}, "token 128 is no row of the embedding (0..127)"),
        (2, {}, "token 2 is a stop token of the target"),
        (41, {}, "token 41 occurs in prompt 2"),
        (3, {"a": None, "b": 7}, "token 3 occurs in row 7 of b"),
    ],
)
def test_another_mask_token(
    tiny: TargetFacts, shape: DrafterSettings, mask: int, in_data: dict[str, int | None], text: str
) -> None:
    found = parity.check_mask(shape.model_copy(update={"mask_token_id": mask}), tiny, PROMPTS, in_data)
    assert (found.state, found.text) == ("off", text)


def test_the_mask_token_of_the_run(tiny: TargetFacts, shape: DrafterSettings) -> None:
    found = parity.check_mask(shape, tiny, PROMPTS, {"a": None})
    assert (found.state, found.text) == ("ok", "token 3 is a row of the embedding; not in 3 prompts, nor in 1 dataset")


@pytest.mark.parametrize(
    ("now", "made", "state", "text"),
    [
        ("a" * 64, {"d": "a" * 64}, "ok", "aaaaaaaaaaaa, as when the data was made"),
        ("a" * 64, {"c": None, "d": "b" * 64}, "off", "aaaaaaaaaaaa now, but d was made with bbbbbbbbbbbb"),
        ("a" * 64, {"d": None}, "unchecked", "the data names none"),
        ("a" * 64, {}, "unchecked", "no dataset of the run is here"),
    ],
)
def test_what_the_data_was_made_with(now: str, made: dict[str, str | None], state: str, text: str) -> None:
    found = parity.check_made("chat template", now, made)
    assert (found.state, found.text) == (state, text)
