"""Matrix products of frozen models on a CPU, by oneDNN instead of MKL.

torch gives float32 products of nn.Linear to MKL, which does not use all of an AMD processor: at SmolLM2's shapes oneDNN
is about twice as fast for 64 tokens, and five times at the head for a block of 8 (benchmarks/log.md). bfloat16 products
are oneDNN's already. oneDNN's operator has no gradient: for inference only.
"""

import copy
from functools import partial
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

_Model = TypeVar("_Model", bound=nn.Module)


def use_onednn(model: nn.Module) -> None:
    """Let every float32 nn.Linear of a model on the CPU compute with oneDNN, where this torch has it."""
    for module in model.modules():
        if type(module) is nn.Linear and _is_for_onednn(module.weight):
            module.forward = partial(_forward, module)  # type: ignore[method-assign]


def twin(model: _Model) -> _Model:
    """Return a copy of a model that shares its tensors, so that one can be changed in how it computes."""
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def product(
    x: Float[Tensor, "*rows inputs"], weight: Float[Tensor, "outputs inputs"], bias: Tensor | None = None
) -> Float[Tensor, "*rows outputs"]:
    """Return x times the transposed weight, without a gradient."""
    # inductor takes oneDNN's operator only in a form of its own
    if torch.compiler.is_compiling() or not _is_for_onednn(weight):
        return nn.functional.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _is_for_onednn(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()


def _forward(module: nn.Linear, x: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
    return product(x, module.weight, module.bias)
