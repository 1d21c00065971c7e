"""What the drafter's step occupies on its GPU, computed from the settings alone, and what to lower if that is too much.

Estimated is the peak of what torch has allocated for a step that is compiled or captured, over a micro-batch and the
update, with attention over tiles. Dense attention takes more, its masks and whatever torch's choice of a kernel keeps,
and is not estimated: eager steps, and sizes that do not fit tiles. What is beside the step on the same GPU, a target,
another rank or features that wait, is not in it.

What backward keeps was read off the joint graph that AOTAutograd's partitioner cuts (torch 2.13). It recomputes next
to nothing here: nearly everything feeds a matrix product or attention in backward. Of a layer, in the compute format:
- of a key, context and block slots alike: the input of the products (H), k and v as they come out (2 M E) and k after
  its norm and rotation (M E); in float32 an rms for each of its heads (M);
- of a block slot: q before (N E) and after its norm and rotation (N E) and the attention's output (N E); in float32 an
  rms for each head of q and the attention's logsumexp (2 N);
- of a block slot behind attention: what the residual stream holds before and behind the MLP and the MLP's normed input
  (3 H), gate and up (2 F), which give their product again in backward; in float32 an rms for both norms (2).
In the first layer the products' rows and results are there once for each distinct input (U) instead of for each block
slot, and v as attention reads it (M E) beside them. Behind the last attention only slots that have a loss are left, and
the attention's output is there once more, without the others.
In fp8 products keep what they read as a byte and a scale a row: of the inputs above instead of them, of the attention's
output, of the features and of all matrices beside them; q's apart from key's and value's, though they read the same.
Beside the layers: the context before hidden_norm (H and an rms a context slot), and the rotary tables (2 E a key, in
float32). Features are kept where they lie, in the buffers.

The step's peak is that of one of four phases, all but the last of which also hold hidden states and their gradient
(2 H a slot that has a loss):
- loss: activations, and a chunk of logits, which their gradient replaces; in float32 both are there;
- backward, at its begin: activations, and of the last layer two more of the MLP's width and a matrix's gradient;
- gradients, at its end: what autograd returns for all weights, and the gradients of the products' inputs of all layers,
  whose context's parts are summed there;
- update: AdamW needs nothing, Muon copies of the matrices of a shape.

Shapes: C context slots, A anchors, B block slots, Q = A * B, K = C + Q, U distinct inputs of slots, H width, F width of
the MLP, N heads, M key/value heads, E head width, L layers, V vocabulary.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Literal

from paceline.config import DrafterSettings, TrainSettings
from paceline.drafter.attention import TILE, fits_tiles
from paceline.drafter.joined import distinct_rows
from paceline.runtime.compiling import Policy
from paceline.train.flat import padded

Phase = Literal["loss", "backward", "gradients", "update"]

# Constants that no shape gives; `benchmarks/step_memory.py` holds the whole estimate against a GPU.
_WORKSPACE = 96 << 20  # bytes: cuBLAS keeps 32 MiB (Hopper) for each thread and stream: forward, backward, capture
# Share of the free memory that a step can use: torch reserves more than it allocates, for gaps between blocks and for
# what CUDA graphs keep. On an H200 the 8B shape, then 45.8 GiB by the estimate, reserved 47.5 GiB when compiled (0.96)
# and 49.4 GiB in the step's benchmark (0.93, with 0.5 GiB of features beside it).
_USABLE = 0.92
_LEAST_LOGITS_MIB = 64  # of train.logits_mib that is advised: with fewer rows the head's products slow down

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
    working_copy: int  # of the matrices, in bfloat16; 0 where the weights themselves are used
    ends: int  # the target's embedding and head
    buffers: int  # the micro-batch at the one shape
    activations: int  # kept for backward; 0 where the peak is when they are gone
    temporaries: int
    workspace: int
    peak: Phase  # when it is reached, which says what the temporaries are

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Return the bytes of each part by its name for a person."""
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "moments": self.moments,
            "working copy": self.working_copy,
            "embedding and head": self.ends,
            "buffers": self.buffers,
            "activations": self.activations,
            _TEMPORARIES[self.peak]: self.temporaries,
            "workspace": self.workspace,
        }

    def as_dict(self) -> dict[str, int | str]:
        """Return every part in bytes, their sum and when the peak is."""
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
    matrices, norms = _matrices(drafter, H), _norms(drafter, H)
    matrix_entries, norm_entries = _entries(matrices), sum(norms)
    flat_matrices, flat_norms = padded(_leaves(drafter, H)), padded(norms)  # as the step lays them
    muon = train.optimizer == "muon"
    adam = flat_norms if muon else flat_matrices + flat_norms
    steps = len(norms) if muon else len(matrices) + len(norms)  # AdamW counts them for each weight, in float32
    activations = _activations(drafter, C, A, H, wire)
    activations += _kept_in_fp8(drafter, C, A, H) if train.fp8 == "on" else 0
    rows, wide = A * (B - 1), wire * drafter.intermediate_size
    # Of the head's logits: their kernel puts the gradient over them; without it logits and gradient are there.
    # In fp8 the gradient lies beside them, and so do two copies of the head.
    fp8 = train.fp8 == "on"
    logit, held = (4, 8) if not mixed else (3, 3) if fp8 else (2, 2)
    chunk = min(rows, max(1, (train.logits_mib << 20) // (logit * vocab_size)))  # at most; the loss prefers a divisor
    hidden = 2 * wire * H * rows
    phases: dict[Phase, tuple[int, int]] = {  # activations and temporaries that are there together
        "loss": (activations, hidden + chunk * vocab_size * held),
        "backward": (activations, hidden + wide * (2 * rows + H)),
        "gradients": (
            0,
            hidden + wire * matrix_entries + 4 * norm_entries + _context_gradients(drafter, C, A, H, wire),
        ),
        "update": (0, _newton_schulz(matrices) if muon else 0),
    }
    peak = max(phases, key=lambda phase: sum(phases[phase]))
    return StepMemory(
        weights=4 * (flat_matrices + flat_norms),
        gradients=4 * (flat_matrices + flat_norms),
        moments=8 * adam + 4 * steps + (4 * matrix_entries if muon else 0),
        working_copy=2 * flat_matrices if mixed else 0,
        ends=vocab_size * H * (wire * (1 if tied else 2) + (2 if fp8 else 0)),
        buffers=C * (len(drafter.taps) * H * wire + 8) + A * (4 * 8 + B * 9),
        activations=phases[peak][0],
        temporaries=phases[peak][1],
        workspace=_WORKSPACE,
        peak=peak,
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
    rules = (("train.context_slots", C, TILE), ("train.anchor_slots", A, _anchor_unit(drafter)))
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

    def memory(**changes: int) -> StepMemory:
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
    now, usable = memory(), int(_USABLE * room)
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
    if options:
        return f"{said}. {lower} {options}."
    least = memory(anchor_slots=_anchor_unit(drafter), context_slots=TILE, logits_mib=1).total
    return (
        f"{said}. The smallest micro-batch there is needs {gib(least)}, nearly all of it for weights, gradients, "
        f"moments, embedding and head. {lower} drafter.layers, or use a device with more memory in pipeline.drafters."
    )


def _matrices(drafter: DrafterSettings, H: int) -> list[tuple[int, int]]:
    """Return rows and columns of every matrix."""
    q, kv, F = drafter.heads * drafter.head_dim, drafter.kv_heads * drafter.head_dim, drafter.intermediate_size
    layer = [(q, H), (kv, H), (kv, H), (H, q), (F, H), (F, H), (H, F)]
    return [(H, len(drafter.taps) * H), *layer * drafter.layers]


def _leaves(drafter: DrafterSettings, H: int) -> list[int]:
    """Return the entries of every leaf of matrices: k and v are one, and gate and up."""
    q, kv, F = drafter.heads * drafter.head_dim, drafter.kv_heads * drafter.head_dim, drafter.intermediate_size
    return [len(drafter.taps) * H * H, *[q * H, 2 * kv * H, H * q, 2 * F * H, H * F] * drafter.layers]


def _norms(drafter: DrafterSettings, H: int) -> list[int]:
    """Return the entries of every norm's weight."""
    return [H, H, *[H, H, drafter.head_dim, drafter.head_dim] * drafter.layers]


def _entries(matrices: list[tuple[int, int]]) -> int:
    return sum(rows * columns for rows, columns in matrices)


def _activations(drafter: DrafterSettings, C: int, A: int, H: int, wire: int) -> int:
    """Return what backward keeps, as the module's docstring lists it."""
    N, M, E, L = drafter.heads, drafter.kv_heads, drafter.head_dim, drafter.layers
    Q, rows, U = A * drafter.block_size, A * (drafter.block_size - 1), distinct_rows(A)
    K = C + Q

    def layer(inputs: int, behind: int) -> int:
        """Of so many inputs of block slots, and block slots behind attention."""
        keys = C + inputs
        before = wire * (keys * (H + 2 * M * E) + inputs * N * E) + 4 * (keys * M + inputs * N)
        attention = wire * (2 * Q * N * E + K * M * E) + 4 * Q * N
        return before + attention + behind * (wire * (3 * H + 2 * drafter.intermediate_size) + 4 * 2)

    layers = sum(layer(U if at == 0 else Q, rows if at == L - 1 else Q) for at in range(L))
    return layers + wire * (K * M * E + rows * N * E) + C * (wire * H + 4) + 8 * K * E


def _kept_in_fp8(drafter: DrafterSettings, C: int, A: int, H: int) -> int:
    """Return what backward keeps more where products are in fp8: a byte, also where it was nothing or two."""
    N, E, F, L = drafter.heads, drafter.head_dim, drafter.intermediate_size, drafter.layers
    Q, rows, U = A * drafter.block_size, A * (drafter.block_size - 1), distinct_rows(A)

    def layer(inputs: int, behind: int) -> int:
        own = inputs * H + behind * (N * E + F)  # of q and o_proj, whose inputs are there anyway, and of down_proj
        return own - (C + inputs) * H - behind * H + 4 * (C + 2 * inputs + 3 * behind)

    layers = sum(layer(U if at == 0 else Q, rows if at == L - 1 else Q) for at in range(L))
    matrices = _matrices(drafter, H)
    weights = _entries(matrices) + 4 * sum(outputs for outputs, _ in matrices)
    return layers - 2 * rows * N * E + C * (len(drafter.taps) * H + 4) + weights


def _context_gradients(drafter: DrafterSettings, C: int, A: int, H: int, wire: int) -> int:
    """Return what is left at the end of backward beside the weights' gradients: those of the products' inputs."""
    return wire * H * (drafter.layers * (C + A * drafter.block_size) + 2 * C)


def _newton_schulz(matrices: list[tuple[int, int]]) -> int:
    """Return the temporaries of Muon for the largest group of matrices of one shape.

    An entry is there twice in float32, as update and in the stack, and twice in bfloat16, before and after an
    iteration, which has three square matrices.
    """
    counts = {shape: matrices.count(shape) for shape in matrices}
    return max(n * (12 * r * c + 3 * 2 * min(r, c) ** 2) for (r, c), n in counts.items())


def _options(drafter: DrafterSettings, train: TrainSettings, needs: Callable[..., int], goal: int) -> str:
    """Return in words the sizes that bring the step to `goal` bytes; an empty text if none do."""
    unit = _anchor_unit(drafter)
    A, C, mib = train.anchor_slots, train.context_slots, train.logits_mib
    anchors = _largest_multiple(unit, A, goal, lambda n: needs(anchor_slots=n))
    context = _largest_multiple(TILE, C, goal, lambda n: needs(context_slots=n))
    logits = _largest_multiple(1, mib, goal, lambda n: needs(logits_mib=n))
    found = []
    if anchors:
        found.append(f"train.anchor_slots from {A:,} to {anchors:,}{_with_anchors(train, anchors)}")
    if context:
        found.append(f"train.context_slots from {C:,} to {context:,}, which no sample may exceed")
    if logits >= _LEAST_LOGITS_MIB:
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


def _anchor_unit(drafter: DrafterSettings) -> int:
    """Return the fewest anchors whose slots are whole tiles of attention."""
    return TILE // math.gcd(TILE, drafter.block_size)


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
    """Return bytes in GiB."""
    return f"{size / 2**30:.1f} GiB"
