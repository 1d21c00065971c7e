"""The log of an open shard: what a kill or a flipped bit leaves of it."""

import json
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from paceline.data.shard_log import ShardLog, write_log


def record(line: int, *, copy: int = 0, over: bool = True, **more: Any) -> dict[str, Any]:
    return {"line": line, "copy": copy, "over": over, "rows": [], "left_out": None, **more}


def test_the_last_record_of_a_key_counts(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with closing(ShardLog(path)) as log:
        for one in (record(2, over=False), record(1, copy=1), record(2, text="é\u2028"), record(1, over=False)):
            log.append(one)
        for _ in range(2):
            assert log.ordered() == [(1, 0), (1, 1), (2, 0)]
            assert log.read((2, 0)) == record(2, text="é\u2028")
            assert [log.is_over(key) for key in ((1, 0), (1, 1), (2, 0), (3, 0))] == [False, True, True, False]
            assert (log.finished, log.damaged) == (2, 0)
            log.append(record(2, text="é\u2028"))
    with closing(ShardLog(path)) as log:
        assert (log.finished, log.damaged) == (2, 0)
        assert log.read((2, 0)) == record(2, text="é\u2028")


@pytest.mark.parametrize("kept", [1, 5, 9, 20, -1])
def test_a_torn_end_costs_its_own_record_alone(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "log"
    with closing(ShardLog(path)) as log:
        log.append(record(1))
        whole = path.stat().st_size
        log.append(record(2, text="x" * 100))
    data = path.read_bytes()
    path.write_bytes(data[: whole + kept] if kept > 0 else data[:kept])
    with closing(ShardLog(path)) as log:
        assert path.stat().st_size == whole
        log.append(record(3))
    with closing(ShardLog(path)) as log:
        assert (log.ordered(), log.damaged) == ([(1, 0), (3, 0)], 0)


def test_each_bit_of_a_record_is_covered(tmp_path: Path) -> None:
    path = tmp_path / "log"
    write_log(path, [record(1), record(2), record(3)])
    data = path.read_bytes()
    first = data.index(b"\n") + 1
    for bit in range(8 * (data.index(b"\n", first) - first)):
        flipped = bytearray(data)
        flipped[first + bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with closing(ShardLog(path)) as log:
            if (2, 0) in log:  # a checksum's digit became a capital letter
                assert log.read((2, 0)) == record(2)
                assert bit // 8 < 8
            else:
                assert (1, 0) in log
                assert log.damaged + ((3, 0) not in log) >= 1
            assert (3, 0) in log or flipped[first + bit // 8] != 10


def test_zeros_after_a_power_failure(tmp_path: Path) -> None:
    path = tmp_path / "log"
    write_log(path, [record(1)])
    path.write_bytes(path.read_bytes() + bytes(4096))
    with closing(ShardLog(path)) as log:
        assert (log.ordered(), log.damaged) == ([(1, 0)], 0)


@pytest.mark.parametrize(
    "body",
    [
        "[]",
        "{}",
        "7",
        "null",
        "{nope",
        "[" * 100_000,
        *(json.dumps(record(2) | {key: "x"}) for key in record(2)),
        *(json.dumps({key: value for key, value in record(2).items() if key != gone}) for gone in record(2)),
    ],
    ids=range(16),
)
def test_what_is_no_record_is_damaged_whatever_its_checksum(tmp_path: Path, body: str) -> None:
    path = tmp_path / "log"
    write_log(path, [record(1)])
    line = f"{body}\n".encode()
    path.write_bytes(path.read_bytes() + b"%08x %s" % (zlib.crc32(line), line))
    with closing(ShardLog(path)) as log:
        assert (log.ordered(), log.damaged) == ([(1, 0)], 1)
        log.append(record(3))
    with closing(ShardLog(path)) as log:
        assert (log.ordered(), log.damaged) == ([(1, 0), (3, 0)], 1)
