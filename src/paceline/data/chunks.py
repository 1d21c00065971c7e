"""Where the rows of mapped Arrow files lie, in a few numbers a record batch.

pyarrow's objects and arrays of them take 4.5 KB a record batch, which with rows of 2,300 tokens is five bytes a row.

Shapes: N rows, S tokens of a row, T tokens of rows that lie end to end.
"""

import bisect
from array import array
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Int, Integer

from paceline.data.columns import Lists, aligned_chunks

_COUNTED = 1 << 20  # tokens whose mask is spread out at a time, where it has to be counted


class Views:
    """Arrays by number, as read-only parts of the buffers that they came in; what they share is kept once."""

    def __init__(self) -> None:
        """Begin with none."""
        self._shared: list[Integer[np.ndarray, " values"]] = []  # a mapped file as values of one type
        self._known: dict[tuple[int, int, np.dtype], int] = {}
        self._which, self._start, self._size = array("i"), array("q"), array("q")  # of each array

    def __len__(self) -> int:
        return len(self._which)

    def append(self, values: pa.Array) -> None:
        """Add whole numbers, or the bytes that hold truth values, whose first bit is then `values.offset`."""
        # DLPack and buffers, because pyarrow's own to_numpy imports pandas (0.3 s).
        bits = pa.types.is_boolean(values.type)
        buffer = values.buffers()[1] or pa.py_buffer(b"")
        dtype = np.dtype(np.uint8) if bits else np.from_dlpack(values).dtype
        offset, size = (0, buffer.size) if bits else (values.offset * dtype.itemsize, len(values))
        address, whole = buffer.address, buffer
        while whole.parent is not None:
            whole = whole.parent
        start, skipped = divmod(address + offset - whole.address, dtype.itemsize)
        key = (whole.address, skipped, dtype)
        if key not in self._known:
            count = (whole.size - skipped) // dtype.itemsize
            shared = np.frombuffer(whole, np.uint8)[skipped:][: count * dtype.itemsize].view(dtype)
            shared.flags.writeable = False
            self._known[key] = len(self._shared)
            self._shared.append(shared)
        self._which.append(self._known[key])
        self._start.append(start)
        self._size.append(size)

    def extend(self, column: pa.ChunkedArray) -> None:
        """Add the chunks of a column that hold anything."""
        for values in column.chunks:
            if len(values):
                self.append(values)

    def part(self, index: int, first: int, behind: int) -> Integer[np.ndarray, " values"]:
        """Return the values of an array from `first` up to `behind`, which are places in it."""
        start = self._start[index]
        return self._shared[self._which[index]][start + first : start + behind]

    def take(self, index_n: Int[np.ndarray, " n"], places_n: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Return one value each of arrays by number, from places in them."""
        at_n = np.frombuffer(self._start, np.int64)[index_n] + places_n
        shared_n = np.frombuffer(self._which, np.int32)[index_n]
        taken_n = np.empty(len(at_n), np.result_type(*self._shared))
        for which in np.flatnonzero(np.bincount(shared_n)).tolist():
            mine_n = np.flatnonzero(shared_n == which)
            taken_n[mine_n] = self._shared[which][at_n[mine_n]]
        return taken_n

    def __getitem__(self, index: int) -> Integer[np.ndarray, " values"]:
        return self.part(index, 0, self._size[index])

    def __iter__(self) -> Iterator[Integer[np.ndarray, " values"]]:
        return (self[index] for index in range(len(self)))


class Chunks:
    """Rows by chunk: their ids, where each begins and ends, and the marks of those that are learnt from."""

    def __init__(self) -> None:
        """Begin with none."""
        self.first_row = array("q", [0])  # of each chunk, and how many rows there are
        self.ids, self.ends = Views(), Views()
        self._marks, self._mark_ends = Views(), Views()
        self._bit0 = array("q")  # of the marks; -1: they are numbers, as somebody else may write them

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, table: pa.Table) -> None:
        """Add the rows of a mapped table, of which nothing is kept but its buffers."""
        for ids, marks in aligned_chunks(table):
            self.ids.append(ids.values)
            self.ends.append(ids.offsets)
            self._add_marks(marks)
            self.first_row.append(self.first_row[-1] + len(ids))

    def find(self, rows_n: Int[np.ndarray, " n"]) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
        """Return the chunk of each row and its place there."""
        first_row = np.frombuffer(self.first_row, np.int64)
        chunk_n = np.searchsorted(first_row, rows_n, side="right") - 1
        return chunk_n, rows_n - first_row[chunk_n]

    def row(self, index: int) -> tuple[Int[np.ndarray, " S"], Bool[np.ndarray, " S"]]:
        """Return a view of a row's ids and a copy of its marks."""
        chunk = bisect.bisect_right(self.first_row, index) - 1
        place = index - self.first_row[chunk]
        first, behind = self.ends.part(chunk, place, place + 2).tolist()
        mark_first, mark_behind = self._mark_ends.part(chunk, place, place + 2).tolist()
        return self.ids.part(chunk, first, behind), self._read_marks(chunk, mark_first, mark_behind)

    def counts(self) -> Iterator[tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]]:
        """Yield supervised tokens and anchor candidates of each row, piece by piece of bounded size."""
        for chunk, offsets in enumerate(self._mark_ends):
            first = 0
            while first < len(offsets) - 1:
                limit = offsets.dtype.type(min(int(offsets[first]) + _COUNTED, int(offsets[-1])))
                behind = int(np.searchsorted(offsets, limit, side="right")) - 1
                behind = max(behind, first + 1)  # a row that is longer comes alone
                ends = offsets[first : behind + 1] - offsets[first]
                mask_T = self._read_marks(chunk, int(offsets[first]), int(offsets[behind]))
                pairs_T = mask_T.copy()
                pairs_T[:-1] &= mask_T[1:]
                pairs_T[ends[1:][np.diff(ends) > 0] - 1] = False  # a row's last token is followed by none of its own
                yield _row_sums(mask_T, ends), _row_sums(pairs_T, ends)
                first = behind

    def _add_marks(self, marks: Lists) -> None:
        self._marks.append(marks.values)
        self._mark_ends.append(marks.offsets)
        self._bit0.append(marks.values.offset if pa.types.is_boolean(marks.values.type) else -1)

    def _read_marks(self, chunk: int, first: int, behind: int) -> Bool[np.ndarray, " T"]:
        bit0 = self._bit0[chunk]
        if bit0 < 0:
            return self._marks.part(chunk, first, behind) != 0
        first, behind = first + bit0, behind + bit0
        bits_T = np.unpackbits(self._marks.part(chunk, first >> 3, (behind + 7) >> 3), bitorder="little")
        return bits_T[first & 7 : (first & 7) + behind - first].view(np.bool_)


def _row_sums(marks_T: Bool[np.ndarray, " T"], ends: Int[np.ndarray, " ends"]) -> Int[np.ndarray, " n"]:
    sums_n = np.zeros(len(ends) - 1, dtype=np.int32)
    filled_n = np.flatnonzero(np.diff(ends))  # reduceat gives an empty row the mark behind it
    sums_n[filled_n] = np.add.reduceat(marks_T, ends[:-1][filled_n], dtype=np.int32)
    return sums_n
