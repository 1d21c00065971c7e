"""The part of `paceline plan` about memory: what a drafter rank of RUN.yaml needs on its GPU."""

from pathlib import Path
from typing import Any

from paceline.config import RunSettings, TargetSettings
from paceline.observe.console import Console
from paceline.records import UserError


def plan_memory(run: RunSettings, console: Console) -> dict[str, Any] | None:
    """Print what a drafter rank needs on a GPU and return it in bytes, or None where the target is not here.

    Of the target only config.json is read. Nothing is fetched: a plan of the data is of use without the target.

    Raises:
        UserError: the target's config.json is not that of a decoder.
    """
    # Late, because reading a target's configuration needs torch, and a dataset is planned without it.
    from paceline.target.load import load_config
    from paceline.train.memory import step_memory

    folder = _target_folder(run.target)
    if folder is None:
        console.line("  memory of a drafter rank not estimated: target.model is not on this machine")
        return None
    config = load_config(folder)
    try:
        hidden_size, vocab_size, tied = config.hidden_size, config.vocab_size, bool(config.tie_word_embeddings)
    except AttributeError as error:
        raise UserError(f"{folder / 'config.json'} does not describe a decoder: {error}.") from None
    memory = step_memory(run.drafter, run.train, hidden_size=hidden_size, vocab_size=vocab_size, tied=tied)
    console.line("  memory of a drafter rank on a GPU at its peak, if compiled or captured:")
    rows = [(name, f"{size / 2**30:.2f}") for name, size in [*memory.parts().items(), ("total", memory.total)]]
    console.table("", ("part", "GiB"), rows)
    if run.train.policy == "eager":
        console.line("  train.policy eager needs more, which is not estimated")
    return memory.as_dict()


def _target_folder(target: TargetSettings) -> Path | None:
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
