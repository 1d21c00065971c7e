"""What a thread says of itself."""

import threading

from paceline.runtime import pulse
from paceline.runtime.pulse import Pulse


def test_a_wait_is_told_and_work_after_it_is_new_work() -> None:
    own = Pulse()
    pulse.adopt(own)
    own.work()
    before = own.now
    with pulse.waiting("room"):
        assert (own.now.kind, own.now.what) == ("waits", "room")
        with pulse.patient("the disk"):
            assert own.now.kind == "patient"
        assert (own.now.kind, own.now.what) == ("waits", "room")
    assert own.now.kind == "works"
    assert own.now is not before, "else work on two micro-batches would count as one"
    pulse.adopt(Pulse())


def test_who_starts_goes_on_starting_whatever_it_waits_for() -> None:
    own = Pulse()
    pulse.adopt(own)
    before = own.now
    with pulse.waiting("its turn"):
        assert own.now is before
    assert own.now is before


def test_a_thread_without_a_pulse_waits_unnoticed() -> None:
    passed = threading.Event()

    def wait() -> None:
        with pulse.waiting("nobody looks"):
            passed.set()

    threading.Thread(target=wait).start()
    assert passed.wait(5)
