"""Which rows make which batch, in which order: a pure function of (lengths, settings, seed, epoch). Free of torch.

Three layouts. bucketed: a batch holds rows of one length bucket, each padded to the bucket's edge. trimmed: batches of
the same sizes, of rows whose lengths are near one another, each padded to the longest of them. packed: samples whole
and end to end in one row of up to the token budget.

The order is the same with every version of numpy and on every machine (plan_order.py). Beside the rows and their
lengths nothing is as long as an epoch: drawn rows come part by part and each goes straight to its place in the plan.

Shapes: N rows, M batches, K buckets, L lengths from 0 up, E distinct aligned lengths, n rows of a piece.
"""

import bisect
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from paceline.config import DataSettings
from paceline.data.arrays import histogram, long_array, pick, put
from paceline.data.packing import Packing, count_bins
from paceline.data.plan_order import numbered, shuffled, shuffled_parts, stable_order
from paceline.records import UserError

# Second word of the Philox key. blocks.sample_anchors has the row there, so these count down from the top; see also
# mixture.py.
_MEMBERS = 2**64 - 1
_ORDER = 2**64 - 2

ROUND = 32  # the widths of trimmed and packed rows are multiples of this many tokens
_WINDOW = 64  # trimmed: full batches within whose rows, in drawn order, those of like length come together


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The batches of one epoch, in order: batch i holds rows_N[offsets[i] : offsets[i + 1]]."""

    layout: str
    edges: tuple[int, ...]  # longest length of each bucket; packed: the token budget
    batch_sizes: tuple[int, ...]  # rows of a full batch of each bucket; packed: 0, as many as fit
    rows_N: Int[np.ndarray, " N"]
    offsets: Int[np.ndarray, " ends"]  # M + 1 of them
    bucket_M: Int[np.ndarray, " M"]

    def __len__(self) -> int:
        return len(self.bucket_M)

    def batch(self, index: int) -> Int[np.ndarray, " n"]:
        """Return the rows of a batch."""
        return self.rows_N[self.offsets[index] : self.offsets[index + 1]]


Seats = Callable[[Int[np.ndarray, " n"]], Int[np.ndarray, " n"]]  # ascending numbers of rows to places in the plan


@dataclass(frozen=True, slots=True, eq=False)
class _Batches:
    """Batches before they are put in order. Rows are numbered group by group, in a group as they are drawn."""

    size_M: Int[np.ndarray, " M"]
    bucket_M: Int[np.ndarray, " M"]
    group_L: Int[np.ndarray, " L"]  # of a row of each length
    seated: Callable[[Int[np.ndarray, " M"]], Seats]  # given, for good, the place of each batch's first row


@dataclass(frozen=True, slots=True)
class BucketRow:
    """One line of the bucket table."""

    low: int  # lengths of the bucket: low <= length < high
    high: int
    samples: int
    batches: int
    batch_share: float  # of all batches
    batch_min: int  # samples in a batch; 0 when there is none
    batch_max: int
    padding_share: float  # of the positions the target computes


@dataclass(frozen=True, slots=True)
class BucketTable:
    """What an epoch looks like."""

    layout: str
    samples: int
    tokens: int
    batches: int
    batch_min: int
    batch_max: int
    batch_avg: float
    padding_share: float
    buckets: tuple[BucketRow, ...]  # none when packed

    def as_dict(self) -> dict[str, Any]:
        """Return the table as plain data."""
        return asdict(self)


def plan(
    lengths_N: Int[np.ndarray, " N"],
    settings: DataSettings,
    *,
    seed: int,
    epoch: int,
    edges: tuple[int, ...] | None = None,
) -> Plan:
    """Return the batches of an epoch; bucket edges are given, hand-written or chosen for these lengths.

    Raises:
        UserError: there are no rows, or one is longer than the token budget or the last hand-written edge.
    """
    edges = check_lengths(lengths_N, settings, edges)
    counts_L = histogram(lengths_N)
    packed = settings.layout == "packed"
    sizes = (0,) if packed else _batch_sizes(settings, edges)
    batches = _packed(counts_L, settings.token_budget) if packed else _bucketed(counts_L, edges, sizes)

    # Batches in drawn order, across buckets.
    order_M = shuffled(len(batches.size_M), seed, _ORDER, epoch)
    offsets = long_array(len(order_M) + 1)
    offsets[0] = 0
    np.cumsum(pick(batches.size_M, order_M), dtype=np.int32, out=offsets[1:])
    seats = batches.seated(put(offsets[:-1], order_M))
    bucket_M, group_L = pick(batches.bucket_M, order_M), batches.group_L
    del batches, order_M  # with long rows there are so many batches that it shows

    # Each row straight to its place there.
    drawn = epoch if settings.reshuffle == "samples" else 0
    parts = shuffled_parts(len(lengths_N), seed, _MEMBERS, drawn)
    rows_N = long_array(len(lengths_N))
    for number_n, rows_n in numbered(parts, lengths_N, group_L, counts_L):
        rows_N[seats(number_n)] = rows_n
    if settings.layout == "trimmed":
        windows = _cuts(_ends(counts_L, edges), tuple(size * _WINDOW for size in sizes))
        _bring_together(rows_N, lengths_N, windows, seats)
    return Plan(settings.layout, edges, sizes, rows_N, offsets, bucket_M)


def count_batches(
    lengths_N: Int[np.ndarray, " N"], settings: DataSettings, edges: tuple[int, ...] | None = None
) -> int:
    """Return how many batches an epoch of these rows has, which no draw changes.

    Raises:
        UserError: as plan.
    """
    edges = check_lengths(lengths_N, settings, edges)
    counts_L = histogram(lengths_N)
    if settings.layout == "packed":
        return count_bins(counts_L, settings.token_budget)
    return int(_batches_of(_ends(counts_L, edges), _batch_sizes(settings, edges)).sum())


def widths(
    layout: str, edges: tuple[int, ...], ordered_N: Int[np.ndarray, " N"], offsets: Int[np.ndarray, " ends"]
) -> Int[np.ndarray, " U"]:
    """Return to how many tokens the target's rows are padded, for U runs of rows that lie one behind the other.

    `ordered_N` has the rows' lengths, those of one bucket in a run, and `offsets` says where a run starts. A packed run
    is one row, all others have a row a sample.
    """
    edge_U = np.array(edges)[np.searchsorted(edges, ordered_N[offsets[:-1]])]
    if layout == "bucketed":
        return edge_U
    packed = layout == "packed"
    over = np.add if packed else np.maximum
    wide = np.int64 if packed else ordered_N.dtype  # another type copies all lengths, but a sum needs it
    width_U = over.reduceat(ordered_N, offsets[:-1], dtype=wide)
    width_U = -(-width_U.astype(np.int64) // ROUND) * ROUND
    return width_U if packed else np.minimum(width_U, edge_U)


def width(layout: str, edges: tuple[int, ...], lengths: Sequence[int]) -> int:
    """Return what `widths` says of one run, in a tenth of the time that it takes for one."""
    if layout == "packed":
        return -(-sum(lengths) // ROUND) * ROUND
    longest = max(lengths)
    edge = edges[bisect.bisect_left(edges, longest)]
    return edge if layout == "bucketed" else min(-(-longest // ROUND) * ROUND, edge)


def optimal_edges(
    counts_L: Int[np.ndarray, " L"] | Float[np.ndarray, " L"], buckets: int, align: int
) -> tuple[int, ...]:
    """Return at most `buckets` edges, multiples of `align`, with the fewest tokens when rows are padded to their edge.

    Counts of rows may be weighted and then be fractions, as long as every length that occurs has one above 0.
    Dynamic program over the aligned lengths that occur: with one bucket more, the shortest lengths up to i cost
    min over j of cost(up to j) + edge(i) * rows(j+1 .. i).
    """
    starts = np.concatenate([[0], np.arange(1, len(counts_L), align)])  # of the lengths that share an aligned one
    counts = np.add.reduceat(counts_L, starts)
    used_E = np.flatnonzero(counts)
    edge_E = used_E * align
    upto_E = np.cumsum(counts[used_E])
    cost_E = edge_E * upto_E
    last_cuts = []
    for _ in range(1, min(buckets, len(used_E))):
        cut_E = np.zeros(len(used_E), dtype=np.int64)
        best_E = np.zeros_like(cost_E)
        for i in range(len(used_E)):
            rise = cost_E[: i + 1] + edge_E[i] * (upto_E[i] - upto_E[: i + 1])
            cut_E[i] = rise.argmin()
            best_E[i] = rise[cut_E[i]]
        cost_E = best_E
        last_cuts.append(cut_E)
    chosen = [len(used_E) - 1]
    for cut_E in reversed(last_cuts):
        chosen.append(int(cut_E[chosen[-1]]))
    return tuple(int(edge) for edge in edge_E[sorted(set(chosen))])


def table(made: Plan, lengths_N: Int[np.ndarray, " N"]) -> BucketTable:
    """Return the bucket table of a plan."""
    sizes_M = np.diff(made.offsets)
    ordered_N = lengths_N[made.rows_N]
    real_M = np.add.reduceat(ordered_N, made.offsets[:-1], dtype=np.int64)
    padded_M = widths(made.layout, made.edges, ordered_N, made.offsets)
    if made.layout != "packed":
        padded_M = padded_M * sizes_M
    lines = []
    for k, (last, edge) in enumerate(zip((-1, *made.edges), made.edges, strict=False)):
        mine_M = made.bucket_M == k
        sizes = sizes_M[mine_M]
        lines.append(
            BucketRow(
                low=last + 1,
                high=edge + 1,
                samples=int(sizes.sum()),
                batches=len(sizes),
                batch_share=len(sizes) / len(made),
                batch_min=int(sizes.min()) if len(sizes) else 0,
                batch_max=int(sizes.max(initial=0)),
                padding_share=_padding(real_M[mine_M], padded_M[mine_M]),
            )
        )
    return BucketTable(
        layout=made.layout,
        samples=len(lengths_N),
        tokens=int(lengths_N.sum(dtype=np.int64)),
        batches=len(made),
        batch_min=int(sizes_M.min()),
        batch_max=int(sizes_M.max()),
        batch_avg=len(lengths_N) / len(made),
        padding_share=_padding(real_M, padded_M),
        buckets=() if made.layout == "packed" else tuple(lines),
    )


def check_lengths(
    lengths_N: Int[np.ndarray, " N"],
    settings: DataSettings,
    edges: tuple[int, ...] | None,
    where: Callable[[int], str] = "row {:,}".format,
) -> tuple[int, ...]:
    """Return the edges of the buckets, or the budget of a packed batch, after checking that every row has room.

    Raises:
        UserError: as plan.
    """
    if len(lengths_N) == 0:
        raise UserError(f"Dataset {', '.join(settings.folders)} (data.dataset) has no rows. Prepare one that has.")
    shortest = int(lengths_N.argmin())
    if lengths_N[shortest] < 1:
        raise UserError(f"A row must hold tokens, got none in {where(shortest)} (data.dataset). Prepare without it.")
    row, budget = int(lengths_N.argmax()), settings.token_budget
    longest = needed = int(lengths_N[row])
    what = f"the longest row, got {budget:,} and {where(row)} of {longest:,} tokens"
    if settings.layout == "packed":
        edges = (budget,)
    else:
        edges = edges or settings.edges or optimal_edges(histogram(lengths_N), settings.buckets, settings.align)
        _check_edges(edges, where(row), longest)
        needed = edges[-1]
        if settings.layout == "trimmed":
            needed = min(-(-longest // ROUND) * ROUND, needed)
        if needed > longest:
            what += f", padded to {needed:,}"
    if needed > budget:
        raise UserError(f"data.token_budget must hold {what}. Raise it to {needed:,} or prepare shorter rows.")
    return edges


def _bucketed(counts_L: Int[np.ndarray, " L"], edges: tuple[int, ...], sizes: tuple[int, ...]) -> _Batches:
    """Return the batches bucket after bucket, each cut to its batch size; its last batch may be smaller."""
    ends = _ends(counts_L, edges)
    offsets = _cuts(ends, sizes)
    size_M = np.subtract(offsets[1:], offsets[:-1], out=long_array(len(offsets) - 1))
    batches_K = _batches_of(ends, sizes)
    bucket_M = np.repeat(np.arange(len(edges), dtype=np.min_scalar_type(-len(edges))), batches_K)
    group_L = np.searchsorted(edges, np.arange(len(counts_L)))

    def seated(start_M: Int[np.ndarray, " M"]) -> Seats:
        shift_M = np.subtract(start_M, offsets[:-1], out=start_M)

        def seats(number_n: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
            sought_n = number_n.astype(offsets.dtype)  # another type copies all offsets
            return number_n + shift_M[np.searchsorted(offsets, sought_n, side="right") - 1]

        return seats

    return _Batches(size_M, bucket_M, group_L, seated)


def _packed(counts_L: Int[np.ndarray, " L"], budget: int) -> _Batches:
    """Return the bins as batches. Lengths alone decide the bins, the drawn order which row is where."""
    packing = Packing(counts_L, budget)
    longest_first_L = np.arange(len(counts_L))[::-1]
    return _Batches(packing.sizes_M, np.zeros(len(packing.sizes_M), dtype=np.int8), longest_first_L, packing.seat)


def _bring_together(
    rows_N: Int[np.ndarray, " N"], lengths_N: Int[np.ndarray, " N"], windows: Int[np.ndarray, " ends"], seats: Seats
) -> None:
    """Sort the drawn rows of each window by length, in the places that they have."""
    for start, stop in pairwise(windows.tolist()):
        places_n = seats(np.arange(start, stop))
        rows_n = rows_N[places_n]
        rows_N[places_n] = rows_n[stable_order(lengths_N[rows_n])]


def _cuts(ends: Int[np.ndarray, " K"], sizes: tuple[int, ...]) -> Int[np.ndarray, " ends"]:
    """Return where batches start, and the end, when each bucket is cut to its size."""
    count_K = _batches_of(ends, sizes)
    cuts, done, start = long_array(int(count_K.sum()) + 1), 0, 0
    for end, size, count in zip(ends.tolist(), sizes, count_K.tolist(), strict=True):
        cuts[done : done + count] = np.arange(start, end, size, dtype=np.int32)
        done, start = done + count, end
    cuts[done] = start
    return cuts


def _batches_of(ends: Int[np.ndarray, " K"], sizes: tuple[int, ...]) -> Int[np.ndarray, " K"]:
    """Return how many batches each bucket is cut to."""
    return -(-np.diff(ends, prepend=0) // np.array(sizes))


def _ends(counts_L: Int[np.ndarray, " L"], edges: tuple[int, ...]) -> Int[np.ndarray, " K"]:
    """Return how many rows lie in each bucket and all before it."""
    return np.cumsum(counts_L)[np.minimum(edges, len(counts_L) - 1)]


def _batch_sizes(settings: DataSettings, edges: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(max(settings.min_batch, min(settings.max_batch, settings.token_budget // edge)) for edge in edges)


def _padding(real_M: Int[np.ndarray, " m"], padded_M: Int[np.ndarray, " m"]) -> float:
    return 1 - int(real_M.sum()) / int(padded_M.sum()) if len(padded_M) else 0.0


def _check_edges(edges: tuple[int, ...], row: str, longest: int) -> None:
    if edges[0] < 1:
        raise UserError(f"data.edges must be lengths from 1 up, got {edges[0]}. Remove that edge.")
    if longest > edges[-1]:
        raise UserError(
            f"data.edges must reach the longest row, got {edges[-1]:,} as the last edge and {row} of "
            f"{longest:,} tokens. Add an edge or set data.edges to null."
        )
