"""A target's files, read once for all replicas of a process that start together."""

import copy
import threading
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from paceline.target.load import TargetFacts, load_trunk
from paceline.target.reading import DeviceOf


@runtime_checkable
class LoadTrunk(Protocol):
    """What `load_trunk` is."""

    def __call__(
        self,
        facts: TargetFacts,
        deepest_tap: int,
        *,
        dtype: torch.dtype,
        device: str | DeviceOf,
        on_loaded: Callable[[float], None] = ...,
    ) -> Any:
        """Return the frozen decoder up to its deepest tap."""


class OneRead:
    """Stands in for `load_trunk` where several replicas want the same on devices of their own.

    The first to come reads it into the host's memory; each then copies it to its own device, side by side. The host's
    copy is let go of with the last of them. A single replica, and who comes later because it is built anew, reads
    for itself.
    """

    def __init__(self, replicas: int, load: LoadTrunk = load_trunk) -> None:
        self._left, self._load = replicas if replicas > 1 else 0, load
        self._changed = threading.Condition()
        self._reading = False
        self._trunk: Any = None

    def __call__(
        self,
        facts: TargetFacts,
        deepest_tap: int,
        *,
        dtype: torch.dtype,
        device: str | DeviceOf,
        on_loaded: Callable[[float], None] = lambda share: None,
    ) -> Any:
        """See load_trunk; all calls ask for the same but for the device. Reading is half of what `on_loaded` learns."""
        if callable(device) or not self._is_expected():
            return self._load(facts, deepest_tap, dtype=dtype, device=device, on_loaded=on_loaded)
        try:
            there = self._read_once(
                lambda: self._load(
                    facts, deepest_tap, dtype=dtype, device="cpu", on_loaded=lambda share: on_loaded(share / 2)
                )
            )
            return _copied(there, torch.device(device), lambda share: on_loaded(0.5 + share / 2))
        finally:
            self._has_it()

    def _is_expected(self) -> bool:
        with self._changed:
            return self._left > 0

    def _read_once(self, read: Callable[[], Any]) -> Any:
        """Return what one thread reads; where that fails the next one tries, so each has an error of its own."""
        with self._changed:
            self._changed.wait_for(lambda: not self._reading)
            if self._trunk is not None:
                return self._trunk
            self._reading = True
        trunk = None
        try:
            trunk = read()
        finally:
            with self._changed:
                self._trunk, self._reading = trunk, False
                self._changed.notify_all()
        return trunk

    def _has_it(self) -> None:
        with self._changed:
            self._left -= 1
            if self._left <= 0:
                self._trunk = None


def _copied(trunk: Any, device: torch.device, on_copied: Callable[[float], None]) -> Any:
    """Return a copy of a frozen decoder with all its tensors on a device; the original is only read."""
    tensors = [*trunk.parameters(), *trunk.buffers()]  # each once, whatever shares it
    made: dict[int, Any] = {}
    for done, tensor in enumerate(tensors):
        on_copied(done / len(tensors))
        there = tensor.detach().to(device, copy=True)
        made[id(tensor)] = nn.Parameter(there, requires_grad=False) if isinstance(tensor, nn.Parameter) else there
    return copy.deepcopy(trunk, made)
