"""What a measured step is asked to do, by ours and by peers alike."""

from dataclasses import dataclass
from typing import Literal

from paceline.bench.shapes import Shape

OptimizerState = Literal["fp32-master", "bf16"]
CLIP = 1.0  # the largest gradient norm, where clipping is on
RATE = 1e-5
COUNTED = "forward, loss, backward, clipping if on, optimizer; features on the device; useful operations only"


@dataclass(frozen=True, slots=True)
class Work:
    """What is measured, with how much beside it."""

    shape: Shape
    device: str
    dtype: str
    steps: int
    noise: int  # threads that run forwards of a small model meanwhile
    hog: bool  # a thread that holds the interpreter
    optimizer_state: OptimizerState = "fp32-master"
    clip: bool = True
    fp8: bool = False  # products of our layers; peers have none


def asked(work: Work, *, fp8: bool = False) -> dict[str, str | bool]:
    """Return what a row says of how the work was asked for, and done: `fp8` says whether in fp8."""
    wide = work.optimizer_state == "fp32-master"
    return {
        "dtype": work.dtype,
        "fp8": fp8,
        "optimizer": f"adamw, weights and moments in {'fp32' if wide else 'bf16'}",
        "clip": work.clip,
        "counted": COUNTED,
    }
