"""A replica that runs out of memory computes a micro-batch in halves, and says what to lower if those do not fit."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from paceline.blocks import context_positions
from paceline.drafter.packed import pack
from paceline.records import BlockSet, FeatureBatch, RunError, TokenBatch
from paceline.runtime.gate import Gate
from paceline.target.feature_cache import MemoryCache
from paceline.target.halves import halves
from paceline.target.load import TargetFacts
from paceline.target.model import FeatureTarget
from paceline.target.replica import TargetReplica

LENGTHS = (9, 17, 1, 4, 12)
LAYOUTS: dict[str, dict[str, Any]] = {
    "trimmed": {},
    "bucketed": {"width": 40},
    "packed": {"packed": True},
    "packed with a padded tail": {"packed": True, "width": 64},
}


def batch_of(lengths: tuple[int, ...], *, packed: bool = False, width: int | None = None) -> TokenBatch:
    """A micro-batch of random ids: a row a sample, or all in one, padded to a width."""
    draw = torch.Generator().manual_seed(0)
    samples = [torch.randint(4, 128, (length,), generator=draw) for length in lengths]
    rows = [torch.cat(samples)] if packed else samples
    S = width or max(map(len, rows))
    ids_RS = torch.stack([torch.nn.functional.pad(row, (0, S - len(row))) for row in rows])
    real_RS = torch.stack([torch.arange(S) < len(row) for row in rows])
    none = torch.zeros(0, dtype=torch.int64)
    blocks = BlockSet(none, none, none, none, none.view(0, 4), none.view(0, 4).bool())
    places_T = real_RS.flatten().nonzero()[:, 0]
    return TokenBatch(0, 0, 0, True, tuple(range(len(lengths))), ids_RS, lengths, places_T, blocks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_halves_laid_end_to_end_are_the_whole(tiny: TargetFacts, layout: str) -> None:
    whole = batch_of(LENGTHS, **LAYOUTS[layout])
    parts = halves(whole)
    assert parts is not None
    one, other = parts
    assert one.lengths + other.lengths == LENGTHS
    assert one.samples + other.samples == whole.samples
    assert abs(len(one.lengths) - len(other.lengths)) <= 1
    target = FeatureTarget(tiny, (0, 2, 4), dtype=torch.float32, device="cpu")
    together = torch.cat([target.features(one), target.features(other)])
    torch.testing.assert_close(together, target.features(whole), rtol=2e-5, atol=2e-5)


def test_one_sample_has_no_halves_and_two_have_one_each() -> None:
    for packed in (False, True):
        assert halves(batch_of((7,), packed=packed)) is None
        parts = halves(batch_of((2, 30), packed=packed))
        assert parts is not None
        assert [part.lengths for part in parts] == [(2,), (30,)]
        assert [part.places_T.tolist() for part in parts] == [[0, 1], list(range(30))]


class Made:
    """A replica of the tiny target, what it delivered and what it told."""

    def __init__(self, facts: TargetFacts, source: Iterable[TokenBatch], wanted: Callable[[], bool]) -> None:
        self.delivered: list[FeatureBatch] = []
        self.split: list[tuple[int, int]] = []
        self.cache = MemoryCache(2**20)
        self.replica = TargetReplica(
            0,
            "cpu",
            facts=facts,
            taps=(0, 2, 4),
            dtype=torch.float32,
            wire=torch.float32,
            largest=batch_of((3,)),
            source=iter(source),
            cache=self.cache,
            deliver=lambda batch: self.delivered.append(batch) or wanted(),
            gate=Gate(),
            on_split=lambda replica, tokens, parts: self.split.append((tokens.seq, parts)),
        )
        self.replica.load()

    def limit(self, tokens: int, calls: list[int]) -> None:
        """Let the fourth layer, behind two taps, run out of memory with more tokens than that."""

        def out_of_memory(module: Any, args: tuple[torch.Tensor, ...]) -> None:
            calls.append(args[0].shape[:2].numel())
            if calls[-1] > tokens:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        self.replica._target._trunk.layers[3].register_forward_pre_hook(out_of_memory)


@pytest.fixture
def make(tiny: TargetFacts) -> Callable[..., Made]:
    return lambda source, wanted=lambda: True: Made(tiny, source, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_micro_batch_that_does_not_fit_is_computed_in_halves(make: Any, layout: str) -> None:
    batches = [replace(batch_of(LENGTHS, **LAYOUTS[layout]), seq=4), replace(batch_of((5,)), seq=5)]
    plain, tight = make(batches), make(batches)
    plain.replica.run()
    calls: list[int] = []
    tight.limit(batches[0].input_ids.numel() - 1, calls)
    tight.replica.run()
    assert tight.split == [(4, 2)]
    assert len(calls) == 4
    for one, other in zip(plain.delivered, tight.delivered, strict=True):
        assert one.tokens is other.tokens
        torch.testing.assert_close(other.features_TD, one.features_TD, rtol=2e-5, atol=2e-5)
        assert torch.equal(other.positions_T, context_positions(one.tokens.lengths))


def test_halves_that_do_not_fit_either_say_what_to_lower(make: Any) -> None:
    made = make([batch_of(LENGTHS, width=20)])
    calls: list[int] = []
    made.limit(5, calls)
    with pytest.raises(
        RunError, match=r"of 43 tokens \(5 x 20 with padding\).*data.token_budget or train.context_slots"
    ):
        made.replica.run()
    assert len(calls) == 2, "it is split once"
    assert made.delivered == []


def test_a_single_sample_is_tried_again_whole(make: Any) -> None:
    made = make([batch_of((9,))])
    calls: list[int] = []
    made.limit(5, calls)
    with pytest.raises(RunError, match="Lower data.token_budget"):
        made.replica.run()
    assert (calls, made.split) == ([9, 9], [(0, 1)])


def test_a_rehearsal_that_does_not_fit_is_refused_at_once(make: Any) -> None:
    made = make([])
    calls: list[int] = []
    made.limit(2, calls)
    with pytest.raises(RunError, match="out of memory. A micro-batch of 3 tokens"):
        made.replica.warm()
    assert (calls, made.split) == ([3], [])


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize("fits", [True, False])
def test_features_are_handed_over_and_kept_as_bytes(make: Any, room: bool, fits: bool) -> None:
    """In the room where there is some; halves as the whole."""
    tokens = batch_of(LENGTHS)
    made = make([tokens])
    target = made.replica._target
    parts = [tokens] if fits else halves(tokens)
    expected_TP = torch.cat([pack(target.features(part), 3) for part in parts])
    made.replica._packs = True
    room_TP = torch.zeros_like(expected_TP)
    if room:
        made.replica._room = lambda tokens: room_TP[: tokens.num_tokens]
    if not fits:
        made.limit(tokens.input_ids.numel() - 1, [])
    made.replica.run()
    (delivered,) = made.delivered
    assert torch.equal(delivered.features_TD, expected_TP)
    assert delivered.nbytes == tokens.num_tokens * (expected_TP.shape[1])
    assert (delivered.features_TD.data_ptr() == room_TP.data_ptr()) == (room and fits)
    kept_TP = made.cache.get(tokens.samples)
    room_TP.zero_()
    assert torch.equal(kept_TP, expected_TP)


@pytest.mark.parametrize("wanted", [True, False])
def test_only_what_was_wanted_is_kept(make: Any, wanted: bool) -> None:
    made = make([batch_of((9,))], lambda: wanted)
    made.replica.run()
    kept = made.cache.get((0,))
    assert (kept is not None) == wanted
    assert len(made.delivered) == 1


@pytest.mark.parametrize("fast", [True, False])
def test_what_is_kept_is_not_where_others_will_write(make: Any, fast: bool) -> None:
    """The room of a micro-batch is written again once it was read, maybe before the cache gets its features."""
    tokens = batch_of(LENGTHS)
    made = make([tokens])
    if fast:
        assert made.replica._target.quicken() == ""
    wanted = made.replica._target.features(tokens).clone()
    room_TD = torch.zeros_like(wanted)
    made.replica._room = lambda tokens: room_TD[: tokens.num_tokens]
    deliver = made.replica._deliver

    def overwritten(batch: FeatureBatch) -> bool:
        assert torch.equal(batch.features_TD, wanted)
        assert (batch.features_TD.data_ptr() == room_TD.data_ptr()) == fast
        room_TD.fill_(7)
        return bool(deliver(batch))

    made.replica._deliver = overwritten
    made.replica.run()
    kept_TD = made.cache.get(tokens.samples)
    assert kept_TD is not None
    assert torch.equal(kept_TD, wanted)
