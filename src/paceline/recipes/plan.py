"""`paceline plan`: the bucket table of a dataset; loads no model."""

from pathlib import Path
from typing import Any

from paceline.config import DataSettings, load_settings
from paceline.data.plan import BucketTable, plan, table
from paceline.data.store import open_dataset
from paceline.observe.console import Console


def plan_epoch(what: Path, overrides: list[str], *, seed: int, console: Console) -> dict[str, Any]:
    """Print the first epoch's bucket table of a dataset folder or of a RUN.yaml and return it."""
    if what.is_dir():
        settings = DataSettings(dataset=str(what))
    else:
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
    console.table("", ("  lengths", "samples", "batches", "share", "batch size", "padding"), rows)
