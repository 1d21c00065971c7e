"""Which rows make which batch, in which order: a pure function of (lengths, settings, seed, epoch). Free of torch.

Three layouts. bucketed: a batch holds rows of one length bucket, each padded to the bucket's edge. trimmed: batches of
the same sizes, of rows whose lengths are near one another, each padded to the longest of them. packed: samples whole
and end to end in one row of up to the token budget.

Only raw words of the counter-based Philox generator and stable sorts decide the order, so it is the same with every
version of numpy and on every machine. What would take eight bytes a row is made piece by piece.

Shapes: N rows, M batches, K buckets, L lengths from 0 up, E distinct aligned lengths, G groups, n rows of a piece.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Float, Int, UInt64

from paceline.config import DataSettings
from paceline.data.arrays import PIECE, histogram, long_array, pick
from paceline.data.packing import count_bins, pack
from paceline.records import UserError

# Second word of the Philox key. blocks.sample_anchors has the row there, so these count down from the top; see also
# mixture.py.
_MEMBERS = 2**64 - 1
_ORDER = 2**64 - 2

ROUND = 32  # the widths of trimmed and packed rows are multiples of this many tokens
_PARTS = 16  # of what is shuffled, each of which draws all words again
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
    drawn = epoch if settings.reshuffle == "samples" else 0
    rows_N = shuffled(len(lengths_N), seed, _MEMBERS, drawn)
    if settings.layout == "packed":
        sizes: tuple[int, ...] = (0,)
        rows_N, offsets = _packed(rows_N, lengths_N, settings.token_budget)
        bucket_M = np.zeros(len(offsets) - 1, dtype=np.int32)
    else:
        sizes = _batch_sizes(settings, edges)
        rows_N, offsets, bucket_M = _bucketed(rows_N, lengths_N, edges, sizes, near=settings.layout == "trimmed")

    # Batches in drawn order, across buckets.
    order_M = shuffled(len(bucket_M), seed, _ORDER, epoch)
    moved = np.concatenate([[0], np.cumsum(np.diff(offsets)[order_M])])
    source_N = long_array(len(rows_N))
    source_N[:] = 1  # from a row of a batch to its next
    source_N[moved[:-1]] = offsets[:-1][order_M] - np.concatenate([[0], offsets[1:][order_M][:-1] - 1])
    np.cumsum(source_N, dtype=np.int32, out=source_N)
    return Plan(settings.layout, edges, sizes, pick(rows_N, source_N), moved, bucket_M[order_M])


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
    samples_K = np.diff(_ends(counts_L, edges), prepend=0)
    return int((-(-samples_K // np.array(_batch_sizes(settings, edges)))).sum())


def widths(
    made: Plan, ordered_N: Int[np.ndarray, " N"], offsets: Int[np.ndarray, " ends"], bucket_U: Int[np.ndarray, " U"]
) -> Int[np.ndarray, " U"]:
    """Return to how many tokens the target's rows are padded, for U runs of rows that lie one behind the other.

    `ordered_N` has the rows' lengths in the plan's order, `offsets` where a run starts, `bucket_U` its bucket. A packed
    run is one row, all others have a row a sample.
    """
    edge_U = np.array(made.edges)[bucket_U]
    if made.layout == "bucketed":
        return edge_U
    over = np.add if made.layout == "packed" else np.maximum
    width_U = over.reduceat(ordered_N, offsets[:-1], dtype=ordered_N.dtype)  # another type would copy all lengths
    width_U = -(-width_U.astype(np.int64) // ROUND) * ROUND
    return width_U if made.layout == "packed" else np.minimum(width_U, edge_U)


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
    padded_M = widths(made, ordered_N, made.offsets, made.bucket_M)
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


def shuffled(count: int, seed: int, purpose: int, epoch: int, place: int = 0) -> Int[np.ndarray, " n"]:
    """Return 0 .. count - 1 in the order that (seed, purpose, epoch, place) draws, as 32-bit numbers."""
    key, order_N, done = np.array([seed, purpose], dtype=np.uint64), long_array(count), 0
    words_N, rows_N = long_array(count, np.int64).view(np.uint64), long_array(count)  # touched as far as a part goes
    for part in range(_PARTS):
        drawing, held = np.random.Philox(key=key, counter=[0, 0, place, epoch]), 0
        for first in range(0, count, PIECE):
            words_n = drawing.random_raw(min(PIECE, count - first))
            mine_n = np.flatnonzero(words_n // (2**64 // _PARTS) == part)
            span = slice(held, held + len(mine_n))
            words_N[span], rows_N[span] = words_n[mine_n], mine_n + first
            held += len(mine_n)
        order_N[done : done + held] = pick(rows_N[:held], _word_order(words_N[:held]))
        done += held
    return order_N


def _word_order(words_n: UInt64[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    order_n = np.argsort(words_n)  # five times as fast as a stable sort, and the same unless two words are equal
    ordered_n = pick(words_n.view(np.int64), order_n)
    return np.argsort(words_n, kind="stable") if (ordered_n[1:] == ordered_n[:-1]).any() else order_n


def _bucketed(
    rows_N: Int[np.ndarray, " N"],
    lengths_N: Int[np.ndarray, " N"],
    edges: tuple[int, ...],
    sizes: tuple[int, ...],
    *,
    near: bool,
) -> tuple[Int[np.ndarray, " N"], Int[np.ndarray, " ends"], Int[np.ndarray, " M"]]:
    """Return rows, batch ends and buckets: bucket after bucket, cut to its batch size; its last batch may be smaller.

    `near`: in each bucket, windows of drawn rows are sorted by length before they are cut.
    """
    counts_L = histogram(lengths_N)
    ends, bucket_L = _ends(counts_L, edges), np.searchsorted(edges, np.arange(len(counts_L)))
    rows_N = _grouped(rows_N, pick(bucket_L.astype(np.min_scalar_type(-len(edges))), pick(lengths_N, rows_N)))
    if near:
        for start, stop in pairwise(_cuts(ends, tuple(size * _WINDOW for size in sizes)).tolist()):
            rows_n = rows_N[start:stop]
            rows_N[start:stop] = rows_n[_stable_order(lengths_N[rows_n])]
    offsets = _cuts(ends, sizes)
    return rows_N, offsets, np.searchsorted(ends, offsets[:-1], side="right").astype(np.int32)


def _packed(
    rows_N: Int[np.ndarray, " N"], lengths_N: Int[np.ndarray, " N"], budget: int
) -> tuple[Int[np.ndarray, " N"], Int[np.ndarray, " ends"]]:
    """Return rows and batch ends, bin after bin. Lengths alone decide the bins, the drawn order which row is where."""
    counts_L = histogram(lengths_N)
    keys_N = pick(lengths_N, rows_N)
    np.subtract(lengths_N.max(), keys_N, out=keys_N)  # longest first
    rows_N = _grouped(rows_N, keys_N)
    bins_N = pack(counts_L, budget)
    return _grouped(rows_N, bins_N), np.concatenate([[0], np.cumsum(histogram(bins_N))])


def _grouped(rows_N: Int[np.ndarray, " N"], keys_N: Int[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
    """Return the rows by their keys, which are small whole numbers, and as they were where keys are equal."""
    counts_G = histogram(keys_N)
    place_G = np.cumsum(counts_G) - counts_G  # of each group's next row
    grouped_N = long_array(len(rows_N))
    step = max(PIECE, len(counts_G))  # with many groups a small piece would cost more than it holds
    for first in range(0, len(rows_N), step):
        keys_n = keys_N[first : first + step]
        counts_G = np.bincount(keys_n, minlength=len(place_G))
        place_n = np.repeat(place_G - np.cumsum(counts_G) + counts_G, counts_G) + np.arange(len(keys_n))
        grouped_N[place_n] = rows_N[first : first + step][_stable_order(keys_n)]
        place_G += counts_G
    return grouped_N


def _cuts(ends: Int[np.ndarray, " K"], sizes: tuple[int, ...]) -> Int[np.ndarray, " ends"]:
    """Return where batches start, and the end, when each bucket is cut to its size."""
    starts = [np.arange(start, end, size) for start, end, size in zip([0, *ends], ends, sizes, strict=False)]
    return np.concatenate([*starts, ends[-1:]])


def _ends(counts_L: Int[np.ndarray, " L"], edges: tuple[int, ...]) -> Int[np.ndarray, " K"]:
    """Return how many rows lie in each bucket and all before it."""
    return np.cumsum(counts_L)[np.minimum(edges, len(counts_L) - 1)]


def _batch_sizes(settings: DataSettings, edges: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(max(settings.min_batch, min(settings.max_batch, settings.token_budget // edge)) for edge in edges)


def _stable_order(keys_N: Int[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
    """Return the order of small whole numbers; numpy sorts 16 bits by radix, ten times as fast as 32."""
    order_N = np.argsort(keys_N.astype(np.uint16), kind="stable")
    if keys_N.dtype.itemsize < 4:
        return order_N
    high_N = keys_N >> 16
    return order_N if not high_N.any() else order_N[np.argsort(high_N[order_N].astype(np.uint16), kind="stable")]


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
