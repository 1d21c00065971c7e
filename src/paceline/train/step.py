"""The drafter's step at its one shape: C context slots and A anchors, whatever the micro-batch holds.

`load` copies a micro-batch into static buffers, `micro` adds its gradients and sums, `update` makes means of them,
clips and steps. Sums cross the boundary, never means, so a step does not depend on how it was cut into micro-batches.
Unused slots are masked and add nothing.

Between `micro` and `update` gradients may be summed over other ranks; both work on static buffers and never wait for
the device, so each can be captured as a CUDA graph. Matrix products run in the weights' working copy (bfloat16 or the
weights themselves) or, made of it as they run, in fp8; sums, moments and weights are float32.

Shapes: C context slots, A anchors, B block slots, D = m * H feature width, Q = A * B.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from paceline import blocks
from paceline.config import TrainSettings
from paceline.drafter.attention import Dense, Sparse, Visibility, block_sparse, fits_tiles
from paceline.drafter.block_attention import Ranges
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.float8 import halves8, linear8
from paceline.drafter.fused_head import FrozenHead8, fused_head_loss, has_kernel, head_in_fp8
from paceline.drafter.joined import Joined, Turns, distinct_ids, leaf_names, turns
from paceline.drafter.loss import HeadLoss, frozen_head_loss, head_loss
from paceline.drafter.model import Drafter
from paceline.drafter.packed import put
from paceline.records import FeatureBatch, RunError, StepReport, TokenBatch
from paceline.runtime.capture import Captured, new_pool
from paceline.runtime.compiling import OneShape, Policy
from paceline.train import check
from paceline.train.backward import Backward, ByLayers, at_once, collect
from paceline.train.buffers import Buffers
from paceline.train.flat import Flat
from paceline.train.look import Look, checksum
from paceline.train.optim import Optimizer


class DrafterStep:
    """The drafter, its optimizer and the static buffers of one device.

    `drafter` holds the weights that are trained and saved; they become views of one buffer. `policy` says how the step
    runs: `eager`, `compiled`, or `captured`, which needs a CUDA device; the latter two become so in `warm`.
    """

    def __init__(
        self,
        drafter: Drafter,
        ends: FrozenEnds,
        settings: TrainSettings,
        *,
        policy: Policy = "eager",
        alarm: Callable[[str], None] = lambda reason: None,
    ) -> None:
        assert settings.fp8 != "auto", "choose_fp8 makes on or off of it"
        self.drafter, self.settings, self.policy = drafter, settings, policy
        weight = drafter.fc.weight
        self.device, self.dtype = weight.device, weight.dtype
        shape = drafter.settings
        C, A, B = settings.context_slots, settings.anchor_slots, shape.block_size
        mixed = settings.dtype == "bfloat16"
        wire = torch.bfloat16 if mixed else self.dtype
        self._flat = Flat(drafter, leaf_names(name for name, _ in drafter.named_parameters()))
        leaves = self._flat.leaves(self._flat.weights_P)
        # Norms are used as they are; without a copy of the matrices, these are, too.
        copy_S = self._flat.weights_P[: self._flat.matrix_entries].bfloat16() if mixed else None
        leaves |= {} if copy_S is None else self._flat.leaves(copy_S)
        working = {name: nn.Parameter(leaf) for name, leaf in leaves.items()}
        products = (linear8, halves8) if settings.fp8 == "on" else ()
        self._working, self._leaves = Joined(shape, working, *products), list(working.values())
        self.gradients = self._flat.gradients_P
        self._summed = dict(zip(self._leaves, self._flat.leaves(self.gradients).values(), strict=True))
        # Head products run in the compute format; the loss itself is float32 or wider.
        self.ends = ends.to(self.device, wire)
        self.buffers = Buffers.empty(C, A, B, drafter.fc.in_features, wire=wire, device=self.device)
        gamma = settings.gamma or blocks.default_gamma(B)
        self.weights_B = blocks.slot_weights(B, gamma).to(self.device)
        self.sums = torch.zeros(2, dtype=torch.float64, device=self.device)  # loss, weight
        self.micro_sums = torch.zeros_like(self.sums)  # of the last micro-batch alone
        self.prefixes = torch.zeros(2, B - 1, dtype=torch.long, device=self.device)  # accepted, available
        self.norm = torch.zeros((), dtype=torch.float64, device=self.device)
        # The largest loss and gradient norm that are applied.
        self.limits_2 = torch.full((2,), math.inf, dtype=torch.float64, device=self.device)
        # 0: update leaves weights, moments and step count as they are.
        self.apply = torch.ones((), dtype=torch.float32, device=self.device)
        # Blocks, anchor slots, tokens, padded and visible tokens; a tensor, to be summed over ranks like the rest.
        self.counts_5 = torch.zeros(5, dtype=torch.float64, device=self.device)
        self.optimizer = Optimizer(self._flat, settings, copy_S=copy_S, one_pass=policy != "eager", alarm=alarm)
        self._sparse = policy != "eager" and self.device.type == "cuda" and fits_tiles(C, A, B)
        self._compiled, self._alarm = list[OneShape](), alarm  # what is compiled of a micro-batch
        self._forward: Callable[[Visibility, Turns], Tensor] = self._hidden
        self._by_layers: ByLayers | None = None
        if settings.recompute == "layers":
            self._by_layers = ByLayers(self._working, (A, B), self._as_told)
        else:
            self._forward = self._as_told(self._hidden)
        self._head: Tensor | FrozenHead8 = self.ends.head_VH
        self._head_loss: Callable[..., HeadLoss] = fused_head_loss
        if policy == "eager" or not has_kernel(self.ends.head_VH):
            self._head_loss = self._as_told(head_loss)
        elif settings.fp8 == "on":
            self._head = head_in_fp8(self.ends.head_VH)
        # By whether it is the first of a step, which writes its gradients where the others add: nothing is cleared.
        self._micro: Callable[[bool], None] = self._run_micro
        self._first = True
        self._update: Callable[[], None] = self._run_update

    @property
    def recompiles(self) -> int:
        """Calls that torch would have compiled again after warm-up."""
        return self.optimizer.recompiles + sum(part.recompiles for part in self._compiled)

    def _as_told(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return how a function of a micro-batch is called under the policy."""
        if self.policy == "eager":
            return function

        def without_tiles(*given: Any) -> Any:  # which only compiled code goes through one by one
            return function(*(self._dense() if isinstance(part, Sparse | Ranges) else part for part in given))

        self._compiled.append(OneShape(function, instead=without_tiles, alarm=self._alarm))
        return self._compiled[-1]

    def load(self, batch: FeatureBatch) -> None:
        """Copy a micro-batch into the buffers; what it does not fill is masked."""
        tokens, blockset, to = batch.tokens, batch.tokens.blocks, self.buffers
        used, K = len(batch.positions_T), len(blockset.anchor_K)
        put(batch.features_TD, to.features_CD)
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
        visible = int((blockset.anchor_K - blockset.start_K).sum())
        counts = (K, len(to.anchor_A), tokens.num_tokens, tokens.input_ids.numel(), visible)
        self.counts_5 += torch.tensor(counts, dtype=torch.float64).to(self.device, non_blocking=True)

    def micro(self) -> None:
        """Run forward, loss and backward on the loaded micro-batch and add to gradients and sums."""
        self._micro(self._first)
        self._first = False

    def look(self, tokens: TokenBatch) -> Look:
        """Return what can be said of the micro-batch that was loaded and run last, without waiting for the device."""
        features_sum = checksum(self.buffers.features_CD[: tokens.num_tokens])
        return Look(tokens.samples, features_sum, self.micro_sums.clone())

    def limit(self, loss: float, grad_norm: float) -> None:
        """Set the largest loss and gradient norm that the next `update` applies."""
        self.limits_2[0].fill_(loss)
        self.limits_2[1].fill_(grad_norm)

    def update(self, lr: float) -> None:
        """Divide the summed gradients by the summed weight, clip them and step at rate `lr`.

        `norm` then holds the gradients' norm before clipping. What is not finite or above its limit, loss or norm, is
        never applied, nor is what no slot had a label for: weights, moments and counts stay as they are.
        """
        self.optimizer.lr.fill_(lr)
        self._update()

    def warm(self) -> None:
        """Compile and capture at the one shape with every slot masked; nothing stays changed. Run this alone.

        Raises:
            RunError: what was compiled does not compute what plain code does.
        """
        self.clear()
        self.apply.zero_()
        for first in (True, False):  # compiles; without a compiler, a rehearsal of the memory
            self._run_micro(first)
        self._run_update()
        told_2 = self._check() if self.policy != "eager" else torch.zeros(2)
        if self.policy == "captured":
            pool = new_pool(self.device)
            # Nothing in the pool outlives a replay, so that only one of two is replayed does no harm. A rehearsal of
            # the second would need all of the first one's memory again.
            begins = Captured(partial(self._run_micro, True), pool=pool)
            goes_on = Captured(partial(self._run_micro, False), pool=pool, rehearsals=0)
            self._micro = lambda first: (begins if first else goes_on)()
            self._update = Captured(self._run_update, pool=pool)
            self._check_again(told_2)
        self.buffers.mask_()
        self.apply.fill_(1)
        self.clear()

    def _check(self) -> Tensor:
        """Hold the compiled step against plain code (see `check`); return its loss and its gradient's norm.

        The buffers still hold what was checked.
        """
        own = self.buffers
        bounds, fp8 = self._bounds()
        made = check.best_labels(self.drafter, self.ends, check.contents(own, len(self.ends.head_VH)), self.weights_B)
        own.copy_(made.buffers)
        made.buffers.features_CD = own.features_CD  # which hold the same: one of the two is enough
        self.clear()
        hidden_NH = self._ahead()[0].detach()
        hits_N = self._through_head(hidden_NH, own.valid_AB * self.weights_B)[1]
        A, checked = len(own.start_A), made.checked_k
        hidden_kbH, hits_kb = hidden_NH.view(A, -1, hidden_NH.shape[1])[checked], hits_N.view(A, -1)[checked]
        del hidden_NH  # of all blocks, which a step has no room for beside its own
        self._run_micro(first=True)
        parts = self._flat.named(self.gradients)
        plain = check.plain(self.drafter, self.ends, made, self.weights_B, bounds.hidden, parts.__getitem__)
        found = plain.errors(hidden_kbH, hits_kb, float(self.micro_sums[0]), made, bounds)
        check.hold(found, device=self.device, fp8=fp8)
        return self._told()

    def _check_again(self, told_2: Tensor) -> None:
        """Hold both captured micro-batches, that which overwrites and that which adds, against the compiled one."""
        self._micro(True)
        once_2 = self._told()
        self._micro(False)
        twice_2 = self._told() / torch.tensor([1.0, 2.0], device=self.device)
        loss, gradient = (torch.stack([once_2, twice_2]) / told_2 - 1).abs().amax(0).tolist()
        bounds, fp8 = self._bounds()
        found = {"a replay's loss": (loss, bounds.loss), "a replay's gradient": (gradient, bounds.gradients)}
        check.hold(found, device=self.device, fp8=fp8)

    def _bounds(self) -> tuple[check.Bounds, bool]:
        fp8 = self.settings.fp8 == "on"
        return check.BOUNDS["fp8" if fp8 else str(self.buffers.features_CD.dtype).removeprefix("torch.")], fp8

    def _told(self) -> Tensor:
        return torch.stack([self.micro_sums[0], torch.linalg.vector_norm(self.gradients).double()])

    def clear(self) -> None:
        """Forget gradients, sums and counts, as before a step's first micro-batch, which then overwrites gradients."""
        self._first = True
        self.sums.zero_()
        self.prefixes.zero_()
        self.counts_5.zero_()

    def shared(self) -> list[Tensor]:
        """Return what ranks sum before an update; one without a micro-batch in this step adds nothing."""
        if self._first:
            self.gradients.zero_()
            self._first = False
        return [self.gradients, self.sums, self.prefixes, self.counts_5]

    def report(self, closing: TokenBatch, lr: float) -> StepReport:
        """Return the sums of the step that a micro-batch closes (waits for the device)."""
        skip = self.optimizer.skip.double()
        everything = (self.sums, self.norm[None], skip[None], self.counts_5, self.prefixes.flatten().double())
        loss_sum, weight_sum, norm, skipped, *counts = torch.cat(everything).tolist()
        blocks_, anchor_slots, tokens, padded_tokens, visible, *prefixes = map(int, counts)
        slots = self.prefixes.shape[1]
        return StepReport(
            step=closing.step,
            epoch=closing.epoch,
            loss_sum=loss_sum,
            weight_sum=weight_sum,
            accepted_K=tuple(prefixes[:slots]),
            available_K=tuple(prefixes[slots:]),
            blocks=blocks_,
            anchor_slots=anchor_slots,
            tokens=tokens,
            padded_tokens=padded_tokens,
            visible=visible,
            lr=lr,
            grad_norm=norm,
            applied=not skipped,
        )

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return what outlives a step, by the file that keeps it: live tensors, some of them in host memory."""
        return {"drafter": dict[str, Tensor](self.drafter.named_parameters()), "optimizer": self.optimizer.state()}

    @torch.no_grad()
    def restore(self, saved: Iterable[tuple[str, str, Tensor]]) -> None:
        """Take over a state as (file, name, tensor): into the tensors that are there, which captured graphs hold.

        Raises:
            RunError: the state is not that of this drafter and optimizer.
        """
        self.optimizer.wait()  # for what an update would put over it
        left = {(file, name): tensor for file, group in self.state().items() for name, tensor in group.items()}
        for file, name, tensor in saved:
            own = left.pop((file, name), None)
            if own is None or (own.shape, own.dtype) != (tensor.shape, tensor.dtype):
                raise RunError(f"A checkpoint must hold this drafter's state, but its {file} has {name} of another.")
            own.copy_(tensor)
        if left:
            raise RunError(f"A checkpoint must hold this drafter's state, but it lacks {next(iter(left))}.")
        self.optimizer.refresh()

    def _run_micro(self, first: bool) -> None:
        own = self.buffers
        weights_AB = own.valid_AB * self.weights_B
        hidden_NH, backward = self._ahead()
        loss, hits_N, grad_NH = self._through_head(hidden_NH.detach(), weights_AB)
        parts = backward(grad_NH)
        del hidden_NH, grad_NH, backward  # they go as soon as backward does not need them
        for part in parts:
            collect(part, self._summed, first=first)
        valid_AK = own.valid_AB[:, 1:]
        right_AK = hits_N.view_as(valid_AK) & valid_AK
        self.micro_sums.copy_(torch.stack([loss.double(), weights_AB.sum()]))
        self.sums += self.micro_sums
        self.prefixes += torch.stack([m.long().cumprod(-1).sum(0) for m in (right_AK, valid_AK)])

    def _through_head(self, hidden_NH: Tensor, weights_AB: Tensor) -> HeadLoss:
        # Slot 0 is known; dropping it saves its share of the head's work.
        return frozen_head_loss(
            hidden_NH,
            self._head,
            self.buffers.labels_AB[:, 1:].flatten(),
            weights_AB[:, 1:].flatten(),
            logits_bytes=self.settings.logits_mib << 20,
            cap=self.ends.cap,
            chunk=self._head_loss,
        )

    def _run_update(self) -> None:
        weight = self.sums[1].clamp_min(1e-30)
        wide = torch.promote_types(self.dtype, torch.float32)
        norm = torch.linalg.vector_norm(self.gradients, dtype=wide) / weight
        self.norm.copy_(norm)
        # The optimizer divides as it reads: a pass over the gradients to divide and one to clip are saved.
        self.optimizer.divisor.copy_(weight * ((norm + 1e-6) / self.settings.clip).clamp_min(1.0))
        told_2 = torch.stack([self.sums[0] / weight, self.norm])
        fit = torch.isfinite(told_2).all() & (told_2 <= self.limits_2).all() & (self.sums[1] > 0)
        self.optimizer.skip.copy_(1 - self.apply * fit)
        self.optimizer.step()

    def _visibility(self) -> Visibility:
        own = self.buffers
        if self._sparse:
            dtype = own.features_CD.dtype
            return block_sparse(own.start_A, own.anchor_A, len(own.positions_C), self.drafter.settings, dtype)
        return self._dense()

    def _dense(self) -> Dense:
        own = self.buffers
        present_AB = torch.ones_like(own.valid_AB)
        return Dense(blocks.block_mask(own.start_A[None], own.anchor_A[None], present_AB[None], len(own.positions_C)))

    def _turns(self) -> Turns:
        """Return the rotary tables, which every layer's kernels read: worked out in each, they would cost more."""
        own = self.buffers
        positions_Q = blocks.block_positions(own.position_A, len(self.weights_B)).flatten()
        return turns(torch.cat([own.positions_C, positions_Q]), self.drafter.settings, own.features_CD.dtype)

    def _ahead(self) -> tuple[Float[Tensor, "N H"], Backward]:
        """Return the hidden states behind the anchors and their backward."""
        if self._by_layers is None:
            hidden_NH = self._forward(self._visibility(), self._turns())
            return hidden_NH, at_once(hidden_NH, self._leaves)
        return self._by_layers.forward(self.buffers.features_CD, self._embeds(), self._turns(), self._visibility())

    def _hidden(self, visibility: Visibility, turns: Turns) -> Float[Tensor, "N H"]:
        """Return the drafter's output at the slots behind the anchors, N = A * (B - 1)."""
        own = self.buffers
        return self._working(own.features_CD, self._embeds(), tuple(own.labels_AB.shape), turns, visibility)

    def _embeds(self) -> Float[Tensor, "U H"]:
        ids_U = distinct_ids(self.buffers.token_A, self.drafter.settings.mask_token_id)
        return self.ends.embed(ids_U[None])[0].to(self.buffers.features_CD.dtype)
