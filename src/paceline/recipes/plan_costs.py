"""What a run asks of its GPUs, and what each part of it takes at a machine's rates; nothing is loaded."""

from dataclasses import replace

from paceline.bench.predict import Costs, Load, again_flops, costs, slowest_share, step_flops, target_flops
from paceline.config import RunSettings
from paceline.data.mixture import Coverage
from paceline.data.plan import BucketTable
from paceline.pipeline.slots import token_bytes
from paceline.recipes.plan_memory import target_folder
from paceline.recipes.target_memory import off_fast_path
from paceline.records import UserError
from paceline.runtime.profile import MachineProfile, Rates
from paceline.target.load import TargetFacts, describe, load_config
from paceline.target.replica import Pace
from paceline.target.stages import split_layers
from paceline.target.weights import layer_entries
from paceline.train.memory import step_memory


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


def expected_pace(run: RunSettings, facts: TargetFacts, profile: MachineProfile) -> tuple[Pace, str]:
    """Return how the targets should compute on the machine of a profile, and how that is called."""
    if off := off_fast_path(run, str(load_config(facts.folder).model_type)):
        return Pace(), f"by transformers' own forward: {off}"
    policy = profile.policy if run.train.policy == "auto" else run.train.policy
    pace = Pace(fast=True, compiled=policy != "eager", fp8=run.target.fp8 == "on")
    if not pace.compiled:
        unknown = "; what fp8 gains there nobody measured" if pace.fp8 else ""
        return pace, f"on the fast path, not compiled (policy eager){unknown}"
    return pace, f"on the fast path, compiled{', in fp8' if pace.fp8 else ''}"


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
    facts: TargetFacts,
    load: Load,
    rates: Rates,
    *,
    peer_gb_s: float | None,
    pace: Pace,
    target_rate: float | None = None,
    step_rate: float | None = None,
) -> Costs:
    """Return what each part of a run takes, predicted, or by rates that were measured: a replica's real tokens a second
    and a rank's blocks.

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
        pace=Pace() if target_rate else pace,  # what is told needs no rate of a product
        step8=run.train.fp8 == "on" and not step_rate,
        moments_in_bytes=run.train.moments == "8bit",
    )
    if target_rate:
        cost = replace(cost, target=load.tokens / target_rate)
    return replace(cost, micro=A / step_rate) if step_rate else cost
