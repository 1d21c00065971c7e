"""What an engine with a drafter occupies on its device, computed from shapes alone.

What stays is counted to the byte, but for a few integers a row. Of what comes and goes the larger of a prompt pass and
a cycle counts, and the cycle's once more, because graphs keep theirs in a pool of their own. Not counted is what the
driver keeps of each graph.

Shapes: R rows, S slots, P padded tokens of a prompt pass, B block slots, H width, F width of the MLP, N heads, M
key/value heads, E head width, L layers, V vocabulary; a small d marks the drafter's own.
"""

from dataclasses import asdict, dataclass

from paceline.config import DrafterSettings
from paceline.records import TargetSizes

PREFILL_TOKENS = 16_384  # padded tokens of one prompt pass on a GPU
_WORKSPACE = 64 << 20  # bytes: cuBLAS keeps 32 MiB (Hopper) for a thread and stream: prompt passes, capture


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes of a device at an engine's peak, by what they are for."""

    target: int  # weights, with embedding and head
    target_cache: int  # keys and values of all rows
    drafter: int  # weights
    drafter_cache: int
    prompt_pass: int  # temporaries
    cycle: int  # temporaries, or the graphs' pool
    workspace: int

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(asdict(self).values())

    def parts(self) -> dict[str, int]:
        """Return the bytes of each part by its name for a person."""
        return {
            "target": self.target,
            "target's keys and values": self.target_cache,
            "drafter": self.drafter,
            "drafter's keys and values": self.drafter_cache,
            "prompt pass": self.prompt_pass,
            "cycles' graphs": self.cycle,
            "workspace": self.workspace,
        }

    def as_dict(self) -> dict[str, int]:
        """Return every part in bytes and their sum."""
        return {**asdict(self), "total": self.total}


def engine_memory(
    target: TargetSizes,
    drafter: DrafterSettings,
    *,
    drafter_entries: int,
    rows: int,
    longest: int,
    slots: int,
    itemsize: int,
) -> EngineMemory:
    """Return the estimate for `rows` rows of `slots` tokens, with prompts of up to `longest`; numbers of `itemsize`
    bytes."""
    R, S, B, H, V = rows, slots, drafter.block_size, target.hidden_size, target.vocab_size
    narrow, own_narrow = target.kv_heads * target.head_dim, drafter.kv_heads * drafter.head_dim
    P = min(R * longest, max(PREFILL_TOKENS, longest))
    # Of a token: what goes on and its norm; then the MLP's three or the attention's; features as they come and side by
    # side; the drafter's keys and values of them.
    inside = max(3 * target.intermediate_size, 2 * target.heads * target.head_dim + 2 * narrow)
    token = 2 * H + inside + 2 * len(drafter.taps) * H + 2 * drafter.layers * own_narrow
    verified, drafted = R * B, R * (B - 1)
    logits = (verified + drafted) * V
    return EngineMemory(
        target=target.entries * itemsize,
        target_cache=2 * target.layers * R * S * narrow * itemsize,
        drafter=drafter_entries * itemsize,
        drafter_cache=2 * drafter.layers * R * S * own_narrow * itemsize,
        prompt_pass=(P * token + R * V) * itemsize,
        cycle=(verified * (token + S) + logits) * itemsize,
        workspace=_WORKSPACE,
    )
