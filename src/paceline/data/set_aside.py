"""Rows of a dataset that would do harm or teach nothing: set aside with their numbers, counted, and told.

Two kinds. What lengths and candidates show when a dataset is opened, a row without tokens or without a position that
may be an anchor, is in no epoch. What only reading a row shows, ids that the target has not or another mask than the
one that was counted, leaves the row where it is, so that neither the plan nor any other row changes: it has ids 0 and
no anchors. Which rows these are follows from the data alone, so a run that goes on sets the same ones aside.

Shapes: N rows.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int

from paceline.data.store import CompletionDataset
from paceline.records import RunError, UserError, many

NO_TOKENS = "no tokens"
ALL_MASKED = "no two supervised tokens"
OUT_OF_VOCABULARY = "out of vocabulary"
OTHER_MASK = "another loss mask"


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that is set aside, the kind of its fault, and what is wrong with this one, as the end of a sentence."""

    dataset: Path
    fingerprint: str  # of the dataset, which may lie elsewhere when a run goes on
    row: int  # numbered in the dataset
    reason: str
    detail: str


class SetAside:
    """The rows that a run has set aside so far, each once, and the bound on how many of a dataset's may be."""

    def __init__(
        self,
        share: float,
        *,
        on_row: Callable[[BadRow], None] = lambda row: None,
        known: Iterable[tuple[str, int]] = (),
    ) -> None:
        """`on_row` gets every row that is not among the `known` ones, which are fingerprints with rows."""
        self._share, self._on_row = share, on_row
        self._known = set(known)
        self._counts = Counter(fingerprint for fingerprint, _ in self._known)

    def __len__(self) -> int:
        return len(self._known)

    def add(self, dataset: CompletionDataset, bad: BadRow) -> None:
        """Count a row of a dataset the first time it is met.

        Raises:
            RunError: more than the share of the dataset's rows are bad.
        """
        key = (dataset.fingerprint, bad.row)
        if key in self._known:
            return
        self._known.add(key)
        self._counts[dataset.fingerprint] += 1
        self._on_row(bad)
        count = self._counts[dataset.fingerprint]
        if count > self._share * len(dataset):
            raise RunError(too_many(dataset, count, self._share, bad))


def too_many(dataset: CompletionDataset, count: int, share: float, example: BadRow) -> str:
    """Return the sentence for a dataset with too many bad rows."""
    return (
        f"At most {share:.2%} of a dataset's rows may be set aside (data.bad_rows), but {count:,} of the "
        f"{len(dataset):,} of {dataset.folder} are, row {example.row:,} because it {example.detail}: the dataset is "
        f"damaged. Look at it with `paceline prepare {dataset.folder} --verify`, or prepare it again."
    )


def without_anchors(dataset: CompletionDataset) -> Int[np.ndarray, " n"]:
    """Return the rows, ascending, that bring no anchor: those without tokens, and those all masked."""
    found, first = [], 0
    for candidates_n in dataset.candidate_parts():
        if not candidates_n.all():
            found.append(np.flatnonzero(candidates_n == 0) + first)
        first += len(candidates_n)
    return np.concatenate(found) if found else np.empty(0, dtype=np.int64)


def fault_without_anchors(dataset: CompletionDataset, row: int) -> BadRow:
    """Return what is wrong with a row that brings no anchor."""
    if len(dataset.row(row)[0]):
        return bad_row(dataset, row, ALL_MASKED, f"has {ALL_MASKED} in a row")
    return bad_row(dataset, row, NO_TOKENS, f"has {NO_TOKENS}")


def fault_when_read(dataset: CompletionDataset, row: int, last_id: int) -> BadRow:
    """Return what is wrong with a row that was found to be bad when it was read."""
    ids_S, mask_S = dataset.row(row)
    wrong = ids_S[(ids_S < 0) | (ids_S > last_id)]
    if len(wrong):
        return bad_row(dataset, row, OUT_OF_VOCABULARY, f"holds the id {wrong[0]:,}, and ids lie in 0..{last_id:,}")
    from paceline.blocks import anchor_candidates  # loads torch, which planning does without

    found, counted = len(anchor_candidates(mask_S)), int(dataset.candidates_of(np.array([row]))[0])
    return bad_row(
        dataset, row, OTHER_MASK, f"has a loss mask for {many(found, 'anchor')}, and its dataset counted {counted:,}"
    )


def bad_row(dataset: CompletionDataset, row: int, reason: str, detail: str) -> BadRow:
    """Return a bad row of a dataset."""
    return BadRow(dataset.folder, dataset.fingerprint, row, reason, detail)


def check_anchors(dataset: CompletionDataset, bad: Int[np.ndarray, " n"], share: float) -> None:
    """Refuse a dataset with more rows that bring no anchor than are permitted.

    Raises:
        UserError: it is such a dataset.
    """
    if len(bad) > share * len(dataset):
        raise UserError(too_many(dataset, len(bad), share, fault_without_anchors(dataset, int(bad[0]))))


def check_vocabulary(dataset: CompletionDataset, last_id: int, share: float) -> None:
    """Refuse a dataset with more rows than are permitted whose ids do not lie in 0..last_id; reads every id once.

    Raises:
        UserError: it is such a dataset.
    """
    found = []
    for first, ids, ends in dataset.chunks():
        wrong = np.flatnonzero((ids < 0) | (ids > last_id))
        found.append(np.unique(np.searchsorted(ends, wrong, side="right") - 1) + first)
    bad = np.concatenate(found)
    if len(bad) > share * len(dataset):
        raise UserError(too_many(dataset, len(bad), share, fault_when_read(dataset, int(bad[0]), last_id)))
