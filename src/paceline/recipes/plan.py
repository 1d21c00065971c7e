"""`paceline plan`: the bucket table of a dataset; loads no model."""

from pathlib import Path
from typing import Any

from paceline.config import DataSettings, load_settings
from paceline.data.plan import BucketTable, plan, table
from paceline.data.store import open_dataset
from paceline.observe.console import Console
from paceline.records import UserError


def plan_epoch(what: Path, overrides: list[str], *, seed: int | None, console: Console) -> dict[str, Any]:
    """Print the first epoch's bucket table of a dataset folder or of a RUN.yaml and return it.

    Raises:
        UserError: the input cannot be read, or an argument does not go with its kind.
    """
    if not what.exists():
        raise UserError(f"There is no dataset folder or settings file {what}. Give one of them.")
    if what.is_dir():
        if overrides:
            raise UserError(f"{overrides[0]!r} changes a RUN.yaml, but {what} is a folder. Give a RUN.yaml to plan.")
        settings, seed = DataSettings(dataset=str(what)), seed or 0
    else:
        if seed is not None:
            raise UserError(f"--seed is for a dataset folder, got it with {what}. Add train.seed={seed} instead.")
        run = load_settings(what, overrides)
        settings, seed = run.data, run.train.seed
    dataset = open_dataset(Path(settings.dataset))
    buckets = table(plan(dataset.lengths, settings, seed=seed, epoch=0), dataset.lengths)
    print_buckets(buckets, console)
    return buckets.as_dict()


def print_buckets(buckets: BucketTable, console: Console) -> None:
    """Print what an epoch looks like, one line a bucket."""
    console.line(f"  {buckets.samples:,} samples loaded lazily, {buckets.tokens:,} tokens")
    console.line(
        f"  {buckets.batches:,} batches an epoch, batch size min {buckets.batch_min}, max {buckets.batch_max}, "
        f"average {buckets.batch_avg:.1f}; padding {buckets.padding_share:.1%}"
    )
    rows = [
        (
            f"[{bucket.low}, {bucket.high})",
            f"{bucket.samples:,}",
            f"{bucket.batches:,}",
            f"{bucket.batch_share:.1%}",
            f"{bucket.batch_min}-{bucket.batch_max}",
            f"{bucket.padding_share:.1%}",
        )
        for bucket in buckets.buckets
    ]
    console.table("", ("lengths", "samples", "batches", "share", "batch size", "padding"), rows)
