"""What is compiled for a step, and its kernels, held against plain code before a run starts.

Compilers, kernels and products in fp8 can be wrong on one machine and right on all others. So the step's own buffers
get made-up contents that use all of its shape: every block sees something, but only some blocks have a loss. These are
computed again by the drafter itself, in float32, with a dense mask over the context slots that they see, which is
little beside the step. Compared are hidden states, the loss, which slots hit, and the gradient of every matrix and
norm.

Shapes: C context slots, A anchors, B block slots, k blocks with a loss, n = k * (B - 1) slots with a loss, c context
slots that they see, D = m * H feature width, H width, V vocabulary.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from paceline import blocks
from paceline.drafter.attention import Dense
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.loss import head_loss
from paceline.drafter.model import Drafter
from paceline.records import RunError
from paceline.train.buffers import Buffers

_BLOCKS = 16  # that have a loss
# How many context slots they see: from one, where a single wrong one is seen, to more than two tiles of attention.
_SEEN = (3, 1, 40, 2, 400, 7, 17, 5, 130, 1, 64, 300, 4, 33, 9, 200)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest errors of what is right, all relative to the plain result's size."""

    hidden: float  # of a slot's hidden state, as a share of its length
    loss: float
    gradients: float  # of all together
    gradient: float  # of one matrix or norm


# Rounding was seen to make, in bfloat16 and in fp8, errors of 0.011 and 0.21 in hidden states, 0.0001 and 0.002 in the
# loss, 0.008 and 0.21 in the gradient, 0.02 and 0.3 in that of one matrix. What is wrong makes more: a lost factor of
# two 0.5 to 1, one slot too many among a few some 0.3.
BOUNDS: dict[str, Bounds] = {
    "float32": Bounds(hidden=0.01, loss=1e-3, gradients=0.01, gradient=0.05),
    "bfloat16": Bounds(hidden=0.06, loss=0.01, gradients=0.06, gradient=0.25),
    "fp8": Bounds(hidden=0.35, loss=0.05, gradients=0.3, gradient=0.45),
}
# Share of the slots whose hit may differ although the plain logits are clear: errors of logits have tails.
HITS = 0.03


@dataclass(frozen=True, slots=True, eq=False)
class Contents:
    """What the buffers hold for the check, and which blocks have a loss."""

    buffers: Buffers
    checked_k: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Plain:
    """What plain code makes of the contents."""

    hidden_nH: Tensor
    loss: float
    hits_n: Tensor
    clear_n: Tensor  # slots whose best token is so by more than rounding, or whose label is worse by more
    gradients: Mapping[str, tuple[float, float]]  # of each weight: squared error and squared length of the plain one

    def errors(
        self, hidden_kbH: Tensor, hits_kb: Tensor, loss: float, made: Contents, bounds: Bounds
    ) -> dict[str, tuple[float, float]]:
        """Return (error, bound) of everything that the step computed, by what it is; b = B - 1 slots of a block."""
        hidden_nH, hits_n = hidden_kbH.flatten(0, 1), hits_kb.flatten()
        weighed_n = made.buffers.valid_AB[made.checked_k, 1:].flatten() & self.clear_n
        whole, weight, one = gradient_errors(self.gradients)
        return {
            "a hidden state": (hidden_error(hidden_nH, self.hidden_nH), bounds.hidden),
            "the loss": (abs(loss / self.loss - 1), bounds.loss),
            "which tokens are best": (float(((hits_n != self.hits_n) & weighed_n).double().mean()), HITS),
            "the gradient": (whole, bounds.gradients),
            f"the gradient of {weight}": (one, bounds.gradient),
        }


def contents(buffers: Buffers, vocab: int) -> Contents:
    """Return contents for a step's buffers, the same at every call.

    Blocks ascend as in a packed batch. Those between two with a loss see what the one before them sees, and the last
    ones are unused where there is room.
    """
    features_CD = buffers.features_CD
    C, (A, B), device = len(features_CD), buffers.valid_AB.shape, features_CD.device
    generator = torch.Generator(device=device).manual_seed(0)
    used = max(1, A - A // 16)
    k = min(_BLOCKS, used)
    checked_k = torch.arange(k, device=device) * used // k
    anchor_k = 1 + (torch.arange(k, device=device) + 1) * (C - 1) // k
    anchor_k = anchor_k.clamp_max(C)
    start_k = (anchor_k - torch.tensor(_SEEN[:k], device=device)).clamp_min(0)
    nearest_A = torch.searchsorted(checked_k, torch.arange(A, device=device), right=True) - 1
    there_A = torch.arange(A, device=device) < used
    valid_kB = torch.rand(k, B, generator=generator, device=device) < 0.8
    valid_kB[:, 1:2] = True
    valid_kB[:, 0] = False
    valid_full_AB = torch.zeros(A, B, dtype=torch.bool, device=device)
    valid_full_AB[checked_k] = valid_kB

    def drawn(high: int, *size: int) -> Tensor:
        return torch.randint(high, size, generator=generator, device=device)

    made = Buffers(
        features_CD=torch.randn(features_CD.shape, generator=generator, device=device, dtype=features_CD.dtype),
        positions_C=torch.arange(C, device=device) % 1009,
        start_A=start_k[nearest_A] * there_A,
        anchor_A=anchor_k[nearest_A] * there_A,
        position_A=(anchor_k % 1009)[nearest_A] * there_A,
        token_A=drawn(vocab, A) * there_A,
        labels_AB=drawn(vocab, A, B) * valid_full_AB,
        valid_AB=valid_full_AB,
    )
    return Contents(made, checked_k)


def plain(
    drafter: Drafter,
    ends: FrozenEnds,
    made: Contents,
    weights_B: Tensor,
    margin: float,
    gradient_of: Callable[[str], Tensor] | None = None,
) -> Plain:
    """Compute the blocks that have a loss by the drafter itself, in its weights' format, and labels' hits with it.

    `gradient_of` gives a weight's gradient as the step made it, for the errors; a plain gradient is dropped when it
    has been compared, so there is never more than one. `margin` is how far a logit is from the best to be clearly
    worse, in standard deviations of its row.
    """
    given, at = made.buffers, made.checked_k
    start_k, anchor_k, token_k = given.start_A[at], given.anchor_A[at], given.token_A[at]
    slots_C = torch.arange(len(given.positions_C), device=at.device)
    seen_c = ((slots_C >= start_k[:, None]) & (slots_C < anchor_k[:, None])).any(0).nonzero().flatten()
    B = len(weights_B)
    own = _with_own_gradients(drafter)
    wide = own.fc.weight.dtype
    errors: dict[str, tuple[float, float]] = {}
    if gradient_of:
        for name, weight in own.named_parameters():
            weight.register_post_accumulate_grad_hook(_compare(name, gradient_of, errors))
    with torch.enable_grad():
        context = own.context(given.features_CD[seen_c][None].to(wide), given.positions_C[seen_c][None])
        embeds_kBH = ends.embed(blocks.block_ids(token_k, drafter.settings.mask_token_id, B))
        positions_kB = blocks.block_positions(given.position_A[at], B)
        mask = _seen_mask(start_k, anchor_k, seen_c, B)
        hidden_1QH = own(embeds_kBH.flatten(0, 1)[None].to(wide), positions_kB.view(1, -1), context, Dense(mask))
        hidden_nH = hidden_1QH.view(len(at), B, -1)[:, 1:].flatten(0, 1)
    labels_n, weights_n = given.labels_AB[at, 1:].flatten(), (given.valid_AB[at] * weights_B)[:, 1:].flatten()
    loss, hits_n, grad_nH = head_loss(hidden_nH.detach(), ends.head_VH, labels_n, weights_n, ends.cap)
    logits_nV = (hidden_nH.detach().to(ends.head_VH.dtype) @ ends.head_VH.T).float()
    clear_n = _clear(logits_nV, labels_n, margin)
    del logits_nV
    if gradient_of:
        hidden_nH.backward(grad_nH)
    return Plain(hidden_nH.detach(), float(loss), hits_n, clear_n, errors)


def best_labels(drafter: Drafter, ends: FrozenEnds, made: Contents, weights_B: Tensor) -> Contents:
    """Return contents in which every third label of the blocks with a loss is the best token: there are hits."""
    with torch.no_grad():
        hidden_nH = plain(drafter, ends, made, weights_B, 0.0).hidden_nH
        best_n = (hidden_nH.to(ends.head_VH.dtype) @ ends.head_VH.T).argmax(-1)
    best_kb = best_n.view(len(made.checked_k), -1)
    best_kb = torch.where(torch.arange(best_n.numel(), device=best_n.device).view_as(best_kb) % 3 == 0, best_kb, -1)
    labels_AB = made.buffers.labels_AB
    labels_AB[made.checked_k, 1:] = torch.where(best_kb >= 0, best_kb, labels_AB[made.checked_k, 1:])
    return made


def hold(found: Mapping[str, tuple[float, float]], *, device: torch.device, fp8: bool) -> None:
    """Compare errors with their bounds: (error, bound), by what they are of.

    Raises:
        RunError: one is above its bound, or is not a number; the one that is furthest above is named.
    """
    wrong = {name: (error, bound) for name, (error, bound) in found.items() if not error <= bound}
    if not wrong:
        return
    name = max(wrong, key=lambda name: _excess(*wrong[name]))
    error, bound = wrong[name]
    remedy = "train.fp8 to off, or train.policy to eager" if fp8 else "train.policy to eager"
    raise RunError(
        f"What is compiled for the step must compute what plain code does, but on {device} {name} differs by "
        f"{error:.2g} of the plain result, and rounding makes at most {bound:.2g}. Set {remedy}."
    )


def _excess(error: float, bound: float) -> float:
    return math.inf if math.isnan(error) else error / max(bound, 1e-6)


def hidden_error(hidden_nH: Float[Tensor, "n H"], plain_nH: Float[Tensor, "n H"]) -> float:
    """Return the largest error of a slot's hidden state, as a share of its length."""
    apart_n = (hidden_nH.detach().to(plain_nH.dtype) - plain_nH).norm(dim=-1) / plain_nH.norm(dim=-1)
    return float(apart_n.max())


def gradient_errors(gradients: Mapping[str, tuple[float, float]]) -> tuple[float, str, float]:
    """Return the error of all gradients together, and the name and error of the weight whose is largest.

    Weights whose gradient is below a millionth of all are only part of the whole.
    """
    total = sum(size for _, size in gradients.values())
    whole = math.sqrt(sum(error for error, _ in gradients.values()) / total) if total > 0 else math.nan
    each = {name: math.sqrt(error / size) for name, (error, size) in gradients.items() if not size <= 1e-12 * total}
    worst = max(each, key=lambda name: math.inf if math.isnan(each[name]) else each[name], default="none")
    return whole, worst, each.get(worst, 0.0)


def _compare(
    name: str, gradient_of: Callable[[str], Tensor], errors: dict[str, tuple[float, float]]
) -> Callable[[Tensor], None]:
    def hook(weight: Tensor) -> None:
        gradient, weight.grad = weight.grad, None
        assert gradient is not None
        size = float(gradient.norm())
        errors[name] = (float(gradient.sub_(gradient_of(name)).norm()) ** 2, size**2)

    return hook


def _with_own_gradients(drafter: Drafter) -> Drafter:
    """Return the drafter over the same weights, whose gradients are its own."""
    memo: dict[int, object] = {id(weight): nn.Parameter(weight.detach()) for weight in drafter.parameters()}
    return copy.deepcopy(drafter, memo)


def _seen_mask(
    start_k: Int[Tensor, " k"], anchor_k: Int[Tensor, " k"], seen_c: Int[Tensor, " c"], block_size: int
) -> Bool[Tensor, "1 Q cQ"]:
    """Return who sees whom among the blocks that have a loss and the context slots that any of them sees."""
    context_kc = (seen_c >= start_k[:, None]) & (seen_c < anchor_k[:, None])
    own_kk = torch.eye(len(start_k), dtype=torch.bool, device=seen_c.device)
    own_kQ = own_kk.repeat_interleave(block_size, 1)
    return torch.cat([context_kc, own_kQ], 1).repeat_interleave(block_size, 0)[None]


def _clear(logits_nV: Tensor, labels_n: Tensor, margin: float) -> Bool[Tensor, " n"]:
    """Return where rounding does not decide whether the label is the best token."""
    first_n, second_n = logits_nV.topk(2).values.unbind(-1)
    label_n = logits_nV.gather(1, labels_n[:, None])[:, 0]
    rival_n = torch.where(label_n == first_n, second_n, first_n)
    return (rival_n - label_n).abs() > margin * logits_nV.std(-1)
