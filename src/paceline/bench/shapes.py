"""The drafter shapes that are measured, and what a step at them costs at least.

Shapes: C context slots, A anchors, B block slots, H width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.config import DrafterSettings, TrainSettings


@dataclass(frozen=True, slots=True)
class Shape:
    """A drafter and the one shape of its micro-batch."""

    name: str
    drafter: DrafterSettings
    hidden_size: int
    vocab_size: int
    context_slots: int
    anchor_slots: int
    anchors_per_sample: int

    def train_settings(self, dtype: str) -> TrainSettings:
        """Return settings of a run at this shape."""
        return TrainSettings.model_validate(
            {
                "context_slots": self.context_slots,
                "anchor_slots": self.anchor_slots,
                "anchors_per_sample": self.anchors_per_sample,
                "dtype": dtype,
                "logits_mib": 1280,
            }
        )

    def flops(self, lengths: Sequence[int], visible: int, anchors: int) -> float:
        """Return the floating-point operations of a step's useful work: real tokens and anchors only.

        `visible` is how many context tokens all anchors see together. A matrix product counts 2 operations an entry;
        backward costs twice the forward, except where no gradient is needed: the features have none, and the frozen
        head has none for its weight.
        """
        d, h = self.drafter, self.hidden_size
        tokens, slots = sum(lengths), anchors * d.block_size
        wide, narrow = d.heads * d.head_dim, d.kv_heads * d.head_dim
        fc = tokens * len(d.taps) * h * h
        context = tokens * h * 2 * narrow * d.layers
        matrices = slots * (2 * h * wide + 2 * h * narrow + 3 * h * d.intermediate_size) * d.layers
        attention = 2 * wide * d.block_size * (visible + anchors * d.block_size) * d.layers
        head = anchors * (d.block_size - 1) * h * self.vocab_size
        return 2.0 * (2 * fc + 3 * (context + matrices + attention) + 2 * head)


def _drafter(hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int, mask: int) -> DrafterSettings:
    return DrafterSettings(
        block_size=16,
        layers=5,
        taps=(1, 9, 17, 25, 33),
        mask_token_id=mask,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=ffn,
        rope_theta=1e6,
    )


SHAPES = {
    "tiny": Shape("tiny", _drafter(64, 4, 2, 16, 128, 3), 64, 500, 256, 16, 8),
    "small": Shape("small", _drafter(1024, 8, 4, 128, 3072, 31_999), 1024, 32_000, 2048, 64, 32),
    "qwen3-8b": Shape("qwen3-8b", _drafter(4096, 32, 8, 128, 12_288, 151_669), 4096, 151_936, 12_288, 2048, 512),
}
