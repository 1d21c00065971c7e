"""A CUDA stream for every role, and events where one role's work has to come behind another's.

Streams of torch's own pool do not wait for the default stream, so nothing is ordered that no event orders. On devices
without streams all of this does nothing.
"""

from contextlib import AbstractContextManager, nullcontext

import torch

Mark = torch.cuda.Event


def own_stream(device: str) -> AbstractContextManager[object]:
    """Let what this thread queues on a device go to a stream of its own while the block lasts."""
    where = torch.device(device)
    if where.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(where))


def mark(device: torch.device) -> Mark | None:
    """Return the place that this thread's stream on a device has reached; None where there are no streams."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def follow(event: Mark | None, device: torch.device) -> None:
    """Let what this thread queues on a device from now on come behind a place; the host waits for nothing."""
    if event is not None and device.type == "cuda":
        torch.cuda.current_stream(device).wait_event(event)


def wait_for(device: str) -> None:
    """Wait until a device has done all that any thread queued on it."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
