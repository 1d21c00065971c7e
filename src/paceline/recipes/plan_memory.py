"""The part of `paceline plan` about the target: whether it can be followed, and what memory a drafter rank needs."""

from collections import Counter
from pathlib import Path
from typing import Any

from paceline.config import RunSettings, TargetSettings
from paceline.observe.console import Console
from paceline.records import UserError


def plan_memory(run: RunSettings, console: Console) -> dict[str, Any] | None:
    """Print what a drafter rank needs on a GPU and return it in bytes, with the ranks on each device.

    None where it is not estimated, and a line says why: a plan of the data is of use without. Of the target only
    config.json and the headers of its weight files are read, and nothing is fetched.
    """
    # Late, because reading a target's configuration needs torch, and a dataset is planned without it.
    from paceline.pipeline.slots import slots_bytes
    from paceline.train.memory import sizes_for_tiles, step_memory

    rules = sizes_for_tiles(run.drafter, run.train)
    if rules:
        _not_estimated(f"attention on a GPU would be dense. If compiled or captured there, {rules}", console)
        return None
    sizes = sizes_of_target(run.target, console)
    if sizes is None:
        return None
    memory, slots = step_memory(run.drafter, run.train, **sizes), slots_bytes(run, sizes["hidden_size"])
    total = memory.total + slots
    console.line("  memory of a drafter rank on a GPU at its peak, if compiled or captured:")
    parts = [*memory.parts().items(), ("slots for features", slots), ("total", total)]
    rows = [(name, f"{size / 2**30:.2f}") for name, size in parts]
    console.table("", ("part", "GiB"), rows)
    ranks = Counter(run.pipeline.drafters)
    for device, count in ranks.items():
        if count > 1:
            console.line(f"  {count} ranks share {device} (pipeline.drafters): each needs that much of it")
    if memory.host:
        console.line(f"  and {memory.host / 2**30:.2f} GiB of page-locked host memory for its moments (train.offload)")
    if run.train.policy == "eager":
        console.line("  train.policy eager needs more, which is not estimated")
    return {**memory.as_dict(), "slots": slots, "total": total, "ranks": dict(ranks)}


def _not_estimated(reason: str, console: Console) -> None:
    console.line(f"  memory of a drafter rank not estimated: {reason}")


def sizes_of_target(target: TargetSettings, console: Console) -> dict[str, Any] | None:
    """Return the target's hidden_size, vocab_size and whether its ends are tied, or None after a line that says why."""
    from paceline.target.load import load_config

    folder = target_folder(target)
    if folder is None:
        _not_estimated("target.model is not on this machine", console)
        return None
    try:
        config = load_config(folder)
    except UserError as error:
        _not_estimated(str(error), console)
        return None
    if missing := _missing(config):
        _not_estimated(f"{folder / 'config.json'} does not describe a decoder: no {' and no '.join(missing)}", console)
        return None
    tied = bool(getattr(config, "tie_word_embeddings", False))
    if tied and _has_head(folder):
        console.line(
            "  config.json ties embedding and head, but the files hold a head: both are counted, "
            "although one is kept where they are equal"
        )
        tied = False
    return {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size, "tied": tied}


def _missing(config: Any) -> list[str]:
    return [key for key in ("hidden_size", "vocab_size") if not isinstance(getattr(config, key, None), int)]


def check_target(run: RunSettings) -> None:
    """Refuse a target whose drafter `train` would refuse; one that is not here, or not readable, is left to `train`.

    Raises:
        UserError: drafters here do not follow what its architecture does, its weights are quantized in a way that is
            not read here, or it does not go with the data's layout.
    """
    from paceline.recipes.target_checks import check_data
    from paceline.target.conventions import find_conventions
    from paceline.target.load import load_config
    from paceline.target.weights import check_weights

    folder = target_folder(run.target)
    if folder is None:
        return
    check_weights(folder, run.target.model)
    try:
        config = load_config(folder)
    except UserError:  # the estimate of memory says so
        return
    if not _missing(config):
        check_data(find_conventions(config, run.target.model), run.data, run.target.model)


def _has_head(folder: Path) -> bool:
    """Return whether the weight files hold a head; a damaged one is left to those who load it."""
    from safetensors import SafetensorError, safe_open

    from paceline.target.weights import gguf_file, gguf_has_head

    if file := gguf_file(folder):
        return gguf_has_head(file)
    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(path, framework="pt") as tensors:
                if not {"lm_head.weight", "model.lm_head.weight"}.isdisjoint(tensors.keys()):
                    return True
        except (SafetensorError, OSError):
            continue
    return False


def target_folder(target: TargetSettings) -> Path | None:
    """Return where the target's config.json is on this machine, if it is."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    folder = Path(target.model).expanduser()
    if folder.is_dir():
        return folder
    if target.revision is None:
        return None
    try:
        cached = try_to_load_from_cache(target.model, "config.json", revision=target.revision)
    except HFValidationError:  # a path that is not there
        return None
    return Path(cached).parent if isinstance(cached, str) else None
