"""How much `paceline demo` does: a size for continuous integration, one for two CPU cores and one for a GPU."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from paceline.config import DataSettings, RunSettings, TargetSettings, TrainSettings
from paceline.recipes.init import drafter_for, pipeline_for
from paceline.recipes.mask_token import choose_mask_token
from paceline.target.load import describe


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
        epochs=5,
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


def gpu_gib() -> float:
    """Return the first GPU's memory in GiB, 0 where there is none."""
    return torch.cuda.get_device_properties(0).total_memory / 2**30 if torch.cuda.is_available() else 0.0


def generate_rows(size: Size) -> int:
    """Return how many prompts run at once: a row's cache takes about 9 MiB, and a quarter of a GPU is for them."""
    return min(size.generate_rows, int(0.25 * gpu_gib() * 1024 / 9)) if gpu_gib() else size.generate_rows


def demo_settings(run: Path, folder: Path, size: Size, gpus: list[str]) -> RunSettings:
    """Return the run's settings: on the CPU two target replicas and a drafter, else what the devices allow."""
    facts = describe(str(folder))
    mask = choose_mask_token(facts, None)
    cache = {"feature_cache": "memory", "feature_cache_gib": min(40.0, 0.3 * gpu_gib()) if gpus else 2.0}
    threads = {"targets": ("cpu", "cpu"), "target_threads": 1, "drafter_threads": 2} if not gpus else {}
    return RunSettings(
        run_dir=str(run),
        target=TargetSettings(model=str(folder)),
        drafter=drafter_for(facts, mask_token_id=mask, taps=size.taps, layers=size.layers, block_size=size.block_size),
        data=DataSettings(
            dataset=str(run / "dataset"),
            token_budget=size.token_budget,
            max_batch=size.max_batch,
            reshuffle="batches",
        ),
        train=TrainSettings(
            epochs=size.epochs,
            context_slots=size.context_slots,
            anchor_slots=size.anchor_slots,
            anchors_per_sample=size.anchors_per_sample,
            batches_per_step=size.batches_per_step,
            optimizer=size.optimizer,
            lr=size.lr,
            logits_mib=1024 if gpus else 64,
        ),
        pipeline=pipeline_for(gpus, **threads, **cache),
    )


def default_size() -> str:
    """Return gpu where there is one, else cpu."""
    return "gpu" if torch.cuda.is_available() else "cpu"
