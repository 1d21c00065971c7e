"""Lanes of a split replica: which of them the others wait for."""

import threading

import pytest

from paceline.runtime.gate import Gate
from paceline.target.lanes import Lanes


@pytest.mark.parametrize("stages", [(0, 1), (1, 0), (-1, 0), (0, 0)])
def test_the_lane_in_front_is_named_whichever_began_first(stages: tuple[int, int]) -> None:
    """Micro-batch 1 is begun before 3, which may all the same be the first in the stages."""
    at: dict[threading.Thread, int] = {}
    begun, turn, go = [threading.Event(), threading.Event()], iter(range(2)), threading.Event()
    lock = threading.Lock()

    def serve() -> None:
        with lock:
            own = next(turn)
            lanes.now(2 * own + 1, f"micro-batch {2 * own + 1}")
            at[threading.current_thread()] = stages[own]
        begun[own].set()
        assert go.wait(60)

    lanes = Lanes(2, "target replica 0", "cpu", Gate(), lambda me: at.get(me, -1), lambda me: f"stage {at[me]}")
    runner = threading.Thread(target=lanes.run, args=(serve,), daemon=True)
    runner.start()
    assert all(event.wait(60) for event in begun)
    front = 0 if stages[0] >= stages[1] else 1
    assert (lanes.stuck_at, lanes.doing) == (2 * front + 1, f"micro-batch {2 * front + 1}, stage {stages[front]}")
    go.set()
    runner.join(60)
    assert lanes.doing == ""
