"""The probe of flex_attention, compared with dense attention under the same mask.

Shapes: H heads, Q queries, K keys, E width of a head.
"""

from functools import partial

import torch
from torch import Tensor

from paceline.probe.finding import Bench, Finding, Verdict, tell
from paceline.probe.nets import devices, use
from paceline.probe.threads import in_worker
from paceline.runtime.devices import device_name

HEADS, LENGTH, BLOCK, WIDTH = 2, 256, 16, 64
CLOSE = {torch.float32: 1e-3, torch.bfloat16: 4e-2}  # relative to the largest value


def flex_attention_both_ways(bench: Bench) -> Finding:
    """Compile flex_attention in a worker with a mask of blocks, run it forward and backward."""
    parts = [in_worker(partial(_try, device)) for device in devices(bench)]
    outcomes = {saw for saw, _ in parts}
    saw = next(one for one in ("none", "forward only", "forward and backward") if one in outcomes)
    verdict: dict[str, Verdict] = {"none": "refused", "forward only": "degraded", "forward and backward": "ok"}
    numbers = {"works": dict(zip((device_name(d) for d in devices(bench)), (saw for saw, _ in parts), strict=True))}
    return Finding(verdict[saw], "; ".join(text for _, text in parts), numbers, saw=saw)


def _try(device: torch.device) -> tuple[str, str]:
    """Return what works on a device, and that in words."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    use(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    source = torch.Generator().manual_seed(0)
    qkv = torch.randn(3, 1, HEADS, LENGTH, WIDTH, generator=source).to(device, dtype)
    anchor_Q = (torch.arange(LENGTH, device=device) // BLOCK) * BLOCK

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:  # the context before a block, and the block
        return k < anchor_Q[q] + BLOCK

    k_K = torch.arange(LENGTH, device=device)
    mask_QK = k_K[None, :] < (anchor_Q + BLOCK)[:, None]
    query, key, value = (part.float().requires_grad_() for part in qkv)
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask_QK)
    wanted_grads = torch.autograd.grad(wanted.square().mean(), (query, key, value))
    block_mask = create_block_mask(visible, None, None, LENGTH, LENGTH, device=device)
    compiled = torch.compile(flex_attention, dynamic=False)
    where = device_name(device)
    try:
        with torch.no_grad():
            got = compiled(qkv[0], qkv[1], qkv[2], block_mask=block_mask)
        _check(got, wanted.detach(), dtype, "forward")
    except Exception as error:
        return "none", f"{where}: {tell(error)}"
    try:
        q, k, v = (part.detach().clone().requires_grad_() for part in qkv)
        loss = compiled(q, k, v, block_mask=block_mask).float().square().mean()
        for got_grad, wanted_grad in zip(torch.autograd.grad(loss, (q, k, v)), wanted_grads, strict=True):
            _check(got_grad, wanted_grad, dtype, "backward")
    except Exception as error:
        return "forward only", f"{where}: forward works, backward: {tell(error)}"
    return "forward and backward", f"{where}: forward and backward equal dense attention ({dtype})"


def _check(got: Tensor, wanted: Tensor, dtype: torch.dtype, what: str) -> None:
    apart = ((got.float() - wanted).abs().max() / wanted.abs().max()).item()
    if not apart <= CLOSE[dtype]:
        raise ArithmeticError(f"{what} differs from dense attention by {apart:.0e}, {CLOSE[dtype]:.0e} is allowed")
