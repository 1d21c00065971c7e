"""Slots: never more out than there are, and none is lost, whoever fails in between."""

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paceline.pipeline.dispenser import Dispenser, Outlet
from paceline.pipeline.slots import Landing, Loan, Slot, Slots, handed_like, slot_count, slots_bytes, slots_per_rank
from paceline.records import BlockSet, FeatureBatch, TokenBatch

NONE = torch.zeros(0, dtype=torch.long)
BLOCKS = BlockSet(NONE, NONE, NONE, NONE, NONE.view(0, 4), NONE.view(0, 4).bool())
C, D, T = 6, 3, 4


def token_batch(seq: int, closes_step: bool = True) -> TokenBatch:
    return TokenBatch(
        seq, 0, 0, closes_step, (seq,), torch.zeros(1, T, dtype=torch.long), (T,), torch.arange(T), BLOCKS
    )


def feature_batch(seq: int) -> FeatureBatch:
    return FeatureBatch(token_batch(seq), torch.full((T, D), float(seq)), torch.arange(T))


def made(ranks: int, replicas: int) -> Slots:
    slots = Slots(1, replicas=replicas, ranks=ranks)
    for rank in range(ranks):
        slots.make(rank, torch.zeros(C, D))
    return slots


@pytest.mark.parametrize(
    ("credit", "replicas", "ranks", "expected"),
    [
        (1, 1, 1, 2),  # one is written while the other is read
        (1, 3, 1, 4),
        (1, 5, 3, 3),
        (700, 1, 1, 7),
        (700, 1, 2, 3),
        (10**9, 1, 1, 16),
        (10**9, 20, 1, 21),
    ],
)
def test_the_credit_pays_for_slots_within_bounds(credit: int, replicas: int, ranks: int, expected: int) -> None:
    assert slot_count(credit, 100, replicas=replicas, ranks=ranks) == expected


class Model:
    """What has to happen, in sets of numbers: who has which micro-batch, and which are read or wait."""

    def __init__(self, ranks: list[int], slots: int) -> None:
        self.ranks, self.slots = ranks, slots
        self.nobodys = list(range(len(ranks)))
        self.held: dict[int, int] = {}  # by owner
        self.delivered: list[int] = []

    def next(self) -> int | None:
        """Return what the next who asks gets, None if he waits or there is no more."""
        if not self.nobodys:
            return None
        first = min(self.nobodys)
        out = [seq for seq in [*self.held.values(), *self.delivered] if self.ranks[seq] == self.ranks[first]]
        return first if len(out) < self.slots else None


@pytest.mark.parametrize("seed", range(12))
def test_slots_are_where_a_plain_model_has_them(seed: int) -> None:
    draw = random.Random(seed)
    ranks, owners = draw.choice([1, 1, 2, 3]), draw.choice([1, 2, 4])
    closes = [draw.random() < 0.4 for _ in range(60)]
    dealt, place = [], 0
    for closing in closes:
        dealt.append(place % ranks)
        place = 0 if closing else place + 1
    slots = made(ranks, owners)
    model = Model(dealt, slot_count(1, 4 * C * D, replicas=owners, ranks=ranks))
    source = Dispenser(iter(token_batch(seq, closing) for seq, closing in enumerate(closes)), lambda _: None, slots)
    outlets: dict[int, Outlet] = {owner: source.open() for owner in range(owners)}
    waiting: dict[int, tuple[TokenBatch, Slot]] = {}
    hung: list[Slot] = []

    def disjoint() -> None:
        out = [outlets[owner].slot for owner in model.held] + [slot for _, slot in waiting.values()] + hung
        assert len({slot.features_CD.data_ptr() for slot in out if slot}) == len(out)

    while model.nobodys or model.held or model.delivered:
        idle = [owner for owner in outlets if owner not in model.held]
        choices = [("lease", owner) for owner in idle if model.next() is not None]
        choices += [(draw.choice(["deliver", "deliver", "fail", "hang"]), owner) for owner in model.held]
        choices += [("read", seq) for seq in sorted(model.delivered)[:1]]
        assert choices, "somebody can always go on"
        what, who = draw.choice(choices)
        if what == "lease":
            expected = model.next()
            batch = source.lease(outlets[who])
            assert batch is not None
            assert batch.seq == expected
            model.held[who] = batch.seq
            model.nobodys.remove(batch.seq)
            slot = outlets[who].slot
            assert slot is not None
            assert slot.rank == dealt[batch.seq]
        elif what == "deliver":
            seq = model.held.pop(who)
            slot = outlets[who].slot
            assert slot is not None
            assert outlets[who].settle(seq)
            waiting[seq] = token_batch(seq), slot
            model.delivered.append(seq)
        elif what == "read":
            with Loan(slots, waiting.pop(who)[1]).reading():
                pass
            model.delivered.remove(who)
        else:
            seq = model.held.pop(who)
            slot = outlets[who].slot
            assert slot is not None
            back = outlets[who].revoke(hung=what == "hang")
            assert back is not None
            assert back.seq == seq
            hung += [slot] * (what == "hang")
            outlets[who] = source.open()
            model.nobodys.append(seq)
        disjoint()
    for rank in range(ranks):
        assert len(slots._free[rank]) == model.slots
    assert len({slot.features_CD.data_ptr() for free in slots._free for slot in free}) == ranks * model.slots


def test_who_waits_for_a_slot_goes_on_once_one_was_read() -> None:
    slots = made(1, 1)
    source = Dispenser(iter(map(token_batch, range(3))), lambda _: None, slots)
    outlet, got = source.open(), []
    loans = []
    for seq in range(2):
        source.lease(outlet)
        assert outlet.slot is not None
        loans.append(Loan(slots, outlet.slot))
        outlet.settle(seq)
    thread = threading.Thread(target=lambda: got.append(source.lease(outlet)), daemon=True)
    thread.start()
    while not source._changed._waiters:  # type: ignore[attr-defined]
        time.sleep(0.001)
    with loans[1].reading():
        assert not got
    thread.join(10)
    assert [batch.seq for batch in got if batch] == [2]
    assert outlet.slot is loans[1].slot


def leased(slots: Slots) -> Iterator[Outlet]:
    source = Dispenser(iter(map(token_batch, range(9))), lambda _: None, slots)
    while True:
        outlet = source.open()
        source.lease(outlet)
        yield outlet


def test_features_land_in_the_slot_wherever_they_were_made() -> None:
    slots = made(1, 1)
    outlets = leased(slots)
    for in_place in (True, False):
        outlet = next(outlets)
        landing = Landing("cpu", outlet, slots)
        batch = feature_batch(3)
        if in_place:
            room_TD = landing.room(batch.tokens)
            assert room_TD is not None
            batch = FeatureBatch(batch.tokens, room_TD.copy_(batch.features_TD), batch.positions_T)
        landed = landing.land(batch)
        assert outlet.slot is not None
        assert landed.features_TD.data_ptr() == outlet.slot.features_CD.data_ptr()
        assert torch.equal(landed.features_TD, torch.full((T, D), 3.0))
        assert torch.equal(landed.positions_T, batch.positions_T)
        with landed.reading():
            pass


@pytest.mark.parametrize("features", ["as_trained", "fp8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_slots_take_is_counted(settings: Any, features: str, dtype: str) -> None:
    """Against slots that are made as in a run, whatever the credit pays for."""
    H = 64
    for credit in (1e-6, 3e-4, 1.0):
        tree = settings("run", target={"features": features}, train={"dtype": dtype}, pipeline={"credit_gib": credit})
        slots = Slots(int(credit * 2**30), replicas=1, ranks=1)
        like_CD = torch.zeros(100, len(tree.drafter.taps) * H, dtype=getattr(torch, dtype))
        slots.make(0, handed_like(like_CD, tree))
        made = sum(slot.features_CD.nbytes + slot.positions_C.nbytes for slot in slots._free[0])
        assert (slots_bytes(tree, H), slots_per_rank(tree, H)) == (made, len(slots._free[0]))
    least = slots_bytes(settings("run", train={"dtype": dtype}, pipeline={"credit_gib": 1e-6}), H)
    less = slots_bytes(
        settings("run", target={"features": features}, train={"dtype": dtype}, pipeline={"credit_gib": 1e-6}), H
    )
    assert (less < least * (0.55 if dtype == "bfloat16" else 0.28)) == (features == "fp8")


def test_on_another_device_nothing_is_written_at_once() -> None:
    slots = made(1, 1)
    assert Landing("meta", next(leased(slots)), slots).room(token_batch(0)) is None


def test_a_replica_that_hung_writes_where_nobody_reads() -> None:
    slots = made(1, 1)
    source = Dispenser(iter(map(token_batch, range(3))), lambda _: None, slots)
    stuck, other = source.open(), source.open()
    source.lease(stuck)
    late = Landing("cpu", stuck, slots)
    stuck.revoke(hung=True)
    assert source.lease(other) is not None
    landed = Landing("cpu", other, slots).land(feature_batch(0))
    late.land(FeatureBatch(token_batch(0), torch.full((T, D), 7.0), torch.arange(T)))
    assert torch.equal(landed.features_TD, torch.zeros(T, D))


def test_too_little_memory_says_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("paceline.pipeline.slots.Slot", none_left)
    with pytest.raises(Exception, match=r"Lower pipeline\.credit_gib or train\.context_slots"):
        made(1, 1)


class Stream:
    """Stands for a CUDA stream: the places that it waits for before what is queued next."""

    def __init__(self) -> None:
        self.behind: set[object] = set()

    def wait_event(self, event: "Event") -> None:
        self.behind |= event.behind


class Event:
    """Stands for a CUDA event."""

    def __init__(self) -> None:
        self.behind: set[object] = set()

    def record(self, stream: Stream) -> None:
        self.behind = {*stream.behind, stream}


@pytest.mark.parametrize("began", [True, False])
def test_behind_a_writer_that_failed_the_next_still_waits_for_the_reader(
    monkeypatch: pytest.MonkeyPatch, began: bool
) -> None:
    first, reader, failing, last = (Stream() for _ in range(4))
    slot = Slot(0, torch.zeros(C, D))
    slot._free, slot._written = Event(), Event()  # type: ignore[assignment]

    def on(stream: Stream) -> None:
        monkeypatch.setattr("torch.cuda.current_stream", lambda device: stream)

    on(first)
    slot.begin_writing()
    slot.end_writing()
    on(reader)
    slot.begin_reading()
    assert reader.behind == {first}
    slot.end_reading()
    on(failing)
    if began:
        slot.begin_writing()
    assert slot.is_left()
    on(last)
    slot.begin_writing()
    assert last.behind == {first, reader} | ({failing} if began else set())
