"""The gate: work overlaps, being alone does not, and nobody waits for ever."""

import threading
import time

import pytest

from paceline.runtime.gate import Gate


def test_work_overlaps() -> None:
    gate, both = Gate(), threading.Barrier(2, timeout=5)

    def work() -> None:
        with gate.work():
            both.wait()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert not both.broken


def test_nobody_works_while_one_is_alone() -> None:
    """Many threads count themselves in and out; who is alone must see nobody."""
    gate, inside, wrong = Gate(), [0], []
    lock = threading.Lock()
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            with gate.work():
                with lock:
                    inside[0] += 1
                time.sleep(0)
                with lock:
                    inside[0] -= 1

    def alone() -> None:
        for _ in range(50):
            with gate.alone():
                before = inside[0]
                time.sleep(0.001)
                if before or inside[0]:
                    wrong.append(inside[0])

    workers = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    loners = [threading.Thread(target=alone, daemon=True) for _ in range(2)]
    for thread in [*workers, *loners]:
        thread.start()
    for thread in loners:
        thread.join(60)
        assert not thread.is_alive(), "who wants to be alone gets its turn although others work without a pause"
    stop.set()
    for thread in workers:
        thread.join(5)
    assert wrong == []


def test_both_may_be_nested() -> None:
    gate, passed = Gate(), threading.Event()

    def nest() -> None:
        with gate.alone():
            with gate.alone(), gate.work():
                pass
            others.start()  # still alone: leaving the inner one must not have let anybody in
            assert not inside.wait(0.1)
        with gate.work(), gate.work():
            pass
        with gate.alone():
            passed.set()

    inside = threading.Event()

    def enter() -> None:
        with gate.work():
            inside.set()

    others = threading.Thread(target=enter, daemon=True)
    threading.Thread(target=nest, daemon=True).start()
    assert passed.wait(10), "a thread waits for itself"
    assert inside.wait(10)


def test_nested_work_does_not_wait_for_a_loner() -> None:
    gate, begun, done = Gate(), threading.Event(), threading.Event()

    def alone() -> None:
        begun.set()
        with gate.alone():
            done.set()

    with gate.work():
        thread = threading.Thread(target=alone, daemon=True)
        thread.start()
        begun.wait(5)
        time.sleep(0.05)
        with gate.work():
            assert not done.is_set()
    assert done.wait(5)


def test_waiting_for_oneself_is_an_error() -> None:
    gate = Gate()
    with gate.work(), pytest.raises(RuntimeError, match="wait for itself"), gate.alone():
        pass
    with gate.alone():
        pass


def test_an_error_inside_opens_the_gate() -> None:
    gate = Gate()
    for hold in (gate.work, gate.alone):
        with pytest.raises(ValueError, match="inside"), hold():
            raise ValueError("inside")
    with gate.alone():
        pass


@pytest.mark.parametrize("hold", ["work", "alone"])
def test_nobody_waits_for_a_thread_whose_place_was_revoked_and_its_leaving_does_no_harm(hold: str) -> None:
    gate, inside, go, left = Gate(), threading.Event(), threading.Event(), threading.Event()

    def hang() -> None:
        with getattr(gate, hold)(), gate.work():
            inside.set()
            go.wait(60)
        left.set()

    stuck = threading.Thread(target=hang, daemon=True)
    stuck.start()
    assert inside.wait(5)
    passed = threading.Event()
    in_between, leave = threading.Event(), threading.Event()

    def alone() -> None:
        with gate.alone():
            in_between.set()
            leave.wait(60)
        passed.set()

    threading.Thread(target=alone, daemon=True).start()
    assert not in_between.wait(0.1)
    gate.revoke(stuck)
    assert in_between.wait(5)
    go.set()  # it comes back to life while another is alone
    assert left.wait(5)
    worked = threading.Event()

    def work() -> None:
        with gate.work():
            worked.set()

    threading.Thread(target=work, daemon=True).start()
    assert not worked.wait(0.1), "its leaving must not have ended who is alone"
    leave.set()
    assert passed.wait(5)
    assert worked.wait(5)
    with gate.work(), gate.work():
        pass
    with gate.alone():
        pass


def test_a_revoked_place_is_its_threads_alone() -> None:
    gate, done = Gate(), threading.Event()
    ended = threading.Thread(target=lambda: None)
    ended.start()
    ended.join()
    with gate.work():
        gate.revoke(ended)  # whose number may by now be ours
        thread = threading.Thread(target=lambda: gate.alone().__enter__() or done.set(), daemon=True)
        thread.start()
        assert not done.wait(0.1)
    assert done.wait(5)
