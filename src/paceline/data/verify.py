"""Checksums of a dataset's shards: all at once on demand, or in the background of a run's first epoch."""

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from paceline.data.manifest import Shard
from paceline.data.store import CompletionDataset
from paceline.records import RunError, TokenBatch, UserError

_READ = 1 << 20  # bytes between two looks at whether to stop


def check_shard(folder: Path, shard: Shard, stop: threading.Event | None = None) -> None:
    """Read a shard and compare it with the checksum in the manifest; `stop` ends it early.

    Raises:
        UserError: it differs, cannot be read, or has no checksum.
    """
    path = folder / shard.file
    if not shard.sha256:
        raise UserError(f"{path} has no checksum, because {folder} has no manifest. Make one with `paceline prepare`.")
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_READ):
                if stop is not None and stop.is_set():
                    return
                digest.update(block)
    except OSError as error:
        raise UserError(f"Shard {path} cannot be read: {error.strerror}. Copy it anew or prepare again.") from None
    if digest.hexdigest() != shard.sha256:
        raise UserError(
            f"Shard {path} is damaged: its sha256 is {digest.hexdigest()[:12]}, the manifest says {shard.sha256[:12]}. "
            "Copy it anew or prepare the dataset again with --overwrite."
        )


def check_counts(dataset: CompletionDataset) -> None:
    """Read every id and mask and compare them with the counts in the manifest that opening cannot look at.

    Raises:
        UserError: a count is another one, or an id is negative.
    """
    made, folder = dataset.manifest, dataset.folder
    ends = [(int(ids.min()), int(ids.max())) for _, ids, _ in dataset.chunks() if len(ids)]
    smallest, largest = min((low for low, _ in ends), default=0), max((high for _, high in ends), default=-1)
    if smallest < 0:
        raise UserError(f"Token ids must not be negative, but {folder} holds {smallest:,}. Prepare it again.")
    for key, found, said in (
        ("largest_id", largest, made.largest_id),
        ("supervised_tokens", dataset.supervised(), made.supervised_tokens),
    ):
        if found != said:
            raise UserError(
                f"The manifest of {folder} must say what its shards hold, but {key} is {said:,} and they have "
                f"{found:,}. Copy it anew or prepare the dataset again with --overwrite."
            )


def watched(
    batches: Iterator[TokenBatch],
    check: "BackgroundCheck",
    *,
    cut_short: bool,
    on_whole: Callable[[int], None] = lambda shards: None,
) -> Iterator[TokenBatch]:
    """Pass micro-batches on until a shard is found damaged.

    A second epoch begins only once every shard was checked, and so does the end, unless the run is `cut_short` by
    train.max_steps: then it need not even have read them all. `on_whole` gets the number of shards, once.

    Raises:
        RunError: a shard is damaged, or could not be checked.
    """
    epoch, told = None, False
    for batch in batches:
        epoch = batch.epoch if epoch is None else epoch
        whole = check.look() if batch.epoch == epoch else check.finish()
        if whole and not told:
            on_whole(check.shards)
            told = True
        yield batch
    if (check.look() if cut_short else check.finish()) and not told:
        on_whole(check.shards)


_LEAVE_S = 5.0  # longest wait for the thread at the end; it looks between two pieces of a shard


class BackgroundCheck:
    """Checks every shard once while a run is already under way, so nobody waits at the start for 10 GB to be read."""

    def __init__(self, datasets: Sequence[CompletionDataset]) -> None:
        """Begin."""
        self._checked = 0
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._shards = [(d.folder, shard) for d in datasets for shard in d.manifest.shards]
        self.shards = len(self._shards)
        self._thread = threading.Thread(target=self._run, name="checksum", daemon=True)
        self._thread.start()

    @property
    def checked(self) -> int:
        """Shards that were checked so far."""
        return self._checked

    def look(self) -> bool:
        """Return at once whether every shard is checked and whole.

        Raises:
            RunError: a shard was found damaged, or the check failed.
        """
        if isinstance(self._error, UserError):
            raise RunError(str(self._error)) from self._error
        if self._error is not None:
            folder, shard = self._shards[self._checked]
            raise RunError(
                f"Every shard must be compared with its checksum, but that failed at {folder / shard.file} "
                f"({type(self._error).__name__}: {self._error}). Look at it with `paceline prepare {folder} --verify`."
            ) from self._error
        return self._checked == self.shards

    def finish(self) -> bool:
        """Wait until every shard is checked and return whether they are; not all are after `close`.

        Raises:
            RunError: as look.
        """
        self._thread.join()
        return self.look()

    def close(self) -> None:
        """Stop early; a second time does nothing. A read that hangs is left behind."""
        self._stop.set()
        self._thread.join(_LEAVE_S)

    def _run(self) -> None:
        try:
            for folder, shard in self._shards:
                check_shard(folder, shard, self._stop)
                if self._stop.is_set():
                    return
                self._checked += 1
        except BaseException as error:  # raised where somebody looks
            self._error = error
