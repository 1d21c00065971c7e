"""benchmarks/fp8_quality.py: the comparison of bfloat16 with fp8, its verdict, and all of it once on a CPU."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Return what imports a module of benchmarks/."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


@pytest.fixture
def verdict(module: Callable[[str], ModuleType]) -> ModuleType:
    return module("fp8_verdict")


@pytest.fixture
def script(module: Callable[[str], ModuleType]) -> ModuleType:
    return module("fp8_quality")


def report(taus: np.ndarray, cycles: int = 10) -> dict[str, Any]:
    columns = {"cycle_tokens": (taus * cycles).tolist(), "cycles": [cycles] * len(taus)}
    return {"prompt_ids_sha256": "same", "tau_trained": taus.mean(), "lossless": True, "per_prompt": columns}


def test_the_difference_is_that_of_questions_averaged_over_seeds(verdict: ModuleType) -> None:
    draw = np.random.default_rng(0)
    hard_P = draw.normal(3, 1, 400)  # questions differ far more than arms do
    arms = [[report(hard_P + shift + draw.normal(0, 0.1, 400)) for _ in range(3)] for shift in (0.0, 0.05)]
    for runs in arms:
        runs[0]["per_prompt"]["cycles"][7] = 0  # an answer that ended at once
    result = verdict.compare(arms, range(3))
    found = result["fp8_against_bf16"]
    taus = [[[t / 10 for t in run["per_prompt"]["cycle_tokens"]] for run in runs] for runs in arms]
    used = [at for at in range(400) if at != 7]
    wanted_P = [sum(taus[1][s][at] - taus[0][s][at] for s in range(3)) / 3 for at in used]
    assert found["difference"]["mean"] == pytest.approx(sum(wanted_P) / 399)
    half = 1.96 * np.std(wanted_P) / 399**0.5  # of the mean of so many, as is known without resampling
    assert found["difference"]["low"] == pytest.approx(np.mean(wanted_P) - half, abs=0.1 * half)
    assert found["difference"]["high"] == pytest.approx(np.mean(wanted_P) + half, abs=0.1 * half)
    assert (found["resamples"], found["prompts"], result["left_out"]) == (10_000, 399, 1)
    assert len(result["difference_by_seed"]) == 3
    told = verdict.table({**result, "steps": 100})
    assert "fp8 3." in told
    assert "verdict: the same (90 % over questions and seeds: +0.0" in told


def test_drafters_that_answered_other_questions_are_not_compared(verdict: ModuleType) -> None:
    other = {**report(np.ones(4)), "prompt_ids_sha256": "other"}
    with pytest.raises(AssertionError, match="same questions"):
        verdict.compare([[report(np.ones(4))], [other]], [0])


def drawn(draw: np.random.Generator, difference: float, of_seeds: float, seeds: int = 3) -> np.ndarray:
    """Return taus of arms x seeds x questions around 2.5: by drafter, by question and arm, and by both."""
    arm_A11 = np.array([0.0, difference])[:, None, None]
    by_drafter, by_arm = draw.normal(0, of_seeds, (2, seeds, 1)), draw.normal(0, 0.1, (2, 1, 256))
    return np.array(2.5 + arm_A11 + by_drafter + by_arm + draw.normal(0, 0.2, (2, seeds, 256)))


@pytest.mark.parametrize(
    ("difference", "of_seeds", "said"),
    [(0.0, 0.005, "the same"), (-0.3, 0.02, "lower"), (0.3, 0.02, "higher"), (0.0, 0.15, "undecided")],
)
def test_a_verdict_is_what_was_put_in(verdict: ModuleType, difference: float, of_seeds: float, said: str) -> None:
    result = verdict.judged(drawn(np.random.default_rng(1), difference, of_seeds))
    assert result["verdict"] == said
    told = result["judged"]
    assert told["low"] < told["difference"] < told["high"]
    assert told["margin"] == pytest.approx(0.075, rel=0.05)
    assert (told["seeds_needed"] or 0) > (3 if said == "undecided" else -1)


def test_drafters_at_the_margin_are_seldom_said_to_be_the_same(
    verdict: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And drafters with no difference are seldom said to differ. Over questions alone both would be frequent."""
    monkeypatch.setattr(verdict, "RESAMPLES", 400)
    draw = np.random.default_rng(2)
    at_margin = [verdict.judged(drawn(draw, -0.075, 0.02))["verdict"] for _ in range(300)]
    assert at_margin.count("the same") <= 0.07 * 300
    equal = [verdict.judged(drawn(draw, 0.0, 0.06))["verdict"] for _ in range(300)]
    assert sum(one in ("lower", "higher") for one in equal) <= 0.12 * 300
    near = [verdict.judged(drawn(draw, 0.0, 0.01))["verdict"] for _ in range(100)]
    assert near.count("the same") >= 90, "it decides where drafters of an arm are alike"


def test_one_seed_decides_nothing(verdict: ModuleType) -> None:
    result = verdict.compare([[report(np.full(9, 2.0))], [report(np.full(9, 2.0))]], [0])
    assert (result["verdict"], result["judged"]["seeds_needed"]) == ("undecided", 2)
    assert "no interval from one seed" in verdict.table({**result, "steps": 1})


def test_a_trials_second_half_is_timed(script: ModuleType, tmp_path: Path) -> None:
    seconds = (50.0, 1.0, 2.0, 4.0)
    lines = [f'{{"event": "step", "since": {{"s": {s}, "steps": 10}}}}' for s in seconds]
    (tmp_path / "events.jsonl").write_text("\n".join(['{"event": "started"}', *lines]))
    assert script._seconds_a_step(tmp_path) == pytest.approx(6 / 20)


def test_pairs_that_are_done_are_told_and_the_others_named(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One drafter of the last pair fails, another lacks what training told: the process ended between two files."""
    (tmp_path / "dataset").mkdir()
    for name in ("bf16-0", "fp8-0", "bf16-1", "fp8-1", "bf16-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "evaluation.json").write_text(json.dumps(report(np.linspace(2, 3, 9))))
        if name != "fp8-1":
            (tmp_path / name / "trained.json").write_text('{"train_s": 3.5}')
    monkeypatch.setattr(script, "fetch_smollm2", lambda *_: tmp_path)
    files = ["--prompts", "-", "--held-out", "-", "--steps", "3", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["fp8_quality.py", str(tmp_path), *files])
    monkeypatch.setattr(script, "__file__", str(tmp_path / "broken.py"))
    (tmp_path / "broken.py").write_text("import sys; sys.exit('no such GPU')")
    monkeypatch.setattr(script.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit, match="^fp8-2 not done: run the same command again$"):
        script.main()
    told = capsys.readouterr()
    assert "no such GPU" in told.err
    assert "| fp8 | 1 | 2.500 |" in told.out
    assert "fp8 | 2" not in told.out
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["verdict"], result["judged"]["seeds"]) == ("the same", 2)
    assert [result["trained"][f"fp8-{seed}"]["train_s"] for seed in (0, 1)] == [3.5, None]


def test_too_few_questions_are_said(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "few.jsonl").write_text('{"question": "a"}\n{"prompt": "b"}\n')
    assert [one[0]["content"] for one in script._questions(tmp_path / "few.jsonl", 2)] == ["a", "b"]
    with pytest.raises(SystemExit, match=r"3 questions are asked for, and .*few\.jsonl has 2: ask for fewer"):
        script._questions(tmp_path / "few.jsonl", 3)


def questions(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"question": f"What is {n} plus {n}?"}) + "\n" for n in range(count)))
    return path


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.12", reason="products in fp8 by rows take a GPU there")
def test_all_of_it_on_a_cpu_in_two_calls(tmp_path: Path) -> None:
    """Completions, dataset, training with products in e4m3, decoding, verdict; the status says what is missing."""
    out = tmp_path / "out"
    files = ["--prompts", questions(tmp_path / "asked.jsonl", 16), "--held-out", questions(tmp_path / "held.jsonl", 4)]
    sizes = ["--rows", 48, "--questions", 4, "--max-new-tokens", 8, "--steps", 6, "--seeds", 1, "--at-once", 2]
    command = [sys.executable, FOLDER / "fp8_quality.py", out, *files, *sizes, "--device", "cpu", "--tiny"]

    def run(*more: object) -> "subprocess.CompletedProcess[str]":
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        given = [*map(str, command), *map(str, more)]
        return subprocess.run(given, capture_output=True, text=True, timeout=280, env=environment)

    late = run("--within", 0)
    assert (late.returncode, (out / "dataset").is_dir()) == (1, True), late.stderr
    assert "bf16-0, fp8-0 not done" in late.stderr
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((out / "result.json").read_text())
    assert set(result["drafters"]) == {"bf16-0", "fp8-0"}
    assert (result["verdict"], result["judged"]["seeds"]) == ("undecided", 1)
    assert "verdict: undecided (no interval from one seed" in done.stdout
    assert all(one["lossless"] for one in result["drafters"].values()), "measured with the float32 target"
    losses = [result["trained"][f"{arm}-0"]["loss"] for arm in ("bf16", "fp8")]
    assert losses[0] != losses[1], "the second arm's products are others"
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
