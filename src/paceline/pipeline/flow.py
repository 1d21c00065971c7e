"""The way of micro-batches through a run, and what rank 0 does with it between two steps."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from paceline.checkpoint.saver import Saver
from paceline.config import RunSettings
from paceline.data.prefetch import Prefetch
from paceline.pipeline.channel import OrderedChannel
from paceline.pipeline.dispenser import Dispenser
from paceline.pipeline.evaluator import Evaluator
from paceline.pipeline.slots import Slots, written_at_once
from paceline.records import TokenBatch
from paceline.train.guard import Guard
from paceline.train.step import DrafterStep


class Flow(NamedTuple):
    """What micro-batches pass: built ahead, handed out, and in order again with their features."""

    ahead: Prefetch[TokenBatch]
    source: Dispenser
    channel: OrderedChannel
    slots: Slots

    def stop(self) -> None:
        """Let nobody wait for room or for data."""
        self.source.stop()
        self.channel.stop()


def make_flow(settings: RunSettings, batches: Iterator[TokenBatch]) -> Flow:
    """Return the way of a run's micro-batches."""
    ahead = Prefetch(batches, settings.data.prefetch)
    pipeline, credit = settings.pipeline, int(settings.pipeline.credit_gib * 2**30)
    slots = Slots(credit, replicas=written_at_once(settings), ranks=len(pipeline.drafters))
    source = Dispenser(ahead, on_end=lambda count: channel.finish(count), slots=slots)
    channel = OrderedChannel(credit, source.missing_before)
    return Flow(ahead, source, channel, slots)


def between_steps(
    flow: Flow, guard: Guard, saver: Saver, evaluator: Evaluator | None
) -> Callable[[DrafterStep, int, bool], None]:
    """Return what rank 0 does between two steps: save, hand weights to the evaluator, and at the end let all go."""

    def between(step: DrafterStep, steps: int, last: bool) -> None:
        claimed = evaluator is not None and evaluator.claim(steps)
        more = {"guard": guard.state()}
        saver.between_steps(steps, step.state(), last=last, more=more, good=guard.first_rejected, candidate=claimed)
        if evaluator is not None and claimed and not last:
            evaluator.give(list(step.drafter.parameters()))
        if last:  # the other ranks have met and ask for nothing more; replicas may wait for room or for data
            flow.stop()
            flow.ahead.close()
            if evaluator is not None:
                evaluator.stop()

    return between
