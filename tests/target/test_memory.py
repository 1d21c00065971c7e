"""What a target replica is said to occupy, against the tensors that it holds."""

from typing import Any

import pytest
import torch

from paceline.config import DataSettings, RunSettings, TargetSettings
from paceline.recipes.target_memory import replica_memory
from paceline.records import TargetSizes
from paceline.target.load import TargetFacts
from paceline.target.memory import target_memory
from paceline.target.model import FeatureTarget


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("name", ["tiny", "tied"])
def test_weights_are_counted_to_the_byte(name: str, fp8: bool, request: pytest.FixtureRequest, shape: Any) -> None:
    facts: TargetFacts = request.getfixturevalue(name)
    taps = (0, 3) if name == "tied" else (0, 4)
    target = FeatureTarget(facts, taps, dtype=torch.bfloat16, device="cpu")
    assert target.quicken(fp8=fp8) == ""
    tensors = [target._trunk.embed_tokens.weight]
    for weights in target._fast._layers.weights:
        tensors += [
            part for item in weights for part in (item if isinstance(item, tuple) else [item]) if part is not None
        ]
    settings = RunSettings(
        run_dir="run",
        target=TargetSettings(model=facts.name, fp8="on" if fp8 else "off"),
        drafter=shape.model_copy(update={"taps": taps}),
        data=DataSettings(dataset="data"),
    )
    (found,) = replica_memory(settings, facts)
    last_norm = 2 * facts.hidden_size  # which the files have and a trunk does without
    assert found.weights == sum(tensor.nbytes for tensor in tensors) + last_norm
    assert found.features == settings.train.context_slots * 2 * facts.hidden_size * 2


def test_in_fp8_the_products_of_a_large_target_need_half() -> None:
    products = 34 * 4096 * (6144 + 4096 + 3 * 12288)
    entries = products + 151936 * 4096 + 34 * (2 * 4096 + 2 * 128)
    sizes = TargetSizes(entries, 34, 4096, 12288, 32, 8, 128, 151936)
    half, whole = (target_memory(sizes, tokens=12288, taps=5, itemsize=2, fp8=fp8) for fp8 in (True, False))
    assert whole.weights - half.weights == pytest.approx(products, rel=1e-3)
    assert whole.total < 17 * 2**30


def test_of_a_run_of_layers_only_their_number_and_weights_are_others(tiny: TargetFacts) -> None:
    whole, run = tiny.sizes(100), tiny.sizes(30, layers=2)
    assert (whole.entries, whole.layers, run.entries, run.layers) == (100, tiny.num_layers, 30, 2)
    for name in ("hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim", "vocab_size"):
        assert getattr(run, name) == getattr(whole, name) == getattr(tiny, name)
