"""The workshop: the folder beside a dataset in which it is made. What prepare replaces and removes is only its own.

It holds a lock, of each finished piece the shard, the refused rows and its facts, and the refused rows of all pieces
once these are finished. A folder of this name that holds anything else belongs to somebody and is not touched.
"""

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.data.writer import cannot_write
from paceline.records import UserError

_QUARANTINE = "quarantine.jsonl"
_OWN = re.compile(r"\.lock|quarantine\.jsonl|[0-9a-f]{24}\.(arrow|json|refused)(\.\d+)?")
_ASIDE = re.compile(r".*\.\d+")  # being written, under the number of its process


def workshop_of(out: Path) -> Path:
    """Return the folder of finished pieces beside a dataset that is being made."""
    return out.with_name(f"{out.name}.partial")


def quarantine_of(out: Path) -> Path:
    """Return where a dataset's refused rows are written."""
    return out.with_name(f"{out.name}.quarantine.jsonl")


def check_apart(inputs: Sequence[Path], eval_sets: Sequence[Path], out: Path) -> None:
    """Refuse to read what preparing the dataset `out` would replace or remove, and to remove what is not its own.

    Nor is a dataset made in a folder that is read: its quarantine file would be read the next time.

    Raises:
        UserError: a file lies in the dataset or in its workshop or is its quarantine file, the dataset lies in a folder
            of inputs, the workshop's place is taken by somebody's folder, or the place has no usable name.
    """
    _check_name(out)
    for folder in inputs:
        if folder.is_dir() and _real(folder) != _real(out) and _real(out).is_relative_to(_real(folder)):
            raise UserError(
                f"A dataset must not lie in a folder that is read, got --out {out} in input {folder}. Choose another "
                "--out."
            )
    places = (out, workshop_of(out), quarantine_of(out))
    for what, paths in (("Input", inputs), ("Evaluation set", eval_sets)):
        for path in paths:
            for place in places:
                if _real(path).is_relative_to(_real(place)):
                    where = "is" if _real(path) == _real(place) else "lies in"
                    raise UserError(
                        f"{what} {path} {where} {place}, which is replaced when {out} is written (--out). Move it, or "
                        "choose another --out."
                    )
    _check_own(out)


@contextmanager
def workshop(out: Path) -> Iterator[Path]:
    """Yield the workshop of a dataset, ours alone; it stays after an error if a piece in it is finished.

    Raises:
        UserError: another process is in it, it is somebody's folder, or the place cannot be written to.
        RunError: the disk is full or broken.
    """
    folder = workshop_of(out)
    _check_own(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Never through a link, and without emptying what is there.
        lock = os.fdopen(os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+")
    except OSError as error:
        raise cannot_write(out, error) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"Another process is preparing {out}. Wait for it or choose another --out.") from None
        try:
            for path in folder.iterdir():
                if _ASIDE.fullmatch(path.name):  # of a process that was killed
                    path.unlink()
            yield folder
        except OSError as error:
            raise cannot_write(out, error) from None
        finally:
            if not any(folder.glob("*.json")):
                clear(folder)


def clear(folder: Path) -> None:
    """Remove a workshop, but nothing that somebody put into it meanwhile."""
    with suppress(OSError):
        for path in folder.iterdir():
            if _OWN.fullmatch(path.name):
                path.unlink()
        folder.rmdir()


def gather_quarantine(folder: Path, parts: Sequence[Path]) -> Path | None:
    """Write the refused rows of all pieces into one file of the workshop and return it; None if there are none."""
    path = folder / _QUARANTINE
    if not parts:
        path.unlink(missing_ok=True)
        return None
    with path.open("wb") as file:
        for part in parts:
            with part.open("rb") as rows:
                shutil.copyfileobj(rows, file)
    return path


def place_quarantine(gathered: Path | None, out: Path) -> Path | None:
    """Put the refused rows beside the finished dataset, in the place of those of the one before it."""
    place = quarantine_of(out)
    if gathered is None:
        place.unlink(missing_ok=True)
        return None
    os.replace(gathered, place)
    return place


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # Path.resolve fails over links in a circle


def _check_name(out: Path) -> None:
    try:
        str(out).encode()
    except UnicodeEncodeError:
        raise UserError(f"--out must be UTF-8, got {str(out)!a}. Choose another name.") from None
    try:
        out.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UserError(
                f"--out must lead to a place, got {out}, whose links lead in a circle. Remove it."
            ) from None


def _check_own(out: Path) -> None:
    folder = workshop_of(out)
    if not folder.is_dir():
        return
    foreign = sorted(path.name for path in folder.iterdir() if not (_OWN.fullmatch(path.name) and path.is_file()))
    if foreign:
        raise UserError(
            f"{folder} is where pieces of {out} are kept (--out), so it must hold nothing else, got {foreign[0]}. Move "
            "that away, or choose another --out."
        )
