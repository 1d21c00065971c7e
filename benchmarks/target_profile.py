"""Where the time of a target's features goes on a GPU. Usage: python benchmarks/target_profile.py [SHAPE] [fp8]

The target of `paceline bench target`, random weights, compiled, or compiled and in fp8, over the same batches of mixed
lengths, under torch's profiler: kernels summed by what they are for against the wall time of a pass over all batches.
"""

import sys
import time

import torch
from step_profile import DEVICE, profiled, show

from paceline.bench.target import TargetWork, token_batches
from paceline.bench.target_shapes import TARGET_SHAPES
from paceline.runtime.compiling import warm_compiler
from paceline.target.model import FeatureTarget


def main(name: str = "qwen3-8b", how: str = "compiled") -> None:
    """Profile a pass over the batches."""
    device, shape = torch.device(DEVICE), TARGET_SHAPES[name]
    work = TargetWork(shape, DEVICE, "bfloat16", "trimmed", 16_384, 131_072, 1, (), stock_compiled=False)
    batches = token_batches(work)
    warm_compiler(DEVICE)  # so that what is compiled is kept, and found by who measures next
    target = FeatureTarget.around(shape.decoder(device, torch.bfloat16), shape.taps)
    reason = target.quicken(fp8=how == "fp8")
    reason = reason or target.compile(max(batches, key=lambda batch: batch.num_tokens), print)
    if reason:
        sys.exit(f"The target's path {how} cannot be measured here: {reason}.")

    def one_pass() -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for batch in batches:
            target.features(batch)
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began)

    tokens = sum(batch.num_tokens for batch in batches)
    show(f"{name} {how}, a pass over {tokens:,} tokens", profiled(one_pass, 1))


if __name__ == "__main__":
    main(*sys.argv[1:])
