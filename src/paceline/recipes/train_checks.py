"""What `paceline train` refuses before it loads a model."""

from pathlib import Path

from paceline.config import RunSettings
from paceline.data.store import CompletionDataset, check_fits, find_token, id_range, tokenizer_fingerprint
from paceline.records import UserError
from paceline.runtime.devices import check_device
from paceline.target.load import TargetFacts, load_tokenizer
from paceline.target.model import check_taps


def check_run_folder(run: Path, dataset: Path) -> None:
    """Refuse a run folder that is taken.

    Raises:
        UserError: it is a file, holds a trained drafter, or lies in the dataset, which `prepare` may replace.
    """
    if run.exists() and not run.is_dir():
        raise UserError(f"run_dir must be a folder, but {run} is a file. Choose another run_dir.")
    if (run / "drafter").exists():
        raise UserError(f"Run folder {run} (run_dir) already holds a trained drafter. Choose another run_dir.")
    if run.resolve().is_relative_to(dataset.resolve()):
        raise UserError(
            f"run_dir must not lie in the dataset {dataset} (data.dataset), got {run}. Choose another run_dir."
        )


def check_inputs(settings: RunSettings, facts: TargetFacts, dataset: CompletionDataset) -> None:
    """Refuse devices that are not there and taps, mask token or dataset that do not fit the target.

    Raises:
        UserError: the first rule that is broken.
    """
    for key in ("targets", "drafters"):
        for device in getattr(settings.pipeline, key):
            check_device(device, f"pipeline.{key}")
    check_taps(settings.drafter.taps, facts)
    if settings.drafter.rope_theta != facts.rope_theta:
        raise UserError(
            f"drafter.rope_theta must be the target's, {facts.rope_theta:g}, got {settings.drafter.rope_theta:g}."
        )
    mask = settings.drafter.mask_token_id
    if mask >= facts.vocab_size:
        raise UserError(
            f"drafter.mask_token_id must be a row of the target's embedding (0..{facts.vocab_size - 1}), got {mask}."
        )
    check_fits(
        dataset.manifest, tokenizer_fingerprint(load_tokenizer(facts.name, settings.target.revision)), facts.name
    )
    if dataset.manifest.longest > settings.data.max_length:
        raise UserError(
            f"A sample may have data.max_length ({settings.data.max_length:,}) tokens, but {settings.data.dataset} has "
            f"one of {dataset.manifest.longest:,}. Raise it or prepare again with --settings."
        )
    row = find_token(dataset, mask)
    if row is not None:
        raise UserError(
            f"drafter.mask_token_id must never occur in the data, but token {mask} is in row {row} of "
            f"{settings.data.dataset}. Choose another id, or prepare again with --mask-token-id {mask}, which leaves "
            f"such rows out."
        )
    low, high = id_range(dataset)
    if low < 0 or high >= facts.vocab_size:
        raise UserError(
            f"Token ids must lie in 0..{facts.vocab_size - 1} for {facts.name}, but {settings.data.dataset} holds "
            f"{low} to {high}: the dataset is damaged. Prepare it again."
        )
