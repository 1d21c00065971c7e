"""Roles on streams of their own: what is trained does not change, memory does not grow, no slot is read too early."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_requests import waiting_is_an_error

from paceline.bench.features import feature_batches
from paceline.bench.shapes import SHAPES
from paceline.bench.weights import random_drafter, random_ends
from paceline.pipeline.channel import OrderedChannel
from paceline.pipeline.dispenser import Dispenser
from paceline.pipeline.slots import Landing, Slots
from paceline.recipes.train_tell import Teller
from paceline.records import BlockSet, FeatureBatch, StepReport, TokenBatch
from paceline.runtime.gate import Gate
from paceline.runtime.streams import own_stream
from paceline.target.replica import TargetReplica
from paceline.train.step import DrafterStep

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("traceable")]

ONE = ("cuda:0", "cuda:0")
CAPTURED = {"policy": "captured", "context_slots": 128, "anchor_slots": 32}
NONE = torch.zeros(0, dtype=torch.long)
BLOCKS = BlockSet(NONE, NONE, NONE, NONE, NONE.view(0, 4), NONE.view(0, 4).bool())


def waiting_after_each_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every role wait for its device at the end of each unit of work."""
    whole = Gate.work

    @contextmanager
    def work(self: Gate) -> Iterator[None]:
        with whole(self):
            yield
            torch.cuda.synchronize()

    monkeypatch.setattr(Gate, "work", work)


def test_roles_have_streams_of_their_own(losses: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, int] = {}
    for owner, method in ((TargetReplica, "_features"), (DrafterStep, "load")):
        whole = getattr(owner, method)

        def noted(self: Any, batch: Any, whole: Any = whole) -> Any:
            seen[threading.current_thread().name] = torch.cuda.current_stream().cuda_stream
            return whole(self, batch)

        monkeypatch.setattr(owner, method, noted)
    losses("one", ONE, "float32", more=CAPTURED)
    assert len(seen) == 2
    assert len(set(seen.values())) == 2, seen
    assert torch.cuda.default_stream().cuda_stream not in seen.values()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_losses_are_those_of_roles_that_wait_after_each_unit(
    losses: Any, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    found = losses("streams", ONE, dtype, more=CAPTURED)
    with monkeypatch.context() as patch:
        waiting_after_each_unit(patch)
        expected = losses("waiting", ONE, dtype, more=CAPTURED)
    assert len(found) == 20
    assert found == expected


def test_reserved_memory_does_not_grow(losses: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reserved: list[int] = []
    whole = Teller.on_step

    def on_step(self: Teller, report: StepReport) -> None:
        reserved.append(torch.cuda.memory_reserved())
        whole(self, report)

    monkeypatch.setattr(Teller, "on_step", on_step)
    losses("flat", ONE, "float32", more={**CAPTURED, "max_steps": 120, "epochs": 200})
    assert len(reserved) == 120
    assert max(reserved[40:]) - min(reserved[40:]) <= 4 << 20, [n >> 20 for n in reserved]


def test_a_replica_that_raises_gives_its_slot_back(losses: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = losses("whole", ONE, "float32", more=CAPTURED)
    whole, hit, made = TargetReplica._features, [], []
    make = Slots.make

    def features(self: TargetReplica, tokens: TokenBatch) -> torch.Tensor:
        found = whole(self, tokens)
        if tokens.seq in (3, 7) and tokens.seq not in hit:
            hit.append(tokens.seq)
            torch.cuda._sleep(10**8)  # its stream is still writing when the slot is somebody else's
            found.fill_(1e3)
            raise RuntimeError("device lost")
        return found

    def noted(self: Slots, rank: int, like_CD: torch.Tensor) -> None:
        make(self, rank, like_CD)
        made.append((self, len(self._free[rank])))

    monkeypatch.setattr(TargetReplica, "_features", features)
    monkeypatch.setattr(Slots, "make", noted)
    assert losses("broken", ONE, "float32", more=CAPTURED) == expected
    assert hit == [3, 7]
    ((slots, count),) = made
    assert not slots._retired
    assert len(slots._free[0]) <= count


def token_batch(seq: int, tokens: int) -> TokenBatch:
    ids = torch.zeros(1, tokens, dtype=torch.long)
    return TokenBatch(seq, 0, seq, True, (seq,), ids, (tokens,), torch.arange(tokens), BLOCKS)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("slow", ["reader", "writer", "both"])
def test_a_slot_is_read_as_it_was_written(in_place: bool, slow: str) -> None:
    """Host threads run ahead of the device as far as slots allow: only events keep reader and writer apart."""
    count, C, D = 150, 2048, 512
    slots = Slots(1, replicas=1, ranks=1)
    slots.make(0, torch.zeros(C, D, device="cuda:0"))
    source = Dispenser(iter(token_batch(seq, C - seq) for seq in range(count)), lambda n: channel.finish(n), slots)
    channel = OrderedChannel(2**40, source.missing_before)
    outlet, failed = source.open(), []
    draw = random.Random(0)
    delays = [[draw.choice([0, 10**5, 4 * 10**6]) for _ in range(count)] for _ in range(2)]

    def write() -> None:
        try:
            with own_stream("cuda:0"):
                landing = Landing("cuda:0", outlet, slots)
                for tokens in outlet:
                    room_TD = landing.room(tokens)
                    assert room_TD is not None
                    made_TD = room_TD if in_place else torch.empty_like(room_TD)
                    if slow != "reader":
                        torch.cuda._sleep(delays[0][tokens.seq])
                    made_TD.fill_(tokens.seq)
                    landed = landing.land(FeatureBatch(tokens, made_TD, torch.full((len(made_TD),), tokens.seq)))
                    channel.put(landed, admit=lambda seq=tokens.seq: outlet.settle(seq))
        except BaseException as error:
            failed.append(error)
            channel.stop()

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    seen = torch.zeros(count, 4, device="cuda:0")
    torch.cuda.synchronize()
    with own_stream("cuda:0"):
        for batch in channel:
            with batch.reading():
                if slow != "writer":
                    torch.cuda._sleep(delays[1][batch.tokens.seq])
                found = (batch.features_TD.min(), batch.features_TD.max(), *batch.positions_T.aminmax())
                seen[batch.tokens.seq] = torch.stack([value.float() for value in found])
        torch.cuda.synchronize()
    thread.join(60)
    assert not failed, failed
    expected = torch.arange(count).float()[:, None].expand(count, 4)
    torch.testing.assert_close(seen.cpu(), expected, rtol=0, atol=0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("devices", [("cuda:1", "cuda:0"), ("cuda:0", "cuda:0", "cuda:1")])
def test_devices_apart_train_what_one_does(losses: Any, devices: tuple[str, ...]) -> None:
    more = {**CAPTURED, "batches_per_step": 2, "context_slots": 768, "anchor_slots": 128}
    one = losses("one", ONE, "float32", slots=768, more=more)
    apart = losses("apart", devices, "float32", slots=768, more=more)
    assert apart == pytest.approx(one, rel=2e-3)


def test_loading_a_micro_batch_waits_for_nothing() -> None:
    """Landing and loading synchronise with nothing: torch would raise here."""
    shape, device = SHAPES["tiny"], torch.device("cuda:0")
    settings = shape.train_settings("bfloat16")
    step = DrafterStep(random_drafter(shape, device), random_ends(shape, device, torch.bfloat16), settings)
    batch = feature_batches(shape, device, torch.bfloat16)[0]
    tokens = replace(batch.tokens, closes_step=True)
    slots = Slots(1, replicas=1, ranks=1)
    slots.make(0, step.buffers.features_CD)
    source = Dispenser(iter(replace(tokens, seq=seq) for seq in range(2)), lambda n: None, slots)
    outlet = source.open()
    landing = Landing("cuda:0", outlet, slots)
    with own_stream("cuda:0"):
        for mode in ("default", "error"):  # memory is pinned and kernels are loaded at the first time
            source.lease(outlet)
            with waiting_is_an_error() if mode == "error" else nullcontext():
                landed = landing.land(batch)
                with landed.reading():
                    step.load(landed)
                step.look(tokens)
            outlet.settle(("default", "error").index(mode))
