"""Going back to a checkpoint: who waits for whom and for how long, and what a run that cannot says."""

import threading
import time
from typing import Any

import pytest

from paceline.checkpoint.saver import Saver
from paceline.config import GuardSettings
from paceline.pipeline.rollback import Rollback
from paceline.records import RunError
from paceline.runtime.gate import Gate
from paceline.runtime.pulse import Pulse, adopt
from paceline.train.guard import Guard, Rejected
from paceline.train.ranks import Meeting
from paceline.train.step import DrafterStep


class SlowDisk(Saver):
    """A saver whose save is not on the disk until `opened`."""

    def __init__(self) -> None:
        self.asked, self.opened, self._line = threading.Event(), threading.Event(), []

    def settle(self) -> None:
        self.asked.set()
        assert self.opened.wait(60)


def test_a_rank_that_waits_for_another_ones_look_at_the_disk_does_not_seem_to_hang(settings: Any) -> None:
    """The first rank waits for a save that may wait for room on the disk for as long as it likes."""
    saver, pulses, errors = SlowDisk(), [Pulse(), Pulse()], []
    go_back = Rollback(
        settings("run"),
        saver=saver,
        meeting=Meeting(2),
        gate=Gate(),
        tell=lambda steps, to: None,
        warn=lambda text: None,
    )

    def body(rank: int) -> None:
        adopt(pulses[rank])
        pulses[rank].work()
        guard = Guard(GuardSettings(), 1.0)
        guard.rejected = [Rejected(3, "loss nan", [1])]
        try:
            go_back(rank, object.__new__(DrafterStep), guard, 4)
        except RunError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(2)]
    threads[0].start()
    assert saver.asked.wait(10)
    threads[1].start()
    until = time.monotonic() + 10
    while pulses[1].now.kind != "waits" and time.monotonic() < until:
        time.sleep(0.01)
    kind = pulses[1].now.kind
    saver.opened.set()
    for thread in threads:
        thread.join(10)
    assert kind == "waits"
    assert len(errors) == 2
    assert all("has no whole checkpoint from before them to go back to" in error for error in errors)


@pytest.mark.parametrize(("rejected", "offered"), [(5, 100), (150, 1500)])
def test_other_limits_that_are_offered_permit_more(settings: Any, rejected: int, offered: int) -> None:
    limits = GuardSettings(rejected=rejected)
    tree = settings("run").model_copy(update={"guard": limits})
    saver, meeting, step = (object.__new__(kind) for kind in (Saver, Meeting, DrafterStep))  # which it does not ask
    roll_back = Rollback(tree, saver=saver, meeting=meeting, gate=Gate(), tell=lambda *_: None, warn=lambda _: None)
    guard = Guard(limits, 1.0)
    guard.roll_back(0)
    with pytest.raises(RunError, match=rf"--resume guard\.rejected={offered}`"):
        roll_back(0, step, guard, 7)
