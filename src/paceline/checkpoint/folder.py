"""Folders and files that are whole or not there, and who owns a run folder. Free of torch.

What is new is written aside and renamed. Where it has to outlast a loss of power, it is synced before the rename and
the rename after it.
"""

import fcntl
import glob
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from safetensors import SafetensorError

from paceline.records import RunError, UserError


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to fill beside `folder`, then put it in that place, replacing what was there.

    What was there is moved away first and comes back if the new folder cannot take its place.

    Raises:
        RunError: the weights could not be written, as on a full disk.
    """
    folder = folder.resolve()
    _sweep(folder)
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        _replace(folder, aside)
    except SafetensorError as error:  # not an OSError, although that is what lies behind it
        raise RunError(f"{folder} cannot be written: {error}. Check the place and its free space.") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove what a killed process left beside `folder`, and bring back what it had only moved away."""
    for path in folder.parent.glob(f".{folder.name}.*"):
        owner = path.name.rsplit(".", 1)[-1]
        if not owner.isdecimal() or _alive(int(owner)):
            continue
        if ".old." in path.name and not folder.exists():
            path.rename(folder)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _replace(folder: Path, aside: Path) -> None:
    old = folder.with_name(f".{folder.name}.old.{os.getpid()}")
    if folder.exists():
        folder.rename(old)
    try:
        aside.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def write_whole(path: Path, text: str) -> None:
    """Replace a file of a run folder; a reader finds the old text or the new one, whoever else writes it meanwhile."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.new"):
        owner = left.name.rsplit(".", 2)[-2]
        if owner == str(os.getpid()) or (owner.isdecimal() and not _alive(int(owner))):
            left.unlink(missing_ok=True)  # of a killed process, or a link to somewhere else
    aside = path.with_name(f".{path.name}.{os.getpid()}.new")
    with aside.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)
    sync(path.parent)


def sync(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_files(folder: Path) -> None:
    """Wait until a folder's files and their names are on the disk."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sync(folder)


def free_bytes(folder: Path) -> int:
    """Return what this user can still write there."""
    told = os.statvfs(folder)
    return told.f_bavail * told.f_frsize


@contextmanager
def claimed(run: Path, *, tell: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """Make a run folder and keep other processes out of it until the block ends, also by a kill.

    The lock is the system's, which drops it with its process; what is written into the file only says whose it is.
    Where a killed process of this machine left its name, `tell` gets a sentence.

    Raises:
        UserError: another process is training into it, one on another machine may be, or the place cannot be
            written to.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
        lock = open(os.open(run / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+", errors="replace")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"Run folder {run} (run_dir) cannot be written to: {error.strerror}. Choose another.") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"Another process is training into {run} (run_dir){_held(lock)}. Choose another run_dir."
            ) from None
        _take_over(run, lock, tell)
        _name(lock, f"{os.getpid()} {socket.gethostname()}")
        try:
            yield
        finally:
            _name(lock, "")


@dataclass(frozen=True, slots=True)
class Claim:
    """Who owns a run folder."""

    held: bool | None  # None: that cannot be told from here
    process: str = ""  # whose name is in the lock
    host: str = ""


def claim(run: Path) -> Claim:
    """Return whether a process holds a run folder, and which.

    The lock is taken for a moment only where it names a process that is gone.
    """
    try:
        handle = os.open(run / ".lock", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return Claim(False)
    except OSError:
        return Claim(None)
    with open(handle, errors="replace") as lock:
        try:
            process, _, host = lock.read(200).partition(" ")
            if not host:
                return Claim(False)
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return Claim(True, process, host)
        except OSError:
            return Claim(None)
    # Another machine's locks may not reach this one.
    return Claim(False if host == socket.gethostname() else None, process, host)


def _take_over(run: Path, lock: IO[str], tell: Callable[[str], None]) -> None:
    lock.seek(0)
    process, _, host = lock.read(200).partition(" ")
    if not host:
        return
    if host != socket.gethostname():  # whose locks may not reach this machine
        raise UserError(
            f"Run folder {run} (run_dir) belongs to process {process} on {host}, which did not let go of it: it still "
            f"trains, or was killed. If it is gone, remove {run / '.lock'}; else choose another run_dir."
        )
    tell(f"  process {process} did not end by itself, so it left its lock on {run}; the lock is taken over")


def _held(lock: IO[str]) -> str:
    lock.seek(0)
    process, _, host = lock.read(200).partition(" ")
    return f": process {process} on {host}" if host else ""


def _name(lock: IO[str], text: str) -> None:
    lock.seek(0)
    lock.truncate()
    lock.write(text)
    lock.flush()
