"""What `paceline bench generate` needs to be judged on a GPU: kernels for the decode step's attention, then the engine.

    python benchmarks/generate_gpu.py [attention] [smollm2] [qwen3-8b]

One JSON object a line on standard output. Everything is random and nothing is downloaded.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

DEVICE = torch.device("cuda:0")
# name, rows, key/value heads, query heads of each, width, slots that are read, live share of them
SHAPES = [
    ("smollm2", 1024, 3, 3, 64, 256, 0.6),
    ("qwen3-8b", 256, 8, 4, 128, 512, 0.6),
    ("qwen3-8b", 256, 8, 4, 128, 768, 0.6),
]
RUNS = {
    "smollm2": [
        [],
        ["--sampled", "--against", "0"],
        ["--compiled", "--against", "0"],
        ["--no-captured", "--against", "0"],
    ],
    "qwen3-8b": [[], ["--sampled", "--against", "0"], ["--compiled", "--against", "0"]],
}


def microseconds(call: Callable[[], Any], count: int = 30) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count * 1e6


def attention() -> None:
    """Time the ways to attend over a row cache in bfloat16; GB/s counts keys and values of all slots once."""
    for name, rows, groups, heads, width, slots, live in SHAPES:
        draw = partial(torch.randn, device=DEVICE, dtype=torch.bfloat16)
        key, value = (draw(rows, groups, slots + 256, width)[:, :, :slots] for _ in range(2))
        query = draw(rows, groups, heads, width)
        lengths = torch.randint(int(slots * live), slots, (rows,), device=DEVICE)
        seen = (torch.arange(slots, device=DEVICE) <= lengths[:, None])[:, None, None]
        for way, call in ways(query, key, value, seen).items():
            row: dict[str, Any] = {"attention": name, "slots": slots, "way": way}
            try:
                us = microseconds(call)
                row |= {"us": round(us, 1), "gb_s": round(2 * key.numel() * key.element_size() / us / 1e3)}
                if "no mask" not in way:
                    row["off_by"] = float((call() - products(query, key, value, bias_of(seen))).abs().max())
            except RuntimeError as error:
                row["error"] = str(error).splitlines()[0][:150]
            print(json.dumps(row), flush=True)


def ways(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Return calls that attend, by name."""
    bias = bias_of(seen)
    unfolded = query.reshape(len(query), -1, 1, query.shape[-1])

    def by(backend: SDPBackend, query: Tensor = query, **how: Any) -> Callable[[], Tensor]:
        def call() -> Tensor:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(query, key, value, **how)

        return call

    return {
        "what torch chooses": lambda: scaled_dot_product_attention(query, key, value, attn_mask=bias),
        "efficient": by(SDPBackend.EFFICIENT_ATTENTION, attn_mask=bias),
        "efficient, mask of truth values": by(SDPBackend.EFFICIENT_ATTENTION, attn_mask=seen),
        "cudnn": by(SDPBackend.CUDNN_ATTENTION, attn_mask=bias),
        "math": by(SDPBackend.MATH, attn_mask=bias),
        "two products": lambda: products(query, key, value, bias),
        "flash, no mask": by(SDPBackend.FLASH_ATTENTION),
        "flash, no mask, not folded": by(SDPBackend.FLASH_ATTENTION, unfolded, enable_gqa=True),
    }


def bias_of(seen: Tensor) -> Tensor:
    return torch.zeros_like(seen, dtype=torch.bfloat16).masked_fill(~seen, -torch.inf)


def products(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    scores = torch.matmul(query, key.transpose(2, 3)) * query.shape[-1] ** -0.5 + bias
    return torch.matmul(scores.float().softmax(-1).to(value.dtype), value)


def engine(shape: str) -> None:
    """Run the engine's measurements, each in a process of its own."""
    for more in RUNS[shape]:
        command = [sys.executable, "-m", "paceline", "bench", "generate", "--shape", shape, "--json", *more]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            print(json.dumps({"options": more, **json.loads(done.stdout)}), flush=True)
        else:
            print(json.dumps({"options": more, "shape": shape, "error": done.stderr[-1500:]}), flush=True)


if __name__ == "__main__":
    for what in sys.argv[1:] or ["attention", "smollm2", "qwen3-8b"]:
        attention() if what == "attention" else engine(what)
