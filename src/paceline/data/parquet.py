"""Parquet shards as Arrow files that can be mapped: written once into the cache, in bounded memory.

Parquet is compressed, so rows cannot be mapped as they lie. A copy is named after its file's place, size and time.
"""

import hashlib
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from paceline.records import UserError
from paceline.runtime.profile import cache_folder

_COLUMNS = ("input_ids", "loss_mask")
_ROWS = 256  # of a record batch


def as_arrow(path: Path) -> Path:
    """Return an Arrow file with the ids and masks of a Parquet file, made before or now.

    Raises:
        UserError: the file cannot be read or lacks the columns, or the copy cannot be written.
    """
    state = path.stat()
    name = hashlib.sha256(f"{path.resolve()} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()[:24]
    copy = cache_folder() / "arrow" / f"{name}.arrow"
    if copy.is_file():
        return copy
    aside = copy.with_name(f".{copy.name}.{os.getpid()}")
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        _copy(path, aside)
        aside.rename(copy)
    except (OSError, pa.ArrowException) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{path} cannot be read as Arrow (through {copy.parent}): {reason}. Check both places."
        ) from None
    finally:
        aside.unlink(missing_ok=True)
    return copy


def _copy(path: Path, place: Path) -> None:
    with pq.ParquetFile(path) as parquet:
        lacking = [name for name in _COLUMNS if name not in parquet.schema_arrow.names]
        if lacking:
            raise UserError(
                f"{path} must have the columns input_ids and loss_mask, it has "
                f"{', '.join(parquet.schema_arrow.names)}. Make a dataset with `paceline prepare`."
            )
        schema = pa.schema([parquet.schema_arrow.field(name) for name in _COLUMNS])
        with pa.OSFile(str(place), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
            for batch in parquet.iter_batches(batch_size=_ROWS, columns=list(_COLUMNS)):
                stream.write_batch(batch.select(list(_COLUMNS)))
