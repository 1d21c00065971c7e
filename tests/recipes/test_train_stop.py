"""Signals where no step is under way."""

import os
import signal

import pytest

from paceline.recipes.train_stop import stoppable
from paceline.records import Interrupted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_wait_that_ctrl_c_may_cut_short_is_cut_short(number: signal.Signals) -> None:
    """As the wait for trackers at a run's end is, which does not make the run an interrupted one."""
    cut = False
    with stoppable():
        try:
            os.kill(os.getpid(), number)
        except KeyboardInterrupt:
            cut = True
    assert cut


def test_elsewhere_it_ends_what_is_stoppable() -> None:
    with pytest.raises(Interrupted, match="SIGTERM came while no step was under way"), stoppable():
        os.kill(os.getpid(), signal.SIGTERM)
