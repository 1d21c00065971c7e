"""What lies in a run's folder beside its events: provenance, evaluations, exports. Damage is told, not hidden."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.observe.report.history import number, whole

_MOST = 256 * 2**20  # bytes of a file that is read
_LAYOUTS = {"DFlashDraftModel": "z-lab", "DFlashSpeculator": "speculators"}


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A result of `paceline evaluate`."""

    file: str
    values: Mapping[str, Any]

    @property
    def steps(self) -> int | None:
        """After how many steps the weights were taken; None: the file does not say."""
        steps = self.values.get("train_steps")
        return whole(steps) if steps is not None else None

    @property
    def tau(self) -> float:
        """The mean over requests of the mean tokens a cycle yields; nan where it is not known."""
        return number(self.values.get("tau_trained", self.values.get("tau")))

    @property
    def server(self) -> str | None:
        """The engine that was measured; None: paceline's own decoding."""
        engine = self.values.get("engine")
        return None if engine is None else str(engine)


@dataclass(frozen=True, slots=True)
class Export:
    """A folder that `paceline export` left beside the run."""

    folder: str
    layout: str
    dtype: str
    files: int
    bytes: int
    written: float  # seconds since 1970


@dataclass(frozen=True, slots=True)
class Folder:
    """A run's folder, without its events."""

    provenance: Mapping[str, Any]
    evaluations: tuple[Evaluation, ...]
    exports: tuple[Export, ...]
    unread: tuple[str, ...]  # a sentence for each file that could not be understood


def look_into(run: Path) -> Folder:
    """Return what lies in a run's folder."""
    unread: list[str] = []
    provenance = _object(run / "provenance.json", unread) if (run / "provenance.json").exists() else None
    evaluations = []
    for path in sorted(run.glob("evaluation*.json")):
        values = _object(path, unread)
        if values is not None:
            values.pop("per_prompt", None)  # a row for each prompt, which a page does not show
            evaluations.append(Evaluation(path.name, values))
    exports = [_export(path.parent, unread) for path in sorted(run.glob("export*/config.json"))]
    return Folder(provenance or {}, tuple(evaluations), tuple(one for one in exports if one), tuple(unread))


def _export(folder: Path, unread: list[str]) -> Export | None:
    if folder.is_symlink():
        unread.append(f"{folder.name} is left out: it is a link.")
        return None
    config = _object(folder / "config.json", unread)
    if config is None:
        return None
    names = config.get("architectures")
    layout = _LAYOUTS.get(str(names[0])) if isinstance(names, list) and names else None
    if layout is None:
        unread.append(f"{folder.name} is left out: its config.json is not of a drafter.")
        return None
    weights = [path for path in folder.glob("*.safetensors") if path.is_file()]
    dtype = str(config.get("dtype", config.get("torch_dtype", "–")))
    told = (path.stat() for path in weights)
    return Export(
        folder.name,
        layout,
        dtype,
        len(weights),
        sum(one.st_size for one in told),
        (folder / "config.json").stat().st_mtime,
    )


def _object(path: Path, unread: list[str]) -> dict[str, Any] | None:
    """Return the JSON object of a file, or None and a sentence. Links are not followed: a page is shown to others."""
    name = f"{path.parent.name}/{path.name}" if path.name == "config.json" else path.name
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > _MOST:
            unread.append(f"{name} is left out: it is a link, no file, or too large.")
            return None
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        unread.append(f"{name} is left out: it cannot be read as JSON ({type(error).__name__}).")
        return None
    if not isinstance(tree, dict):
        unread.append(f"{name} is left out: it must hold a JSON object, found {type(tree).__name__}.")
        return None
    return tree
