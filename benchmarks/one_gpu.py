"""The figures of one GPU: what the step, the target's features and a whole run are to reach, and what they reach.

    python benchmarks/one_gpu.py --out OUT [--parts PART ...] [--device cpu]

Parts, each in a process of its own that is ended at its limit; what has not begun within ten minutes (`--within`) is
left out, and a later call with `--parts` goes on in the same folder:

    tests     the tests that need a GPU, ten at a time; their output is OUT/tests.log
    small     a small drafter's step under each policy
    beside    the same with seven threads of forwards in the process, captured and eager
    hog       the same with a thread that never leaves Python
    cold      the step at the Qwen3-8B shape, captured and compiled, with an empty compile cache
    warm      the same again, with the cache that `cold` has filled
    long      500 steps at that shape with micro-batches of every bucket
    memory    the estimate of a step's memory against what it takes
    step      the step on 2 x 3,072 tokens, bfloat16 state, against SpecForge's; then float32 state; then fp8
    features  the target's features of mixed lengths, in bfloat16 and in fp8
    whole     a whole run that shares the GPU, in bfloat16 and in fp8
    where     which kernels the time of the step and of the features goes into

The table is printed as it comes and lies in OUT/table.md and OUT/table.json; OUT/PART.json has every figure. The status
is 1 where a part fails or a bar is missed. `--device cpu` runs all but `tests`, `long`, `memory` and `where` at tiny
shapes, where speed is not judged.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from parts import Found, Part, main

from paceline.records import RunError

ROOT = Path(__file__).resolve().parents[1]
TEST_PROCESSES = 10
STEPS, FEW_STEPS, LONG_STEPS = 500, 24, 500
NOISE_THREADS, HOG_STEPS = 7, 12
OFF = 0.1  # share that an estimate of memory may be off
SEEN = 0.95  # share of the time that known kernels must explain

Row = dict[str, Any]


def run(asked: argparse.Namespace, log: str, *command: str, cache: Path | None = None, fine: int = 0) -> str:
    """Return what a command prints; what it says beside that is in OUT/LOG.log.

    Raises:
        RunError: its status was above `fine`; the end of the log is in the message.
    """
    path = asked.out / f"{log}.log"
    environment = os.environ | ({"PACELINE_CACHE": str(cache)} if cache else {})
    # As where packages are installed: images often let Python keep nothing, and then every start compiles it anew.
    environment["PYTHONPYCACHEPREFIX"] = str(asked.out.absolute() / "python")
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with path.open("w", encoding="utf-8") as errors:
        done = subprocess.run(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, cwd=ROOT
        )
    if not 0 <= done.returncode <= fine:
        said = path.read_text(encoding="utf-8")[-1000:]
        raise RunError(f"`{' '.join(command)}` failed with status {done.returncode}; the end of {path}:\n{said}")
    return done.stdout


def bench(asked: argparse.Namespace, found: Found, what: str, *options: str, cache: Path | None = None) -> list[Row]:
    """Return the rows of `paceline bench`, which are also kept in the part's data under `what`."""
    command = ("-m", "paceline", "bench", *options, "--json")
    rows: list[Row] = json.loads(run(asked, what.replace(" ", "-"), *command, cache=cache))
    for row in rows:
        if row.get("failed"):
            found.notes.append(f"{what}, {row['who']}: {row['failed']}")
    found.data[what] = rows
    return rows


def step_rows(
    asked: argparse.Namespace, found: Found, what: str, shape: str, policies: tuple[str, ...], *more: str, steps: int
) -> dict[str, Row]:
    """Return our rows of `bench step` by policy; on a CPU at a tiny shape, without the captured one."""
    gpu = asked.device == "cuda"
    here = policies if gpu else tuple(dict.fromkeys("compiled" if one == "captured" else one for one in policies))
    options = ["step", "--shape", shape if gpu else "tiny", "--steps", str(steps if gpu else 8)]
    options += [part for policy in here for part in ("--policy", policy)] + list(more)
    if not gpu:
        options += ["--device", "cpu"]
    rows = bench(asked, found, what, *options, cache=asked.out / "cache")
    ours = {row["policy"]: row for row in rows if row["who"] == "paceline"}
    if failed := [f"{policy}: {row['failed']}" for policy, row in ours.items() if "failed" in row]:
        raise RunError(f"{what}, {'; '.join(failed)}")
    if not gpu and "captured" in policies:
        ours["captured"] = ours["compiled"]
    return ours


def at_least(found: Found, asked: argparse.Namespace, what: str, value: float, bar: float) -> None:
    """Add a row with a bar that only a GPU is held to."""
    found.add(what, value, f">= {bar:,g}", value >= bar if asked.device == "cuda" else None)


def at_most(found: Found, asked: argparse.Namespace, what: str, value: float, bar: float) -> None:
    """Add a row with a bar that only a GPU is held to."""
    found.add(what, value, f"<= {bar:,g}", value <= bar if asked.device == "cuda" else None)


def none_of(found: Found, what: str, count: int) -> None:
    """Add a row of something that must not occur anywhere."""
    found.add(what, count, "0", count == 0)


def tests(asked: argparse.Namespace, found: Found) -> None:
    """Run tests/gpu and say which failed."""
    options = ["-m", "gpu", "-n", str(TEST_PROCESSES), "--dist", "worksteal", "--timeout", "200", "-q", "-rfE"]
    command = [sys.executable, "-m", "pytest", *options, "tests/gpu", "--deselect", "tests/gpu/test_two_gpus.py"]
    with (asked.out / "tests.log").open("w", encoding="utf-8") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
    told = (asked.out / "tests.log").read_text(encoding="utf-8")
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|error|skipped)", told[-500:])}
    found.add("passed", counts.get("passed", 0), "> 0", counts.get("passed", 0) > 0)
    found.add("skipped", counts.get("skipped", 0))
    none_of(found, "failed", counts.get("failed", 0) + counts.get("error", 0))
    found.notes += re.findall(r"^(?:FAILED|ERROR) .*", told, re.MULTILINE)
    if done.returncode and not counts.get("failed"):
        raise RunError(f"pytest ended with status {done.returncode}:\n{told[-1000:]}")


def small(asked: argparse.Namespace, found: Found) -> None:
    """Compare the policies."""
    rows = step_rows(asked, found, "small", "small", ("eager", "compiled", "captured"), steps=STEPS)
    captured = rows["captured"]["step_ms"]
    found.add("captured, ms a step", captured)
    at_least(found, asked, "eager / captured", rows["eager"]["step_ms"] / captured, 3)
    at_least(found, asked, "compiled / captured", rows["compiled"]["step_ms"] / captured, 2.5)
    none_of(found, "recompiles", sum(row["recompiles"] for row in rows.values()))


def beside(asked: argparse.Namespace, found: Found) -> None:
    """Measure what threads of forwards cost either policy."""
    policies = ("captured", "eager")
    alone = step_rows(asked, found, "alone", "small", policies, steps=STEPS)
    noise = ("--noise", str(NOISE_THREADS))
    noisy = step_rows(asked, found, "beside threads", "small", policies, *noise, steps=STEPS)
    slower = {policy: noisy[policy]["step_ms"] - alone[policy]["step_ms"] for policy in policies}
    found.add(f"eager, ms a step more beside {NOISE_THREADS} threads", slower["eager"])
    at_most(found, asked, "captured, ms a step more", slower["captured"], round(slower["eager"] / 2, 3))


def hog(asked: argparse.Namespace, found: Found) -> None:
    """Measure a step beside a thread that holds the interpreter."""
    for policy in ("captured", "eager"):  # one by one: eager may not end within the part's limit
        rows = step_rows(asked, found, f"hog {policy}", "small", (policy,), "--hog", steps=HOG_STEPS)
        found.add(f"{policy}, ms a step", rows[policy]["step_ms"])


def cold(asked: argparse.Namespace, found: Found) -> None:
    """Compile everything and compare captured with compiled."""
    shutil.rmtree(asked.out / "cache", ignore_errors=True)
    rows = step_rows(asked, found, "cold", "qwen3-8b", ("captured", "compiled"), steps=FEW_STEPS)
    at_most(found, asked, "captured, seconds to the first step", rows["captured"]["first_step_s"], 120)
    found.add("captured, ms a step", rows["captured"]["step_ms"])
    at_least(found, asked, "compiled / captured", rows["compiled"]["step_ms"] / rows["captured"]["step_ms"], 1)
    none_of(found, "recompiles", sum(row["recompiles"] for row in rows.values()))
    if asked.device == "cuda":
        none_of(found, "growth of reserved memory, GiB", rows["captured"]["reserved_growth_gib"])


def warm(asked: argparse.Namespace, found: Found) -> None:
    """Start once more, where everything is compiled."""
    row = step_rows(asked, found, "warm", "qwen3-8b", ("captured",), steps=FEW_STEPS)["captured"]
    at_most(found, asked, "captured, seconds to the first step", row["first_step_s"], 20)
    none_of(found, "functions compiled", row["compiled"])
    found.add("functions found in the cache", row["found"], "> 0", row["found"] > 0)


def long(asked: argparse.Namespace, found: Found) -> None:
    """Take many steps."""
    told = json.loads(run(asked, "long", "benchmarks/long_run.py", str(LONG_STEPS), cache=asked.out / "cache"))
    found.data["long"] = told
    found.add("steps", told["steps"], f"{LONG_STEPS}", told["steps"] == LONG_STEPS)
    found.add("ms a step", told["step_ms"])
    none_of(found, "recompiles", told["recompiles"])
    none_of(found, "growth of reserved memory, bytes", told["reserved_growth_bytes"])
    found.add("the gradients' norm is finite", told["finite"], "True", told["finite"] is True)


def memory(asked: argparse.Namespace, found: Found) -> None:
    """Compare estimates with peaks."""
    text = run(asked, "memory", "benchmarks/step_memory.py", fine=1)  # 1: a case is off or failed, which its line says
    found.notes.append(text)
    # "32.42  32.30  0.996  33.00  peak": a case's GiB, estimate, ratio and reserved.
    ratios = [float(ratio) for ratio in re.findall(r"[\d.]+ +[\d.]+ +([\d.]+) +[\d.]+  \w", text)]
    cases = len(re.findall(r"^(?:small|qwen)", text, re.MULTILINE))
    found.add("cases measured", f"{len(ratios)} of {cases}", "all", len(ratios) == cases)
    if not ratios:
        raise RunError("no case was measured")
    for name, ratio in (("least", min(ratios)), ("greatest", max(ratios))):
        found.add(f"{name} estimate / peak", ratio, f"within {OFF:g} of 1", abs(ratio - 1) <= OFF)


def step(asked: argparse.Namespace, found: Found) -> None:
    """Measure the step that peers publish."""
    gpu, policies = asked.device == "cuda", ("captured",)
    peer = ("--peer", "specforge") if gpu else ()
    shape, narrow = "qwen3-8b-2x3072", ("--optimizer-state", "bf16")
    row = step_rows(asked, found, "step", shape, policies, *narrow, *peer, steps=FEW_STEPS)["captured"]
    at_least(found, asked, "bfloat16 state, blocks/s; required", row["blocks_per_s"], 4018)
    at_least(found, asked, "bfloat16 state, blocks/s; goal", row["blocks_per_s"], 4300)
    found.add("bfloat16 state, TFLOP/s; peak of products", f"{row['tflops']}; {row['matrix_peak_tflops']}")
    if gpu:
        at_least(found, asked, "times SpecForge in the same run", row["ratio_to_best_peer"], 1.3)
    row = step_rows(asked, found, "step fp32", shape, policies, steps=FEW_STEPS)["captured"]
    found.add("float32 state, blocks/s", row["blocks_per_s"])
    if gpu:
        at_most(found, asked, "float32 state, GB", row["peak_gib"] * 2**30 / 1e9, 34)
        row = step_rows(asked, found, "step fp8", shape, policies, *narrow, "--fp8", steps=FEW_STEPS)["captured"]
        at_least(found, asked, "fp8, bfloat16 state, blocks/s", row["blocks_per_s"], 6200)


def features(asked: argparse.Namespace, found: Found) -> None:
    """Measure the target."""
    gpu = asked.device == "cuda"
    here = ("--shape", "qwen3-8b", "--path", "compiled", "--path", "fp8")
    if not gpu:
        here = ("--shape", "tiny", "--path", "fast", "--device", "cpu", "--tokens", "512", "--budget", "256")
    options = ("target", "--passes", "2", "--no-stock-compiled", *here)
    rows = bench(asked, found, "features", *options, cache=asked.out / "cache")
    ours = {row["how"]: row for row in rows if row["who"] == "paceline"}
    stock = max(row["tokens_per_s"] for row in rows if row["who"] != "paceline")
    found.add("transformers, real tokens/s", stock)
    for how, bar in (("compiled", 44_000), ("fp8", 70_000)) if gpu else (("fast", 44_000),):
        at_least(found, asked, f"{how}, real tokens/s", ours[how]["tokens_per_s"], bar)


def whole(asked: argparse.Namespace, found: Found) -> None:
    """Measure whole runs."""
    gpu = asked.device == "cuda"
    where = ("--shape", "qwen3-8b") if gpu else ("--shape", "tiny", "--targets", "cpu", "--steps", "8")
    for kind, more, bar in (("plain", (), 13), ("fp8", ("--fp8",), 19))[: 2 if gpu else 1]:
        _, _, both = bench(asked, found, f"whole {kind}", "pipeline", *where, *more, cache=asked.out / "cache")
        at_least(found, asked, f"{kind}, samples/s", both["samples_per_s"], bar)
        at_least(found, asked, f"{kind}, share of the harmonic sum of both sides", both["share_of_bound"], 0.95)


def where(asked: argparse.Namespace, found: Found) -> None:
    """Say what the time goes into."""
    for name, *command in (
        ("the step", "step_profile.py", "qwen3-8b-2x3072", "state=bf16"),
        ("the step in fp8", "step_profile.py", "qwen3-8b-2x3072", "state=bf16", "fp8=on"),
        ("features", "target_profile.py", "qwen3-8b"),
        ("features in fp8", "target_profile.py", "qwen3-8b", "fp8"),
    ):
        script, *options = command
        text = run(asked, name.replace(" ", "-"), f"benchmarks/{script}", *options, cache=asked.out / "cache")
        found.notes.append("\n".join(text.splitlines()[:30]))
        share = re.search(r"known are ([\d.]+) %", text)
        at_least(found, asked, f"{name}: share that known kernels explain", float(share[1]) / 100 if share else 0, SEEN)


PARTS = {
    "tests": Part(tests, 300),
    "small": Part(small, 120),
    "beside": Part(beside, 330),
    "hog": Part(hog, 100),
    "cold": Part(cold, 150),
    "warm": Part(warm, 80),
    "long": Part(long, 420),
    "memory": Part(memory, 560),
    "step": Part(step, 300),
    "features": Part(features, 180),
    "whole": Part(whole, 300),
    "where": Part(where, 240),
}

if __name__ == "__main__":
    assert __doc__ is not None
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sys.exit(main(__file__, "One GPU", PARTS, arguments, lambda asked: 1))
