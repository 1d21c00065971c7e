"""What a run's roles should make where its settings place them, by the machine's rates: for `plan --memory`."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.bench.predict import predict_roles
from paceline.config import RunSettings
from paceline.data.mixture import Coverage
from paceline.data.plan import BucketTable
from paceline.observe.console import Console
from paceline.recipes.machine_rates import measured_rates, slowest_peer
from paceline.recipes.plan_costs import costs_of, expected_pace, facts_of, load_of
from paceline.records import UserError


def expected_rate(
    run: RunSettings, profile: Path | None, buckets: BucketTable, share: Coverage, console: Console
) -> dict[str, Any] | None:
    """Print what a run should make and return it; None where that is unknown, and a line says why.

    `profile` is that of another machine.
    """
    targets, drafters = run.replicas, run.pipeline.drafters
    together = {*run.pipeline.targets} == {*drafters} and len({*drafters}) == len(drafters) == len(targets)
    if not together and len({*run.pipeline.targets, *drafters}) < len(run.pipeline.targets) + len(drafters):
        console.line("  rate not predicted: some roles share a card, and not one of each on every card")
        return None
    facts, each = facts_of(run), run.target.devices_per_replica
    load = load_of(run, facts, buckets, share)
    try:
        made, rates = measured_rates(profile)
        pace, how = expected_pace(run, facts, made)
        cost = costs_of(run, facts, load, rates, peer_gb_s=slowest_peer(made), pace=pace)
    except UserError as error:
        console.line(f"  rate unknown: {error} `paceline bench step` measures a drafter's step.")
        return None
    found = predict_roles(len(targets), len(drafters), load, cost, colocated=together, devices_per_replica=each)
    blocks = run.train.anchor_slots / cost.micro
    names = " and ".join(sorted(made.rates))
    console.line(
        f"  expected: about {found.samples_per_s:,.1f} samples/s, limited by {found.limit}; of the drafter alone about "
        f"{blocks:,.0f} blocks/s (predicted from the machine profile of {made.made_at[:10]}: {names})"
    )
    console.line(f"  targets {how}")
    if run.train.offload == "moments":
        console.line("  copies of moments to and from host memory are not in it: nobody measured them")
    return {
        **asdict(found),
        "blocks_per_s": blocks,
        "gpus": sorted(made.rates),
        "pace": {**asdict(pace), "targets": how},
    }
