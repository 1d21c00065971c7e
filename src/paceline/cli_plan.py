"""The command that shows what a run will be: `paceline plan`."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli_options import AsJson, finish
from paceline.observe.console import Console
from paceline.records import UserError


def plan(
    what: Annotated[Path, typer.Argument(metavar="DATASET|RUN.yaml", help="A dataset folder or a settings file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Settings of a RUN.yaml to change."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**63 - 1, help="Seed of the order, for a dataset folder. Default: 0.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Predict samples/s for every split of so many GPUs.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="24GiB", help="Name the settings that fit on cards of so much memory.")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Machine profile to predict from. Default: what `doctor` found here.")
    ] = None,
    target_rate: Annotated[
        float | None, typer.Option(min=1e-9, help="Measured tokens/s of the target on one GPU.")
    ] = None,
    step_rate: Annotated[
        float | None, typer.Option(min=1e-9, help="Measured blocks/s of the drafter's step on one GPU.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Print an epoch's batches and padding; with --gpus how to split them, with --memory what fits. Loads no model."""
    given: list[tuple[str, object]] = [("--target-rate", target_rate), ("--step-rate", step_rate)]
    if gpus is None and (alone := [name for name, value in given if value is not None]):
        raise UserError(f"{alone[0]} goes with --gpus, got it without. Add --gpus N, or leave it out.")
    if profile is not None and gpus is None and memory is None:
        raise UserError("--profile goes with --gpus or --memory, got it without. Add one of them, or leave it out.")
    from paceline.recipes.plan import plan_epoch

    asked, fits = None, None
    if gpus is not None:
        from paceline.recipes.plan_gpus import Asked, plan_gpus

        asked = partial(plan_gpus, Asked(gpus, profile, target_rate, step_rate))
    if memory is not None:
        from paceline.pipeline.cards import read_memory
        from paceline.recipes.plan_fit import Card, plan_fit

        fits = partial(plan_fit, Card(read_memory(memory), profile))
    if profile is not None:
        from paceline.recipes.machine_rates import measured_rates

        measured_rates(profile)  # what a person names has to be there, before anything is planned
    console = Console(json=json)
    made = plan_epoch(what, overrides or [], seed=seed, console=console, asked=asked, fits=fits, profile=profile)
    finish(console, json, made, "")
