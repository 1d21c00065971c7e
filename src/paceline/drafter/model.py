"""The DFlash drafter: a few Qwen3-style layers that denoise a block while reading the target's features.

The target's features enter each layer as extra keys and values (K/V injection): `fc` and `hidden_norm` make one
context of the m tapped outputs, every layer projects it with its own k_proj and v_proj, and it is not updated through
depth (arXiv 2602.06036). Training and decoding call the same two methods, `context` and `forward`; only the mask and
the place of the context differ. Parameter names are those of the published checkpoints.

Shapes: G groups with a context of their own, C context slots, Q block slots of a group, D = m * H, H width,
N heads, M key/value heads, E head width.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils import skip_init

from paceline.config import DrafterSettings
from paceline.drafter.attention import Visibility, attend
from paceline.records import UserError

ContextKV = tuple[Float[Tensor, "G M C E"], Float[Tensor, "G M C E"]]


def rotary(
    positions_GQ: Int[Tensor, "G Q"], head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[Float[Tensor, "G 1 Q E"], Float[Tensor, "G 1 Q E"]]:
    """Return cosine and sine of the rotary angles (halves layout), computed in float32 or wider."""
    wide = torch.promote_types(dtype, torch.float32)
    exponent_F = torch.arange(0, head_dim, 2, device=positions_GQ.device).to(wide) / head_dim
    angle_GQF = positions_GQ[..., None].to(wide) * theta**-exponent_F
    angle_GQE = torch.cat([angle_GQF, angle_GQF], dim=-1)[:, None]
    return angle_GQE.cos(), angle_GQE.sin()


def rotate(x_GNQE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x turned by its positions' angles, in x's dtype."""
    first, second = x_GNQE.chunk(2, dim=-1)
    return (x_GNQE * cos + torch.cat([-second, first], dim=-1) * sin).to(x_GNQE.dtype)


class Attention(nn.Module):
    """Attention of block slots over the context's and the blocks' keys; q and k are normalised per head."""

    def __init__(self, settings: DrafterSettings, hidden_size: int) -> None:
        super().__init__()
        self.head_dim = settings.head_dim
        self.q_proj = _linear(hidden_size, settings.heads * settings.head_dim)
        self.k_proj = _linear(hidden_size, settings.kv_heads * settings.head_dim)
        self.v_proj = _linear(hidden_size, settings.kv_heads * settings.head_dim)
        self.o_proj = _linear(settings.heads * settings.head_dim, hidden_size)
        self.q_norm = nn.RMSNorm(settings.head_dim, eps=settings.rms_norm_eps)
        self.k_norm = nn.RMSNorm(settings.head_dim, eps=settings.rms_norm_eps)

    def _heads(self, x_GQX: Tensor) -> Tensor:
        return x_GQX.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def keys_values(self, x_GQH: Float[Tensor, "G Q H"], cos: Tensor, sin: Tensor) -> ContextKV:
        """Return normalised, turned keys and plain values of any tokens, context or block."""
        k_GMQE = _normed(self.k_norm, self._heads(self.k_proj(x_GQH)))
        return rotate(k_GMQE, cos, sin), self._heads(self.v_proj(x_GQH))

    def forward(
        self,
        x_GQH: Float[Tensor, "G Q H"],
        cos: Tensor,
        sin: Tensor,
        context: ContextKV,
        visibility: Visibility,
    ) -> Float[Tensor, "G Q H"]:
        q_GNQE = rotate(_normed(self.q_norm, self._heads(self.q_proj(x_GQH))), cos, sin)
        own_k, own_v = self.keys_values(x_GQH, cos, sin)
        k = torch.cat([context[0].to(own_k.dtype), own_k], dim=2)
        v = torch.cat([context[1].to(own_v.dtype), own_v], dim=2)
        out_GNQE = attend(q_GNQE, k, v, visibility)
        return self.o_proj(out_GNQE.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = _linear(hidden_size, intermediate_size)
        self.up_proj = _linear(hidden_size, intermediate_size)
        self.down_proj = _linear(intermediate_size, hidden_size)

    def forward(self, x: Float[Tensor, "G Q H"]) -> Float[Tensor, "G Q H"]:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm attention and MLP. The context bypasses input_layernorm, the query and the MLP."""

    def __init__(self, settings: DrafterSettings, hidden_size: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden_size, eps=settings.rms_norm_eps)
        self.self_attn = Attention(settings, hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(hidden_size, eps=settings.rms_norm_eps)
        self.mlp = Mlp(hidden_size, settings.intermediate_size)

    def forward(
        self,
        x_GQH: Float[Tensor, "G Q H"],
        cos: Tensor,
        sin: Tensor,
        context: ContextKV,
        visibility: Visibility,
    ) -> Float[Tensor, "G Q H"]:
        x_GQH = x_GQH + self.self_attn(_normed(self.input_layernorm, x_GQH), cos, sin, context, visibility)
        return x_GQH + self.mlp(_normed(self.post_attention_layernorm, x_GQH))


class Drafter(nn.Module):
    """The trainable part. Token embeddings come in and hidden states go out: embedding and head are the target's.

    Matrices hold anything until `initialise` or `load_state_dict` fills them.
    """

    def __init__(self, settings: DrafterSettings, hidden_size: int) -> None:
        super().__init__()
        self.settings = settings
        self.hidden_size = hidden_size
        self.fc = _linear(len(settings.taps) * hidden_size, hidden_size)
        self.hidden_norm = nn.RMSNorm(hidden_size, eps=settings.rms_norm_eps)
        self.layers = nn.ModuleList([Layer(settings, hidden_size) for _ in range(settings.layers)])
        self.norm = nn.RMSNorm(hidden_size, eps=settings.rms_norm_eps)
        self.to(torch.float32)  # whatever the process-wide default is while another role loads

    def initialise(self, seed: int) -> "Drafter":
        """Draw weights as Qwen3 does, normal(0, 0.02), on the CPU; norms are ones.

        Each matrix has a generator of its own, so they are drawn side by side: a billion weights in about a second.
        """
        matrices = [module.weight for module in self.modules() if isinstance(module, nn.Linear)]

        def draw(index: int) -> None:
            generator = torch.Generator().manual_seed((seed + 1) * 0x9E3779B97F4A7C15 + index & 2**63 - 1)
            drawn = torch.randn(matrices[index].shape, generator=generator, dtype=torch.float32)
            with torch.no_grad():
                matrices[index].copy_(drawn * 0.02)

        with ThreadPoolExecutor() as pool:
            list(pool.map(draw, range(len(matrices))))
        return self

    @classmethod
    def from_weights(cls, settings: DrafterSettings, hidden_size: int, weights: Mapping[str, Tensor]) -> "Drafter":
        """Return a trained drafter, frozen, as it is used in decoding.

        Raises:
            UserError: the weights are not those of a drafter of these settings.
        """
        drafter = cls(settings, hidden_size)
        _check_weights({name: p.shape for name, p in drafter.named_parameters()}, weights)
        drafter.load_state_dict(weights)
        return drafter.eval().requires_grad_(False)

    def context(self, features_GCD: Float[Tensor, "G C D"], positions_GC: Int[Tensor, "G C"]) -> list[ContextKV]:
        """Return every layer's keys and values of the target's features."""
        ctx_GCH = _normed(self.hidden_norm, self.fc(features_GCD))
        cos, sin = self._rotary(positions_GC)
        attentions: list[Attention] = [layer.self_attn for layer in self.layers]  # type: ignore[misc]
        return [attention.keys_values(ctx_GCH, cos, sin) for attention in attentions]

    def forward(
        self,
        embeds_GQH: Float[Tensor, "G Q H"],
        positions_GQ: Int[Tensor, "G Q"],
        context: list[ContextKV],
        visibility: Visibility,
    ) -> Float[Tensor, "G Q H"]:
        """Return the hidden states that the target's head turns into logits; keys are the context, then the blocks."""
        cos, sin = self._rotary(positions_GQ)
        x_GQH = embeds_GQH
        for layer, layer_context in zip(self.layers, context, strict=True):
            x_GQH = layer(x_GQH, cos, sin, layer_context, visibility)
        return _normed(self.norm, x_GQH)

    def _rotary(self, positions: Int[Tensor, "G Q"]) -> tuple[Tensor, Tensor]:
        return rotary(positions, self.settings.head_dim, self.settings.rope_theta, self.fc.weight.dtype)


def _check_weights(shapes: Mapping[str, torch.Size], weights: Mapping[str, Tensor]) -> None:
    for name in sorted(shapes.keys() | weights.keys()):
        expected, found = shapes.get(name), weights.get(name)
        if expected is None or found is None:
            wrong = "lack" if found is None else "have no place for"
            raise UserError(f"The drafter's weights {wrong} {name}: they belong to other settings. Restore them.")
        if found.shape != expected or found.dtype != torch.float32:
            raise UserError(
                f"The drafter's weights must hold {name} as float32 {list(expected)} by its settings, found "
                f"{str(found.dtype).removeprefix('torch.')} {list(found.shape)}. Restore them."
            )


def _linear(width_in: int, width_out: int) -> nn.Linear:
    """Return a matrix that is not filled: nn.Linear would draw a billion weights on one core, to be thrown away."""
    return skip_init(nn.Linear, width_in, width_out, bias=False)


def _normed(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """Normalise in the weight's precision and come back to x's; autocast leaves a norm alone whose inputs agree."""
    return norm(x.to(norm.weight.dtype)).to(x.dtype)
