"""The checkpoints of a run: what they are on disk, which is the newest whole one, and which ones stay.

    RUN/checkpoints/latest              name of the newest, replaced in one rename
    RUN/checkpoints/best                name of the one with the lowest held-out loss or the highest true
                                    acceptance, where there is one, likewise
    RUN/checkpoints/step-00001200/      the state after 1,200 optimizer steps
        drafter.safetensors             weights, float32
        optimizer.safetensors           moments and counts, float32, or codes of a byte with their scales
        state.json                      settings, position, sums, the best so far, the guard's history, versions, what
                                        was read, and `line`, the older checkpoints that it came through
        manifest.json                   size and sha256 of the files above

The position is the number of steps, and of those that were applied: order and anchors are functions of the settings'
seed, and no generator has a state that outlives a step. Nothing is pickled.

What stays are the newest `checkpoint.keep` of the line, what these name, so that whichever of them a run goes on from
finds its best, and the best of the run. A checkpoint that was passed over, because it was damaged or because the run
went back behind it, is none of the line any more: it is not counted and goes. But what was measured of it holds, so it
may be the best, and as that it stays. When a run goes back, nothing goes until the state it goes on with is saved.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from paceline.checkpoint.folder import sync, whole_folder, write_whole
from paceline.checkpoint.host import HostCopy
from paceline.records import UserError

FORMAT = 2
_NAME = re.compile(r"step-(\d{8,})")
_STATE = "state.json"
_TENSORS = ("drafter.safetensors", "optimizer.safetensors")


class Damaged(Exception):
    """What is wrong with a checkpoint, as the begin of a sentence for a person."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A whole checkpoint: its files have the sizes and checksums that its manifest says."""

    folder: Path
    steps: int  # that are done
    state: dict[str, Any]

    def line(self) -> list[int]:
        """Return the steps of the checkpoints that its run came through, in ascending order, this one at the end."""
        if (before := self.state.get("line")) is None:  # of a version that did not note it
            before = [n for n in saved_steps(self.folder.parents[1]) if n < self.steps]
        return [*before, self.steps]

    def tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield file, name and tensor, one at a time: a rank needs no second copy of all in host memory."""
        for path in (self.folder / name for name in _TENSORS):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    yield path.stem, name, file.get_tensor(name)


def folder_of(run: Path) -> Path:
    """Return where a run's checkpoints lie."""
    return run / "checkpoints"


def resume_command(run: Path, option: str = "--resume") -> str:
    """Return what to type to go on with a run."""
    return f"paceline train {shlex.quote(str(run))} {option}"


def saved_steps(run: Path) -> list[int]:
    """Return after how many steps there are checkpoints, whole or damaged, in ascending order."""
    folder = folder_of(run)
    names = map(_NAME.fullmatch, os.listdir(folder)) if folder.is_dir() else ()
    return sorted(int(match[1]) for match in names if match)


def write(
    run: Path, steps: int, tensors: Mapping[str, HostCopy], state: Mapping[str, Any], *, best: bool = False
) -> None:
    """Write a checkpoint and point `latest` at it; a reader finds the old state or the new one, never a part.

    If it is the `best`, that pointer comes first: `latest` then never leads to a state whose best is not pointed at.

    Raises:
        OSError: as on a full disk. The checkpoints that were there are as before.
    """
    place = _place(run, steps)
    with whole_folder(place) as aside:
        text = json.dumps({**state, "format": FORMAT, "steps": steps}, indent=1)
        write_whole(aside / _STATE, text)
        files = {_STATE: _entry(len(text.encode()), hashlib.sha256(text.encode()).hexdigest())}
        for name, copy in tensors.items():
            file = f"{name}.safetensors"
            files[file] = _entry(copy.nbytes, copy.write(aside / file))
        write_whole(aside / "manifest.json", json.dumps({"format": FORMAT, "files": files}, indent=1))
    sync(place.parent)
    if best:
        write_whole(place.parent / "best", place.name)
    write_whole(place.parent / "latest", place.name)


def _place(run: Path, steps: int) -> Path:
    return folder_of(run) / f"step-{steps:08d}"


def _entry(nbytes: int, sha256: str) -> dict[str, Any]:
    return {"bytes": nbytes, "sha256": sha256}


def prune(
    run: Path, line: Sequence[int], keep: int, *, good: int | None = None, also: Collection[int] = ()
) -> list[int]:
    """Keep the newest `keep` checkpoints of a line, those that they name, the best and `also`; return the first.

    With `good`, the newest of the line after at most so many steps is one of them in any case, in the place of the
    oldest of the others, or where one is kept, on top of it. What stays for another reason is none of the line any
    more: what a run goes back to does not depend on how long that is.
    """
    found = saved_steps(run)
    held = [n for n in line if n in found]
    newest = held[-keep:]
    last_good = [n for n in held if good is not None and n <= good][-1:]
    if last_good and last_good[0] not in newest:
        newest = last_good + held[-max(1, keep - 1) :]
    stay = {*newest, *also}
    for steps in newest[-keep:]:  # one on top is gone back to, with the best of the run, and not gone on from
        with suppress(Damaged):
            stay |= _named_by(_open(run, steps, ()).state)
    with suppress(Damaged):
        stay.add(_pointed(run, "best"))
    for old in set(found) - stay:
        place = _place(run, old)
        gone = place.with_name(f".{place.name}.gone")  # so that a kill leaves no folder that looks damaged
        place.rename(gone)
        shutil.rmtree(gone)
    return newest


def _named_by(state: Mapping[str, Any]) -> set[int]:
    """Return the steps of the checkpoints that a state names: the best, and one whose worth is not known."""
    pending = (state.get("evaluation") or {}).get("pending")
    return {place["steps"] for place in (state.get("best"), pending) if place}


def sweep(run: Path) -> None:
    """Remove what a killed process had not finished, bring back what it was replacing, and touch nothing else.

    Only the run's owner may.
    """
    folder = folder_of(run)
    for path in [found for name in (".step-*", ".latest.*", ".best.*") for found in folder.glob(name)]:
        replaced = re.fullmatch(r"\.(step-\d+)\.old\.\d+", path.name)  # see whole_folder
        if replaced and not (folder / replaced[1]).exists() and not path.is_symlink():
            path.rename(folder / replaced[1])
        else:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def point_best(run: Path, steps: int | None) -> bool:
    """Let `best` name the checkpoint after so many steps; False, and no pointer, where that is not there.

    Whoever goes on from a checkpoint calls it: a crash may have left a pointer that is ahead of that state.
    """
    pointer = folder_of(run) / "best"
    if steps is None or not _place(run, steps).is_dir():
        pointer.unlink(missing_ok=True)
        return False
    write_whole(pointer, _place(run, steps).name)
    return True


def point_latest(run: Path, steps: int) -> None:
    """Let `latest` name the checkpoint that a run goes on from, where it names another or is not there."""
    with suppress(Damaged):
        if _pointed(run, "latest") == steps:
            return
    write_whole(folder_of(run) / "latest", _place(run, steps).name)


def newest(run: Path, *, previous: bool, tell: Callable[[str], None]) -> Saved | None:
    """Return the checkpoint to go on from, or None where none was ever written.

    With `previous`, a damaged one is passed over for the newest whole one before it, and `tell` gets the sentence.

    Raises:
        UserError: the newest is damaged, or `latest` names none, and `previous` does not permit another; or none is
            whole.
    """
    steps, pointer = saved_steps(run), (folder_of(run) / "latest").exists()
    if not steps and not pointer:
        return None
    try:
        # Alone and without a pointer it is the first that was written, and a crash came before its pointer.
        pointed = steps[0] if len(steps) == 1 and not pointer else _pointed(run, "latest")
        steps = [n for n in steps if n < pointed]
        return _open(run, pointed)
    except Damaged as error:
        damage = str(error)
    for older in reversed(steps):
        try:
            saved = _open(run, older)
        except Damaged as error:
            damage += f" So is another: {error}"
            continue
        if not previous:
            command = resume_command(run, "--resume-previous")
            raise UserError(f"{damage} The one after step {older:,} is whole: go on from there with `{command}`.")
        tell(f"  {damage} Going on from the one after step {older:,}.")
        return saved
    raise UserError(f"{damage} There is no older one that is whole. Start anew in another run_dir.")


def named(run: Path, name: str, files: Sequence[str]) -> Saved:
    """Return a checkpoint by `latest`, `best` or the number of its steps, of which only state and `files` are checked.

    Raises:
        UserError: there is no such checkpoint, or it is damaged.
    """
    there = saved_steps(run)
    which = f"There are checkpoints after step {', '.join(f'{n}' for n in there)}." if there else "There is none."
    if name not in ("latest", "best") and not (name.isascii() and name.isdecimal()):
        raise UserError(f"A checkpoint is named latest, best or by its number of steps, got {name!r}. {which}")
    pointer = folder_of(run) / name
    if not there or (name == "best" and not pointer.exists()) or (name.isdecimal() and int(name) not in there):
        what = f"checkpoint after step {name}" if name.isdecimal() else f"{name} checkpoint"
        remedy = " A run has a best one once evaluate.held_out or evaluate.device is set." if name == "best" else ""
        raise UserError(f"There is no {what} in {folder_of(run)}. {which}{remedy}")
    try:
        return _open(run, int(name) if name.isdecimal() else _pointed(run, name), files)
    except Damaged as error:
        raise UserError(f"{error} {which} Name another.") from None


def newest_before(run: Path, line: Sequence[int], steps: int, *, tell: Callable[[str], None]) -> Saved | None:
    """Return a line's newest whole checkpoint after at most `steps` steps; `tell` hears of each damaged one."""
    for older in reversed([n for n in line if n <= steps]):
        try:
            return _open(run, older)
        except Damaged as error:
            tell(f"  {error}")
    return None


def _pointed(run: Path, pointer: str) -> int:
    path, what = folder_of(run) / pointer, {"latest": "newest", "best": "best"}[pointer]
    if path.is_symlink():
        raise Damaged(f"{path} must name the {what} checkpoint, but it is a link.")
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise Damaged(f"{path}, which names the {what} checkpoint, cannot be read ({_cause(error)}).") from None
    match = _NAME.fullmatch(text)
    if not match:
        raise Damaged(f"{path} must name the {what} checkpoint, got {text[:40]!r}.")
    return int(match[1])


def _open(run: Path, steps: int, needed: Sequence[str] = _TENSORS) -> Saved:
    """Return a checkpoint after its state and the files `needed` were checked; by default all that it may have."""
    place = _place(run, steps)
    for path in (place, place / "manifest.json"):
        if path.is_symlink():
            raise Damaged(f"Checkpoint {place} is damaged: {path.name} is a link.")
    try:
        manifest = json.loads((place / "manifest.json").read_text())
        files = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
        known = manifest["format"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise Damaged(f"Checkpoint {place} is damaged: manifest.json cannot be read ({_cause(error)}).") from None
    if known != FORMAT:
        raise Damaged(f"Checkpoint {place} has format {known}, and this paceline reads {FORMAT}.")
    for name in sorted({_STATE, *needed, *files}):
        if name not in files:
            raise Damaged(f"Checkpoint {place} is damaged: manifest.json does not list {name}.")
        if name not in (_STATE, *_TENSORS):
            raise Damaged(f"Checkpoint {place} is damaged: manifest.json lists {name!r:.80}, which is no file of one.")
        if name in (_STATE, *needed):
            _check(place, name, *files[name])
    return Saved(place, steps, json.loads((place / _STATE).read_text()))


def _check(place: Path, name: str, nbytes: int, sha256: str) -> None:
    try:
        with open(os.open(place / name, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != nbytes:
                raise Damaged(
                    f"Checkpoint {place} is damaged: {name} has {size:,} bytes, its manifest says {nbytes:,}."
                )
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError) as error:
        raise Damaged(f"Checkpoint {place} is damaged: {name} cannot be read ({_cause(error)}).") from None
    if found != sha256:
        raise Damaged(
            f"Checkpoint {place} is damaged: the sha256 of {name} is {found[:12]}, its manifest says {sha256[:12]}."
        )


def _cause(error: Exception) -> str:
    return getattr(error, "strerror", None) or type(error).__name__
