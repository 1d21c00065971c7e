"""Events of a run that never was: two GPUs, a target replica and a drafter rank."""

import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]

SETTINGS = {"run_dir": "/runs/one", "pipeline": {"targets": ["cuda:0"], "drafters": ["cuda:1"]}}
PEAK = 1e15


def told(event: str, t: float, **values: Any) -> Event:
    return {"schema": 1, "t": t, "event": event, **values}


def append(run: Path, *events: Event) -> None:
    """Add events to those of a run."""
    run.mkdir(exist_ok=True)
    with (run / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def step_event(step: int, t: float, **more: Any) -> Event:
    since = {"steps": 10, "s": 5.0, "tokens": 1000, "padded_tokens": 1200, "blocks": 50, "flops": 1e15}
    values = {"step": step, "total_steps": 100, "epoch": 0, "loss": 2.5, "acceptance": 1.5, "lr": 1e-3}
    values |= {"accepted_K": [20, 5, 4, 2, 0], "available_K": [50, 50, 50, 40, 0]}
    return told("step", t, **{**values, "grad_norm": 0.5, "applied": True, "since": since, **more})


def sample_event(t: float, target: dict[str, float], drafter: dict[str, float], s: float = 5.0, **more: Any) -> Event:
    """A sample in which either role waited these shares for these things."""
    roles = []
    for name, device, waits in (("target replica 0", "cuda:0", target), ("drafter rank 0", "cuda:1", drafter)):
        waited = sum(waits.values())
        shares = {"busy_share": 1 - waited, "wait_share": waited, "waits": waits}
        longest = max(waits, key=lambda what: waits[what]) if waits else None
        roles.append({"role": name, "device": device, "state": "running", "waits_for": longest, **shares})
    gpus = [
        {"device": device, "name": "H", "memory_used_bytes": 2**30, "memory_total_bytes": 2**33, "utilisation": 0.5}
        for device in ("cuda:0", "cuda:1")
    ]
    values = {"queue_bytes": 2**20, "queue_limit_bytes": 2**31, "host_bytes": 2**30, "gpus": gpus}
    return told("sample", t, s=s, roles=roles, **{**values, **more})


def begin(t: float = 1000.0, **settings: Any) -> list[Event]:
    """Events until both roles run."""
    gpus = [{"device": f"cuda:{i}", "name": "H", "memory_bytes": 2**33, "peak_flops": PEAK} for i in range(2)]
    roles = (("target replica 0", "cuda:0"), ("drafter rank 0", "cuda:1"))
    states = [
        told("role", t + after, role=role, device=device, state=state, s=after)
        for after, state in enumerate(("loading", "compiling", "ready", "running"))
        for role, device in roles
    ]
    return [
        told("started", t, settings={**SETTINGS, **settings}),
        told("plan", t, layout="trimmed", samples=90, tokens=900, batches=10, padding_share=0.1, steps=100, buckets=[]),
        told("machine", t, host="h", cores=2, python="3", torch="2", gpus=gpus),
        told("stage", t, name="dataset opened", s=0.25),
        *states,
    ]
