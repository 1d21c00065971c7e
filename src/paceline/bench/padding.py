"""Padding of the ways to make batches, and the least that length buckets can have.

Shapes: N rows, E distinct lengths, K edges.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from paceline.config import DataSettings
from paceline.data.plan import plan, table


def least_padding(lengths_N: Int[np.ndarray, " N"], buckets: Sequence[int]) -> dict[int, float]:
    """Return the smallest share of padded positions by number of buckets, when rows are padded to their bucket's edge.

    Edges may be any length. The first i distinct lengths in k buckets take min over j of what the first j take in k - 1
    buckets and edge(i) for each row behind them. j may also be above i: that only adds rows that the minimum drops.
    """
    counts = np.bincount(lengths_N)
    edge_E = np.flatnonzero(counts)
    upto_E = np.cumsum(counts[edge_E])
    tokens = int(counts @ np.arange(len(counts)))
    cost_E = edge_E * upto_E  # one bucket
    shares = {}
    for bucket in range(1, max(buckets) + 1):
        if bucket > 1:
            rises = ((cost_E - edge * upto_E).min() for edge in edge_E.tolist())
            cost_E = edge_E * upto_E + np.fromiter(rises, dtype=np.int64, count=len(edge_E))
        if bucket in buckets:
            shares[bucket] = 1 - tokens / int(cost_E[-1])
    return shares


def equal_count_padding(lengths_N: Int[np.ndarray, " N"], buckets: int) -> float:
    """Return the share of padded positions with edges that put as many rows in each bucket, for comparison."""
    edge_K = np.quantile(lengths_N, np.arange(1, buckets + 1) / buckets, method="inverted_cdf")
    padded = edge_K[np.searchsorted(edge_K, lengths_N)].sum(dtype=np.int64)
    return 1 - int(lengths_N.sum(dtype=np.int64)) / int(padded)


def static_padding(lengths_N: Int[np.ndarray, " N"], buckets: int) -> float:
    """Return the share of padded positions with `layout: bucketed`."""
    return _planned(lengths_N, DataSettings(dataset="bench", layout="bucketed", buckets=buckets))


def trim_padding(lengths_N: Int[np.ndarray, " N"]) -> float:
    """Return the share of padded positions with `layout: trimmed`."""
    return _planned(lengths_N, DataSettings(dataset="bench", layout="trimmed"))


def packed_padding(lengths_N: Int[np.ndarray, " N"], budget: int) -> float:
    """Return the share of unused positions with `layout: packed`, every batch taken as full as it may be."""
    settings = DataSettings(dataset="bench", layout="packed", token_budget=budget)
    batches = len(plan(lengths_N, settings, seed=0, epoch=0))
    return 1 - int(lengths_N.sum(dtype=np.int64)) / (batches * budget)


def _planned(lengths_N: Int[np.ndarray, " N"], settings: DataSettings) -> float:
    return table(plan(lengths_N, settings, seed=0, epoch=0), lengths_N).padding_share
