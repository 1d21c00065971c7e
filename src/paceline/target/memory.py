"""What a target replica on the fast path occupies on its device at its peak, computed from shapes alone.

Weights are counted to the byte, but for biases and for what quantizing holds for a moment. Of a replica on several
devices each has its layers' weights, the first one the embedding, and the last one the features of all micro-batches
that are under way. Of what comes and goes the
MLP's part of a layer is the largest: its input, what attention read, both residual sums, the norm's output, gate and up
side by side and their product. The plain path needs more: what it computes for padding, and every tap twice.

Shapes: T tokens of a micro-batch, H width, F width of the MLP, N heads, M key/value heads, E head width, L layers.
"""

from dataclasses import asdict, dataclass

_WORKSPACE = 64 << 20  # bytes: cuBLAS keeps 32 MiB (Hopper) for a thread and stream, and attention some


@dataclass(frozen=True, slots=True)
class TrunkShape:
    """What the estimate needs of a target up to its deepest tap."""

    entries: int  # of all its weights
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class TargetMemory:
    """Bytes of a replica's device at its peak, by what they are for."""

    weights: int
    features: int  # of one micro-batch; what waits for the drafter comes on top (pipeline.credit_gib)
    working: int  # temporaries of a layer
    workspace: int

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(asdict(self).values())

    def as_dict(self) -> dict[str, int]:
        """Return every part in bytes and their sum."""
        return {**asdict(self), "total": self.total}


def target_memory(
    shape: TrunkShape, *, tokens: int, taps: int, itemsize: int, fp8: bool, made: int = 1
) -> TargetMemory:
    """Return the estimate for micro-batches of up to `tokens` real tokens; numbers of `itemsize` bytes. `shape` is of
    the layers on the device, on which the features of `made` micro-batches are at once."""
    H, F, wide = shape.hidden_size, shape.intermediate_size, shape.heads * shape.head_dim
    outputs = wide + 2 * shape.kv_heads * shape.head_dim
    weights = shape.entries * itemsize
    if fp8:  # a byte an entry of the products, and a float32 scale an output
        products = shape.layers * H * (outputs + wide + 3 * F)
        scales = shape.layers * (outputs + 2 * H + 2 * F)
        weights += products * (1 - itemsize) + 4 * scales
    return TargetMemory(
        weights=weights,
        features=made * tokens * taps * H * itemsize,
        working=tokens * itemsize * (3 * H + wide + 3 * F),
        workspace=_WORKSPACE,
    )
