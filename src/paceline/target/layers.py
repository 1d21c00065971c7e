"""The layers of a plain decoder as the fast path reads them: weights side by side, and what is done with them.

Plain is what Llama, Mistral, Qwen2 and Qwen3 are in transformers: RMSNorm before attention and MLP, whole heads turned
by rotary angles, grouped queries, SwiGLU; with biases and norms of q and k where a layer has them. A decoder is known
by the classes of its layers and by what is in them; anything else is not plain, and `why_not_plain` says why.

Shapes: T tokens, H width, E head width, F width of the MLP.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.target.conventions import ATTENTION
from paceline.target.products import Matrix, fits_fp8, gated, gated_product, in_fp8, product

_LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
PLAIN_TYPES = ("llama", "mistral", "qwen2", "qwen3")  # the model_type of decoders that are made of them
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MLP = {"gate_proj", "up_proj", "down_proj"}
_NORMS = {"input_layernorm", "post_attention_layernorm"}


class Weights(NamedTuple):
    """A layer's weights: tensors that a compiled function takes as arguments, so that one function does all layers."""

    norm_H: Tensor
    qkv: Matrix
    q_norm_E: Tensor | None
    k_norm_E: Tensor | None
    out: Matrix
    mlp_norm_H: Tensor
    gate_up: Matrix
    down: Matrix


class Shape(NamedTuple):
    """What all layers of a decoder have in common."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float  # of attention scores


@dataclass(frozen=True, slots=True)
class PlainLayers:
    """The layers of a decoder, ready to be run."""

    shape: Shape
    weights: list[Weights]  # one a layer
    windows: tuple[int, ...]  # tokens that a layer's attention sees; 0: all


def why_not_plain(trunk: Any, *, fp8: bool) -> str:
    """Return why a loaded decoder cannot be run as a plain one, as the end of a sentence; an empty text if it can."""
    for index, layer in enumerate(trunk.layers):
        if type(layer).__name__ not in _LAYERS:
            return f"layers of the class {type(layer).__name__} are not known to be plain"
        if wrong := _wrong_part(layer):
            return f"layer {index} has {wrong}"
        if fp8 and (odd := _odd_for_fp8(layer)):
            return f"{odd} of layer {index} has sizes that are no multiples of 16, which fp8 products want"
    if type(trunk.embed_tokens) is not nn.Embedding or not hasattr(trunk, "rotary_emb"):
        return "its embedding or its rotary angles are not plain"
    kinds = set(getattr(trunk.config, "layer_types", None) or ())
    if others := sorted(kinds - set(ATTENTION)):
        return f"it has layers of the kind {others[0]}"
    if len({_shape(layer) for layer in trunk.layers}) > 1:
        return "its layers are of different shapes"
    return ""


def _wrong_part(layer: Any) -> str:
    attention, mlp = layer.self_attn, layer.mlp
    parts = {name for name, _ in layer.named_children()}
    own = {name for name, _ in attention.named_children()}
    own_mlp = {name for name, _ in mlp.named_children()}
    if (
        parts != {"self_attn", "mlp", *_NORMS}
        or own - {"q_norm", "k_norm"} != _ATTENTION
        or own_mlp - {"act_fn"} != _MLP
    ):
        return "parts that a plain one has not"
    if ("q_norm" in own) != ("k_norm" in own):
        return "a norm of q or k without the other"
    linears = [
        *(getattr(attention, name) for name in sorted(_ATTENTION)),
        *(getattr(mlp, name) for name in sorted(_MLP)),
    ]
    if any(type(linear) is not nn.Linear for linear in linears):
        return "products that are no plain ones"
    if len({linears[at].bias is None for at in (0, 2, 3)}) > 1:  # k, q, v
        return "biases of some of q, k and v"
    if (mlp.gate_proj.bias is None) != (mlp.up_proj.bias is None):
        return "a bias of gate or up without the other"
    if type(mlp.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
        return f"the activation {type(mlp.act_fn).__name__}"
    if len({_eps(norm) for norm in (*_norms(layer), *_head_norms(attention))}) > 1:
        return "norms of different epsilons"
    return ""


def _odd_for_fp8(layer: Any) -> str:
    linears = [(name, module) for name, module in layer.named_modules() if type(module) is nn.Linear]
    return next((name for name, linear in linears if not fits_fp8(linear.weight)), "")


def _norms(layer: Any) -> list[Any]:
    return [layer.input_layernorm, layer.post_attention_layernorm]


def _head_norms(attention: Any) -> list[Any]:
    return [attention.q_norm, attention.k_norm] if hasattr(attention, "q_norm") else []


def _eps(norm: Any) -> float:
    return float(norm.variance_epsilon)


def _shape(layer: Any) -> Shape:
    attention = layer.self_attn
    E = attention.head_dim
    heads, kv_heads = attention.q_proj.out_features // E, attention.k_proj.out_features // E
    return Shape(heads, kv_heads, E, _eps(layer.input_layernorm), float(attention.scaling))


def plain_layers(trunk: Any) -> PlainLayers:
    """Lay a plain decoder's weights side by side, and return its layers.

    The modules' own weights become views of what is made, a layer at a time, so nothing is held twice and the modules
    work as before.
    """
    weights = [_side_by_side(layer) for layer in trunk.layers]
    return PlainLayers(_shape(trunk.layers[0]), weights, _windows(trunk.config, len(trunk.layers)))


def quantize_layers(trunk: Any, layers: PlainLayers) -> None:
    """Put the matrices in fp8, and let go of the others a layer at a time: the decoder's own modules work no more."""
    for index, layer in enumerate(trunk.layers):
        for module in layer.modules():
            if type(module) is nn.Linear:
                module.weight = nn.Parameter(module.weight.new_empty(0), requires_grad=False)
        own = layers.weights[index]
        layers.weights[index] = own._replace(
            qkv=in_fp8(own.qkv), out=in_fp8(own.out), gate_up=in_fp8(own.gate_up), down=in_fp8(own.down)
        )


def _side_by_side(layer: Any) -> Weights:
    attention, mlp = layer.self_attn, layer.mlp
    head_norms = _head_norms(attention)
    return Weights(
        norm_H=layer.input_layernorm.weight,
        qkv=_fused([attention.q_proj, attention.k_proj, attention.v_proj]),
        q_norm_E=head_norms[0].weight if head_norms else None,
        k_norm_E=head_norms[1].weight if head_norms else None,
        out=Matrix(attention.o_proj.weight, None, attention.o_proj.bias),
        mlp_norm_H=layer.post_attention_layernorm.weight,
        gate_up=_fused([mlp.gate_proj, mlp.up_proj]),
        down=Matrix(mlp.down_proj.weight, None, mlp.down_proj.bias),
    )


def _fused(linears: Sequence[nn.Linear]) -> Matrix:
    """Return linear modules as one matrix, of which their weights are views from now on."""
    sizes = [linear.out_features for linear in linears]
    bias = None
    weight = torch.cat([linear.weight for linear in linears])
    if linears[0].bias is not None:
        bias = torch.cat([linear.bias for linear in linears])
        for linear, part in zip(linears, bias.split(sizes), strict=True):
            linear.bias = nn.Parameter(part, requires_grad=False)
    for linear, part in zip(linears, weight.split(sizes), strict=True):
        linear.weight = nn.Parameter(part, requires_grad=False)
    return Matrix(weight, None, bias)


def _windows(config: Any, count: int) -> tuple[int, ...]:
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or [ATTENTION[1] if window else ATTENTION[0]] * count
    return tuple((window or 0) if kind == ATTENTION[1] else 0 for kind in kinds[:count])


def enter(
    x_TH: Tensor, weights: Weights, cos_TE: Tensor, sin_TE: Tensor, shape: Shape
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of a layer's attention, heads of each token side by side, turned."""
    heads, kv_heads, E = shape.heads, shape.kv_heads, shape.head_dim
    fused = product(rms_norm(x_TH, weights.norm_H, shape.eps), weights.qkv)
    q, k, v = (part.unflatten(-1, (-1, E)) for part in fused.split([heads * E, kv_heads * E, kv_heads * E], dim=-1))
    if weights.q_norm_E is not None and weights.k_norm_E is not None:
        q, k = rms_norm(q, weights.q_norm_E, shape.eps), rms_norm(k, weights.k_norm_E, shape.eps)
    cos, sin = cos_TE[:, None], sin_TE[:, None]
    return _turned(q, cos, sin), _turned(k, cos, sin), v


def leave(x_TH: Tensor, read_TX: Tensor, weights: Weights, shape: Shape) -> Tensor:
    """Return a layer's output of its input and of what attention read."""
    x_TH = x_TH + product(read_TX, weights.out)
    return x_TH + gated_product(_gate_up(x_TH, weights, shape), weights.down)


def widen(x_TH: Tensor, weights: Weights, shape: Shape) -> Tensor:
    """Return what a layer's MLP makes of x before its last product."""
    return gated(_gate_up(x_TH, weights, shape))


def _gate_up(x_TH: Tensor, weights: Weights, shape: Shape) -> Tensor:
    return product(rms_norm(x_TH, weights.mlp_norm_H, shape.eps), weights.gate_up)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return what transformers' RMSNorm does: float32 inside, rounded before the weight."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-other, one], dim=-1) * sin
