"""How many samples a second a run should make with so many GPUs, from measured rates: for every split and colocated.

Of a step's micro-batches each rank gets its share, in whole ones, and ends with an update and, with others, a sum of
gradients. Side by side the slowest of three sides counts: targets, drafters, and features on their way. Colocated, each
GPU makes its share of the targets' work and then of the drafters'. A replica whose layers lie on several GPUs is as
fast as its slowest one, and is not colocated. docs/throughput.md has the formulas.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.config import DrafterSettings
from paceline.drafter.flops import useful_flops
from paceline.records import UserError
from paceline.runtime.profile import Rates
from paceline.target.load import TargetFacts
from paceline.target.replica import Pace

# Shares of a large product's rate that were reached on one H200 at the Qwen3-8B shape: by a stock forward of the target
# (461 of 797 TFLOP/s; the fast path that is not compiled, 451 of 778), by the compiled fast path (608 of 778) and by a
# compiled step of the drafter (575 of 797). In fp8 956 and, without its update, 912 of some 1,400 of products.
TARGET_SHARE, FAST_SHARE, FAST8_SHARE = 0.58, 0.78, 0.68
STEP_SHARE, STEP8_SHARE = 0.72, 0.65
# Bytes that an update with AdamW reads and writes of a weight: it, its gradient and both moments in float32, the
# gradient once more for its norm and once to clear it, and the bfloat16 copy.
_UPDATE_BYTES = 38
_FEWER_BYTES = (
    12  # where moments are bytes: two are read and written instead of two floats; their scales are not counted
)

Side = Literal["targets", "drafters", "features", "both in turn"]


@dataclass(frozen=True, slots=True)
class Load:
    """What a run asks of its GPUs, on average."""

    tokens: float  # of a sample
    padding: float  # share of what the target computes
    samples: float  # of a step
    micro_samples: float  # of a micro-batch
    feature_bytes: int  # of a token
    weights: int  # of the drafter


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds on one GPU."""

    target: float  # of a sample, by a replica: on its slowest GPU where it has several
    micro: float  # of a drafter's micro-batch, at its one shape
    update: float
    gradients: float  # summing them over two ranks; 0 where nobody measured copies
    features: float  # of a sample, on the way to a rank


@dataclass(frozen=True, slots=True)
class Prediction:
    """One way to use the GPUs."""

    targets: int  # replicas
    drafters: int
    colocated: bool
    target_side: float  # samples a second that the targets could make
    drafter_side: float
    samples_per_s: float
    limit: Side
    devices_per_replica: int = 1


def target_flops(facts: TargetFacts, last_tap: int, tokens: float) -> float:
    """Return the operations of a sample's features: products of all layers up to the deepest tap, causal attention."""
    wide, narrow = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
    matrices = facts.hidden_size * (2 * wide + 2 * narrow + 3 * facts.intermediate_size)
    return (last_tap + 1) * (2 * tokens * matrices + 2 * tokens**2 * wide)


def slowest_share(layers: Sequence[int]) -> float:
    """Return the share of a forward that the device with most layers makes of it; `layers` are those of each device."""
    return max(layers) / sum(layers)


def step_flops(
    drafter: DrafterSettings, facts: TargetFacts, *, context_slots: int, anchor_slots: int, seen: float
) -> float:
    """Return the operations of a micro-batch whose slots are all used; a block sees `seen` context tokens."""
    return useful_flops(
        drafter,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        tokens=context_slots,
        visible=round(anchor_slots * seen),
        blocks=anchor_slots,
    )


def again_flops(
    drafter: DrafterSettings, facts: TargetFacts, *, context_slots: int, anchor_slots: int, seen: float
) -> float:
    """Return the operations that backward repeats of such a micro-batch where it computes layers again: the forward of
    all but the last."""

    def layers(count: int) -> float:
        fewer = drafter.model_copy(update={"layers": count})
        sizes = {"hidden_size": facts.hidden_size, "vocab_size": 0, "tokens": context_slots, "blocks": anchor_slots}
        return useful_flops(fewer, visible=round(anchor_slots * seen), **sizes)

    return (layers(drafter.layers) - layers(1)) / 3


def costs(
    load: Load,
    rates: Rates,
    *,
    target_flops: float,
    step_flops: float,
    peer_gb_s: float | None,
    pace: Pace,
    step8: bool = False,
    moments_in_bytes: bool = False,
) -> Costs:
    """Return what each part takes at these rates; copies between GPUs take nothing where nobody measured them.

    `pace` is that of the targets; `step8` says that the drafter's products are in fp8.

    Raises:
        UserError: products in fp8 are asked for, and nobody measured them.
    """
    peer = peer_gb_s * 1e9 if peer_gb_s else math.inf
    computed = 1 if pace.fast else 1 - load.padding  # the share of it that is wanted
    return Costs(
        target=target_flops / computed / (1e12 * _target_tflops(rates, pace)),
        micro=step_flops
        / (1e12 * (STEP8_SHARE * _fp8(rates, "train.fp8") if step8 else STEP_SHARE * rates.bf16_tflops)),
        update=(_UPDATE_BYTES - _FEWER_BYTES * moments_in_bytes) * load.weights / (rates.memory_gb_s * 1e9),
        gradients=4 * load.weights / peer,
        features=load.tokens * load.feature_bytes / peer,
    )


def _target_tflops(rates: Rates, pace: Pace) -> float:
    if not pace.compiled:
        return TARGET_SHARE * rates.bf16_tflops
    return FAST8_SHARE * _fp8(rates, "target.fp8") if pace.fp8 else FAST_SHARE * rates.bf16_tflops


def _fp8(rates: Rates, key: str) -> float:
    if rates.fp8_tflops is None:
        raise UserError(
            f"{key}: on is predicted from the rate of products in fp8, but the machine profile has none: the GPU makes "
            f"none, or `paceline doctor` saw them fail. Set {key} to off, or name another profile with --profile."
        )
    return rates.fp8_tflops


def predict(gpus: int, load: Load, cost: Costs, *, devices_per_replica: int = 1) -> list[Prediction]:
    """Return every split of the GPUs, few targets first, and behind them both roles on each GPU. All are used, and none
    is left where replicas of several GPUs leave no drafter any."""
    each = devices_per_replica
    found = [_apart(targets, gpus - each * targets, load, cost, each) for targets in range(1, (gpus - 1) // each + 1)]
    return found if each > 1 else [*found, _together(gpus, load, cost)]


def predict_roles(
    targets: int, drafters: int, load: Load, cost: Costs, *, colocated: bool, devices_per_replica: int = 1
) -> Prediction:
    """Return what so many replicas and ranks make, each on GPUs of its own, or one of each on every GPU."""
    if colocated:
        return _together(drafters, load, cost)
    return _apart(targets, drafters, load, cost, devices_per_replica)


def _apart(targets: int, drafters: int, load: Load, cost: Costs, each: int) -> Prediction:
    sides: dict[Side, float] = {
        "targets": targets / cost.target,
        "drafters": load.samples / _step(drafters, load, cost),
        "features": drafters / cost.features if cost.features else math.inf,
    }
    limit = min(sides, key=lambda side: sides[side])
    return Prediction(targets, drafters, False, sides["targets"], sides["drafters"], sides[limit], limit, each)


def _together(gpus: int, load: Load, cost: Costs) -> Prediction:
    targets, step = gpus / cost.target, _step(gpus, load, cost)
    both = load.samples / (load.samples / targets + step)
    return Prediction(gpus, gpus, True, targets, load.samples / step, both, "both in turn")


def _step(ranks: int, load: Load, cost: Costs) -> float:
    """Return the seconds of an optimizer step whose micro-batches are dealt to so many ranks."""
    micro = math.ceil(round(load.samples / load.micro_samples, 6))
    summing = 2 * (ranks - 1) / ranks * cost.gradients
    return math.ceil(micro / ranks) * cost.micro + cost.update + summing
