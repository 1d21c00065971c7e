"""Trained on a target's own completions until the loss is gone, a drafter is accepted almost whole by real decoding.

Shifted labels and taps off by one pass a loss curve and fail here.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline import blocks
from paceline.config import DataSettings, DrafterSettings, TrainSettings
from paceline.data import loader
from paceline.data.mixture import Mixture
from paceline.data.store import open_dataset
from paceline.decode.generate import generate
from paceline.decode.speculate import speculate
from paceline.drafter.model import Drafter
from paceline.records import FeatureBatch
from paceline.target.load import TargetFacts, load_ends
from paceline.target.model import DecodingTarget, FeatureTarget
from paceline.train.optim import learning_rate
from paceline.train.step import DrafterStep

B = 8
SAMPLES, ANCHORS = 4, 24
PROMPT, ANSWER = 6, 5 * B + 2


@pytest.fixture
def completions(tiny: TargetFacts) -> list[tuple[list[int], int]]:
    """Greedy completions of at least 5 blocks that do not stop early, with their prompts."""
    generator = torch.Generator().manual_seed(11)
    prompts = [torch.randint(4, 128, (PROMPT,), generator=generator).tolist() for _ in range(20)]
    target = DecodingTarget(tiny, (), dtype=torch.float32, device="cpu")
    done = dict(generate(target, prompts, max_new_tokens=ANSWER, rows=20))
    whole = [c for _, c in sorted(done.items()) if c.finish == "length" and 3 not in c.token_ids]
    assert len(whole) >= SAMPLES
    return [([*c.prompt_ids, *c.token_ids], PROMPT) for c in whole[:SAMPLES]]


def test_an_overfitted_drafter_is_accepted_almost_whole(
    tiny: TargetFacts,
    shape: DrafterSettings,
    completions: list[tuple[list[int], int]],
    write_dataset: Callable[..., Path],
) -> None:
    settings = shape.model_copy(update={"block_size": B})
    train = TrainSettings(
        epochs=400,
        context_slots=SAMPLES * (PROMPT + ANSWER),
        anchor_slots=SAMPLES * ANCHORS,
        anchors_per_sample=ANCHORS,
        dtype="float32",
        lr=1e-2,
        optimizer="muon",
    )
    dataset = open_dataset(write_dataset(completions))
    drafter = Drafter(settings, tiny.hidden_size).initialise(0)
    ends = load_ends(tiny)
    step = DrafterStep(drafter, ends, train)
    features = FeatureTarget(tiny, settings.taps, dtype=torch.float32, device="cpu")
    loss = float("inf")
    for tokens in loader.micro_batches(Mixture([dataset]), DataSettings(dataset=""), train, B):
        step.clear()
        context = features.features(tokens)
        batch = FeatureBatch(tokens, context, blocks.context_positions(tokens.lengths))
        step.load(batch)
        step.micro()
        step.update(learning_rate(tokens.step, 400, train))
        loss = step.report(tokens, 0.0).loss
        if loss < 0.01:
            break
    assert loss < 0.01
    target = DecodingTarget(tiny, settings.taps, dtype=torch.float32, device="cpu")
    prompts = [ids[:PROMPT] for ids, _ in completions]
    done = dict(speculate(target, drafter.eval(), ends, prompts, max_new_tokens=ANSWER, rows=SAMPLES))
    for index, (ids, _) in enumerate(completions):
        assert [*prompts[index], *done[index].token_ids] == ids
    lengths = [length for c in done.values() for length in c.acceptance_lengths[:-1]]
    assert sum(lengths) / len(lengths) >= 0.8 * B
