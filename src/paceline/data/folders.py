"""Which files a folder of input stands for. Nothing in it that looks like data is passed over silently."""

from collections.abc import Iterator
from pathlib import Path

from paceline.data.completions import NAME as COMPLETIONS
from paceline.data.completions import shard_files
from paceline.data.manifest import NAME
from paceline.data.store import arrow_files
from paceline.records import UserError

SUFFIXES = (".jsonl", ".parquet", ".arrow")
_OTHER_DATA = (".json", ".csv", ".tsv", ".gz", ".zst", ".zip")
_BESIDE = {NAME, "state.json", "dataset_info.json", "dataset_infos.json"}  # what describes data files


def files_of(folder: Path) -> list[Path]:
    """Return the data files of a folder in the order of their names, or those that its state.json lists.

    Raises:
        UserError: there is none, other data is beside them or in a folder inside, or state.json cannot be understood.
    """
    if (folder / COMPLETIONS).is_file():
        return shard_files(folder)
    if any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):  # as `datasets` saves
        files = arrow_files(folder)
    else:
        entries = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
        files = [path for path in entries if path.suffix.lower() in SUFFIXES and not path.is_dir()]
        if other := next(_passed_over(entries), None):
            raise UserError(
                f"Of a folder the {', '.join(SUFFIXES[:-1])} and {SUFFIXES[-1]} files in it are read, and {folder} "
                f"holds {other.relative_to(folder)} too. Convert it or move it away, or give files and folders one "
                "by one."
            )
    if not files:
        raise UserError(
            f"Folder {folder} holds no {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} files. Give files, or a folder "
            "that `datasets` saved (one split, save_to_disk)."
        )
    return files


def _passed_over(entries: list[Path]) -> Iterator[Path]:
    for path in entries:
        if path.is_dir():
            inside = (file for file in sorted(path.rglob("*")) if file.suffix.lower() in SUFFIXES + _OTHER_DATA)
            yield from (file for file in inside if file.is_file() and file.name not in _BESIDE)
        elif path.suffix.lower() in _OTHER_DATA and path.name not in _BESIDE:
            yield path
