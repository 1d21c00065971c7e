"""What `paceline train` refuses before it loads a model."""

from collections.abc import Sequence
from pathlib import Path

import torch

from paceline.checkpoint.store import resume_command, saved_steps
from paceline.config import RunSettings
from paceline.data.manifest import check_fits, tokenizer_fingerprint
from paceline.data.mixture import Mixture
from paceline.data.set_aside import check_vocabulary
from paceline.data.store import CompletionDataset, find_token
from paceline.drafter.attention import TILE, fits_tiles
from paceline.observe.console import Console
from paceline.recipes.target_checks import check_data
from paceline.records import UserError
from paceline.runtime.compiling import Policy
from paceline.runtime.devices import check_device
from paceline.runtime.profile import load_profile, profile_path, this_machine
from paceline.target.load import TargetFacts, load_tokenizer
from paceline.target.model import check_taps
from paceline.target.replica import pace_of
from paceline.target.stages import split_layers

LONG_SCAN = 10**8  # tokens: reading them takes so long that a person is told


def check_run_folder(run: Path, datasets: Sequence[str], *, resume: bool, held_out: str | None = None) -> None:
    """Refuse a run folder that is taken, or one without a run to resume.

    Raises:
        UserError: it is a file, holds a trained drafter or checkpoints that are not asked for, holds no run that is
            asked for, or lies in a dataset, which `prepare` may replace.
    """
    if run.exists() and not run.is_dir():
        raise UserError(f"run_dir must be a folder, but {run} is a file. Choose another run_dir.")
    if resume and (run / "drafter").exists():
        raise UserError(f"The run in {run} (run_dir) is finished: there is nothing to resume. Use its drafter.")
    if resume and not (run / "settings.yaml").is_file():
        raise UserError(f"There is no run in {run} (run_dir) to resume. Leave --resume out, or correct run_dir.")
    if (run / "drafter").exists():
        raise UserError(f"Run folder {run} (run_dir) already holds a trained drafter. Choose another run_dir.")
    if not resume and (steps := saved_steps(run)):
        raise UserError(
            f"Run folder {run} (run_dir) holds a run that is not finished, with a checkpoint after step {steps[-1]:,}. "
            f"Go on with `{resume_command(run)}`, or choose another run_dir."
        )
    folders = [(dataset, "data.dataset") for dataset in datasets]
    for dataset, key in [*folders, *([(held_out, "evaluate.held_out")] if held_out else [])]:
        if run.resolve().is_relative_to(Path(dataset).resolve()):
            raise UserError(
                f"run_dir must not lie in the dataset {dataset} ({key}), got {run}. Choose another run_dir."
            )


def check_inputs(
    settings: RunSettings,
    facts: TargetFacts,
    mixture: Mixture,
    console: Console,
    held_out: CompletionDataset | None = None,
) -> None:
    """Refuse devices that are not there and taps, mask token or datasets that do not fit the target.

    Raises:
        UserError: the first rule that is broken.
    """
    for key in ("targets", "drafters"):
        for device in getattr(settings.pipeline, key):
            check_device(device, f"pipeline.{key}")
    if settings.evaluate.device is not None:
        check_device(settings.evaluate.device, "evaluate.device")
    check_taps(settings.drafter.taps, facts)
    if (each := settings.target.devices_per_replica) > 1:
        split_layers([1] * (max(settings.drafter.taps) + 1), 0, each)  # refuses more devices than layers
    check_data(facts.conventions, settings.data, facts.name)
    if settings.drafter.rope_theta != facts.rope_theta:
        raise UserError(
            f"drafter.rope_theta must be the target's, {facts.rope_theta:g}, got {settings.drafter.rope_theta:g}."
        )
    mask = settings.drafter.mask_token_id
    if mask >= facts.vocab_size:
        raise UserError(
            f"drafter.mask_token_id must be a row of the target's embedding (0..{facts.vocab_size - 1}), got {mask}."
        )
    tokenizer = tokenizer_fingerprint(load_tokenizer(facts.name, settings.target.revision))
    datasets = [*mixture.datasets, *([held_out] if held_out else [])]
    for dataset in datasets:
        what = f"Dataset {dataset.folder}" if len(datasets) > 1 else "The dataset"
        check_fits(dataset.manifest, tokenizer, facts.name, what=what)
        _check_rows(dataset, settings, facts, console)
    for dataset in mixture.datasets:
        if held_out and dataset.fingerprint == held_out.fingerprint:
            raise UserError(
                f"evaluate.held_out must hold other rows than data.dataset, but {held_out.folder} holds those of "
                f"{dataset.folder}. Prepare prompts that the run does not train on."
            )


def _check_rows(dataset: CompletionDataset, settings: RunSettings, facts: TargetFacts, console: Console) -> None:
    """Hold what the manifest says of the rows against the settings; ids are read only where it does not say enough."""
    made, mask = dataset.manifest, settings.drafter.mask_token_id
    if made.longest > settings.data.max_length:
        raise UserError(
            f"A sample may have data.max_length ({settings.data.max_length:,}) tokens, but {dataset.folder} has "
            f"one of {made.longest:,}. Raise it or prepare again with --settings."
        )
    if made.origin.mask_token_id != mask:  # else `prepare` has seen to it that it does not occur
        if made.tokens >= LONG_SCAN:
            console.line(
                f"  looking for token {mask} (drafter.mask_token_id) in {made.tokens:,} tokens of {dataset.folder}, "
                f"which was prepared for token {made.origin.mask_token_id}"
            )
        row = find_token(dataset, mask)
        if row is not None:
            raise UserError(
                f"drafter.mask_token_id must never occur in the data, but token {mask} is in row {row} of "
                f"{dataset.folder}. Choose another id, or prepare again with --mask-token-id {mask}, which leaves "
                f"such rows out."
            )
    if made.largest_id >= facts.vocab_size:  # some rows are bad, or all
        if made.tokens >= LONG_SCAN:
            console.line(
                f"  looking for ids from {facts.vocab_size:,} on in {made.tokens:,} tokens of {dataset.folder}"
            )
        check_vocabulary(dataset, facts.vocab_size - 1, settings.data.bad_rows)


def choose_policy(settings: RunSettings, console: Console) -> Policy:
    """Return how the drafter's step runs: as train.policy says, or as `paceline doctor` found possible here.

    Raises:
        UserError: train.policy, or target.fp8 with it, asks for what these devices or this shape cannot do.
    """
    wanted, train = settings.train.policy, settings.train
    on_gpu = all(torch.device(name).type == "cuda" for name in settings.pipeline.drafters)
    if wanted == "captured" and not on_gpu:
        raise UserError(
            f"train.policy: captured needs CUDA devices in pipeline.drafters, got {list(settings.pipeline.drafters)}. "
            "Set train.policy to compiled or eager."
        )
    policy: Policy
    if wanted == "auto":
        profile, reason = load_profile(profile_path(), this_machine())
        policy = profile.policy if profile else "eager"
        policy = "compiled" if policy == "captured" and not on_gpu else policy
        console.line(f"  policy {policy}: {profile.reason if profile else reason}")
    else:
        policy = wanted
    if policy != "eager" and on_gpu:
        slots = settings.drafter.block_size * train.anchor_slots
        if not fits_tiles(train.context_slots, train.anchor_slots, settings.drafter.block_size):
            raise UserError(
                f"On a GPU, policy {policy} needs train.context_slots ({train.context_slots:,}) and "
                f"train.anchor_slots × drafter.block_size ({slots:,}) to be multiples of {TILE}, and block_size "
                f"to divide {TILE}. Change them, or set train.policy to eager."
            )
    for device in settings.pipeline.targets:
        pace_of(settings.target, device, policy)
    return policy
