"""A CUDA graph of one unit of work, captured by hand in the thread that replays it.

`capture_error_mode="thread_local"` lets other threads allocate and synchronise meanwhile; only this thread may not. No
other thread may draw from the device's default generator while a capture is open, so every role has its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Pool:
    """Memory that graphs share, and the stream on which they are captured: only on one stream is it used again."""

    handle: Any
    stream: torch.cuda.Stream


def new_pool(device: torch.device) -> Pool:
    """Return a pool for the graphs of one role."""
    return Pool(torch.cuda.graph_pool_handle(), torch.cuda.Stream(device))


class Captured:
    """A unit of work over static buffers as a graph; calling it replays the graph on the current stream.

    Everything it allocated while captured stays in its pool. Units that share a pool must be replayed in the order in
    which they were captured, unless nothing in the pool outlives a replay.
    """

    def __init__(
        self,
        work: Callable[[], None],
        *,
        pool: Pool,
        generator: torch.Generator | None = None,
        rehearsals: int = 2,
    ) -> None:
        """Rehearse the work on the pool's stream and capture it there. Run this alone (see Gate).

        A rehearsal's memory is not the pool's, which other graphs may have filled: who needs much of it and knows that
        everything is loaded, because nearly the same work was captured before, takes 0 rehearsals.
        """
        stream, device = pool.stream, pool.stream.device
        stream.wait_stream(torch.cuda.current_stream(device))
        self._graph = torch.cuda.CUDAGraph()
        if generator is not None:
            self._graph.register_generator_state(generator)
        # Backward in the capturing thread: a graph holds what its own thread does.
        with torch.autograd.set_multithreading_enabled(False):
            torch.cuda.empty_cache()  # what another stream's run left would be held beside this one's
            with torch.cuda.stream(stream):
                for _ in range(rehearsals):
                    work()
            torch.cuda.current_stream(device).wait_stream(stream)
            torch.cuda.synchronize(device)
            with torch.cuda.graph(self._graph, pool=pool.handle, stream=stream, capture_error_mode="thread_local"):
                work()
        torch.cuda.synchronize(device)

    def __call__(self) -> None:
        """Replay."""
        self._graph.replay()
