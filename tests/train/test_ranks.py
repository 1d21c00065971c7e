"""Ranks that meet hold the same sums, whoever comes first; a meeting that is ended wakes who waits."""

import threading
import time

import pytest
import torch

from paceline.pipeline.dealer import Dealer
from paceline.records import BlockSet, FeatureBatch, TokenBatch
from paceline.train.ranks import Meeting


def meet(meeting: Meeting, buffers: list[list[torch.Tensor]], late: int) -> None:
    def body(rank: int) -> None:
        time.sleep(0.05 * (rank == late))
        meeting.reduce(rank, buffers[rank])

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(len(buffers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("late", [0, 1])
def test_every_rank_gets_the_sum(ranks: int, late: int) -> None:
    generator = torch.Generator().manual_seed(0)
    given = [[torch.randn(7, generator=generator), torch.arange(3) + rank] for rank in range(ranks)]
    want = [sum(part[i].clone() for part in given) for i in range(2)]
    meeting = Meeting(ranks)
    meet(meeting, given, late)
    for buffers in given:
        assert all(torch.equal(a, b) for a, b in zip(buffers, given[0], strict=True))
        torch.testing.assert_close(buffers[0], want[0])
        assert torch.equal(buffers[1], want[1])
    meet(meeting, given, late)  # and again: the next step


@pytest.mark.parametrize("late", [0, 1])
def test_whether_a_step_is_the_last_is_rank_0s_to_say(late: int) -> None:
    """A rank that asked for itself would leave alone if the signal came between two ranks' looks."""
    meeting, said = Meeting(2), [[True, False, False, True], [False, True, False, False]]
    learnt: list[list[bool]] = [[], []]

    def body(rank: int) -> None:
        for last in said[rank]:
            time.sleep(0.02 * (rank == late))
            learnt[rank].append(meeting.reduce(rank, [torch.zeros(1)], last=last))

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert learnt == [said[0], said[0]]


def test_ending_a_meeting_wakes_who_waits() -> None:
    meeting, woken = Meeting(2), threading.Event()

    def wait() -> None:
        try:
            meeting.reduce(1, [torch.zeros(1)])
        except threading.BrokenBarrierError:
            woken.set()

    threading.Thread(target=wait, daemon=True).start()
    time.sleep(0.05)
    meeting.end()
    assert woken.wait(5)


def batch(seq: int, step: int, *, closes: bool) -> FeatureBatch:
    empty = torch.zeros(0, dtype=torch.long)
    blocks = BlockSet(empty, empty, empty, empty, torch.zeros(0, 4, dtype=torch.long), torch.zeros(0, 4).bool())
    tokens = TokenBatch(
        seq, 0, step, closes, (seq,), torch.zeros(1, 2, dtype=torch.long), (2,), torch.arange(2), blocks
    )
    return FeatureBatch(tokens, torch.zeros(2, 1), torch.arange(2))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_step_goes_round_from_rank_0_and_everyone_learns_of_its_end(ranks: int) -> None:
    sizes = [1, 3, 2, 5, 1]
    stream, seq = [], 0
    for step, size in enumerate(sizes):
        for i in range(size):
            stream.append(batch(seq, step, closes=i == size - 1))
            seq += 1
    dealer = Dealer(iter(stream), ranks)
    got: list[list[tuple[int | None, int | None]]] = [[] for _ in range(ranks)]

    def take(rank: int) -> None:
        for item, closing in dealer.stream(rank):
            got[rank].append((item and item.tokens.seq, closing and closing.step))

    threads = [threading.Thread(target=take, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    want: list[list[tuple[int | None, int | None]]] = [[] for _ in range(ranks)]
    seq = 0
    for step, size in enumerate(sizes):
        for i in range(size):
            for rank in range(ranks):
                closing = step if i == size - 1 else None
                if i % ranks == rank:
                    want[rank].append((seq, closing))
                elif closing is not None:
                    want[rank].append((None, closing))
            seq += 1
    assert got == want


def test_an_error_of_the_stream_reaches_every_rank() -> None:
    def stream() -> object:
        yield batch(0, 0, closes=True)
        raise ValueError("broken")

    dealer = Dealer(stream(), 2)  # type: ignore[arg-type]
    for rank in range(2):
        items = dealer.stream(rank)
        next(items)
        with pytest.raises(ValueError, match="broken"):
            next(items)
