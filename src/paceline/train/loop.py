"""The loop of a drafter rank: receive, step, report; nothing else."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

from paceline.config import GuardSettings
from paceline.records import FeatureBatch, Rejection, StepReport, Suspect, TokenBatch
from paceline.train.guard import Broken, Guard
from paceline.train.look import Look
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
    guard: Guard | None = None,
    rank: int = 0,
    on_rejected: Callable[[Rejection], None] = lambda rejection: None,
    roll_back: Callable[[int], None] = lambda steps: None,
    meet: Callable[[int], bool] = lambda steps: False,
    between_steps: Callable[[int, bool], None] = lambda steps, last: None,
    on_whole: Callable[[int], None] = lambda steps: None,
    work: Callable[[], AbstractContextManager[None]] = nullcontext,
    looks: Callable[[int], bool] = lambda steps: False,
    on_held_out: Callable[[StepReport], None] = lambda report: None,
) -> None:
    """Train on feature batches in their order and hand every optimizer step's sums to `on_step`.

    A step that `guard` does not let through leaves the drafter and the schedule as they are and is handed to
    `on_rejected` too; when there were too many of them, `roll_back` is called with how many steps are done.

    `meet` gets how many steps are done with the one that ends, sums what the ranks have, and says whether all of them
    stop after it. `on_whole` gets how many are done as soon as weights, moments and guard are those after that step,
    `between_steps` gets both once nothing more belongs to it. `looks` says whether held-out micro-batches follow
    so many steps: then `on_held_out` gets their sums first, and `between_steps` is called once, after them. `work` is
    held around each unit of work (see Gate), never while this rank waits for a batch or for other ranks.
    """
    guard = guard or Guard(GuardSettings(), step.settings.clip)
    seen: list[Look] = []
    step.clear()
    last = False
    for batch, closing in dealt:
        if batch is not None:
            with work():
                with batch.reading():
                    step.load(batch)
                step.micro()
                if not batch.tokens.held_out:
                    seen.append(step.look(batch.tokens))
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
        lr = learning_rate(guard.applied, total_steps, step.settings)
        with work():
            step.limit(*guard.limits())
            step.update(lr)
            report = step.report(closing, lr)
            step.clear()
            suspects = () if report.applied else tuple(look.read() for look in seen)
        seen.clear()
        on_step(report)
        if broken := guard.add(report, [row for suspect in suspects for row in suspect.samples]):
            on_rejected(_rejection(report, rank, broken, suspects))
        if guard.exceeded:
            roll_back(closing.step + 1)
        on_whole(closing.step + 1)
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


def _rejection(report: StepReport, rank: int, broken: Broken, suspects: tuple[Suspect, ...]) -> Rejection:
    return Rejection(
        step=report.step,
        rank=rank,
        loss=report.loss,
        grad_norm=report.grad_norm,
        rule=broken.rule,
        limit=broken.limit,
        why=str(broken),
        suspects=suspects,
    )
