"""What a thread says of itself."""

import threading

import pytest

from paceline.runtime import pulse
from paceline.runtime.pulse import Moment, Pulse, adopt, standing_in


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


def test_waits_of_a_sort_add_up_and_one_under_way_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(pulse, "_clock", lambda: now[0])
    own = Pulse()
    pulse.adopt(own)
    with pulse.waiting("its turn"):
        now[0] += 5  # who starts does not wait for anybody's work
    own.work()
    assert (own.began, own.waited(15.0)) == (15.0, {})
    for number in range(3):
        now[0] += 1
        with pulse.waiting(f"features of {number}", "features"):
            now[0] += 2
            with pulse.patient("the disk"):
                now[0] += 4
    own.work()
    assert (own.began, own.waited(now[0])) == (15.0, {"features": 18.0})
    with pulse.patient("room"):
        assert own.waited(now[0] + 3) == {"features": 18.0, "room": 3.0}
        assert own.waited(now[0] - 3) == {"features": 18.0, "room": 0.0}
    pulse.adopt(Pulse())


def test_an_error_ends_a_wait() -> None:
    own = Pulse()
    pulse.adopt(own)
    own.work()
    with pytest.raises(ValueError), pulse.waiting("room"):
        raise ValueError
    assert own.now.kind == "works"
    assert own.now.waited.keys() == {"room"}
    pulse.adopt(Pulse())


def test_what_stands_in_for_a_pulse_has_waited_on_average(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "_own", threading.local())
    own, one, other = Pulse(), Pulse(), Pulse()
    adopt(own)
    own.work()
    with standing_in([one, other]):
        one.now = Moment("works", waited={"data": 4.0})
        other.now = Moment("waits", "data", "data", since=10.0, waited={"room": 1.0})
        assert own.moments() == (one.now, other.now)
        assert own.waited(12.0) == {"data": 3.0, "room": 0.5}
        other.rest()
        assert other.now.kind == "waits"
    assert own.moments() == (own.now,)
    assert own.waited(12.0) == {}
