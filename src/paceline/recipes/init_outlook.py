"""What `paceline init` says beside the file it wrote: thinking or not, memory, and the work that the data is."""

from pathlib import Path
from typing import Any

from paceline.config import RunSettings
from paceline.data.chat_template import chat_template, check_known
from paceline.data.manifest import NAME
from paceline.data.mixture import Coverage, Mixture, coverage, first_table, open_mixture
from paceline.observe.console import Console
from paceline.pipeline.cards import usable_of
from paceline.recipes.evaluator_memory import smallest_device
from paceline.recipes.plan_gpus import Asked, best_split
from paceline.recipes.plan_memory import sizes_of_target
from paceline.recipes.target_memory import fewest_devices, replica_memory
from paceline.records import UserError, many
from paceline.target.load import TargetFacts, describe, load_tokenizer
from paceline.target.weights import weight_entries
from paceline.train.memory import gib, sizes_for_tiles, step_memory


def outlook(settings: RunSettings, console: Console) -> dict[str, Any]:
    """Print what a run of the settings will ask for, and return it as data."""
    return {
        "thinking": _thinking(settings, console),
        "memory": _memory(settings, console),
        "work": _work(settings, console),
    }


def _thinking(settings: RunSettings, console: Console) -> bool | None:
    """Return whether the chat template has a switch for thinking; None without a template."""
    tokenizer = load_tokenizer(settings.target.model, settings.target.revision)
    if not tokenizer.chat_template:
        console.line("  thinking: the tokenizer has no chat template, so data has to be token ids or plain text")
        return None
    try:
        check_known(tokenizer, ["enable_thinking"], chat_template(tokenizer))
    except UserError:
        console.line("  thinking: the chat template has no switch for it, so completions are as the target writes them")
        return False
    console.line(
        "  thinking: the chat template has a switch; a drafter is good in the mode of its data, so let `paceline "
        "generate --thinking on` (or off) write completions in the one that you will serve"
    )
    return True


def _memory(settings: RunSettings, console: Console) -> dict[str, int | None]:
    """Return bytes of a GPU: a target replica's weights, and a drafter rank's peak where it is estimated."""
    facts = describe(settings.target.model, settings.target.revision)
    deepest = max(settings.drafter.taps)
    weights = weight_entries(facts.folder, deepest=deepest) * (2 if settings.target.dtype == "bfloat16" else 4)
    console.line(
        f"  memory of a target replica: {gib(weights)} for its weights up to layer {deepest}, a batch comes on top"
    )
    devices = _devices(settings, facts, console)
    sizes = sizes_of_target(settings.target, console)
    if sizes is None or sizes_for_tiles(settings.drafter, settings.train):
        return {"target_weights": weights, "devices_per_replica": devices, "drafter_rank": None}
    rank = step_memory(settings.drafter, settings.train, **sizes).total
    console.line(f"  memory of a drafter rank: {gib(rank)} of a GPU at its peak; `paceline plan` has the parts")
    return {"target_weights": weights, "devices_per_replica": devices, "drafter_rank": rank}


def _devices(settings: RunSettings, facts: TargetFacts, console: Console) -> int | None:
    """Return how many GPUs of this machine a target replica needs, and say what to set if that is more than one; None
    where there is no GPU, or too small ones."""
    card = smallest_device(settings.pipeline.targets)
    batch = f"micro-batches of up to {settings.train.context_slots:,} tokens (train.context_slots)"
    if not card:
        (alone,) = replica_memory(settings, facts)
        console.line(
            f"  no GPU here to compare with: a replica needs {gib(alone.total)} of one with {batch}; for smaller ones "
            "`paceline plan --memory` says how many share its layers (target.devices_per_replica)"
        )
        return None
    found = fewest_devices(settings, facts, usable_of(card))
    if found is None:
        console.line(f"  the target fits no number of GPUs of {gib(card)}: a layer with {batch} needs more")
        return None
    each, most = found
    if each > 1:
        if settings.target.devices_per_replica == each:
            so = f"each replica is on {each} (target.devices_per_replica)"
        else:
            so = (
                f"a replica and a drafter need {each + 1}, and here are fewer. Where they are, set "
                f"target.devices_per_replica to {each} and name so many in pipeline.targets"
            )
        console.line(
            f"  the target does not fit one GPU of {gib(card)}: {so}; it takes {gib(most)} of each with {batch}"
        )
    return each


def _work(settings: RunSettings, console: Console) -> dict[str, Any] | None:
    """Return what the data at hand is to train on, an epoch's tokens and blocks and all epochs' GPU hours; None without
    data.

    Hours are predicted from rates that the doctor measured here, not guessed: what is missing is told.
    """
    (folder,), train = settings.data.folders, settings.train
    if not (Path(folder) / NAME).is_file():
        console.line(f"  GPU hours not estimated: there is no dataset in {folder} yet; `paceline prepare` writes it")
        return None
    mixture = open_mixture(settings.data)
    share = coverage(mixture, anchors_per_sample=train.anchors_per_sample, epochs=train.epochs)
    tokens = mixture.datasets[0].manifest.tokens
    blocks = round(share.epoch_share * share.candidates)
    console.line(
        f"  work: {many(train.epochs, 'epoch')} of {tokens:,} tokens through the target and of {blocks:,} "
        "blocks through the "
        "drafter"
    )
    hours = _hours(settings, mixture, share, console)
    return {"epochs": train.epochs, "tokens": tokens, "blocks": blocks, "gpu_hours": hours}


def _hours(settings: RunSettings, mixture: Mixture, share: Coverage, console: Console) -> float | None:
    gpus = len({*settings.pipeline.targets, *settings.pipeline.drafters})
    buckets = first_table(mixture, settings.data, seed=settings.train.seed)
    try:
        best, words, how = best_split(Asked(gpus, None, None, None), settings, buckets, share)
    except UserError as error:
        console.line(f"  GPU hours not estimated: {error}")
        return None
    hours = settings.train.epochs * buckets.samples / best.samples_per_s / 3600
    console.line(
        f"  GPU hours: about {gpus * hours:,.2f}, that is {hours:,.2f} hours with {words} (predicted from the machine "
        f"profile, targets {how}; limited by {best.limit}; `paceline plan --gpus` has every split)"
    )
    return gpus * hours
