"""What a target replica of a run needs on its device, for `paceline plan` and for who shares the device."""

from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

from paceline.config import RunSettings
from paceline.observe.console import Console
from paceline.records import UserError
from paceline.target.layers import PLAIN_TYPES
from paceline.target.load import TargetFacts, describe, load_config
from paceline.target.memory import TargetMemory, target_memory
from paceline.target.replica import under_way
from paceline.target.stages import split_layers
from paceline.target.weights import layer_entries, weight_entries


def replica_memory(settings: RunSettings, facts: TargetFacts) -> list[TargetMemory]:
    """Return the estimate of each device of a replica for the largest micro-batch there may be, on the fast path.

    Raises:
        UserError: there are fewer layers than devices.
    """
    deepest, devices = max(settings.drafter.taps), settings.target.devices_per_replica
    parts = [(weight_entries(facts.folder, deepest=deepest), deepest + 1)]
    if devices > 1:
        embedding, layers = layer_entries(facts.folder, deepest)
        counts = split_layers(layers, embedding, devices)
        ends = [*accumulate(counts)]
        parts = [(sum(layers[end - count : end]), count) for end, count in zip(ends, counts, strict=True)]
        parts[0] = parts[0][0] + embedding, parts[0][1]
    return [
        target_memory(
            facts.sizes(entries, layers),
            tokens=settings.train.context_slots,
            taps=len(settings.drafter.taps),
            itemsize=2 if settings.target.dtype == "bfloat16" else 4,
            fp8=settings.target.fp8 == "on",
            made=_made(stage, devices),
        )
        for stage, (entries, layers) in enumerate(parts)
    ]


def beyond_estimate(settings: RunSettings, kind: str) -> str:
    """Return why a target of this model_type needs more than the estimate, which is that of the fast path; an empty
    text if it does not."""
    off = off_fast_path(settings, kind)
    return f"{off}, so it needs more, which is not estimated" if off else ""


def off_fast_path(settings: RunSettings, kind: str) -> str:
    """Return why a target of this model_type will not be on the fast path, as far as that is known before it is loaded;
    an empty text if it should be."""
    if settings.target.fast == "off":
        return "target.fast is off"
    return "" if kind in PLAIN_TYPES else f"{kind} is not known to the fast path"


def fewest_devices(settings: RunSettings, facts: TargetFacts, room: int) -> tuple[int, int] | None:
    """Return the fewest devices of so much room that hold a replica's layers, and what the fullest one then needs, in
    bytes; None where it is too large for one a layer."""
    for devices in range(1, max(settings.drafter.taps) + 2):
        target = settings.target.model_copy(update={"devices_per_replica": devices})
        most = max(part.total for part in replica_memory(settings.model_copy(update={"target": target}), facts))
        if most <= room:
            return devices, most
    return None


def _made(stage: int, devices: int) -> int:
    """Return of how many micro-batches a device has the features at once."""
    return under_way(devices) if stage == devices - 1 else 0


def plan_target(settings: RunSettings, folder: Path | None, console: Console) -> dict[str, Any] | None:
    """Print what a target replica needs on a GPU, or on each of its GPUs, and return it in bytes, with the replicas on
    each device; None where it is not estimated, and a line says why. `folder` is where the target lies, if it is here.

    Raises:
        UserError: there are fewer layers than devices.
    """
    try:
        if folder is None:
            raise UserError("target.model is not on this machine.")
        facts, kind = describe(str(folder)), load_config(folder).model_type
    except UserError as error:
        console.line(f"  memory of a target replica not estimated: {error}")
        return None
    parts, split = [part.as_dict() for part in replica_memory(settings, facts)], settings.target.devices_per_replica > 1
    beyond = beyond_estimate(settings, kind)
    console.line(
        f"  memory of a target replica on {'each of its GPUs' if split else 'a GPU'}"
        f"{', at least' if beyond else ' at its peak, on the fast path'}:"
    )
    heads = [f"GiB, device {at}" for at in range(1, len(parts) + 1)] if split else ["GiB"]
    rows = [(name, *(f"{part[name] / 2**30:.2f}" for part in parts)) for name in parts[0]]
    console.table("", ("part", *heads), rows)
    if beyond:
        console.line(f"  {beyond}")
    whole = {name: sum(part[name] for part in parts) for name in parts[0]}
    more = {"devices": parts} if split else {}
    return {**whole, **more, "replicas": dict(Counter(settings.pipeline.targets))}
