"""Features kept from one epoch to the next, by micro-batch, up to a size.

A micro-batch comes back with the same rows when batches keep their members (`data.reshuffle: batches`), so what is
kept is bit for bit what the target would compute again. Passes over a dataset are cyclic: what came first stays, and
nothing is thrown out for what comes later, which would never hit.
"""

import shutil
import threading
import warnings
from pathlib import Path
from typing import Protocol, runtime_checkable

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

Key = tuple[int, ...]


@runtime_checkable
class FeatureCache(Protocol):
    """Kept features of micro-batches, by their rows."""

    def get(self, rows: Key) -> Tensor | None:
        """Return the features of a micro-batch, or None."""

    def wants(self, rows: Key, nbytes: int) -> bool:
        """Return whether features of so many bytes would be kept."""

    def put(self, rows: Key, features_TD: Tensor) -> None:
        """Keep the features of a micro-batch, which nobody changes, if there is room."""

    def close(self) -> None:
        """Let go of what is kept."""


class NoCache:
    """Keeps nothing."""

    def get(self, rows: Key) -> Tensor | None:
        """Return None."""
        return None

    def wants(self, rows: Key, nbytes: int) -> bool:
        """Return False."""
        return False

    def put(self, rows: Key, features_TD: Tensor) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class MemoryCache:
    """Keeps features where the target left them."""

    def __init__(self, limit_bytes: int) -> None:
        self._kept: dict[Key, Tensor] = {}
        self._left = limit_bytes
        self._lock = threading.Lock()

    def get(self, rows: Key) -> Tensor | None:
        """Return kept features or None."""
        return self._kept.get(rows)

    def wants(self, rows: Key, nbytes: int) -> bool:
        """Return whether they are not there and there is room."""
        return rows not in self._kept and nbytes <= self._left

    def put(self, rows: Key, features_TD: Tensor) -> None:
        """Keep features while there is room."""
        with self._lock:
            if rows not in self._kept and features_TD.nbytes <= self._left:
                self._left -= features_TD.nbytes
                self._kept[rows] = features_TD

    def close(self) -> None:
        """Forget all."""
        self._kept.clear()


class DiskCache:
    """Keeps features in files of a folder of the run, which is removed at the end."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._folder = folder
        self._files: dict[Key, Path] = {}
        self._taken = 0
        self._left = limit_bytes
        self._lock = threading.Lock()

    def get(self, rows: Key) -> Tensor | None:
        """Read kept features or return None."""
        path = self._files.get(rows)
        return None if path is None else load_file(path)["features"]

    def wants(self, rows: Key, nbytes: int) -> bool:
        """Return whether they are not there and there is room."""
        return rows not in self._files and nbytes <= self._left

    def put(self, rows: Key, features_TD: Tensor) -> None:
        """Write features while there is room."""
        with self._lock:
            if rows in self._files or features_TD.nbytes > self._left:
                return
            self._left -= features_TD.nbytes
            self._taken += 1
            path = self._folder / f"{self._taken:08d}.safetensors"
        try:
            save_file({"features": features_TD.contiguous()}, path)
        except (OSError, SafetensorError) as error:  # a full disk: the cache is a help, not a need
            path.unlink(missing_ok=True)
            self._left = 0
            warnings.warn(f"The feature cache {self._folder} takes no more: {error}", stacklevel=2)
            return
        self._files[rows] = path  # only now: a reader finds whole files

    def close(self) -> None:
        """Remove the files."""
        shutil.rmtree(self._folder, ignore_errors=True)
