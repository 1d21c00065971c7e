"""The fast path of a target on a CUDA device: one kernel for all samples, compiled, in bfloat16 and in fp8."""

from typing import Any

import pytest
import torch
from families import FAMILIES
from torch import nn
from transformers import AutoModel

from paceline.drafter.e4m3 import quantize
from paceline.records import BlockSet, TokenBatch
from paceline.runtime.compiling import forbid_recompiles, warm_compiler
from paceline.target.model import FeatureTarget
from paceline.target.products import Matrix, in_fp8, product
from paceline.target.varlen import Ends, kernel_for, samples_apart

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("traceable")]

TAPS = (0, 2, 4)
LENGTHS = (9, 170, 1, 64, 129)


def batch_of(lengths: tuple[int, ...], seed: int = 0) -> TokenBatch:
    draw = torch.Generator().manual_seed(seed)
    rows = [torch.randint(4, 128, (length,), generator=draw) for length in lengths]
    S = max(lengths)
    ids_RS = torch.stack([nn.functional.pad(row, (0, S - len(row))) for row in rows])
    places_T = torch.stack([torch.arange(S) < len(row) for row in rows]).flatten().nonzero()[:, 0]
    none = torch.zeros(0, dtype=torch.int64)
    blocks = BlockSet(none, none, none, none, none.view(0, 4), none.view(0, 4).bool())
    return TokenBatch(0, 0, 0, True, tuple(range(len(lengths))), ids_RS, lengths, places_T, blocks)


@pytest.mark.parametrize("window", [0, 1, 50])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 4, 64), (8, 2, 128), (9, 3, 64), (4, 2, 16)])
def test_one_kernel_reads_what_samples_alone_do(window: int, heads: int, kv_heads: int, width: int) -> None:
    draw = torch.Generator(device="cuda").manual_seed(0)
    T = sum(LENGTHS)
    fused = torch.randn(T + 11, heads + 2 * kv_heads, width, device="cuda", dtype=torch.bfloat16, generator=draw)
    q, k, v = fused.split([heads, kv_heads, kv_heads], dim=1)
    edges = torch.tensor([0, *LENGTHS]).cumsum(0, dtype=torch.int32).cuda()
    kernels = {"FlashAttention 2", kernel_for(q.device, q.dtype, width, windows=bool(window))}
    assert "sample by sample" not in kernels
    ends = Ends(LENGTHS, edges)
    more: dict[str, Any] = {"window": window, "scale": width**-0.5}
    wanted = samples_apart(q.float(), k.float(), v.float(), ends, kernel="sample by sample", **more)[:T]
    for kernel in kernels:
        whole = samples_apart(q, k, v, ends, kernel=kernel, **more)
        assert not whole[T:].any(), "what lies behind must be finite: the next layer's last tile reads it"
        found = whole[:T]
        assert ((found.float() - wanted).norm() / wanted.norm()) <= 0.01, kernel


@pytest.mark.parametrize("name", ["Llama 3", "SmolLM2", "Mistral", "Qwen2.5", "Qwen3"])
@pytest.mark.parametrize("fp8", [False, True])
def test_compiled_it_gives_the_plain_paths_features(name: str, fp8: bool) -> None:
    torch.manual_seed(0)
    config = next(family for family in FAMILIES if family.name == name).config()
    config.initializer_range = 0.02
    trunk: Any = AutoModel.from_config(config).eval().requires_grad_(False).to("cuda", torch.bfloat16)
    del trunk.layers[5:]
    trunk.norm = nn.Identity()
    target = FeatureTarget.around(trunk, TAPS)
    lengths = [LENGTHS, (300,), (1, 1, 1), (127, 1), (40, 60, 28)]
    batches = [batch_of(each, seed) for seed, each in enumerate(lengths)]
    plain = [target.features(batch) for batch in batches]
    warm_compiler("cuda:0")
    assert target.quicken(fp8=fp8) == ""
    assert target.compile(batches[0], alarm=pytest.fail) == ""
    with forbid_recompiles():
        for batch, wanted in zip(batches, plain, strict=True):
            found = target.features(batch)
            error_T = (found - wanted).float().norm(dim=-1) / wanted.float().norm(dim=-1)
            assert error_T.median() <= (0.1 if fp8 else 0.02)
            assert torch.equal(target.features(batch), found), "the same each time"
    assert target.recompiles == 0


def test_a_product_in_fp8_is_that_of_the_numbers_that_fp8_holds() -> None:
    draw = torch.Generator().manual_seed(0)
    x = (torch.randn(256, 512, generator=draw) * torch.logspace(-3, 3, 256)[:, None]).bfloat16().cuda()
    matrix = in_fp8(Matrix((torch.randn(384, 512, generator=draw) * 0.02).bfloat16().cuda(), None, None))
    assert matrix.scale_N1 is not None
    held, scale = quantize(x)
    wanted = (held.double() * scale) @ (matrix.weight_NK.double() * matrix.scale_N1).T
    found = product(x, matrix).double()
    assert ((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max() <= 0.01


def test_losses_of_a_run_are_near_those_of_the_plain_path(losses: Any) -> None:
    """With whole tiles of context and block slots, so that the step is compiled, too."""
    more = {"policy": "compiled", "anchor_slots": 32, "context_slots": 128}
    alike: dict[str, Any] = {"more": more, "layout": "packed", "token_budget": 120}
    fast = losses("fast", ("cuda:0", "cuda:0"), "bfloat16", **alike)
    plain = losses("plain", ("cuda:0", "cuda:0"), "bfloat16", target={"fast": "off"}, **alike)
    assert fast == pytest.approx(plain, rel=0.03)
    assert fast != plain
