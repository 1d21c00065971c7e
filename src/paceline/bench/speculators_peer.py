"""The training module of PyPI speculators 0.9.0, unchanged but for where its anchors lie.

On a GPU its forward is compiled by torch.compile, as the package itself does it. Its samples share one row. Its loss is
its default for DFlash, cross-entropy with the target's best token, for which it runs the target's head, too: that is
part of its step and not of the useful work. On a CPU, where flex attention has no backward and its fused loss does not
run, its sdpa and its eager loss do.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from paceline import blocks
from paceline.bench.peers import PeerBatch, flat_anchors, frozen, import_around, qwen3_config
from paceline.bench.shapes import Shape
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import Drafter


class Speculators:
    """Its `DFlashDraftModel` around our weights."""

    def __init__(self, shape: Shape, drafter: Drafter, ends: FrozenEnds, dtype: torch.dtype) -> None:
        import_around("speculators", ["", "models"])
        import speculators
        from speculators.config import SpeculatorModelConfig

        speculators.SpeculatorModelConfig = SpeculatorModelConfig  # which its own modules read there
        from speculators.losses import resolve_loss_config
        from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig, core

        DFlashSpeculatorConfig.model_rebuild(force=True, _types_namespace={"torch": torch})
        own, device = shape.drafter, ends.head_VH.device
        layers = qwen3_config(shape)
        layers._attn_implementation = "simple_flex_attention" if device.type == "cuda" else "sdpa"
        config = DFlashSpeculatorConfig(
            transformer_layer_config=layers,
            draft_vocab_size=shape.vocab_size,
            block_size=own.block_size,
            aux_hidden_state_layer_ids=list(own.taps),
            mask_token_id=own.mask_token_id,
        )
        with torch.device(device):
            self._module: Any = DFlashDraftModel(config)
        missing, unexpected = self._module.load_state_dict(drafter.state_dict(), strict=False)
        kept = {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
        assert set(missing) == kept
        assert not unexpected
        self._module.to(dtype).train()
        self._module.embed_tokens.load_state_dict(frozen(ends.embed_VH), assign=True)
        for head in (self._module.lm_head, self._module.verifier_lm_head):
            head.load_state_dict(frozen(ends.head_VH), assign=True)
        self.trained: list[nn.Parameter] = [p for p in self._module.parameters() if p.requires_grad]
        self._loss_config = resolve_loss_config("ce", "fused" if device.type == "cuda" else "eager")
        self._gamma, self._slots = blocks.default_gamma(own.block_size), own.block_size
        self._anchors: Tensor | None = None
        draw = core.select_anchors

        def ours(*args: Any) -> tuple[Tensor, Tensor]:
            draw(*args)  # the package's own draw stays part of its step
            assert self._anchors is not None
            return self._anchors, torch.ones_like(self._anchors, dtype=torch.bool)

        core.select_anchors = ours

    def loss(self, batch: PeerBatch) -> Float[Tensor, ""]:
        """Return the mean loss over all labels, weighted by slot."""
        R, S = batch.ids_RS.shape
        features_1TD = batch.features_RSD.flatten(0, 1)[None]
        # No block may reach past the row's end here, so the last few anchors are moved to the front of it.
        self._anchors = flat_anchors(batch.anchors_RA, S).clamp(max=R * S - self._slots)
        _, loss, _ = self._module(
            hidden_states=features_1TD,
            input_ids=batch.ids_RS.view(1, -1),
            loss_mask=batch.supervised_RS.view(1, -1),
            verifier_last_hidden_states=features_1TD[..., : self._module.hidden_size],
            document_ids=torch.arange(R, device=features_1TD.device).repeat_interleave(S)[None],
            position_ids=torch.arange(S, device=features_1TD.device).repeat(R)[None],
            loss_config=self._loss_config,
            gamma=self._gamma,
            max_anchors=batch.anchors_RA.numel(),
        )
        return loss
