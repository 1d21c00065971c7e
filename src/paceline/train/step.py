"""The drafter's step at its one shape: C context slots and A anchors, whatever the micro-batch holds.

`load` copies a micro-batch into static buffers, `micro` adds its gradients and sums, `divide` makes means of them,
`update` clips and steps. Sums cross the boundary, never means, so a step does not depend on how it was cut into
micro-batches. Unused slots are masked and add nothing.

Shapes: C context slots, A anchors, B block slots, D = m * H feature width, Q = A * B.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline import blocks
from paceline.config import TrainSettings
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.loss import frozen_head_loss
from paceline.drafter.model import Drafter
from paceline.records import FeatureBatch, StepReport
from paceline.train.optim import make_optimizers, set_learning_rate


@dataclass(slots=True)
class _Counts:
    """What the host knows of the step without asking the device."""

    blocks: int = 0
    anchor_slots: int = 0
    tokens: int = 0
    padded_tokens: int = 0


@dataclass(slots=True, eq=False)
class _Buffers:
    """One micro-batch at the one shape."""

    features_CD: Tensor
    positions_C: Tensor
    start_A: Tensor
    anchor_A: Tensor
    position_A: Tensor
    token_A: Tensor
    labels_AB: Tensor
    valid_AB: Tensor


class DrafterStep:
    """The drafter, its optimizer and the static buffers of one device."""

    def __init__(self, drafter: Drafter, ends: FrozenEnds, settings: TrainSettings) -> None:
        self.drafter, self.settings = drafter, settings
        weight = self.drafter.fc.weight
        self.device, self.dtype = weight.device, weight.dtype
        shape = self.drafter.settings
        C, A, B = self.settings.context_slots, self.settings.anchor_slots, shape.block_size
        self.autocast = self.settings.dtype == "bfloat16"
        wire = torch.bfloat16 if self.autocast else self.dtype
        # Head products run in the compute format; the loss itself is float32 or wider.
        self.ends = ends.to(self.device, wire)

        def zeros(*size: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=self.device)

        self.buffers = _Buffers(
            features_CD=zeros(C, self.drafter.fc.in_features, dtype=wire),
            positions_C=zeros(C),
            start_A=zeros(A),
            anchor_A=zeros(A),
            position_A=zeros(A),
            token_A=zeros(A),
            labels_AB=zeros(A, B),
            valid_AB=zeros(A, B, dtype=torch.bool),
        )
        gamma = self.settings.gamma or blocks.default_gamma(B)
        self.weights_B = blocks.slot_weights(B, gamma).to(self.device)
        self.sums = torch.zeros(2, dtype=torch.float64, device=self.device)  # loss, weight
        self.prefixes = torch.zeros(2, B - 1, dtype=torch.long, device=self.device)  # accepted, available
        self.counts = _Counts()
        self.optimizers = make_optimizers(self.drafter, self.settings)
        for parameter in self.drafter.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def load(self, batch: FeatureBatch) -> None:
        """Copy a micro-batch into the buffers; what it does not fill is masked."""
        tokens, blockset, to = batch.tokens, batch.tokens.blocks, self.buffers
        used, K = len(batch.positions_T), len(blockset.anchor_K)
        to.features_CD[:used].copy_(batch.features_TD)
        to.features_CD[used:].zero_()
        to.positions_C[:used].copy_(batch.positions_T)
        to.positions_C[used:].zero_()
        # An unused anchor starts and ends at slot 0: it sees no context and only itself, so no row is empty.
        for buffer, values in (
            (to.start_A, blockset.start_K),
            (to.anchor_A, blockset.anchor_K),
            (to.position_A, blockset.position_K),
            (to.token_A, blockset.token_K),
            (to.labels_AB, blockset.labels_KB),
            (to.valid_AB, blockset.valid_KB),
        ):
            buffer[:K].copy_(values, non_blocking=values.is_pinned())  # which is not given out again before its copy
            buffer[K:].zero_()
        self.counts.blocks += K
        self.counts.anchor_slots += len(to.anchor_A)
        self.counts.tokens += tokens.num_tokens
        self.counts.padded_tokens += tokens.input_ids.numel()

    def micro(self) -> None:
        """Run forward, loss and backward on the loaded micro-batch and add to gradients and sums."""
        own, B = self.buffers, len(self.weights_B)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            hidden_AQH = self._hidden()
        weights_AB = own.valid_AB * self.weights_B
        # Slot 0 is known; dropping it saves its share of the head's work.
        loss, hits = frozen_head_loss(
            hidden_AQH[:, 1:].flatten(0, 1),
            self.ends.head_VH,
            own.labels_AB[:, 1:].flatten(),
            weights_AB[:, 1:].flatten(),
            logits_bytes=self.settings.logits_mib << 20,
        )
        loss.backward()
        valid_AK = own.valid_AB[:, 1:]
        right_AK = hits.view(-1, B - 1) & valid_AK
        self.sums += torch.stack([loss.detach().double(), weights_AB.sum()])
        self.prefixes += torch.stack([m.long().cumprod(-1).sum(0) for m in (right_AK, valid_AK)])

    def _hidden(self) -> Tensor:
        own, B = self.buffers, len(self.weights_B)
        present_AB = torch.ones_like(own.valid_AB)
        mask = blocks.block_mask(own.start_A[None], own.anchor_A[None], present_AB[None], len(own.positions_C))
        ids_AB = blocks.block_ids(own.token_A, self.drafter.settings.mask_token_id, B)
        embeds_1QH = self.ends.embed(ids_AB.view(1, -1)).to(self.dtype)
        positions_1Q = blocks.block_positions(own.position_A, B).view(1, -1)
        context = self.drafter.context(own.features_CD[None], own.positions_C[None])
        return self.drafter(embeds_1QH, positions_1Q, context, mask).view(*ids_AB.shape, -1)

    def divide(self) -> Tensor:
        """Divide the summed gradients by the summed weight and return their norm; weights are as before."""
        gradients = [p.grad for p in self.drafter.parameters() if p.grad is not None]
        torch._foreach_div_(gradients, self.sums[1].clamp_min(1e-30).to(self.dtype))
        return torch.nn.utils.get_total_norm(gradients)

    def update(self, lr: float, norm: Tensor) -> None:
        """Clip the divided gradients, whose norm is `norm`, and step at rate `lr`."""
        torch.nn.utils.clip_grads_with_norm_(self.drafter.parameters(), self.settings.clip, norm)
        set_learning_rate(self.optimizers, lr)
        for optimizer in self.optimizers:
            optimizer.step()

    def rehearse(self) -> None:
        """Run micro and update at the one shape with every slot masked, for their memory; nothing stays changed."""
        self.micro()
        self.update(0.0, self.divide())
        self.optimizers = make_optimizers(self.drafter, self.settings)  # forget that a step was counted
        self.clear()

    def clear(self) -> None:
        """Forget gradients, sums and counts, as before a step's first micro-batch."""
        torch._foreach_zero_([p.grad for p in self.drafter.parameters() if p.grad is not None])
        self.sums.zero_()
        self.prefixes.zero_()
        self.counts = _Counts()

    def report(self, batch: FeatureBatch, lr: float, norm: Tensor) -> StepReport:
        """Return the sums of the step that `batch` closes (waits for the device)."""
        loss_sum, weight_sum = self.sums.tolist()
        accepted_K, available_K = self.prefixes.tolist()
        return StepReport(
            step=batch.tokens.step,
            epoch=batch.tokens.epoch,
            loss_sum=loss_sum,
            weight_sum=weight_sum,
            accepted_K=tuple(accepted_K),
            available_K=tuple(available_K),
            blocks=self.counts.blocks,
            anchor_slots=self.counts.anchor_slots,
            tokens=self.counts.tokens,
            padded_tokens=self.counts.padded_tokens,
            lr=lr,
            grad_norm=float(norm),
        )
