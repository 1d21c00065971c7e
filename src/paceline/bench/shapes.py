"""The drafter shapes that are measured."""

from dataclasses import dataclass, replace

from paceline.config import DrafterSettings, TrainSettings


@dataclass(frozen=True, slots=True)
class Shape:
    """A drafter and the one shape of its micro-batch.

    With `lengths`, every micro-batch holds samples of these; without, those of a run's plan.
    """

    name: str
    drafter: DrafterSettings
    hidden_size: int
    vocab_size: int
    context_slots: int
    anchor_slots: int
    anchors_per_sample: int
    lengths: tuple[int, ...] = ()
    tied: bool = False  # embedding and head are one tensor

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


def _fixed(shape: Shape, name: str, samples: int, length: int, anchors: int, context_slots: int) -> Shape:
    """Return the shape with so many samples of one length, which fill all anchor slots."""
    lengths = (length,) * samples
    return replace(
        shape,
        name=name,
        context_slots=context_slots,
        anchor_slots=samples * anchors,
        anchors_per_sample=anchors,
        lengths=lengths,
    )


_TINY = Shape("tiny", _drafter(64, 4, 2, 16, 128, 3), 64, 500, 256, 16, 8)
_SMALL = Shape("small", _drafter(1024, 8, 4, 128, 3072, 31_999), 1024, 32_000, 2048, 64, 32)
_QWEN3_4B = Shape("qwen3-4b", _drafter(2560, 32, 8, 128, 9728, 151_669), 2560, 151_936, 12_288, 2048, 512, tied=True)
_QWEN3_8B = Shape("qwen3-8b", _drafter(4096, 32, 8, 128, 12_288, 151_669), 4096, 151_936, 12_288, 2048, 512)

SHAPES = {
    shape.name: shape
    for shape in (
        _TINY,
        _SMALL,
        _QWEN3_4B,
        _QWEN3_8B,
        # Samples of one length, as peers publish their figures: nothing is padded, so nothing but the step is compared.
        _fixed(_TINY, "tiny-2x128", 2, 128, 8, 256),
        _fixed(_QWEN3_8B, "qwen3-8b-2x3072", 2, 3072, 512, 6144),
        _fixed(_QWEN3_8B, "qwen3-8b-8x550", 8, 550, 256, 4480),  # 4,400 tokens in whole tiles
    )
}
