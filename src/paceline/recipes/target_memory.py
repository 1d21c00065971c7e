"""What a target replica of a run needs on its device, for `paceline plan` and for who shares the device."""

from collections import Counter
from pathlib import Path
from typing import Any

from paceline.config import RunSettings
from paceline.observe.console import Console
from paceline.records import UserError
from paceline.target.layers import PLAIN_TYPES
from paceline.target.load import TargetFacts, describe, load_config
from paceline.target.memory import TargetMemory, TrunkShape, target_memory
from paceline.target.weights import weight_entries


def replica_memory(settings: RunSettings, facts: TargetFacts) -> TargetMemory:
    """Return the estimate for the largest micro-batch there may be, on the fast path."""
    deepest = max(settings.drafter.taps)
    shape = TrunkShape(
        weight_entries(facts.folder, deepest=deepest),
        deepest + 1,
        facts.hidden_size,
        facts.intermediate_size,
        facts.heads,
        facts.kv_heads,
        facts.head_dim,
    )
    return target_memory(
        shape,
        tokens=settings.train.context_slots,
        taps=len(settings.drafter.taps),
        itemsize=2 if settings.target.dtype == "bfloat16" else 4,
        fp8=settings.target.fp8 == "on",
    )


def plan_target(settings: RunSettings, folder: Path | None, console: Console) -> dict[str, Any] | None:
    """Print what a target replica needs on a GPU and return it in bytes, with the replicas on each device; None where
    it is not estimated, and a line says why. `folder` is where the target lies, if it does here."""
    try:
        if folder is None:
            raise UserError("target.model is not on this machine.")
        memory = replica_memory(settings, describe(str(folder)))
        kind = load_config(folder).model_type
    except UserError as error:
        console.line(f"  memory of a target replica not estimated: {error}")
        return None
    on_fast = settings.target.fast == "auto" and kind in PLAIN_TYPES
    console.line(
        f"  memory of a target replica on a GPU{' at its peak, on the fast path' if on_fast else ', at least'}:"
    )
    console.table("", ("part", "GiB"), [(name, f"{size / 2**30:.2f}") for name, size in memory.as_dict().items()])
    if settings.target.fast == "off":
        console.line("  target.fast off needs more, which is not estimated")
    elif not on_fast:
        console.line(f"  {kind} is not known to the fast path: it needs more, which is not estimated")
    return {**memory.as_dict(), "replicas": dict(Counter(settings.pipeline.targets))}
