"""The drafter shapes that are measured."""

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
