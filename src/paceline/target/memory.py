"""What a target replica on the fast path occupies on its device at its peak, computed from shapes alone.

Weights are counted to the byte, but for biases and for what quantizing holds for a moment. Of a replica on several
devices each has its layers' weights, the first one the embedding, and the last one the features of all micro-batches
that are under way. Of what comes and goes the
MLP's part of a layer is the largest: its input, what attention read, both residual sums, the norm's output, gate and up
side by side and their product. The plain path needs more: what it computes for padding, and every tap twice.

Shapes: T tokens of a micro-batch, H width, F width of the MLP, N heads, M key/value heads, E head width, L layers.
"""

from dataclasses import asdict, dataclass

from paceline.records import TargetSizes

_WORKSPACE = 64 << 20  # bytes: cuBLAS keeps 32 MiB (Hopper) for a thread and stream, and attention some


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
    sizes: TargetSizes, *, tokens: int, taps: int, itemsize: int, fp8: bool, made: int = 1
) -> TargetMemory:
    """Return the estimate for micro-batches of up to `tokens` real tokens; numbers of `itemsize` bytes. `sizes` are of
    the layers on the device, on which the features of `made` micro-batches are at once."""
    H, F, wide = sizes.hidden_size, sizes.intermediate_size, sizes.heads * sizes.head_dim
    outputs = wide + 2 * sizes.kv_heads * sizes.head_dim
    weights = sizes.entries * itemsize
    if fp8:  # a byte an entry of the products, and a float32 scale an output
        products = sizes.layers * H * (outputs + wide + 3 * F)
        scales = sizes.layers * (outputs + 2 * H + 2 * F)
        weights += products * (1 - itemsize) + 4 * scales
    return TargetMemory(
        weights=weights,
        features=made * tokens * taps * H * itemsize,
        working=tokens * itemsize * (3 * H + wide + 3 * F),
        workspace=_WORKSPACE,
    )
