"""What the drafter's step occupies on its GPU, computed from the settings alone, and what to lower if that is too much.

Estimated is the peak of what torch has allocated for a step that is compiled or captured, over a micro-batch and the
update, with attention over tiles. Dense attention takes more, its masks and whatever torch's choice of a kernel keeps,
and is not estimated: eager steps, and sizes that do not fit tiles. What is beside the step on the same GPU, a target,
another rank or features that wait, is not in it.

Activations and what is there in passing, by the phases of a step, are in `activations`. With train.offload: moments
those of matrices lie in host memory, and of the device they take the chunks that pass through it.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import asdict, dataclass

from paceline.config import DrafterSettings, TrainSettings
from paceline.drafter.attention import TILE, fits_tiles
from paceline.drafter.e4m3 import TILE8
from paceline.runtime.compiling import Policy
from paceline.train import activations
from paceline.train.activations import Phase
from paceline.train.flat import padded
from paceline.train.moments import CHUNK, STAGED, moments_bytes
from paceline.train.small_cards import LEAST_LOGITS_MIB, cheapest_first, small_card_ladders

# Constants that no shape gives; `benchmarks/step_memory.py` holds the whole estimate against a GPU.
_WORKSPACE = 96 << 20  # bytes: cuBLAS keeps 32 MiB (Hopper) for each thread and stream: forward, backward, capture
# Share of the free memory that a step can use: torch reserves more than it allocates, for gaps between blocks and for
# what CUDA graphs keep. On an H200 the 8B shape, then 45.8 GiB by the estimate, reserved 47.5 GiB when compiled (0.96)
# and 49.4 GiB in the step's benchmark (0.93, with 0.5 GiB of features beside it).
USABLE = 0.92

_TEMPORARIES: dict[Phase, str] = {
    "loss": "logits and their gradients",
    "backward": "temporaries of a layer",
    "gradients": "new gradients",
    "update": "temporaries of the update",
}


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes of one drafter rank's device at the step's peak, by what they are for."""

    weights: int  # float32, what is trained and saved
    gradients: int  # float32 sums
    moments: int
    chunks: int  # of moments in host memory, on their way; 0 where none are
    working_copy: int  # of the matrices, in bfloat16; 0 where the weights themselves are used
    ends: int  # the target's embedding and head
    buffers: int  # the micro-batch at the one shape
    activations: int  # kept for backward; 0 where the peak is when they are gone
    temporaries: int
    workspace: int
    peak: Phase  # when it is reached, which says what the temporaries are
    host: int  # moments in host memory, page-locked; not of the device's bytes

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Return the bytes of each part on the device by its name for a person."""
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "moments": self.moments,
            **({"chunks of moments": self.chunks} if self.chunks else {}),
            "working copy": self.working_copy,
            "embedding and head": self.ends,
            "buffers": self.buffers,
            "activations": self.activations,
            _TEMPORARIES[self.peak]: self.temporaries,
            "workspace": self.workspace,
        }

    @property
    def stays(self) -> int:
        """Bytes that are there between two steps."""
        lasting = (self.weights, self.gradients, self.moments, self.chunks, self.working_copy, self.ends, self.buffers)
        return sum(lasting)

    @property
    def saved(self) -> int:
        """Bytes of the tensors of a checkpoint."""
        return self.weights + self.moments + self.host

    def as_dict(self) -> dict[str, int | str]:
        """Return every part in bytes, the device's sum and when the peak is."""
        return {**asdict(self), "total": self.total}


def step_memory(
    drafter: DrafterSettings, train: TrainSettings, *, hidden_size: int, vocab_size: int, tied: bool
) -> StepMemory:
    """Return the estimate for a compiled or captured step whose sizes fit tiles (see `sizes_for_tiles`).

    `tied` says whether embedding and head are one tensor.
    """
    C, A, B, H = train.context_slots, train.anchor_slots, drafter.block_size, hidden_size
    mixed = train.dtype == "bfloat16"
    wire = 2 if mixed else 4
    matrices, norms = activations.matrices(drafter, H), activations.norms(drafter, H)
    flat_matrices, flat_norms = padded(activations.leaves(drafter, H)), padded(norms)  # as the step lays them
    phases = activations.phases(drafter, train, H, vocab_size)
    peak = max(phases, key=lambda phase: sum(phases[phase]))
    if train.optimizer == "muon":
        of_matrices, steps = 4 * activations.total(matrices), len(norms)
    else:
        of_matrices, steps = moments_bytes(train.moments, flat_matrices), len(matrices) + len(norms)
    away = train.offload == "moments"
    maps = 4 * 1022 if train.moments == "8bit" else 0  # of 256 values each, and what lies in the middle of two
    return StepMemory(
        weights=4 * (flat_matrices + flat_norms),
        gradients=4 * (flat_matrices + flat_norms),
        # AdamW counts steps for each weight, in float32.
        moments=8 * flat_norms + 4 * steps + maps + (0 if away else of_matrices),
        chunks=STAGED * moments_bytes(train.moments, min(CHUNK, flat_matrices)) if away else 0,
        working_copy=2 * flat_matrices if mixed else 0,
        # In fp8 there are two copies of the head beside it.
        ends=vocab_size * H * (wire * (1 if tied else 2) + (2 if train.fp8 == "on" else 0)),
        buffers=C * (len(drafter.taps) * H * wire + 8) + A * (4 * 8 + B * 9),
        activations=phases[peak][0],
        temporaries=phases[peak][1],
        workspace=_WORKSPACE,
        peak=peak,
        host=of_matrices if away else 0,
    )


def sizes_for_tiles(drafter: DrafterSettings, train: TrainSettings) -> str:
    """Return which sizes must change, and to what, for attention over tiles; an empty text if they fit.

    Others cannot be compiled or captured on a GPU, and what their dense attention needs is not estimated.
    """
    A, B, C = train.anchor_slots, drafter.block_size, train.context_slots
    if fits_tiles(C, A, B):
        return ""
    if TILE % B:
        return f"drafter.block_size ({B:,}) must divide {TILE}"
    rules = (("train.context_slots", C, TILE), ("train.anchor_slots", A, anchor_unit(drafter, train)))
    return " and ".join(f"{key} ({size:,}) must be a multiple of {unit}" for key, size, unit in rules if size % unit)


def advice(
    drafter: DrafterSettings,
    train: TrainSettings,
    *,
    hidden_size: int,
    vocab_size: int,
    tied: bool,
    policy: Policy,
    room: int,
    total: int,
) -> str:
    """Return what a step that ran out of memory needs, and which sizes to lower to what.

    `policy` is how the step ran; `room` is what it may take of the device's `total`, in bytes. Sizes that are named fit
    by the estimate when compiled or captured.
    """

    def memory(**changes: int | str) -> StepMemory:
        changed = train.model_copy(update=changes)
        return step_memory(drafter, changed, hidden_size=hidden_size, vocab_size=vocab_size, tied=tied)

    there = f"can have {gib(room)} of the device's {gib(total)} (others hold the rest)"
    compile_it, lower = "Set train.policy to compiled or captured", "Lower"
    rules = sizes_for_tiles(drafter, train)
    if rules:
        return (
            f"The step {there}; what dense attention needs is not estimated. Attention over tiles needs less. "
            f"{compile_it}, for which {rules}."
        )
    now, usable = memory(), int(USABLE * room)
    if policy == "eager":
        # Sizes that fit when compiled say nothing of an eager step, so they are named with the policy alone.
        said = f"Policy eager needs more memory than a compiled step, which needs about {gib(now.total)}; it {there}"
        if now.total <= usable:
            return f"{said}. {compile_it}."
        goal, lower = usable, f"{compile_it} and lower"
    else:
        said = f"The step needs about {gib(now.total)} at its peak ({_largest(now)}) and {there}"
        if now.total <= usable:
            said += ", which should do but did not"
        elif now.total <= room:
            said += f", of which about {gib(usable)} are of use: the rest goes to gaps between blocks"
        # What ran out although it should fit must become smaller all the same.
        goal = min(usable, int(0.9 * now.total))
    options = _options(drafter, train, lambda **changes: memory(**changes).total, goal)
    small = _small_card(train, lambda **changes: memory(**changes).total, goal, policy)
    if options:
        return f"{said}. {lower} {options}.{small}"
    least = memory(anchor_slots=anchor_unit(drafter, train), context_slots=TILE, logits_mib=1).total
    return (
        f"{said}. The smallest micro-batch there is needs {gib(least)}, nearly all of it for weights, gradients, "
        f"moments, embedding and head. {lower} drafter.layers, or use a device with more memory in pipeline.drafters."
        f"{small}"
    )


def _options(drafter: DrafterSettings, train: TrainSettings, needs: Callable[..., int], goal: int) -> str:
    """Return in words the sizes that bring the step to `goal` bytes; an empty text if none do."""
    unit = anchor_unit(drafter, train)
    A, C, mib = train.anchor_slots, train.context_slots, train.logits_mib
    anchors = _largest_multiple(unit, A, goal, lambda n: needs(anchor_slots=n))
    context = _largest_multiple(TILE, C, goal, lambda n: needs(context_slots=n))
    logits = _largest_multiple(1, mib, goal, lambda n: needs(logits_mib=n))
    found = []
    if anchors:
        found.append(f"train.anchor_slots from {A:,} to {anchors:,}{_with_anchors(train, anchors)}")
    if context:
        found.append(f"train.context_slots from {C:,} to {context:,}, which no sample may exceed")
    if logits >= LEAST_LOGITS_MIB:
        found.append(f"train.logits_mib from {mib:,} to {logits:,}")
    if found:
        return " or ".join(found)
    return _together(train, unit, needs, goal)


def _together(train: TrainSettings, unit: int, needs: Callable[..., int], goal: int) -> str:
    """Return in words how anchors and context become smaller in proportion; an empty text if in vain."""
    A, C = train.anchor_slots, train.context_slots

    def context_for(anchors: int) -> int:
        return max(1, C * anchors // A // TILE) * TILE

    anchors = _largest_multiple(unit, A, goal, lambda n: needs(anchor_slots=n, context_slots=context_for(n)))
    if not anchors:
        return ""
    return (
        f"together train.anchor_slots from {A:,} to {anchors:,}{_with_anchors(train, anchors)} and "
        f"train.context_slots from {C:,} to {context_for(anchors):,}, which no sample may exceed"
    )


def _small_card(train: TrainSettings, needs: Callable[..., int], goal: int, policy: Policy) -> str:
    """Return in words the cheapest of the settings for small cards that bring the step to `goal` bytes, if any do."""
    for changes in cheapest_first(small_card_ladders(train)):
        if changes and (total := needs(**changes)) <= goal:
            named = {"policy": "compiled or captured"} if policy == "eager" else {}  # what is needed holds of these
            sets = " and ".join(f"train.{key} to {value}" for key, value in {**named, **changes}.items())
            return f" Or set {sets}, with which it needs about {gib(total)}."
    return ""


def anchor_unit(drafter: DrafterSettings, train: TrainSettings) -> int:
    """Return the fewest anchors whose slots are whole tiles of attention, and rows that products in fp8 take."""
    unit = TILE // math.gcd(TILE, drafter.block_size)
    # A * B and A * (B - 1) slots must be multiples of 16 (float8.check_sizes), and so must A, in which they differ.
    return math.lcm(unit, TILE8) if train.fp8 == "on" else unit


def _with_anchors(train: TrainSettings, anchors: int) -> str:
    """Return what else must be lowered with train.anchor_slots."""
    return " (train.anchors_per_sample too)" if anchors < train.anchors_per_sample else ""


def _largest_multiple(unit: int, below: int, goal: int, needs: Callable[[int], int]) -> int:
    """Return the largest multiple of `unit` under `below` that needs no more than `goal` bytes, or 0."""
    return unit * bisect_right(range(1, -(-below // unit)), goal, key=lambda count: needs(unit * count))


def _largest(memory: StepMemory) -> str:
    """Return the four largest parts in words."""
    parts = sorted(memory.parts().items(), key=lambda part: -part[1])[:4]
    return ", ".join(f"{name} {gib(size)}" for name, size in parts)


def gib(size: int) -> str:
    """Return bytes in GiB, or in MiB where they are fewer than a tenth of one."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.1f} MiB"
