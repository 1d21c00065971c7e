"""Threads that serve a replica's stream side by side, one micro-batch each, so that all its devices have work.

They are the replica's own: its role starts them, waits for them, and fails with the first one that fails. Their pulses
count for the role, and nothing waits for a lane that hangs.
"""

import contextvars
import queue
import threading
import time
from collections.abc import Callable

import torch

from paceline.runtime.gate import Gate
from paceline.runtime.pulse import Pulse, adopt, standing_in

_LEAVE_S = 5.0  # longest wait for lanes that have a reason to leave


class Lanes:
    """The lanes of a replica, whose work goes to the streams of the thread that starts them."""

    def __init__(
        self,
        count: int,
        name: str,
        device: str,
        gate: Gate,
        stage: Callable[[threading.Thread], int],
        where: Callable[[threading.Thread], str],
    ) -> None:
        """`stage` says which stage a thread is in, -1 if in none; `where` which layers it works at, "" if at none, also
        of a thread that has failed there."""
        self._device = torch.device(device)
        self._count, self._name, self._gate, self._stage, self._where = count, name, gate, stage, where
        self._pulses: dict[threading.Thread, Pulse] = {}
        self._under_way: dict[threading.Thread, tuple[int, str]] = {}  # the micro-batch of each, in order of beginning
        self._failed: tuple[int, str] | None = None  # what the first failure was at

    def run(self, serve: Callable[[], None]) -> None:
        """Let every lane call `serve`; return when all have returned.

        Raises:
            BaseException: what the first lane that failed has raised. The others are not waited for: see `join`.
        """
        ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        cpu_threads = torch.get_num_threads()
        on_cuda = self._device.type == "cuda"
        stream = torch.cuda.current_stream(self._device) if on_cuda else None

        def body() -> None:
            me, error = threading.current_thread(), None
            pulse = self._pulses[me]
            try:
                adopt(pulse)
                torch.get_num_threads()  # initialises this thread's own count, which would undo the next line later
                torch.set_num_threads(cpu_threads)
                pulse.work()
                with torch.cuda.stream(stream):
                    serve()
            except BaseException as caught:
                error = caught
                self._failed = self._failed or self._told(me)
            self._under_way.pop(me, None)
            pulse.rest()
            ended.put(error)

        for at in range(self._count):
            context, name = contextvars.copy_context(), f"{self._name}, lane {at}"
            self._pulses[threading.Thread(target=context.run, args=(body,), name=name, daemon=True)] = Pulse()
        with standing_in([*self._pulses.values()]):
            for thread in self._pulses:
                thread.start()
            for _ in self._pulses:
                if (error := ended.get()) is not None:
                    raise error
        self.join()

    @property
    def doing(self) -> str:
        """What the lane does that has failed, else the one that the others wait for; "" if none has a micro-batch."""
        return self._front()[1]

    @property
    def stuck_at(self) -> int:
        """The place in the stream of that micro-batch; -1 if there is none."""
        return self._front()[0]

    def now(self, seq: int, doing: str) -> None:
        """Say what this thread's lane does about a micro-batch; -1: about none."""
        me = threading.current_thread()
        self._under_way.pop(me, None)  # so that the order is that of beginning
        self._under_way[me] = seq, doing

    def _front(self) -> tuple[int, str]:
        if self._failed is not None:
            return self._failed
        begun = [thread for thread, (seq, _) in self._under_way.copy().items() if seq >= 0]
        working = [thread for thread in begun if self._pulses[thread].now.kind == "works"]  # and does not hand over
        # For who is in front in the stages others wait, also such as began before and came behind at the first stage.
        return self._told(max(working or begun, key=self._stage)) if begun else (-1, "")

    def _told(self, thread: threading.Thread) -> tuple[int, str]:
        seq, doing = self._under_way.get(thread, (-1, ""))
        where = self._where(thread) if seq >= 0 else ""
        return seq, f"{doing}, {where}" if where else doing

    def join(self) -> None:
        """Wait a while for lanes that have been told to leave."""
        until = time.monotonic() + _LEAVE_S
        for thread in self._pulses:
            if thread.ident is not None:
                thread.join(max(0.0, until - time.monotonic()))

    def give_up(self) -> None:
        """Let nobody wait at the gate for lanes that hang, nor for the others, which leave."""
        for thread in self._pulses:
            self._gate.revoke(thread)
