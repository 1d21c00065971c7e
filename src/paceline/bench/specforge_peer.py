"""SpecForge's DFlash training module (PyPI specforge 0.2.0), unchanged but for where its anchors lie.

Attention is flex attention as transformers compiles it, the package's default, or on a CPU, where that has no backward,
its sdpa; nothing else of the module is compiled. `chunk_blocks` is its `training.objective_chunk_blocks`, 128 by
default, 0 for one pass; both are measured.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from paceline import blocks
from paceline.bench.peers import PeerBatch, import_around, qwen3_config, shared_embedding, shared_linear
from paceline.bench.shapes import Shape
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import Drafter

VARIANTS = {f"objective_chunk_blocks {chunk}": chunk for chunk in (128, 0)}


class SpecForge:
    """Its `OnlineDFlashModel` around our weights."""

    def __init__(self, shape: Shape, drafter: Drafter, ends: FrozenEnds, dtype: torch.dtype, chunk_blocks: int) -> None:
        import_around("specforge", ["modeling.draft", "algorithms", "algorithms.common"])
        from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
        from specforge.modeling.draft.dflash import DFlashDraftModel

        own, config = shape.drafter, qwen3_config(shape)
        config.block_size, config.num_target_layers = own.block_size, max(own.taps) + 3
        config.dflash_config = {"target_layer_ids": list(own.taps), "mask_token_id": own.mask_token_id}
        device = ends.head_VH.device
        attention = "flex_attention" if device.type == "cuda" else "sdpa"
        config._attn_implementation = attention
        with torch.device(device):
            draft: Any = DFlashDraftModel(config)
        draft.load_state_dict(drafter.state_dict())
        self._anchors: Tensor | None = None
        self._module: Any = OnlineDFlashModel(
            draft_model=draft.to(dtype).train(),
            target_lm_head=shared_linear(ends.head_VH),
            target_embed_tokens=shared_embedding(ends.embed_VH),
            mask_token_id=own.mask_token_id,
            block_size=own.block_size,
            attention_backend=attention,
            num_anchors=shape.anchors_per_sample,
            loss_decay_gamma=blocks.default_gamma(own.block_size),
            objective_chunk_blocks=chunk_blocks,
        )
        draw = self._module._sample_anchor_positions

        def ours(*args: Any) -> tuple[Tensor, Tensor]:
            draw(*args)  # the package's own draw stays part of its step
            assert self._anchors is not None
            return self._anchors, torch.ones_like(self._anchors, dtype=torch.bool)

        self._module._sample_anchor_positions = ours
        self.trained: list[nn.Parameter] = [p for p in draft.parameters() if p.requires_grad]

    def loss(self, batch: PeerBatch) -> Float[Tensor, ""]:
        """Return the mean loss over all labels, weighted by slot."""
        self._anchors = batch.anchors_RA
        loss, _, _ = self._module(batch.ids_RS, batch.features_RSD, batch.supervised_RS)
        return loss
