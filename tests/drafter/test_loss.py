"""The frozen-head loss against torch's cross-entropy."""

import pytest
import torch
import torch.nn.functional as F

from paceline.drafter.loss import chunk_rows, frozen_head_loss


@pytest.mark.parametrize("logits_bytes", [1, 5 * 50 * 8, 1 << 20])
def test_loss_gradient_and_hits_equal_cross_entropy(logits_bytes: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(23, 16, dtype=torch.float64, generator=generator, requires_grad=True)
    head = torch.randn(50, 16, dtype=torch.float64, generator=generator)
    labels = torch.randint(50, (23,), generator=generator)
    weights = torch.rand(23, dtype=torch.float64, generator=generator)
    weights[::5] = 0

    logits = hidden @ head.T
    expected = (F.cross_entropy(logits, labels, reduction="none") * weights).sum()
    (expected_gradient,) = torch.autograd.grad(expected, hidden)

    loss, hits, gradient = frozen_head_loss(hidden, head, labels, weights, logits_bytes=logits_bytes)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, expected_gradient)
    assert torch.equal(hits, logits.argmax(-1) == labels)


def test_a_bfloat16_head_keeps_the_loss_in_float32() -> None:
    hidden = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    head = torch.randn(32, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
    labels = torch.arange(8)
    loss, _, _ = frozen_head_loss(hidden, head, labels, torch.ones(8), logits_bytes=1 << 20)
    expected = F.cross_entropy((hidden.bfloat16() @ head.T).float(), labels, reduction="sum")
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize(
    ("rows", "most", "expected"),
    [
        *((30_720, 2208, 2048), (960, 5000, 960), (23, 10, 10), (1, 1, 1), (7, 1, 1), (15_720, 2208, 1965), (10, 4, 2)),
        # Whole tiles of 128 rows where there is a choice.
        *((15_360, 3533, 3072), (15_360, 2355, 1920), (3840, 1000, 768), (1_000_003, 1000, 896)),
    ],
)
def test_chunks_are_of_one_size_where_one_divides(rows: int, most: int, expected: int) -> None:
    assert chunk_rows(rows, most) == expected
