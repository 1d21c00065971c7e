"""What of a run's events is told to trackers: numbers by name, after how many steps."""

from dataclasses import dataclass
from typing import Any

BEGIN = ("started", "resumed")
OUTCOMES = {"trained": "finished", "failed": "failed", "interrupted": "interrupted"}


@dataclass(frozen=True, slots=True)
class Point:
    """Numbers that belong to one moment of a run."""

    kind: str  # of the event
    steps: int  # done by then
    t: float  # seconds since 1970
    numbers: dict[str, float]


class Numbers:
    """Turns events into points. Memory, which is looked at every few seconds, is told with the next step."""

    def __init__(self) -> None:
        self._memory: dict[str, float] = {}

    def of(self, event: dict[str, Any]) -> Point | None:
        """Return what an event has to tell, if it has."""
        match event["event"]:
            case "step":
                steps, numbers = event["step"] + 1, _step(event) | self._memory
            case "held_out":
                steps, numbers = event["steps"], _held_out(event)
            case "evaluated":
                steps, numbers = event["steps"], _evaluated(event)
            case "sample":
                self._memory = _memory(event)
                return None
            case _:
                return None
        return Point(event["event"], steps, event["t"], numbers)


def flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a settings tree as one level, `section.key`; what is no number or text becomes one."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            found |= {f"{name}.{key}": leaf for key, leaf in flat(value).items()}
        else:
            found[name] = value if isinstance(value, int | float | str) else str(value)
    return found


def _step(event: dict[str, Any]) -> dict[str, float]:
    names = ("loss", "acceptance", "lr", "grad_norm")
    numbers = {f"train/{name}": float(event[name]) for name in names}
    numbers |= _slots("train_slots", _shares(event))
    since = event.get("since") or {}
    if since.get("s"):
        numbers |= {f"rate/{name}_per_s": since[name] / since["s"] for name in ("tokens", "blocks")}
    return numbers


def _held_out(event: dict[str, Any]) -> dict[str, float]:
    numbers = {f"held_out/{name}": float(event[name]) for name in ("loss", "acceptance")}
    return numbers | _slots("held_out_slots", _shares(event))


def _evaluated(event: dict[str, Any]) -> dict[str, float]:
    numbers = {f"evaluated/{name}": float(event[name]) for name in ("tau", "tau_pooled") if event.get(name) is not None}
    return numbers | _slots("evaluated_slots", event.get("slot_acceptance_K") or [])


def _shares(event: dict[str, Any]) -> list[float]:
    """Of the blocks that have labels there, which share had the slots 1..k all right."""
    counts = zip(event["accepted_K"], event["available_K"], strict=True)
    return [accepted / available if available else float("nan") for accepted, available in counts]


def _slots(group: str, shares_K: list[float]) -> dict[str, float]:
    """A number a slot; those that nobody saw are left out. Names have two digits, so that they sort."""
    return {f"{group}/{slot:02d}": share for slot, share in enumerate(shares_K, 1) if share == share}


def _memory(event: dict[str, Any]) -> dict[str, float]:
    found = {f"memory/{gpu['device'].replace(':', '')}_gib": gpu.get("memory_used_bytes") for gpu in event["gpus"]}
    found["memory/host_gib"] = event.get("host_bytes")
    return {name: count / 2**30 for name, count in found.items() if count is not None}
