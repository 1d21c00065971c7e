"""The targets that are measured: decoders with random weights, up to the deepest tap and without a head."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Qwen3Config, Qwen3Model


@dataclass(frozen=True, slots=True)
class TargetShape:
    """A decoder of Qwen3's kind, cut behind its deepest tap."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    taps: tuple[int, ...]
    longest: int  # tokens of a sample; all lengths are scaled to it

    @property
    def layers(self) -> int:
        """Layers that are computed."""
        return max(self.taps) + 1

    def flops(self, lengths: tuple[int, ...]) -> float:
        """Return the operations that features of samples need at least: no padding, and no token ahead of another.

        Matrices read every token once; token i sees i + 1 tokens, in two products over all heads.
        """
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        matrices = self.hidden_size * (2 * wide + 2 * narrow + 3 * self.intermediate_size)
        seen = sum(n * (n + 1) // 2 for n in lengths)
        return 2.0 * self.layers * (sum(lengths) * matrices + 2 * wide * seen)

    def config(self, layers: int) -> Qwen3Config:
        """Return the shape as transformers has it, with so many layers."""
        return Qwen3Config(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=40_960,
            rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )

    def decoder(self, device: torch.device, dtype: torch.dtype) -> Any:
        """Return the decoder; its final norm is none, so its last output is a layer's, as the taps are."""
        torch.manual_seed(0)
        with torch.device(device):
            model = Qwen3Model._from_config(self.config(self.layers), dtype=dtype)
        model.norm = nn.Identity()
        return model.eval().requires_grad_(False)


TARGET_SHAPES = {
    shape.name: shape
    for shape in (
        TargetShape("tiny", 500, 64, 128, 4, 2, 16, (0, 2, 3), 256),
        TargetShape("qwen3-8b", 151_936, 4096, 12_288, 32, 8, 128, (1, 9, 17, 25, 33), 8192),
    )
}
