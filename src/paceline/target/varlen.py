"""Causal attention of samples that lie end to end, none of which sees another, without a mask and without padding.

On a GPU of the Ampere generation or newer one kernel takes all samples: that of torch.nn.attention.varlen, which is
FlashAttention 2, or on Hopper FlashAttention 3 where the package fa3-fwd is installed. Elsewhere, and for formats and
widths that these do not know, torch's own attention is called sample by sample.

Shapes: T tokens, H query heads, M key/value heads, E head width, n samples.
"""

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

Kernel = Literal["FlashAttention 3", "FlashAttention 2", "sample by sample"]
# Who has one has those before it.
KERNELS: tuple[Kernel, ...] = ("sample by sample", "FlashAttention 2", "FlashAttention 3")
_WIDEST = 256  # head width that FlashAttention takes
_FA3 = "fa3_fwd_interface"


@dataclass(frozen=True, slots=True, eq=False)
class Ends:
    """Where samples end."""

    lengths: tuple[int, ...]
    edges: Tensor  # int32 [n + 1] on the device: 0, and the sum of lengths after each sample

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return max(self.lengths)


def kernel_for(device: torch.device, dtype: torch.dtype, head_dim: int, *, windows: bool) -> Kernel:
    """Return the fastest kernel for heads of a width, some of which see a window only."""
    half = dtype in (torch.bfloat16, torch.float16)
    if device.type != "cuda" or not half or head_dim % 8 or head_dim > _WIDEST:
        return "sample by sample"
    generation = torch.cuda.get_device_capability(device)[0]
    # fa3-fwd is built without windows and without float16, and for Hopper.
    if generation == 9 and dtype == torch.bfloat16 and not windows and importlib.util.find_spec(_FA3):
        return "FlashAttention 3"
    return "FlashAttention 2" if generation >= 8 else "sample by sample"


def samples_apart(
    q_THE: Tensor, k_TME: Tensor, v_TME: Tensor, ends: Ends, *, window: int, scale: float, kernel: Kernel
) -> Tensor:
    """Return what each token reads, [T, H, E]. Tokens behind the last sample read zeros.

    `window` is how many tokens one sees, itself included; 0: all before it.
    """
    if kernel != "sample by sample":
        at_once_THE = (
            _fa3(q_THE, k_TME, v_TME, ends, scale)
            if kernel == "FlashAttention 3"
            else _fa2(q_THE, k_TME, v_TME, ends, window, scale)
        )
        # Not written by the kernel. In the next layer it may multiply what is there by nothing, which must be finite.
        at_once_THE[sum(ends.lengths) :].zero_()
        return at_once_THE
    out_THE = torch.zeros_like(q_THE)
    start = 0
    for length in ends.lengths:
        here = slice(start, start + length)
        out_THE[here] = _alone(q_THE[here], k_TME[here], v_TME[here], window, scale)
        start += length
    return out_THE


def _fa3(q: Tensor, k: Tensor, v: Tensor, ends: Ends, scale: float) -> Tensor:
    interface = importlib.import_module(_FA3)
    edges, longest = ends.edges, ends.longest
    read: Tensor = interface.flash_attn_varlen_func(
        q, k, v, edges, edges, longest, longest, softmax_scale=scale, causal=True
    )
    return read


def _fa2(q: Tensor, k: Tensor, v: Tensor, ends: Ends, window: int, scale: float) -> Tensor:
    varlen_attn, grouped = _varlen()
    edges, longest = ends.edges, ends.longest
    seen = (window - 1 if window else -1, 0)
    read: Tensor = varlen_attn(q, k, v, edges, edges, longest, longest, scale=scale, window_size=seen, **grouped)
    return read


@cache
def _varlen() -> tuple[Callable[..., Any], dict[str, bool]]:
    """Return the function, and what this version must be told so that query heads may share a key/value head."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def _alone(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
    length, mask = q.shape[2], None
    if window and length > window:
        at = torch.arange(length, device=q.device)
        mask = (at <= at[:, None]) & (at > at[:, None] - window)
    read = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return read[0].transpose(0, 1)
