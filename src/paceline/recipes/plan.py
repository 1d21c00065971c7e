"""`paceline plan`: what an epoch looks like, and what memory a drafter rank needs; loads no model."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.config import DataSettings, RunSettings, TrainSettings
from paceline.config_file import load_settings
from paceline.data.manifest import Origin
from paceline.data.mixture import Coverage, Mixture, coverage, first_table, open_mixture
from paceline.data.plan import BucketTable
from paceline.observe.console import Console
from paceline.recipes.choose_fp8 import planned_fp8
from paceline.recipes.plan_memory import check_target, plan_memory, target_folder
from paceline.records import UserError, many

# How to split GPUs among a run's roles, printed and as data; see plan_gpus.
Split = Callable[[RunSettings, BucketTable, Coverage, Console], dict[str, Any]]
# Which settings fit a card, printed and as data, told what an epoch looks like with other settings of the data and what
# the evaluator needs; see plan_fit.
Fits = Callable[[RunSettings, Callable[[DataSettings], BucketTable], Coverage, Console, int | None], dict[str, Any]]


def plan_epoch(
    what: Path,
    overrides: list[str],
    *,
    seed: int | None,
    console: Console,
    asked: Split | None = None,
    fits: Fits | None = None,
    profile: Path | None = None,
) -> dict[str, Any]:
    """Print the first epoch of a dataset folder, or of a RUN.yaml with the drafter's memory, and return it as data.

    With `asked` and `fits` also what they say of a RUN.yaml. `profile` is that of the machine it is planned for.

    Raises:
        UserError: the input cannot be read, or an argument does not go with its kind.
    """
    run = None if what.is_dir() else _run_settings(what, overrides, seed)
    if (asked or fits) and not run:
        option = "--gpus" if asked else "--memory"
        raise UserError(f"{option} needs the shapes of target and drafter, but {what} is a folder. Give a RUN.yaml.")
    if run:
        check_target(run)
        run = planned_fp8(run, profile, console)
    settings, train = (run.data, run.train) if run else _folder_settings(what, overrides, seed)
    began = time.perf_counter()
    mixture = open_mixture(settings)
    opened = time.perf_counter()
    buckets = first_table(mixture, settings, seed=train.seed)
    planned = time.perf_counter()
    lost = _truncation(mixture)
    share = coverage(mixture, anchors_per_sample=train.anchors_per_sample, epochs=train.epochs)
    print_buckets(buckets, console)
    _print_losses(lost, share, train, console)
    memory = {"memory": plan_memory(run, console), "target": _target(run, console)} if run else {}
    if run and run.evaluate.device is not None:
        memory["evaluator"] = _evaluator(run, console)
    gpus = {"gpus": asked(run, buckets, share, console)} if run and asked else {}
    if run and fits:
        evaluator = (memory.get("evaluator") or {}).get("total")

        def epoch(data: DataSettings) -> BucketTable:
            return buckets if data == settings else first_table(mixture, data, seed=train.seed)

        gpus["fit"] = fits(run, epoch, share, console, evaluator)
    return {
        **buckets.as_dict(),
        "datasets": _rows_of_datasets(mixture, console),
        "fill": buckets.tokens / (buckets.batches * settings.token_budget),
        "truncation": lost,
        "anchors": {
            "candidates": share.candidates,
            "per_sample": train.anchors_per_sample,
            "epochs": train.epochs,
            "epoch_share": share.epoch_share,
            "run_share": share.run_share,
        },
        "open_s": round(opened - began, 4),
        "plan_s": round(planned - opened, 4),
        **memory,
        **gpus,
    }


def _target(run: RunSettings, console: Console) -> dict[str, Any] | None:
    from paceline.recipes.target_memory import plan_target  # late, because it needs torch

    return plan_target(run, target_folder(run.target), console)


def _evaluator(run: RunSettings, console: Console) -> dict[str, Any] | None:
    from paceline.recipes.evaluator_memory import plan_evaluator  # late, because it needs torch

    return plan_evaluator(run, target_folder(run.target), console)


def _folder_settings(what: Path, overrides: list[str], seed: int | None) -> tuple[DataSettings, TrainSettings]:
    if overrides:
        raise UserError(f"{overrides[0]!r} changes a RUN.yaml, but {what} is a folder. Give a RUN.yaml to plan.")
    return DataSettings(dataset=str(what)), TrainSettings(seed=seed or 0)


def _run_settings(what: Path, overrides: list[str], seed: int | None) -> RunSettings:
    if not what.exists():
        raise UserError(f"There is no dataset folder or settings file {what}. Give one of them.")
    if seed is not None:
        raise UserError(f"--seed is for a dataset folder, got it with {what}. Add train.seed={seed} instead.")
    return load_settings(what, overrides)


def _rows_of_datasets(mixture: Mixture, console: Console) -> list[dict[str, Any]]:
    """Return how many rows the first epoch takes of each dataset, and tell of one that it takes none of."""
    taken = mixture.rows_of_epoch(0)
    for dataset, weight, rows in zip(mixture.datasets, mixture.weights, taken, strict=True):
        if not rows:
            console.line(
                f"  none of the {many(len(dataset), 'row')} of {dataset.folder} in the first epoch: its weight is "
                f"{float(weight):g} (data.weights)"
            )
    folders = zip(mixture.datasets, taken, strict=True)
    return [{"folder": str(d.folder), "rows": len(d), "epoch_rows": rows} for d, rows in folders]


def _truncation(mixture: Mixture) -> dict[str, int | float]:
    """Return what truncation took from the datasets, as their manifests have it."""
    origins: list[Origin] = [dataset.manifest.origin for dataset in mixture.datasets]
    tokens, supervised = sum(o.tokens_cut for o in origins), sum(o.supervised_cut for o in origins)
    whole = tokens + sum(dataset.manifest.tokens for dataset in mixture.datasets)
    whole_supervised = supervised + sum(dataset.manifest.supervised_tokens for dataset in mixture.datasets)
    return {
        "rows": sum(origin.truncated for origin in origins),
        "tokens": tokens,
        "token_share": tokens / max(whole, 1),
        "supervised": supervised,
        "supervised_share": supervised / max(whole_supervised, 1),
    }


def print_buckets(buckets: BucketTable, console: Console) -> None:
    """Print what an epoch looks like, one line a bucket."""
    console.line(f"  {many(buckets.samples, 'sample')} loaded lazily, {buckets.tokens:,} tokens")
    console.line(
        f"  {many(buckets.batches, 'batch', 'batches')} an epoch ({buckets.layout}), samples in one: min "
        f"{buckets.batch_min}, "
        f"max {buckets.batch_max}, avg {buckets.batch_avg:.1f}"
    )
    console.line(f"  padding {buckets.padding_share:.1%} of what the target computes")
    if not buckets.buckets:
        return
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


def _print_losses(lost: dict[str, int | float], share: Coverage, train: TrainSettings, console: Console) -> None:
    cut = many(int(lost["rows"]), "row")
    console.line(f"  truncation: {cut} cut, {lost['tokens']:,} tokens lost ({lost['token_share']:.1%})")
    console.line(f"  supervised tokens lost: {lost['supervised']:,} ({lost['supervised_share']:.1%})")
    console.line(
        f"  anchors: an epoch draws {share.epoch_share:.1%} of {share.candidates:,} candidates, "
        f"{many(train.epochs, 'epoch')} {share.run_share:.1%}"
    )
