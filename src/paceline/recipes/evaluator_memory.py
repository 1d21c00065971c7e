"""What the evaluator of a run needs on its device, beside whom: for `paceline plan`, and before a run starts."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from paceline.config import DType, RunSettings
from paceline.data.held_out import open_held_out
from paceline.decode.engine import kept_slots
from paceline.decode.memory import EngineMemory, engine_memory
from paceline.decode.prompts import reach_for
from paceline.observe.console import Console
from paceline.pipeline.slots import slots_bytes
from paceline.recipes.target_memory import replica_memory
from paceline.recipes.train_prompts import Prompts, open_prompts
from paceline.records import UserError
from paceline.target.load import TargetFacts, describe
from paceline.target.weights import weight_entries
from paceline.train.memory import gib, sizes_for_tiles, step_memory


def evaluator_memory(settings: RunSettings, facts: TargetFacts, prompts: Prompts) -> EngineMemory:
    """Return the estimate for the prompts of a run."""
    evaluate, shape = settings.evaluate, settings.drafter
    longest = max(map(len, prompts.ids))
    return engine_memory(
        facts.sizes(weight_entries(facts.folder)),
        shape,
        drafter_entries=_step_memory(settings, facts).weights // 4,
        rows=min(evaluate.rows, len(prompts.ids)),
        longest=longest,
        slots=kept_slots(reach_for(longest + evaluate.max_new_tokens), shape.block_size),
        itemsize=_itemsize(settings.target.dtype),
    )


def beside(settings: RunSettings, facts: TargetFacts) -> dict[str, int]:
    """Return what others need on the evaluator's device, in bytes by who they are; 0 where it is not estimated."""
    device, pipeline = settings.evaluate.device, settings.pipeline
    rank = 0
    if not sizes_for_tiles(settings.drafter, settings.train):
        rank = _step_memory(settings, facts).total + slots_bytes(settings, facts.hidden_size)
    trunk = [part.weights for part in replica_memory(settings, facts)]
    return {f"drafter rank {at}": rank for at, name in enumerate(pipeline.drafters) if name == device} | {
        f"target replica {at}": sum(size for size, name in zip(trunk, own, strict=True) if name == device)
        for at, own in enumerate(settings.replicas)
        if device in own
    }


def check_room_on_device(settings: RunSettings, facts: TargetFacts, prompts: Prompts) -> None:
    """Refuse a GPU on which the evaluator has no room beside others, by what each needs at least.

    Raises:
        UserError: they need more than the device has.
    """
    device, evaluate = settings.evaluate.device, settings.evaluate
    total = device_bytes(device) if device is not None else None
    if total is None:
        return
    own, others = evaluator_memory(settings, facts, prompts).total, beside(settings, facts)
    if own + sum(others.values()) > total:
        with_others = "".join(f", {who} {gib(size)}" for who, size in others.items())
        raise UserError(
            f"evaluate.device must have room for the evaluator, which needs about {gib(own)}, but {device} has "
            f"{gib(total)}{' for all: evaluator' + ' ' + gib(own) + with_others if others else ''}. Use a device of "
            f"its own, or lower evaluate.rows ({evaluate.rows}) or evaluate.max_new_tokens ({evaluate.max_new_tokens})."
        )


def device_bytes(device: str) -> int | None:
    """Return all the memory of a GPU; None of what is none."""
    return torch.cuda.get_device_properties(device).total_memory if torch.device(device).type == "cuda" else None


def smallest_device(devices: Iterable[str]) -> int:
    """Return the memory of the smallest GPU among devices; 0 where there is none."""
    return min((size for name in devices if (size := device_bytes(name)) is not None), default=0)


def plan_evaluator(settings: RunSettings, folder: Path | None, console: Console) -> dict[str, Any] | None:
    """Print what the evaluator needs on a GPU and return it in bytes; None without one, or where it is not estimated,
    and a line says why. `folder` is where the target lies, if it does here."""
    if settings.evaluate.device is None:
        return None
    try:
        if folder is None:
            raise UserError("target.model is not on this machine.")
        facts = describe(str(folder))
        data, train, size = settings.data, settings.train, settings.drafter.block_size
        held_out = open_held_out(settings.evaluate, data, train, size, first_row=0, vocab_size=facts.vocab_size)
        prompts = open_prompts(settings, facts, held_out, console)
        memory, others = evaluator_memory(settings, facts, prompts), beside(settings, facts)
    except UserError as error:
        console.line(f"  memory of the evaluator not estimated: {error}")
        return None
    device = settings.evaluate.device
    console.line(f"  memory of the evaluator at its peak, if {device} (evaluate.device) is a GPU:")
    rows = [(name, f"{size / 2**30:.2f}") for name, size in [*memory.parts().items(), ("total", memory.total)]]
    console.table("", ("part", "GiB"), rows)
    for who, size in others.items():
        console.line(f"  {who} is on {device} too" + (f" and needs about {gib(size)} there" if size else ""))
    return {**memory.as_dict(), "device": device, "beside": others}


def _step_memory(settings: RunSettings, facts: TargetFacts) -> Any:
    return step_memory(
        settings.drafter, settings.train, hidden_size=facts.hidden_size, vocab_size=facts.vocab_size, tied=False
    )


def _itemsize(dtype: DType) -> int:
    return 2 if dtype == "bfloat16" else 4
