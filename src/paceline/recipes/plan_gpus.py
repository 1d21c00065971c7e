"""`paceline plan RUN.yaml --gpus N`: samples a second by the machine's rates, for every split of N GPUs."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.bench.predict import (
    Costs,
    Load,
    Prediction,
    again_flops,
    costs,
    predict,
    slowest_share,
    step_flops,
    target_flops,
)
from paceline.config import RunSettings
from paceline.data.mixture import Coverage
from paceline.data.plan import BucketTable
from paceline.observe.console import Console
from paceline.pipeline.slots import token_bytes
from paceline.recipes.machine_rates import measured_rates, slowest_peer
from paceline.recipes.plan_memory import target_folder
from paceline.recipes.plan_pace import expected_pace
from paceline.records import UserError, many
from paceline.runtime.profile import MachineProfile, Rates
from paceline.target.load import TargetFacts, describe
from paceline.target.replica import Pace
from paceline.target.stages import split_layers
from paceline.target.weights import layer_entries
from paceline.train.memory import step_memory


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
    cost = costs_of(run, asked, facts, load, rates, peer_gb_s=slowest_peer(profile), pace=pace)
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
    cost = costs_of(run, asked, facts, load, rates, peer_gb_s=peer, pace=pace)
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


def facts_of(run: RunSettings) -> TargetFacts:
    """Return what is known of a run's target.

    Raises:
        UserError: it is not on this machine.
    """
    folder = target_folder(run.target)
    if folder is None:
        raise UserError(
            f"plan --gpus needs the target's shape, but target.model {run.target.model} is not on this machine. Name "
            "its folder."
        )
    return describe(str(folder))


def load_of(run: RunSettings, facts: TargetFacts, buckets: BucketTable, share: Coverage) -> Load:
    """Return what a run asks of its GPUs, on average."""
    tokens = buckets.tokens / buckets.samples
    anchors = max(1.0, share.epoch_share * share.candidates / buckets.samples)
    samples = buckets.batch_avg * run.train.batches_per_step
    fit = min(buckets.batch_avg, run.train.context_slots // tokens, run.train.anchor_slots // anchors)
    memory = step_memory(run.drafter, run.train, hidden_size=facts.hidden_size, vocab_size=facts.vocab_size, tied=False)
    return Load(
        tokens=tokens,
        padding=buckets.padding_share,
        samples=samples,
        micro_samples=max(1.0, fit),
        feature_bytes=token_bytes(run, facts.hidden_size),
        weights=memory.weights // 4,
    )


def costs_of(
    run: RunSettings,
    asked: Asked,
    facts: TargetFacts,
    load: Load,
    rates: Rates,
    *,
    peer_gb_s: float | None,
    pace: Pace,
) -> Costs:
    """Return what each part of a run takes, predicted, or as it is told in `asked`.

    Raises:
        UserError: products in fp8 are asked for, and nobody measured them.
    """
    C, A = run.train.context_slots, run.train.anchor_slots
    step = step_flops(run.drafter, facts, context_slots=C, anchor_slots=A, seen=load.tokens / 2)
    if run.train.recompute == "layers":
        step += again_flops(run.drafter, facts, context_slots=C, anchor_slots=A, seen=load.tokens / 2)
    forward = target_flops(facts, max(run.drafter.taps), load.tokens)
    if (each := run.target.devices_per_replica) > 1:
        embedding, layers = layer_entries(facts.folder, max(run.drafter.taps))
        forward *= slowest_share(split_layers(layers, embedding, each))
    cost = costs(
        load,
        rates,
        target_flops=forward,
        step_flops=step,
        peer_gb_s=peer_gb_s,
        pace=Pace() if asked.target_rate else pace,  # what is told needs no rate of a product
        step8=run.train.fp8 == "on" and not asked.step_rate,
        moments_in_bytes=run.train.moments == "8bit",
    )
    if asked.target_rate:
        cost = replace(cost, target=load.tokens / asked.target_rate)
    return replace(cost, micro=A / asked.step_rate) if asked.step_rate else cost


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
