"""What is built ahead: its order and bound, and that its thread ends in every way there is to stop."""

import gc
import threading
import time
from collections.abc import Iterator

import pytest

from paceline.data import prefetch as module
from paceline.data.prefetch import Prefetch


class Source:
    """Counts up to `count` and knows how many it gave."""

    def __init__(self, count: int = 10**9, error: BaseException | None = None) -> None:
        self.given, self.count, self.error = 0, count, error
        self.building = threading.Event()
        self.go = threading.Event()
        self.go.set()

    def __iter__(self) -> Iterator[int]:
        while self.given < self.count:
            self.given += 1
            self.building.set()
            self.go.wait(10)
            yield self.given - 1
        if self.error is not None:
            raise self.error


def wait_until(true: object) -> None:
    until = time.monotonic() + 10
    while not true():  # type: ignore[operator]
        assert time.monotonic() < until
        time.sleep(0.002)


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    wait_until(lambda: not running())


@pytest.mark.parametrize("ahead", [1, 3, 100])
@pytest.mark.parametrize("count", [0, 1, 20])
def test_everything_comes_once_and_in_order(ahead: int, count: int) -> None:
    stream = Prefetch(iter(Source(count)), ahead)
    assert list(stream) == list(range(count))
    assert next(stream, None) is None, "it stays at its end"


@pytest.mark.parametrize("ahead", [1, 4])
def test_no_more_than_the_bound_is_built_ahead(ahead: int) -> None:
    source = Source()
    with Prefetch(iter(source), ahead) as stream:
        assert source.given == 0, "nothing is built before somebody asks"
        for taken in range(1, 6):
            assert next(stream) == taken - 1
            wait_until(lambda taken=taken: source.given == taken + ahead)
            time.sleep(0.02)
            assert source.given == taken + ahead


def test_an_error_comes_in_its_place_and_again_for_whoever_asks() -> None:
    stream = Prefetch(iter(Source(3, OSError("disk gone"))), 10)
    assert [next(stream) for _ in range(3)] == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(OSError, match="^disk gone$"):
            next(stream)


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_a_consumer_that_fails_ends_the_thread(kind: type[BaseException]) -> None:
    with pytest.raises(kind), Prefetch(iter(Source()), 2) as stream:
        next(stream)
        assert len(running()) == 1
        raise kind
    assert not running()


def test_a_stream_that_is_dropped_ends_its_thread() -> None:
    stream = Prefetch(iter(Source()), 2)
    next(stream)
    assert len(running()) == 1
    del stream


def test_one_that_was_never_read_has_no_thread() -> None:
    Prefetch(iter(Source()), 2).close()
    stream = Prefetch(iter(Source()), 2)
    stream.close()
    assert next(stream, None) is None
    assert not running()


def test_closing_wakes_a_reader_who_waits_for_an_item() -> None:
    source = Source()
    source.go.clear()
    stream = Prefetch(iter(source), 2)
    got: list[object] = []
    reader = threading.Thread(target=lambda: got.append(next(stream, "end")))
    reader.start()
    assert source.building.wait(10)
    closer = threading.Thread(target=stream.close)
    closer.start()
    reader.join(10)
    assert got == ["end"]
    source.go.set()
    closer.join(10)
    assert not closer.is_alive()


def test_what_was_being_built_at_the_close_is_not_handed_out() -> None:
    source = Source()
    source.go.clear()
    stream = Prefetch(iter(source), 2)
    reader = threading.Thread(target=lambda: next(stream, None))
    reader.start()
    assert source.building.wait(10)
    closer = threading.Thread(target=stream.close)
    closer.start()
    reader.join(10)
    source.go.set()
    closer.join(10)
    assert next(stream, None) is None
    assert not running()


def test_several_readers_share_one_stream() -> None:
    stream = Prefetch(iter(Source(300)), 4)
    got: list[list[int]] = [[], [], []]
    readers = [threading.Thread(target=lambda mine=mine: mine.extend(stream)) for mine in got]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(10)
    assert sorted(number for mine in got for number in mine) == list(range(300))
    assert all(mine == sorted(mine) for mine in got)


def test_a_source_that_hangs_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LEAVE_S", 0.5)
    begun, go = threading.Event(), threading.Event()

    def hanging() -> Iterator[int]:
        begun.set()
        go.wait(60)
        yield 1

    ahead = Prefetch(hanging(), 1)
    threading.Thread(target=lambda: next(ahead, None), daemon=True).start()
    assert begun.wait(5)
    joins: list[float] = []
    whole = threading.Thread.join
    monkeypatch.setattr(
        threading.Thread, "join", lambda self, timeout=None: joins.append(timeout) or whole(self, timeout)
    )
    ahead.close()
    ahead.close()
    assert joins == [0.5, 0.0]
    go.set()
