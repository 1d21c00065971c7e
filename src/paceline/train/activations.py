"""What a step's forward leaves for backward, and what is there in passing, by the phases of a step. See `memory`.

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

With train.recompute: layers the last layer's activations are there, of the others their inputs (U or Q rows of H) and
the context that they read (H a context slot). Each layer's backward is then a begin and an end of its own, beside the
context's summed gradient and the inputs of the layers in front of it: with its own activations, then with the gradients
of its weights and inputs alone. Behind the last layer's, hidden states are gone and the stream's gradient (H a block
slot) is there instead.

Shapes: C context slots, A anchors, B block slots, Q = A * B, K = C + Q, U distinct inputs of slots, H width, F width of
the MLP, N heads, M key/value heads, E head width, L layers, V vocabulary.
"""

from dataclasses import dataclass
from typing import Literal

from paceline.config import DrafterSettings, TrainSettings
from paceline.drafter.joined import distinct_rows

Phase = Literal["loss", "backward", "gradients", "update"]
There = tuple[int, int]  # activations and temporaries that are there together


@dataclass(frozen=True, slots=True)
class Rows:
    """The step's one shape and the bytes of an entry of the compute format."""

    drafter: DrafterSettings
    train: TrainSettings
    H: int
    wire: int

    @property
    def C(self) -> int:
        """Context slots."""
        return self.train.context_slots

    @property
    def Q(self) -> int:
        """Block slots."""
        return self.train.anchor_slots * self.drafter.block_size

    @property
    def N(self) -> int:
        """Slots that have a loss."""
        return self.train.anchor_slots * (self.drafter.block_size - 1)

    @property
    def U(self) -> int:
        """Distinct inputs of slots."""
        return distinct_rows(self.train.anchor_slots)

    @property
    def last(self) -> int:
        """The last layer."""
        return self.drafter.layers - 1


def phases(drafter: DrafterSettings, train: TrainSettings, hidden_size: int, vocab_size: int) -> dict[Phase, There]:
    """Return bytes of activations and temporaries of each phase of a step."""
    rows = Rows(drafter, train, hidden_size, 2 if train.dtype == "bfloat16" else 4)
    hidden = 2 * rows.wire * rows.H * rows.N
    logits = _logits(train, rows.N, vocab_size)
    update = (0, _newton_schulz(matrices(drafter, hidden_size)) if train.optimizer == "muon" else 0)
    if train.recompute == "layers":
        return _by_layers(rows, hidden, logits) | {"update": update}
    kept = context_kept(rows) + sum(layer_kept(rows, at) for at in range(drafter.layers))
    given = rows.wire * rows.H * (drafter.layers * (rows.C + rows.Q) + 2 * rows.C)  # the products' inputs' gradients
    entries, norm_entries = total(matrices(drafter, hidden_size)), sum(norms(drafter, hidden_size))
    return {
        "loss": (kept, hidden + logits),
        "backward": (kept, hidden + _begin(rows, rows.last)),
        "gradients": (0, hidden + rows.wire * entries + 4 * norm_entries + given),
        "update": update,
    }


def _by_layers(rows: Rows, hidden: int, logits: int) -> dict[Phase, There]:
    stream, context = rows.wire * rows.H * rows.Q, rows.wire * rows.H * rows.C
    stays = context_kept(rows) + context + rows.wire * rows.H * rows.U  # also the first layer's input

    def largest(made: list[There]) -> There:
        return max(made, key=sum)

    ends, begins = [], []
    for at in range(rows.last + 1):
        before = stays + at * stream  # what it and those in front of it are given
        beside = context + (hidden if at == rows.last else stream)
        begins.append((before + layer_kept(rows, at), beside + _begin(rows, at)))
        own = rows.wire * total(layer_matrices(rows.drafter, rows.H)) + 4 * sum(layer_norms(rows.drafter, rows.H))
        ends.append((before, beside + own + context + stream * (2 if at else 1)))
    fc = (stays, context + rows.wire * (len(rows.drafter.taps) * rows.H**2) + 4 * rows.C * rows.H)
    return {
        "loss": (stays + rows.last * stream + layer_kept(rows, rows.last), hidden + logits),
        "backward": largest(begins),
        "gradients": largest([*ends, fc]),
    }


def layer_kept(rows: Rows, at: int) -> int:
    """Return what backward keeps of a layer, its output included."""
    drafter, wire, H = rows.drafter, rows.wire, rows.H
    N, M, E, F = drafter.heads, drafter.kv_heads, drafter.head_dim, drafter.intermediate_size
    inputs, behind = (rows.U if at == 0 else rows.Q), (rows.N if at == rows.last else rows.Q)
    keys, K = rows.C + inputs, rows.C + rows.Q
    kept = wire * (keys * (H + 2 * M * E) + inputs * N * E) + 4 * (keys * M + inputs * N)
    kept += wire * (2 * rows.Q * N * E + K * M * E) + 4 * rows.Q * N
    kept += behind * (wire * (3 * H + 2 * F) + 4 * 2)
    kept += wire * K * M * E if at == 0 else 0
    kept += wire * rows.N * N * E if at == rows.last else 0
    if rows.train.fp8 == "on":  # a byte, also where it was nothing or two
        kept += inputs * H + behind * (N * E + F)  # of q and o_proj, whose inputs are there anyway, and of down_proj
        kept += 4 * (keys + inputs + 3 * behind) - keys * H - behind * H
        kept += _bytes8(layer_matrices(drafter, H)) - (2 * rows.N * N * E if at == rows.last else 0)
    return kept


def context_kept(rows: Rows) -> int:
    """Return what backward keeps beside the layers."""
    D = len(rows.drafter.taps) * rows.H
    kept = rows.C * (rows.wire * rows.H + 4) + 8 * (rows.C + rows.Q) * rows.drafter.head_dim
    return kept + (rows.C * (D + 4) + _bytes8([(rows.H, D)]) if rows.train.fp8 == "on" else 0)


def _bytes8(of: list[tuple[int, int]]) -> int:
    return total(of) + 4 * sum(outputs for outputs, _ in of)


def _begin(rows: Rows, at: int) -> int:
    behind = rows.N if at == rows.last else rows.Q
    return rows.wire * rows.drafter.intermediate_size * (2 * behind + rows.H)


def _logits(train: TrainSettings, rows: int, vocab_size: int) -> int:
    """Return what a chunk of logits takes with its gradient.

    Their kernel puts the gradient over them; without it logits and gradient are there. In fp8 the gradient lies beside
    them.
    """
    logit, held = (4, 8) if train.dtype != "bfloat16" else (3, 3) if train.fp8 == "on" else (2, 2)
    chunk = min(rows, max(1, (train.logits_mib << 20) // (logit * vocab_size)))  # at most; the loss prefers a divisor
    return chunk * vocab_size * held


def layer_matrices(drafter: DrafterSettings, H: int) -> list[tuple[int, int]]:
    """Return rows and columns of a layer's matrices."""
    q, kv, F = drafter.heads * drafter.head_dim, drafter.kv_heads * drafter.head_dim, drafter.intermediate_size
    return [(q, H), (kv, H), (kv, H), (H, q), (F, H), (F, H), (H, F)]


def matrices(drafter: DrafterSettings, H: int) -> list[tuple[int, int]]:
    """Return rows and columns of every matrix."""
    return [(H, len(drafter.taps) * H), *layer_matrices(drafter, H) * drafter.layers]


def leaves(drafter: DrafterSettings, H: int) -> list[int]:
    """Return the entries of every leaf of matrices: k and v are one, and gate and up."""
    q, kv, F = drafter.heads * drafter.head_dim, drafter.kv_heads * drafter.head_dim, drafter.intermediate_size
    return [len(drafter.taps) * H * H, *[q * H, 2 * kv * H, H * q, 2 * F * H, H * F] * drafter.layers]


def layer_norms(drafter: DrafterSettings, H: int) -> list[int]:
    """Return the entries of a layer's norms' weights."""
    return [H, H, drafter.head_dim, drafter.head_dim]


def norms(drafter: DrafterSettings, H: int) -> list[int]:
    """Return the entries of every norm's weight."""
    return [H, H, *layer_norms(drafter, H) * drafter.layers]


def total(of: list[tuple[int, int]]) -> int:
    """Return the entries of matrices."""
    return sum(rows * columns for rows, columns in of)


def _newton_schulz(of: list[tuple[int, int]]) -> int:
    """Return the temporaries of Muon for the largest group of matrices of one shape.

    An entry is there twice in float32, as update and in the stack, and twice in bfloat16, before and after an
    iteration, which has three square matrices.
    """
    counts = {shape: of.count(shape) for shape in of}
    return max(n * (12 * r * c + 3 * 2 * min(r, c) ** 2) for (r, c), n in counts.items())
