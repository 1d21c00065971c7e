"""The loop of a drafter rank: receive, step, report; nothing else."""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

from paceline.records import FeatureBatch, RunError, StepReport, TokenBatch
from paceline.train.optim import learning_rate
from paceline.train.step import DrafterStep

# A micro-batch of this rank, or None; and the micro-batch that closes the step, this rank's or another's.
Dealt = tuple[FeatureBatch | None, TokenBatch | None]


def alone(batches: Iterable[FeatureBatch]) -> Iterable[Dealt]:
    """Yield what a rank gets that is the only one."""
    return ((batch, batch.tokens if batch.tokens.closes_step else None) for batch in batches)


def train_loop(
    step: DrafterStep,
    dealt: Iterable[Dealt],
    *,
    total_steps: int,
    on_step: Callable[[StepReport], None],
    meet: Callable[[int], bool] = lambda steps: False,
    between_steps: Callable[[int, bool], None] = lambda steps, last: None,
    work: Callable[[], AbstractContextManager[None]] = nullcontext,
    looks: Callable[[int], bool] = lambda steps: False,
    on_held_out: Callable[[StepReport], None] = lambda report: None,
) -> None:
    """Train on feature batches in their order and hand every optimizer step's sums to `on_step`.

    `meet` gets how many steps are done with the one that ends, sums what the ranks have, and says whether all of them
    stop after it. `between_steps` gets both once that step is applied. `work` is held around each unit of work (see
    Gate), never while this rank waits for a batch or for other ranks. `looks` says whether held-out micro-batches
    follow so many steps: then `on_held_out` gets their sums first, and `between_steps` is called once, after them.

    Raises:
        RunError: the loss or the gradient norm of a step is not finite.
    """
    step.clear()
    last = False
    for batch, closing in dealt:
        if batch is not None:
            with work():
                step.load(batch)
                step.micro()
        if closing is None:
            continue
        last = meet(closing.step + 1) or last
        if closing.held_out:
            with work():
                report = _looked_at(step, closing)
            on_held_out(report)
            between_steps(closing.step + 1, last)
            if last:
                return
            continue
        lr = learning_rate(closing.step, total_steps, step.settings)
        with work():
            step.update(lr)
            report = step.report(closing, lr)
            step.clear()
        if not math.isfinite(report.loss) or not math.isfinite(report.grad_norm):
            raise RunError(
                f"Loss {report.loss} with gradient norm {report.grad_norm} at step {report.step} is not finite and "
                f"was not applied; its last micro-batch held rows {list(closing.samples)}. Lower train.lr."
            )
        on_step(report)
        if looks(closing.step + 1):
            continue  # a save holds what comes of it, and a stop waits for it
        between_steps(closing.step + 1, last)
        if last:
            return


def _looked_at(step: DrafterStep, closing: TokenBatch) -> StepReport:
    """Return the sums of the held-out micro-batches that `closing` ends; nothing stays of them, their gradients least.

    The report's rate and gradient norm mean nothing.
    """
    report = step.report(closing, lr=0.0)
    step.clear()
    return report
