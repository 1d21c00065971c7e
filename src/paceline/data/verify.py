"""Checksums of a dataset's shards: all at once on demand, or in the background of a run's first epoch."""

import hashlib
import threading
from collections.abc import Iterator, Sequence
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


def watched(batches: Iterator[TokenBatch], check: "BackgroundCheck") -> Iterator[TokenBatch]:
    """Pass micro-batches on until a shard is found damaged; the stream ends only once every shard was checked.

    Raises:
        RunError: a shard is damaged.
    """
    for batch in batches:
        check.look()
        yield batch
    check.finish()


class BackgroundCheck:
    """Checks every shard once while a run is already under way.

    Bytes that rotted on the disk show in the first epoch at the latest, and nobody waits for 10 GB to be read.
    """

    def __init__(self, datasets: Sequence[CompletionDataset]) -> None:
        """Begin."""
        self._error: UserError | None = None
        self._stop = threading.Event()
        self._shards = [(d.folder, shard) for d in datasets for shard in d.manifest.shards]
        self._thread = threading.Thread(target=self._run, name="checksum", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Return at once.

        Raises:
            RunError: a shard was found damaged.
        """
        if self._error is not None:
            raise RunError(str(self._error))

    def finish(self) -> None:
        """Wait until every shard is checked.

        Raises:
            RunError: a shard is damaged.
        """
        self._thread.join()
        self.look()

    def close(self) -> None:
        """Stop early; a second time does nothing."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            for folder, shard in self._shards:
                check_shard(folder, shard, self._stop)
        except UserError as error:
            self._error = error
