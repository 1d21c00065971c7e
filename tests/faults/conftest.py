"""Runs of the command line in processes of their own that are killed, asked to stop, or let finish.

A fork server loads torch once, so that a process takes a tenth of a second to start.
"""

import json
import multiprocessing
import os
import random
import runpy
import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from paceline.config import RunSettings
from paceline.config_file import dump_settings

CHILD = Path(__file__).with_name("child.py")
Changes = dict[str, dict[str, object]]


class Child:
    """`paceline` with some arguments, under way."""

    def __init__(self, process: Any, output: Path, run: Path) -> None:
        self.process, self.pid, self.run, self._output = process, process.pid, run, output

    def text(self) -> str:
        return self._output.read_text() if self._output.exists() else ""

    def status(self, timeout_s: float = 60) -> int:
        self.process.join(timeout_s)
        assert self.process.exitcode is not None, self.text()
        return self.process.exitcode

    def wait_for(self, seen: Callable[[], object], timeout_s: float = 60) -> bool:
        """Wait until something is seen; False if the process ended before."""
        until = time.monotonic() + timeout_s
        while not seen():
            if not self.process.is_alive():
                return False
            assert time.monotonic() < until, self.text()
            time.sleep(0.001)
        return True

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def moment(self, draw: random.Random) -> str:
        """Wait for a moment drawn at random, half of them in the middle of a save, and say which."""
        if draw.random() < 0.5:
            after, before = draw.randrange(14), len(events(self.run))
            self.wait_for(lambda: len(events(self.run)) >= before + after)
            time.sleep(draw.uniform(0, 0.05))
            return f"{after} events later"
        saves, names = draw.randrange(4), (".step-*", ".step-*/d*", ".step-*/o*", ".step-*/m*", ".latest*", ".*.gone")
        wanted = draw.choice(names)
        before = told(self.run, "checkpoint")
        self.wait_for(lambda: told(self.run, "checkpoint") >= before + saves)
        self.wait_for(lambda: any((self.run / "checkpoints").glob(wanted)))
        return f"{saves} saves later, {wanted}"


class Survival:
    """What was survived of every fault; printed at the end of the session."""

    def __init__(self) -> None:
        self._lost: dict[str, list[str | None]] = {}

    @contextmanager
    def trial(self, fault: str, seed: object) -> Iterator[None]:
        """Count what happens in the block as one more time that `fault` was survived, or not."""
        try:
            yield
        except BaseException as error:
            self._lost.setdefault(fault, []).append(f"{seed}: {str(error).splitlines()[0][:80]}")
            raise
        self._lost.setdefault(fault, []).append(None)

    def lines(self) -> list[str]:
        """Return a table with a line a fault, and under it the seeds that were lost."""
        found = []
        for fault, times in sorted(self._lost.items()):
            lost = [time for time in times if time is not None]
            found.append(f"{fault:60s} {len(times) - len(lost):3d} / {len(times):3d}")
            found += [f"    lost: {time}" for time in lost]
        return found


_SURVIVAL = Survival()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if lines := _SURVIVAL.lines():
        terminalreporter.section("faults: survived / total")
        terminalreporter.write_line("\n".join(lines))


@pytest.fixture
def survival() -> Survival:
    return _SURVIVAL


class Lab:
    """Makes runs of 14 steps over more than one epoch, saved every second step, and looks at what they leave.

    `held_out` is a dataset that they do not train on.
    """

    def __init__(self, folder: Path, tree: Any, server: Any, held_out: str) -> None:
        self._folder, self._tree, self._server = folder, tree, server
        self.held_out = held_out
        self.children: list[Child] = []

    def settings(self, name: str, changes: Changes | None = None) -> Path:
        """Write the settings of a run and return its folder."""
        tree = {**self._tree, "run_dir": str(self._folder / name)}
        for section, values in (changes or {}).items():
            tree[section] = tree.get(section, {}) | values
        (self._folder / f"{name}.yaml").write_text(dump_settings(RunSettings.model_validate(tree)))
        return self._folder / name

    def train(
        self, run: Path, *options: str, slow_s: float = 0.0, fault: tuple[str, dict[str, object]] | None = None
    ) -> Child:
        """Start `paceline train`, with --resume where there is a run. `slow_s` and `fault`: see child.py."""
        resume = ["--resume"] * (run / "settings.yaml").exists()
        return self.command("train", f"{run}.yaml", *options, *resume, run=run, slow_s=slow_s, fault=fault)

    def command(
        self,
        *arguments: object,
        run: Path | None = None,
        slow_s: float = 0.0,
        fault: tuple[str, dict[str, object]] | None = None,
    ) -> Child:
        """Start `paceline` with some arguments; `run` is the folder whose events tell how far it is."""
        given = {
            "ARGUMENTS": [str(argument) for argument in arguments],
            "OUTPUT": str(self._folder / f"output-{len(self.children)}.txt"),
            "SLOW_S": slow_s,
            "FAULT": fault,
            "FOLDER": str(CHILD.parent),
            "TEMP": str(self._folder / "tmp"),
        }
        process = self._server.Process(target=runpy.run_path, args=(str(CHILD), given, "__main__"))
        process.start()
        self.children.append(Child(process, Path(given["OUTPUT"]), run or self._folder))
        return self.children[-1]

    def finished(self, run: Path, *options: str) -> Path:
        """Train until the end."""
        child = self.train(run, *options)
        assert child.status() == 0, child.text()
        return run

    def killed(
        self, run: Path, seed: int, kills: int, fault: tuple[str, dict[str, object]] | None = None
    ) -> tuple[list[str], int]:
        """Kill a run `kills` times at moments drawn by `seed`, let it finish, and return the moments and how many
        hit."""
        draw, moments, hit = random.Random(seed), [], 0
        for _ in range(kills):
            child = self.train(run, slow_s=0.005, fault=fault)
            moments.append(child.moment(draw))
            if child.process.is_alive():
                child.send(signal.SIGKILL)
            status = child.status()
            assert status in (-signal.SIGKILL, 0), child.text()
            self.assert_left_nothing()
            hit += status != 0
            if (run / "drafter").exists():
                return moments, hit
        child = self.train(run, fault=fault)
        assert child.status() == 0, child.text()
        return moments, hit

    def events(self, run: Path) -> list[dict[str, Any]]:
        return events(run)

    def told(self, run: Path, kind: str) -> int:
        return told(run, kind)

    def weights(self, run: Path) -> bytes:
        """Return a trained drafter's file."""
        return (run / "drafter" / "model.safetensors").read_bytes()

    def assert_left_nothing(self) -> None:
        """No process has left anything in the folder of temporary files or in shared memory, however it ended."""
        temporary = self._folder / "tmp"
        assert not temporary.exists() or os.listdir(temporary) == []
        pids = [str(child.pid) for child in self.children]
        assert not [name for name in os.listdir("/dev/shm") if any(pid in name for pid in pids)]

    def assert_equal(self, run: Path, whole: Path, besides: Collection[str] = ()) -> None:
        """Both runs told the same of every step and held-out loss, leave the same weights and files, and nothing else
        but files of the names `besides`.
        """
        assert steps(run) == steps(whole)
        assert steps(run, "held_out") == steps(whole, "held_out")
        one, other = (load_file(folder / "drafter" / "model.safetensors") for folder in (run, whole))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert (run / ".lock").read_text() == ""
        names = {".lock", "settings.yaml", "provenance.json", "events.jsonl", "drafter", "checkpoints"}
        names |= {path.name for path in whole.glob("quarantine.jsonl")}
        assert {path.name for path in run.iterdir()} | {"checkpoints"} == names | {*besides}
        self.assert_left_nothing()
        assert best_of(run) == best_of(whole)
        if not (run / "checkpoints").exists():
            return
        names = sorted(path.name for path in (run / "checkpoints").iterdir())
        kept = [name for name in names if name not in ("latest", "best")]
        assert (run / "checkpoints" / "latest").read_text() == kept[-1]
        assert all(name.startswith("step-") for name in kept)
        # one more if it was killed before the oldest was removed, and not saved since
        assert len(kept) <= 3 + (best_of(run) is not None)


def events(run: Path) -> list[dict[str, Any]]:
    """Return a run's events; what a killed process left of a line is skipped."""
    found, path = [], run / "events.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def told(run: Path, kind: str) -> int:
    return sum(event["event"] == kind for event in events(run))


def steps(run: Path, kind: str = "step") -> dict[int, dict[str, Any]]:
    """Return what every step, or held-out loss, told; one that was made again must have told the same."""
    found: dict[int, dict[str, Any]] = {}
    for event in events(run):
        if event["event"] == kind:
            del event["t"]
            event.pop("since", None)  # what this process has measured
            assert found.setdefault(event["step" if kind == "step" else "steps"], event) == event
    return found


def best_of(run: Path) -> tuple[str, bytes] | None:
    """Return the name and the weights of a run's best checkpoint."""
    pointer = run / "checkpoints" / "best"
    if not pointer.exists():
        return None
    return pointer.read_text(), (pointer.with_name(pointer.read_text()) / "drafter.safetensors").read_bytes()


@pytest.fixture(scope="session")
def server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["paceline.recipes.train", "paceline.cli", "transformers.models.qwen3.modeling_qwen3"]
    )
    return context


@pytest.fixture
def lab(
    server: Any, tmp_path: Path, tiny_folder: Path, shape: Any, write_dataset: Callable[..., Path], random_rows: list
) -> Iterator[Lab]:
    dataset = str(write_dataset(random_rows))
    tree = {
        "target": {"model": str(tiny_folder), "dtype": "float32"},
        "drafter": shape.model_dump(),
        "data": {"dataset": dataset, "token_budget": 120, "align": 8, "buckets": 3},
        "train": {"epochs": 20, "max_steps": 14, "context_slots": 100, "anchor_slots": 16, "anchors_per_sample": 4}
        | {"policy": "eager", "log_every": 1, "lr": 1e-2},
        "pipeline": {"targets": ["cpu"], "drafters": ["cpu"]},
        "checkpoint": {"every_steps": 2},
    }
    draw = np.random.default_rng(7)
    others = [(draw.integers(4, 128, draw.integers(8, 41)).tolist(), 3) for _ in range(8)]
    made = Lab(tmp_path, tree, server, str(write_dataset(others, "held-out")))
    yield made
    for child in made.children:
        if child.process.is_alive():
            child.send(signal.SIGKILL)
        child.process.join()
        child.process.close()
