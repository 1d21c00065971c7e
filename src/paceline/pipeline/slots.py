"""Slots: memory on the drafters' devices that features land in, made once and used again and again.

A micro-batch is leased together with a slot of the rank that will get it, so whoever computes has where to write, and
the first micro-batch that nobody has always finds one: what is given back takes its slot along. A slot goes from writer
to reader and back by events: the reader's stream waits for what wrote it, the next writer's for what read it, and no
host waits for either. A replica on the rank's own device writes its taps straight into the slot.

Shapes: C context slots of a micro-batch, T its real tokens, D feature width, packed or not.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Num
from torch import Tensor

from paceline.config import RunSettings
from paceline.drafter.packed import is_packed, packed_width, room_like
from paceline.pipeline.dealer import Turns
from paceline.records import FeatureBatch, RunError, TokenBatch
from paceline.target.replica import under_way

_LEAST, _MOST = 2, 16  # one is written while the other is read; more than a few only wait


def slot_count(credit_bytes: int, slot_bytes: int, *, replicas: int, ranks: int) -> int:
    """Return how many slots each rank has: what the credit pays for, within bounds.

    At least one for every replica that works for the rank and one that is read meanwhile; a replica counts as often as
    it has micro-batches under way.
    """
    least = max(_LEAST, -(-replicas // ranks) + 1)
    return min(max(credit_bytes // (ranks * slot_bytes), least), max(_MOST, least))


def written_at_once(settings: RunSettings) -> int:
    """Return how many micro-batches all replicas have under way at once, each with a slot."""
    return sum(under_way(len(devices)) for devices in settings.replicas)


def slots_per_rank(settings: RunSettings, hidden_size: int) -> int:
    """Return how many slots each rank of a run has, which is how far targets may be ahead of it."""
    features = settings.train.context_slots * token_bytes(settings, hidden_size)
    credit, ranks = int(settings.pipeline.credit_gib * 2**30), len(settings.pipeline.drafters)
    return slot_count(credit, features, replicas=written_at_once(settings), ranks=ranks)


def slots_bytes(settings: RunSettings, hidden_size: int) -> int:
    """Return what all slots of a rank take of its device, features and positions."""
    each = settings.train.context_slots * (token_bytes(settings, hidden_size) + 8)
    return slots_per_rank(settings, hidden_size) * each


def token_bytes(settings: RunSettings, hidden_size: int) -> int:
    """Return what a token's features take where they wait."""
    taps = len(settings.drafter.taps)
    if settings.target.features == "fp8":
        return packed_width(taps * hidden_size, taps)
    return taps * hidden_size * (2 if settings.train.dtype == "bfloat16" else 4)


def handed_like(features_CD: Tensor, settings: RunSettings) -> Tensor:
    """Return what says place, size and format of a micro-batch's features as a run hands them over."""
    return room_like(features_CD, len(settings.drafter.taps)) if settings.target.features == "fp8" else features_CD


class Slot:
    """Room for the features and positions of one micro-batch on a rank's device."""

    def __init__(self, rank: int, like_CD: Tensor) -> None:
        self.rank = rank
        self.features_CD = torch.empty(like_CD.shape, dtype=like_CD.dtype, device=like_CD.device)
        self.positions_C = torch.empty(len(like_CD), dtype=torch.long, device=like_CD.device)
        cuda = self.device.type == "cuda"
        # An event that nobody has recorded yet lets everybody pass.
        self._written: torch.cuda.Event | None = torch.cuda.Event() if cuda else None
        self._free: torch.cuda.Event | None = torch.cuda.Event() if cuda else None
        self._writer: torch.cuda.Stream | None = None

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.features_CD.device

    def begin_writing(self) -> None:
        """Let this thread's stream wait until nobody reads any more."""
        if self._free is not None:
            self._writer = torch.cuda.current_stream(self.device)
            self._writer.wait_event(self._free)

    def end_writing(self) -> None:
        """Note where the writer's stream is."""
        if self._written is not None:
            self._written.record(torch.cuda.current_stream(self.device))

    def begin_reading(self) -> None:
        """Let this thread's stream wait until all is written."""
        if self._written is not None:
            torch.cuda.current_stream(self.device).wait_event(self._written)

    def end_reading(self) -> None:
        """Note where the reader's stream is."""
        if self._free is not None:
            self._free.record(torch.cuda.current_stream(self.device))
        self._writer = None

    def is_left(self) -> bool:
        """Let who writes next wait for a writer that failed; False if its stream is beyond help.

        Who failed before it began to write has queued nothing, and has not waited for the reader before it.
        """
        if self._free is not None and self._writer is not None:
            try:
                self._free.record(self._writer)
            except RuntimeError:
                return False
        self._writer = None
        return True


class Slots:
    """The slots of all ranks.

    Only the dispenser takes slots and gives those of its leases back, under its lock; readers give back without one.
    """

    def __init__(self, credit_bytes: int, *, replicas: int, ranks: int) -> None:
        self._credit, self._replicas, self._ranks = credit_bytes, replicas, ranks
        self._turns = Turns(ranks)
        self._expected: dict[int, int] = {}  # the rank of every micro-batch that nobody has
        self._free: list[list[Slot]] = [[] for _ in range(ranks)]
        self._retired: list[Slot] = []  # who hangs may still write into them
        self.on_free: Callable[[], None] = lambda: None

    def make(self, rank: int, like_CD: Tensor) -> None:
        """Make a rank's slots, which hold what `like_CD` does, where that is.

        Raises:
            RunError: the device has too little memory for them.
        """
        count = slot_count(self._credit, like_CD.nbytes, replicas=self._replicas, ranks=self._ranks)
        for _ in range(count):
            self._free[rank].append(_new(rank, like_CD, count))

    def expect(self, tokens: TokenBatch) -> None:
        """Learn of the next micro-batch of the stream; all of them, in their order."""
        self._expected[tokens.seq] = self._turns.next(tokens)

    def has(self, seq: int) -> bool:
        """Return whether there is a slot for a micro-batch that nobody has."""
        return bool(self._free[self._expected[seq]])

    def take(self, seq: int) -> Slot:
        """Return a slot for a micro-batch; there is one."""
        return self._free[self._expected.pop(seq)].pop()

    def give_back(self, seq: int, slot: Slot, *, hung: bool) -> None:
        """Take back the slot of a micro-batch that was not delivered, which nobody has now.

        A hung writer may go on at any time, so nobody else gets its slot: a new one takes the place.
        """
        self.expect_again(seq, slot)
        self.take_back(slot, hung=hung)

    def expect_again(self, seq: int, slot: Slot) -> None:
        """Learn that nobody has a micro-batch any more, whose slot its thread still writes into."""
        self._expected[seq] = slot.rank

    def take_back(self, slot: Slot, *, hung: bool) -> None:
        """Take back the slot of such a thread once it has left, or is not waited for any more."""
        if hung or not slot.is_left():
            self._retired.append(slot)
            slot = _new(slot.rank, slot.features_CD, 1)
        self._free[slot.rank].append(slot)

    def free(self, slot: Slot) -> None:
        """Take back a slot whose reading is queued."""
        self._free[slot.rank].append(slot)
        self.on_free()


def _new(rank: int, like_CD: Tensor, count: int) -> Slot:
    try:
        return Slot(rank, like_CD)
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"out of memory. Room for features of {count} micro-batches on {like_CD.device} (pipeline.drafters) takes "
            f"{like_CD.nbytes / 2**30:.2f} GiB each. Lower pipeline.credit_gib or train.context_slots"
            f"{'' if is_packed(like_CD) else ', or set target.features to fp8'}."
        ) from error


@dataclass(frozen=True, slots=True, eq=False)
class Loan:
    """A slot with features, until they are read."""

    slots: Slots
    slot: Slot

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold while the features are read, which may be queued; behind it the slot is somebody else's."""
        self.slot.begin_reading()
        try:
            yield
        finally:
            self.slot.end_reading()
            self.slots.free(self.slot)


@runtime_checkable
class Holder(Protocol):
    """Who has a slot with its lease."""

    @property
    def slot(self) -> Slot | None:
        """That of the thread that asks."""


class Landing:
    """The way of one replica's features into slots, for all its threads, whose streams are the same."""

    def __init__(self, device: str, holder: Holder, slots: Slots) -> None:
        self._device, self._holder, self._slots = torch.device(device), holder, slots
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def room(self, tokens: TokenBatch) -> Num[Tensor, "T D"] | None:
        """Return where to write the features of the micro-batch that is leased; None if that is on another device."""
        slot = self._holder.slot
        if slot is None or slot.device != self._device:
            return None
        slot.begin_writing()
        return slot.features_CD[: tokens.num_tokens]

    @torch.no_grad()
    def land(self, batch: FeatureBatch) -> FeatureBatch:
        """Return a batch whose features are in the slot of its lease, or queued to get there; from the host nobody
        waits but for what comes from or goes to a CPU."""
        slot = self._holder.slot
        assert slot is not None, "features are made under a lease"
        room_TD = slot.features_CD[: len(batch.features_TD)]
        positions_T = slot.positions_C[: len(batch.positions_T)]
        with self._on(slot.device):
            slot.begin_writing()
            if batch.features_TD.data_ptr() != room_TD.data_ptr():
                room_TD.copy_(batch.features_TD, non_blocking=slot.device.type == batch.features_TD.device.type)
            there = batch.positions_T
            if slot.device.type == "cuda":  # else the host would wait for the whole stream
                there = there.pin_memory()
            positions_T.copy_(there, non_blocking=True)
            slot.end_writing()
        return replace(batch, features_TD=room_TD, positions_T=positions_T, loan=Loan(self._slots, slot))

    def _on(self, device: torch.device) -> AbstractContextManager[object]:
        """Queue on this replica's stream, or, where the device is another one, on a stream of its own there.

        A copy from device to device runs on the sender's stream; torch lets it wait for the other's and that for it.
        """
        if device.type != "cuda" or device == self._device:
            return nullcontext()
        if device not in self._streams:
            self._streams.setdefault(device, torch.cuda.Stream(device))
        return torch.cuda.stream(self._streams[device])
