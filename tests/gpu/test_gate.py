"""The kernel that gates and quantizes against float64. With TRITON_INTERPRET=1 and Triton it runs on a CPU, too."""

import os

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda:0")


def rows_of(F: int, rows: int = 33) -> Tensor:
    """Rows of all sizes, one of zeros, and after them NaNs in memory that is handed out next."""
    drawn = torch.randn(rows, 2 * F, generator=torch.Generator().manual_seed(F))
    drawn *= torch.logspace(-3, 2, rows)[:, None]
    drawn[5] = 0
    return drawn.bfloat16().to(DEVICE)


@pytest.mark.parametrize("F", [16, 48, 1000, 1024, 9728, 12_288, 20_000])
def test_every_row_is_gated_and_fills_the_format(F: int) -> None:
    from paceline.target.gate_kernel import gate_rows

    rows = rows_of(F)
    torch.full((len(rows) * F,), torch.nan, device=DEVICE)
    made, scale = gate_rows(rows)
    gate, up = rows.double().chunk(2, dim=-1)
    wanted = gate * torch.sigmoid(gate) * up
    assert (made.shape, made.dtype, scale.shape, scale.dtype) == (
        (len(rows), F), torch.float8_e4m3fn, (len(rows), 1), torch.float32,
    )  # fmt: skip
    largest = wanted.abs().amax(-1, keepdim=True)
    torch.testing.assert_close(scale.double(), (largest / 448).clamp_min(1e-12), rtol=1e-5, atol=0)
    # Four bits of significand round by a sixteenth, and below the smallest normal number by half of 2^-9.
    bound = wanted.abs() * (2**-4 + 1e-4) + scale.double() * (2**-10 + 1e-4)
    assert bool(((made.double() * scale.double() - wanted).abs() <= bound).all())
    filled = made.double().abs().amax(-1)
    assert bool((filled[filled > 0] == 448).all())
    assert int((filled == 0).sum()) == 1


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_says_so(bad: float) -> None:
    from paceline.target.gate_kernel import gate_rows

    rows = rows_of(256)
    rows[7, 3] = bad
    made, scale = gate_rows(rows)
    values = made.double() * scale.double()
    assert bool(values[7].isnan().any())
    others = torch.arange(len(rows), device=DEVICE) != 7
    assert bool(values[others].isfinite().all())
