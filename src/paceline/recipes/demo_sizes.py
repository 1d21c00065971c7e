"""How much `paceline demo` does: a size for continuous integration, one for two CPU cores and one for a GPU."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Size:
    """How much the demo does."""

    prompts: int
    held_out: int
    max_new_tokens: int
    generate_rows: int  # prompts that run at once
    taps: tuple[int, ...]
    layers: int
    block_size: int
    context_slots: int
    anchor_slots: int
    anchors_per_sample: int
    token_budget: int  # padded tokens of a plan batch
    max_batch: int
    batches_per_step: int
    epochs: int
    optimizer: Literal["adamw", "muon"]
    lr: float
    evaluate_rows: int  # held-out prompts that are decoded at once
    timed_prompts: int
    untrained_prompts: int


SIZES = {
    "ci": Size(
        prompts=32,
        held_out=8,
        max_new_tokens=32,
        generate_rows=32,
        taps=(1, 14, 27),
        layers=1,
        block_size=8,
        context_slots=1024,
        anchor_slots=96,
        anchors_per_sample=24,
        token_budget=1024,
        max_batch=4,
        batches_per_step=1,
        epochs=4,
        optimizer="muon",
        lr=4e-3,
        evaluate_rows=8,
        timed_prompts=2,
        untrained_prompts=2,
    ),
    "cpu": Size(
        prompts=720,
        held_out=32,
        max_new_tokens=64,
        generate_rows=64,
        taps=(1, 14, 27),
        layers=2,
        block_size=8,
        context_slots=1024,
        anchor_slots=96,
        anchors_per_sample=12,
        token_budget=1024,
        max_batch=8,
        batches_per_step=1,
        epochs=7,
        optimizer="muon",
        lr=4e-3,
        evaluate_rows=8,
        timed_prompts=6,
        untrained_prompts=8,
    ),
    "gpu": Size(
        prompts=24576,
        held_out=128,
        max_new_tokens=128,
        generate_rows=2048,
        taps=(1, 8, 14, 20, 27),
        layers=4,
        block_size=8,
        context_slots=4096,
        anchor_slots=768,
        anchors_per_sample=24,
        token_budget=4096,
        max_batch=32,
        batches_per_step=1,
        epochs=3,
        optimizer="muon",
        lr=2e-3,
        evaluate_rows=64,
        timed_prompts=4,
        untrained_prompts=32,
    ),
}
