"""`paceline plan RUN.yaml --gpus N`: samples a second by the machine's rates, for every split of N GPUs."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.bench.predict import (
    Costs,
    Load,
    Prediction,
    predict,
)
from paceline.config import RunSettings
from paceline.data.mixture import Coverage
from paceline.data.plan import BucketTable
from paceline.observe.console import Console
from paceline.recipes.machine_rates import measured_rates, slowest_peer
from paceline.recipes.plan_costs import costs_of, expected_pace, facts_of, load_of
from paceline.records import UserError, many
from paceline.runtime.profile import MachineProfile


@dataclass(frozen=True, slots=True)
class Asked:
    """What `--gpus` and the options beside it say."""

    gpus: int
    profile: Path | None  # of another machine
    target_rate: float | None  # real tokens a second that were measured on one GPU
    step_rate: float | None  # blocks


def best_split(asked: Asked, run: RunSettings, buckets: BucketTable, share: Coverage) -> tuple[Prediction, str, str]:
    """Return the split that should make most samples a second, how it is called, and how its targets compute.

    Raises:
        UserError: nobody measured the GPUs, or the target's shape is not known.
    """
    profile, rates = measured_rates(asked.profile)
    facts = facts_of(run)
    load, (pace, how) = load_of(run, facts, buckets, share), expected_pace(run, facts, profile)
    cost = costs_of(run, facts, load, rates, peer_gb_s=slowest_peer(profile), pace=pace)
    best = _best(_predict(run, asked.gpus, load, cost))
    return best, _words(best), how


def _predict(run: RunSettings, gpus: int, load: Load, cost: Costs) -> list[Prediction]:
    """Return the splits there are.

    Raises:
        UserError: a replica and a drafter rank need more GPUs.
    """
    each = run.target.devices_per_replica
    found = predict(gpus, load, cost, devices_per_replica=each)
    if not found:
        raise UserError(
            f"A target replica on {many(each, 'GPU')} (target.devices_per_replica) and a drafter rank need "
            f"{each + 1}, got "
            f"{gpus}. Plan for more, or lower it."
        )
    return found


def plan_gpus(
    asked: Asked, run: RunSettings, buckets: BucketTable, share: Coverage, console: Console
) -> dict[str, Any]:
    """Print what each split should make and return it, the best one named.

    Raises:
        UserError: nobody measured the GPUs, or the target's shape is not known.
    """
    profile, rates = measured_rates(asked.profile)
    facts = facts_of(run)
    load, peer = load_of(run, facts, buckets, share), slowest_peer(profile)
    pace, how = expected_pace(run, facts, profile)
    given = {"target_rate": asked.target_rate, "step_rate": asked.step_rate}
    cost = costs_of(run, facts, load, rates, peer_gb_s=peer, pace=pace, **given)
    found = _predict(run, asked.gpus, load, cost)
    best = _best(found)
    console.line(f"  {many(asked.gpus, 'GPU')}, predicted from {_source(asked, profile)}:")
    if not asked.target_rate:
        console.line(f"  targets {how}")
    console.table(
        "", ("targets", "drafters", "targets/s", "drafters/s", "samples/s", "limited by"), [_row(one) for one in found]
    )
    console.line(f"  best: {_words(best)}")
    epoch_h = buckets.samples / best.samples_per_s / 3600
    console.line(
        f"  about {best.samples_per_s:,.1f} samples/s, limited by {best.limit}; an epoch in {epoch_h:,.2f} hours"
    )
    if asked.gpus > 1 and peer is None:
        console.line("  nobody measured copies between GPUs here: they are taken to cost nothing")
    return {
        "gpus": asked.gpus,
        "rates": rates.model_dump(),
        "peer_gb_s": peer,
        "pace": {**asdict(pace), "targets": how},
        "load": asdict(load),
        "seconds": asdict(cost),
        "splits": [asdict(one) for one in found],
        "best": asdict(best),
    }


def _best(found: list[Prediction]) -> Prediction:
    return max(found, key=lambda one: one.samples_per_s)


def _source(asked: Asked, profile: MachineProfile) -> str:
    given = [name for name, rate in (("targets'", asked.target_rate), ("steps'", asked.step_rate)) if rate]
    more = f" and the {' and the '.join(given)} rate that you give" if given else ""
    return f"the machine profile of {profile.made_at[:10]}{more}"


def _row(one: Prediction) -> tuple[str, ...]:
    each = one.devices_per_replica
    targets = f"{one.targets} of {each}" if each > 1 else str(one.targets)
    counts = ("all", "all") if one.colocated else (targets, str(one.drafters))
    rates = (f"{rate:,.1f}" for rate in (one.target_side, one.drafter_side, one.samples_per_s))
    return (*counts, *rates, one.limit)


def _words(one: Prediction) -> str:
    if one.colocated:
        return "a target and a drafter on each GPU" if one.targets > 1 else "target and drafter on the one GPU"
    each = one.devices_per_replica
    replicas = (
        f"{one.targets * each} for targets, {each} for each replica" if each > 1 else f"{one.targets} for targets"
    )
    return f"{replicas}, {one.drafters} for drafters"
