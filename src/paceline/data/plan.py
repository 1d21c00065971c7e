"""Which rows make which batch, in which order: a pure function of (lengths, settings, seed, epoch). Free of torch.

Rows are put into length buckets; a batch holds rows of one bucket. Only raw words of the counter-based Philox
generator and stable sorts decide the order, so it is the same with every version of numpy and on every machine.

Shapes: N rows, M batches, K buckets, E distinct aligned lengths.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Int, UInt64

from paceline.config import DataSettings
from paceline.records import UserError

# Second word of the Philox key. blocks.sample_anchors has the row there, so these count down from the top.
_MEMBERS = 2**64 - 1
_ORDER = 2**64 - 2


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The batches of one epoch, in order: batch i holds rows_N[offsets[i] : offsets[i + 1]]."""

    edges: tuple[int, ...]  # longest length of each bucket
    batch_sizes: tuple[int, ...]  # rows of a full batch of each bucket
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
    """What an epoch looks like; every batch is padded to its own longest row."""

    samples: int
    tokens: int
    batches: int
    batch_min: int
    batch_max: int
    batch_avg: float
    padding_share: float
    buckets: tuple[BucketRow, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the table as plain data."""
        return asdict(self)


def plan(lengths_N: Int[np.ndarray, " N"], settings: DataSettings, *, seed: int, epoch: int) -> Plan:
    """Return the batches of an epoch.

    Raises:
        UserError: there are no rows, or one is longer than the last hand-written edge.
    """
    if len(lengths_N) == 0:
        raise UserError(f"Dataset {settings.dataset} (data.dataset) has no rows. Prepare one that has.")
    edges = settings.edges or optimal_edges(lengths_N, settings.buckets, settings.align)
    _check_edges(lengths_N, edges)
    sizes = tuple(max(settings.min_batch, min(settings.max_batch, settings.token_budget // edge)) for edge in edges)
    bucket_N = np.searchsorted(edges, lengths_N).astype(np.uint16)  # 16 bits: numpy sorts them by radix

    # 1. Rows of each bucket in drawn order, bucket after bucket.
    drawn = epoch if settings.reshuffle == "samples" else 0
    rows_N = _shuffled(len(lengths_N), seed, _MEMBERS, drawn)
    rows_N = rows_N[np.argsort(bucket_N[rows_N], kind="stable")]

    # 2. Cut each bucket; its last batch may be smaller.
    ends = np.cumsum(np.bincount(bucket_N, minlength=len(edges)))
    starts = [np.arange(start, end, size) for start, end, size in zip([0, *ends], ends, sizes, strict=False)]
    bucket_M = np.repeat(np.arange(len(edges)), [len(part) for part in starts])
    offsets = np.concatenate([*starts, ends[-1:]])

    # 3. Batches in drawn order across buckets.
    order_M = _shuffled(len(bucket_M), seed, _ORDER, epoch)
    sizes_M = np.diff(offsets)[order_M]
    moved = np.concatenate([[0], np.cumsum(sizes_M)])
    source_N = np.arange(len(rows_N)) + np.repeat(offsets[:-1][order_M] - moved[:-1], sizes_M)
    return Plan(edges, sizes, rows_N[source_N], moved, bucket_M[order_M])


def optimal_edges(lengths_N: Int[np.ndarray, " N"], buckets: int, align: int) -> tuple[int, ...]:
    """Return at most `buckets` edges, multiples of `align`, with the fewest tokens when rows are padded to their edge.

    Dynamic program over the aligned lengths that occur: with one bucket more, the shortest lengths up to i cost
    min over j of cost(up to j) + edge(i) * rows(j+1 .. i).
    """
    counts = np.bincount(-(-lengths_N // align))
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


def table(plan: Plan, lengths_N: Int[np.ndarray, " N"]) -> BucketTable:
    """Return the bucket table of a plan."""
    sizes_M = np.diff(plan.offsets)
    ordered_N = lengths_N[plan.rows_N]
    real_M = np.add.reduceat(ordered_N, plan.offsets[:-1])
    padded_M = np.maximum.reduceat(ordered_N, plan.offsets[:-1]) * sizes_M
    lines = []
    for k, (last, edge) in enumerate(zip((-1, *plan.edges), plan.edges, strict=False)):
        mine_M = plan.bucket_M == k
        sizes = sizes_M[mine_M]
        lines.append(
            BucketRow(
                low=last + 1,
                high=edge + 1,
                samples=int(sizes.sum()),
                batches=len(sizes),
                batch_share=len(sizes) / len(plan),
                batch_min=int(sizes.min()) if len(sizes) else 0,
                batch_max=int(sizes.max(initial=0)),
                padding_share=_padding(real_M[mine_M], padded_M[mine_M]),
            )
        )
    return BucketTable(
        samples=len(lengths_N),
        tokens=int(lengths_N.sum()),
        batches=len(plan),
        batch_min=int(sizes_M.min()),
        batch_max=int(sizes_M.max()),
        batch_avg=len(lengths_N) / len(plan),
        padding_share=_padding(real_M, padded_M),
        buckets=tuple(lines),
    )


def _padding(real_M: Int[np.ndarray, " m"], padded_M: Int[np.ndarray, " m"]) -> float:
    return 1 - int(real_M.sum()) / int(padded_M.sum()) if len(padded_M) else 0.0


def _check_edges(lengths_N: Int[np.ndarray, " N"], edges: tuple[int, ...]) -> None:
    if edges[0] < 1:
        raise UserError(f"data.edges must be lengths from 1 up, got {edges[0]}. Remove that edge.")
    row = int(lengths_N.argmax())
    if lengths_N[row] > edges[-1]:
        raise UserError(
            f"data.edges must reach the longest row, got {edges[-1]:,} as the last edge and row {row:,} of "
            f"{lengths_N[row]:,} tokens. Add an edge or set data.edges to null."
        )


def _shuffled(count: int, seed: int, purpose: int, epoch: int) -> Int[np.ndarray, " n"]:
    key = np.array([seed, purpose], dtype=np.uint64)
    words: UInt64[np.ndarray, " n"] = np.random.Philox(key=key, counter=[0, 0, 0, epoch]).random_raw(count)
    return np.argsort(words, kind="stable")
