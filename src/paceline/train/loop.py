"""The loop of a drafter rank: receive, step, report; nothing else."""

import math
from collections.abc import Callable, Iterable

from paceline.records import FeatureBatch, RunError, StepReport
from paceline.train.optim import learning_rate
from paceline.train.step import DrafterStep


def train_loop(
    step: DrafterStep, batches: Iterable[FeatureBatch], *, total_steps: int, on_step: Callable[[StepReport], None]
) -> None:
    """Train on feature batches in their order and hand every optimizer step's sums to `on_step`.

    Raises:
        RunError: the loss or the gradient norm of a step is not finite.
    """
    step.clear()
    for batch in batches:
        step.load(batch)
        step.micro()
        if not batch.tokens.closes_step:
            continue
        lr = learning_rate(batch.tokens.step, total_steps, step.settings)
        norm = step.divide()
        report = step.report(batch, lr, norm)
        if not math.isfinite(report.loss) or not math.isfinite(report.grad_norm):
            raise RunError(
                f"Loss {report.loss} with gradient norm {report.grad_norm} at step {report.step} is not finite and "
                f"was not applied; its last micro-batch held rows {list(batch.tokens.samples)}. Lower train.lr."
            )
        step.update(lr, norm)
        on_step(report)
        step.clear()
