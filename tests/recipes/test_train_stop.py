"""Signals where no step is under way."""

import os
import signal
from contextlib import suppress

import pytest

from paceline.recipes.train_stop import stoppable
from paceline.records import Interrupted, RunError


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


def raised_and_swallowed() -> None:
    """As in torch's import of NumPy."""
    with suppress(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_that_an_import_swallowed_ends_it_all_the_same() -> None:
    with pytest.raises(Interrupted, match="SIGTERM came while no step was under way"), stoppable() as imported:
        raised_and_swallowed()
        imported()
        raise AssertionError("the run began")


def test_an_import_that_fails_behind_a_swallowed_signal_was_interrupted() -> None:
    with pytest.raises(Interrupted, match="SIGTERM came while no step was under way"), stoppable():
        raised_and_swallowed()
        raise ModuleNotFoundError("Could not import module 'AttentionInterface'.")


def test_what_fails_without_a_signal_or_in_the_run_itself_is_no_interruption() -> None:
    with pytest.raises(ModuleNotFoundError), stoppable():
        raise ModuleNotFoundError("transformers")
    with pytest.raises(RunError, match="all replicas failed"), stoppable() as imported:
        imported()
        raised_and_swallowed()  # as the wait for trackers lets itself be cut short
        raise RunError("all replicas failed")
