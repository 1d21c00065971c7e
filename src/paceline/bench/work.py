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
    # Of ours; peers have none of these.
    fp8: bool = False
    recompute: Literal["off", "layers"] = "off"
    moments: Literal["float32", "8bit"] = "float32"
    offload: Literal["off", "moments"] = "off"


def asked(work: Work, *, ours: bool) -> dict[str, str | bool]:
    """Return what a row says of how the work was asked for, and done: `ours`, or a peer's, which has less to set."""
    of = "fp32" if work.optimizer_state == "fp32-master" else "bf16"
    eight = ours and work.moments == "8bit"
    return {
        "dtype": work.dtype,
        "fp8": ours and work.fp8,
        "recompute": work.recompute if ours else "off",
        "optimizer": f"adamw, weights in {of}, moments in 8 bits" if eight else f"adamw, weights and moments in {of}",
        "offload": work.offload if ours else "off",
        "clip": work.clip,
        "counted": COUNTED,
    }
