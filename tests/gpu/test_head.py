"""The head's kernel against float64. With TRITON_INTERPRET=1 and Triton installed it runs on a CPU, too."""

import os

import pytest
import torch
from torch import Tensor

from paceline.drafter.e4m3 import quantize
from paceline.drafter.fused_head import FrozenHead8, fused_head_loss, has_kernel, head_in_fp8
from paceline.drafter.loss import frozen_head_loss, head_loss

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda:0")
on_a_gpu = pytest.mark.skipif(INTERPRETED, reason="needs a GPU itself, not an interpreter")

# A significand of 8 bits rounds by 2^-8 of a number, one of 4 bits (e4m3) by 2^-4, and below the smallest normal number
# by half of 2^-9. float32's own errors are far below 1e-4 of a number, but for p - 1, where they are some 1e-6 of 1.
BFLOAT16, E4M3, E4M3_STEP, FLOAT32 = 2**-8 + 1e-4, 2**-4 + 1e-4, 2**-10, 4e-6
CAPS = [0.0, 5.0]


def random(*size: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE)


def poison(entries: int) -> None:
    """Leave NaNs in memory that is handed out next."""
    spoilt = [torch.full((entries // part,), torch.nan, device=DEVICE) for part in (1, 2, 4)]
    del spoilt


def truth(logits: Tensor, labels: Tensor, weights: Tensor, cap: float) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's loss, hit and gradient of the logits, by autograd in float64."""
    leaf = logits.double().requires_grad_()
    capped = torch.tanh(leaf / cap) * cap if cap else leaf
    losses = weights * torch.nn.functional.cross_entropy(capped, labels, reduction="none")
    (grad,) = torch.autograd.grad(losses.sum(), leaf)
    return losses.detach(), logits.argmax(-1) == labels, grad


def rows_of(V: int, rows: int = 12) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels at the edges of row and block, and weights of which some are 0."""
    edges = [0, V - 1, *(at for at in (4095, 4096, 8191, 8192) if at < V)]
    labels = torch.tensor([*edges, *(torch.arange(rows) * 37 % V).tolist()][:rows], device=DEVICE)
    logits = random(rows, V, seed=V, scale=3).bfloat16()
    logits[3, labels[3]] = 30.0  # a certain hit
    weights = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(DEVICE) + 0.1
    weights[1::5] = 0
    return logits, labels, weights


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("V", [1, 16, 1000, 4096, 5000, 12_289])
def test_losses_hits_and_gradients_are_those_of_float64(V: int, cap: float) -> None:
    from paceline.drafter.head_kernel import gradient_in_place

    logits, labels, weights = rows_of(V)
    losses, hits, grads = truth(logits, labels, weights, cap)
    poison(4 * len(labels))
    given = logits.clone()
    made_losses, made_hits = gradient_in_place(given, labels, weights, cap)
    torch.testing.assert_close(made_losses.double(), losses, rtol=1e-5, atol=2e-5)
    assert torch.equal(made_hits, hits & (weights > 0))
    assert made_hits[3]
    torch.testing.assert_close(given.double(), grads, rtol=BFLOAT16, atol=FLOAT32)
    assert not given[weights == 0].any()


def test_the_first_of_equal_logits_is_the_best() -> None:
    from paceline.drafter.head_kernel import gradient_in_place

    V = 9000
    rows = torch.full((7, V), -2.0, device=DEVICE)
    labels = torch.tensor([5000, 5000, 5000, 0, 8999, 0, 7], device=DEVICE)
    rows[0, [5000, 5001, 8999]] = 3.0  # equal ones behind: hit
    rows[1, [4999, 5000]] = 3.0  # one before in the same block
    rows[2, [1, 5000]] = 3.0  # in an earlier block
    rows[4, 8999] = -1.0  # the last, of negative ones: hit; row 3 holds nothing but equal ones: hit
    rows[5] = 0.0
    rows[5, :8] = -0.0  # equal to 0, so the first is the best
    rows[6, 7] = float("-inf")
    _, hits = gradient_in_place(rows.bfloat16(), labels, torch.ones(7, device=DEVICE), 0.0)
    assert hits.tolist() == [True, False, False, True, True, True, False]


@pytest.mark.parametrize("fp8", [False, True])
def test_a_row_of_weight_0_is_not_read_and_nothing_else_hides_a_nan(fp8: bool) -> None:
    hidden, labels = random(6, 32).bfloat16(), torch.arange(6, device=DEVICE)
    weights = torch.ones(6, device=DEVICE)
    weights[2] = 0
    head = random(5008, 32, seed=2).bfloat16()
    given = head_in_fp8(head) if fp8 else head
    hidden[2] = torch.nan
    poison(6 * 5008)
    loss, hits, grad = fused_head_loss(hidden, given, labels, weights)
    assert torch.isfinite(loss)
    assert torch.isfinite(grad).all()
    assert not grad[2].any()
    assert not hits[2]
    hidden[4] = torch.nan
    assert fused_head_loss(hidden, given, labels, weights)[0].isnan()


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("V", [16, 1001, 8192, 12_289])
def test_the_gradient_in_e4m3_is_that_of_float64_times_the_heads_steps(V: int, cap: float) -> None:
    from paceline.drafter.head_kernel import gradient_in_e4m3

    logits, labels, weights = rows_of(V)
    losses, hits, grads = truth(logits, labels, weights, cap)
    W = -(-V // 16) * 16
    steps = torch.ones(W, device=DEVICE)
    steps[:V] = 2.0 ** torch.randint(-12, -6, (V,), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    padded = torch.zeros(len(labels), W, dtype=torch.bfloat16, device=DEVICE)
    padded[:, :V] = logits
    padded[:, V:] = 50.0  # no tokens, whatever is there
    poison(len(labels) * W)
    made_losses, made_hits, made, scale, of_label = gradient_in_e4m3(
        padded, labels, weights, cap, steps_W=steps.bfloat16(), largest_step=float(steps[:V].max()), vocab=V
    )
    torch.testing.assert_close(made_losses.double(), losses, rtol=1e-5, atol=2e-5)
    assert torch.equal(made_hits, hits & (weights > 0))
    numbers = made.to(torch.float64)
    assert torch.isfinite(numbers).all()
    assert not numbers[:, V:].any()
    assert not numbers[weights == 0].any()
    own = labels[:, None]
    torch.testing.assert_close(of_label.double(), grads.gather(1, own), rtol=1e-5, atol=2e-6)
    assert not numbers.gather(1, own).any()
    expected = grads.scatter(1, own, 0) * steps[:V]
    bound = E4M3 * expected.abs() + (E4M3_STEP * 1.01 * scale + FLOAT32 * steps[:V]).double()
    assert ((numbers[:, :V] * scale - expected).abs() <= bound).all()


@pytest.mark.parametrize("H", [64, 1000, 4096])
def test_the_kernel_quantizes_rows_by_the_rule_that_all_have(H: int) -> None:
    from paceline.drafter.head_kernel import quantize_rows

    x = random(64, H, seed=11) * 10.0 ** torch.linspace(-6, 6, 64, device=DEVICE)[:, None]
    x[3] = 0
    (made, scale), (wanted, wanted_scale) = quantize_rows(x.bfloat16()), quantize(x.bfloat16())
    torch.testing.assert_close(scale, wanted_scale, rtol=1e-6, atol=0)
    # Triton's division may be off in its last bit, and then a value between two numbers may become the other one.
    off = (made.float() - wanted.float()).abs()
    assert (off <= 2**-3 * wanted.float().abs() + 2**-9).all()
    assert (off > 0).float().mean() <= 1e-3
    assert not made[3].float().any()


def test_gradients_in_e4m3_use_the_range_they_have() -> None:
    from paceline.drafter.head_kernel import gradient_in_e4m3

    logits, labels, weights = rows_of(4096)
    weights = weights.clamp_min(0.1)
    steps = torch.full((4096,), 2.0**-9, device=DEVICE)
    _, _, made, _, _ = gradient_in_e4m3(
        logits, labels, weights, 0.0, steps_W=steps.bfloat16(), largest_step=2.0**-9, vocab=4096
    )
    largest = made.float().abs().amax(1)
    certain = torch.arange(12, device=DEVICE) == 3  # where 1 - p is below float32's errors
    best_but_label = logits.double().scatter(1, labels[:, None], -torch.inf).argmax(1)
    wrong = logits.double().argmax(1) == best_but_label
    assert wrong.any()
    assert (largest[wrong & ~certain] >= 416).all()


def problem(rows: int, V: int, H: int, head_format: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden = random(rows, H, seed=5).bfloat16()
    head = random(V, H, seed=6, scale=2 * H**-0.5).bfloat16()
    labels = torch.randint(V, (rows,), generator=torch.Generator().manual_seed(7)).to(DEVICE)
    labels[::3] = (hidden[::3].double() @ head.double().T).argmax(-1)
    weights = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(8)).to(DEVICE)
    weights[::4] = 0
    return hidden, head.to(head_format), labels, weights


def difference(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b).norm() / b.norm())


def held_against_float64(rows: int, V: int, H: int, cap: float, fp8: bool, logits_bytes: int) -> None:
    hidden, head, labels, weights = problem(rows, V, H, torch.bfloat16)
    loss, hits, grad = head_loss(hidden.double(), head.double(), labels, weights, cap)
    given: Tensor | FrozenHead8 = head_in_fp8(head) if fp8 else head
    poison(rows * V)
    results = [
        frozen_head_loss(hidden, given, labels, weights, logits_bytes=logits_bytes, cap=cap, chunk=fused_head_loss)
        for _ in range(2)
    ]
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second), "two calls differ"
    made_loss, made_hits, made_grad = results[0]
    loss_error, grad_error = difference(made_loss, loss), difference(made_grad, grad)
    agree = (made_hits == (hits & (weights > 0))).float().mean().item()
    print(f"{rows} x {V} x {H}, cap {cap}, fp8 {fp8}: loss {loss_error:.1e}, gradient {grad_error:.4f}, hits {agree}")
    # What bfloat16 logits and gradients (8 bits), and e4m3 hidden states, heads and gradients (4 bits) cost.
    assert loss_error < (1e-2 if fp8 else 1e-3)
    assert grad_error < (0.08 if fp8 else 0.01)
    assert agree >= (0.9 if fp8 else 0.97)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize(("rows", "V", "logits_bytes"), [(40, 5008, 1 << 20), (37, 9001, 5 * 9001 * 3)])
def test_loss_and_gradient_through_the_head(rows: int, V: int, logits_bytes: int, cap: float, fp8: bool) -> None:
    held_against_float64(rows, V, 64, cap, fp8, logits_bytes)


@on_a_gpu
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("cap", [0.0, 30.0])
def test_loss_and_gradient_through_a_head_of_qwen3s_size(cap: float, fp8: bool) -> None:
    held_against_float64(384, 151_936, 4096, cap, fp8, 128 * 151_936 * 3)


@on_a_gpu
@pytest.mark.parametrize("fp8", [False, True])
def test_small_probabilities_reach_the_gradient_of_a_head_of_qwen3s_size(fp8: bool) -> None:
    """Of flat distributions, whose gradient is the mean of the head less the label's row, where all rows have a common
    part that is as large as they are: each token adds 1 / 151,936 of it."""
    V, H, rows = 151_936, 1024, 128
    head = (random(V, H, seed=1) + random(1, H, seed=2)).mul_(0.02).bfloat16()
    hidden = random(rows, H, seed=3, scale=1e-3).bfloat16()
    labels = torch.arange(rows, device=DEVICE) * 7
    weights = torch.ones(rows, device=DEVICE)
    _, _, expected = head_loss(hidden.double(), head.double(), labels, weights)
    _, _, made = fused_head_loss(hidden, head_in_fp8(head) if fp8 else head, labels, weights)
    error = difference(made, expected)
    print(f"flat distributions, fp8 {fp8}: gradient {error:.4f}")
    assert error < (0.1 if fp8 else 0.01)


@on_a_gpu
@pytest.mark.parametrize("fp8", [False, True])
def test_a_captured_head_computes_what_it_does_by_itself(fp8: bool) -> None:
    hidden, head, labels, weights = problem(192, 5008, 128, torch.bfloat16)
    assert has_kernel(head)
    given = head_in_fp8(head) if fp8 else head

    def run() -> tuple[Tensor, Tensor, Tensor]:
        return frozen_head_loss(hidden, given, labels, weights, logits_bytes=64 * 5008 * 3, chunk=fused_head_loss)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for seed in (11, 12):
        hidden.copy_(random(192, 128, seed=seed))
        weights.copy_(random(192, seed=seed).abs())
        graph.replay()
        for replayed, expected in zip(captured, run(), strict=True):
            assert torch.equal(replayed, expected)
