"""Matrix products of a target on a CPU, by oneDNN instead of MKL.

torch gives float32 products of nn.Linear to MKL, which does not use all of an AMD processor: for 64 tokens at
SmolLM2's shapes oneDNN is about twice as fast (benchmarks/log.md). bfloat16 products are oneDNN's already.
"""

from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn


def use_onednn(model: nn.Module) -> None:
    """Let every float32 nn.Linear of a model on the CPU compute with oneDNN, where this torch has it."""
    if not torch.backends.mkldnn.is_available():
        return
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype == torch.float32 and module.weight.device.type == "cpu":
            module.forward = partial(_product, module)  # type: ignore[method-assign]


def _product(module: nn.Linear, x: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
    if torch.compiler.is_compiling():  # inductor takes this operator only in a form of its own
        return nn.functional.linear(x, module.weight, module.bias)
    return torch.ops.mkldnn._linear_pointwise(x, module.weight, module.bias, "none", [], "")
