"""A page of a long run: how long it takes to make, and to open until its figures are drawn.

The run is made up: every kind of event, a step logged each time, samples every 5 s, for eight roles on eight GPUs.
"""

import json
import math
import random
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.config import RunSettings
from paceline.observe.console import Console
from paceline.observe.report.page import open_runs, plotly_js, report_page
from paceline.records import RunError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
STEP_S = 0.6
_EVENT_S = 5.0  # between two samples
_SLOTS = 15
_GPUS = 8
_BEGAN = 1.8e9  # seconds since 1970


def bench_report(*, steps: int, opens: int, console: Console) -> dict[str, Any]:
    """Write a run's events, make its page, open it where there is a browser; return seconds and bytes.

    `opens` says how often; the median counts.
    """
    plotly_js()  # before events are written for nothing
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as work:
        run = Path(work) / "run"
        with console.progress("events", steps) as tick:
            write_run(run, steps, tick=lambda done: tick(done))
        result: dict[str, Any] = {"steps": steps, "events_bytes": (run / "events.jsonl").stat().st_size}
        began = time.perf_counter()
        runs = open_runs([run])
        result["read_s"] = round(time.perf_counter() - began, 2)
        began = time.perf_counter()
        text = report_page(runs)
        result["page_s"] = round(time.perf_counter() - began, 2)
        page = Path(work) / "report.html"
        page.write_text(text, encoding="utf-8")
        result |= {"page_bytes": page.stat().st_size, "plotly_bytes": len(plotly_js().encode())}
        result |= _opened(page, opens, console)
    return result


def _opened(page: Path, opens: int, console: Console) -> dict[str, Any]:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        console.line(f"  the page is not opened: none of {', '.join(BROWSERS)} is here")
        return {"browser": None}
    found = []
    with console.progress("open", opens) as tick:
        for done in range(opens):
            found.append(_open(browser, page))
            tick(done + 1)
    middle = {key: sorted(one[key] for one in found)[opens // 2] for key in found[0]}
    return {"browser": browser, "opens": opens, **middle}


def _open(browser: str, page: Path) -> dict[str, Any]:
    """Return what the page notes of itself, in seconds since it was asked for.

    Raises:
        RunError: the browser does not show it.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as profile:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--dump-dom"]
        try:
            done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120)
        except subprocess.TimeoutExpired:
            raise RunError(f"{browser} has not shown the page after 120 s. Try without other load.") from None
    noted = dict(re.findall(r'data-(first-figure-ms|last-figure-ms|figures)="(\d+)"', done.stdout[:2000]))
    if len(noted) != 3:
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise RunError(f"{browser} did not draw the page's figures and said: {said}.")
    return {
        "first_figure_s": int(noted["first-figure-ms"]) / 1000,
        "last_figure_s": int(noted["last-figure-ms"]) / 1000,
        "figures": int(noted["figures"]),
    }


def write_run(run: Path, steps: int, *, seed: int = 0, tick: Any = lambda done: None) -> None:
    """Write the folder of a run that never was, with every kind of event that a page shows."""
    run.mkdir(parents=True)
    with (run / "events.jsonl").open("w", encoding="utf-8") as file:
        for event in made_up(steps, random.Random(seed)):
            file.write(json.dumps(event) + "\n")
            if event["event"] == "step" and event["step"] % 10_000 == 0:
                tick(event["step"])
    tick(steps)


def made_up(steps: int, draw: random.Random) -> Iterator[dict[str, Any]]:
    """Yield the events of such a run."""
    t = _BEGAN

    def told(event: str, **values: Any) -> dict[str, Any]:
        return {"schema": 1, "t": round(t, 3), "event": event, **values}

    yield from _beginning(told, steps)
    for state, s in (("loading", 40), ("compiling", 90), ("ready", 5), ("running", 0)):
        for role, device in _ROLES:
            yield told("role", role=role, device=device, state=state, s=t - _BEGAN)
        t += s
    sampled = t
    for step in range(steps):
        t += STEP_S
        yield _step(told, step, steps, draw)
        while sampled + _EVENT_S <= t:
            sampled += _EVENT_S
            yield _sample(told, draw)
        done = step + 1
        if done % max(1, steps // 50) == 0:
            yield _held_out(told, done, steps, draw)
        if done % max(1, steps // 20) == 0:
            yield _evaluated(told, done, steps, draw)
        if done % max(1, steps // 7) == 0:
            yield from _faults(told, step, draw)
    yield told(
        "trained", run="run", drafter="run/drafter", train_steps=steps, rejected_steps=7, loss=1.0, policy="captured"
    )


def _beginning(told: Any, steps: int) -> Iterator[dict[str, Any]]:
    gpus = [
        {"device": f"cuda:{gpu}", "name": "NVIDIA H200", "memory_bytes": 150_754_820_096, "peak_flops": 9.89e14}
        for gpu in range(_GPUS)
    ]
    yield told("started", settings=_SETTINGS)
    yield told(
        "machine",
        host="machine",
        platform="Linux",
        python="3.12.3",
        torch="2.13.0",
        cpu="a processor",
        cores=128,
        memory_bytes=2**40,
        gpus=gpus,
    )
    yield told(
        "data",
        folders=["dataset"],
        fingerprints=["ab" * 32],
        samples=1_000_000,
        tokens=2_300_000_000,
        target="target",
        target_revision="0123456789abcdef",
    )
    edges = [0, 770, 1216, 1728, 2432, 3296, 8193]
    buckets = [
        {"low": low, "high": high, "samples": 1000 * (9 - place), "batches": 100 * (9 - place), "padding_share": 0.05}
        for place, (low, high) in enumerate(pairwise(edges))
    ]
    yield told(
        "plan",
        layout="bucketed",
        samples=39_000,
        tokens=89_700_000,
        batches=3_900,
        padding_share=0.05,
        buckets=buckets,
        steps=steps,
    )


def _step(told: Any, step: int, steps: int, draw: random.Random) -> dict[str, Any]:
    part = (step + 1) / steps
    loss = 1 + 9 * math.exp(-8 * part) + draw.gauss(0, 0.15)
    share = (0.2 + 0.7 * part) * draw.uniform(0.9, 1.0)
    accepted = [round(512 * share ** (slot + 1)) for slot in range(_SLOTS)]
    available = [512 - 4 * slot for slot in range(_SLOTS)]
    return told(
        "step",
        step=step,
        total_steps=steps,
        epoch=0,
        loss_sum=loss * 3000.0,
        weight_sum=3000.0,
        loss=loss,
        applied=True,
        accepted_K=accepted,
        available_K=available,
        acceptance=1 + sum(right / of for right, of in zip(accepted, available, strict=True)),
        blocks=512,
        anchor_slots=512,
        tokens=30_000,
        padded_tokens=31_500,
        lr=6e-4,
        grad_norm=1.0,
    )


def _sample(told: Any, draw: random.Random) -> dict[str, Any]:
    roles = []
    for role, device in _ROLES:
        busy = draw.uniform(0.5, 0.95)
        waits = "features" if role.startswith("drafter") else "room in the channel"
        roles.append(
            {
                "role": role,
                "device": device,
                "state": "running",
                "busy_share": busy,
                "wait_share": 1 - busy,
                "waits_for": waits,
            }
        )
    gpus = [
        {
            "device": f"cuda:{gpu}",
            "name": "NVIDIA H200",
            "memory_used_bytes": draw.randrange(90, 110) * 2**30,
            "memory_total_bytes": 150_754_820_096,
            "utilisation": draw.uniform(0.6, 1.0),
        }
        for gpu in range(_GPUS)
    ]
    return told(
        "sample", s=_EVENT_S, roles=roles, queue_bytes=2**28, queue_limit_bytes=2**31, gpus=gpus, host_bytes=2**35
    )


def _held_out(told: Any, done: int, steps: int, draw: random.Random) -> dict[str, Any]:
    loss = 1.1 + 8 * math.exp(-8 * done / steps) + draw.gauss(0, 0.02)
    return told("held_out", steps=done, loss=loss, best=True, acceptance=1 + 4 * done / steps)


def _evaluated(told: Any, done: int, steps: int, draw: random.Random) -> dict[str, Any]:
    tau = 1 + 3.5 * done / steps + draw.gauss(0, 0.05)
    slots = [0.9 ** (slot + 1) * done / steps for slot in range(_SLOTS)]
    return told(
        "evaluated",
        steps=done,
        tau=tau,
        tau_pooled=tau - 0.1,
        slot_acceptance_K=slots,
        prompts=32,
        tokens=8192,
        s=20.0,
        best=True,
        estimate=tau + 0.4,
    )


def _faults(told: Any, step: int, draw: random.Random) -> Iterator[dict[str, Any]]:
    yield told("rejected", step=step, loss="inf", grad_norm="nan", rule="loss", limit=draw.uniform(10, 20))
    yield told(
        "replica_failed",
        role=_ROLES[0][0],
        device="cuda:0",
        doing="a micro-batch",
        restarted=True,
        restarts_left=2,
        message="target replica 0 on cuda:0 failed: CUDA error.",
    )
    yield told("checkpoint_skipped", steps=step)
    yield told("disk_full", steps=step, message="There is no room for a checkpoint.")


_ROLES = [
    *((f"target replica {place}", f"cuda:{place}") for place in range(5)),
    *((f"drafter rank {place}", f"cuda:{5 + place}") for place in range(3)),
]
_SETTINGS = RunSettings.model_validate(
    {
        "run_dir": "run",
        "target": {"model": "target"},
        "drafter": {
            "block_size": _SLOTS + 1,
            "layers": 5,
            "taps": [1, 9, 17],
            "mask_token_id": 3,
            "heads": 32,
            "kv_heads": 8,
            "head_dim": 128,
            "intermediate_size": 12288,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-6,
        },
        "data": {"dataset": "dataset"},
        "train": {},
    }
).model_dump(mode="json")
