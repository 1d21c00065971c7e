"""The comparison of bfloat16 with fp8 that benchmarks/fp8_quality.py makes of evaluations."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fp8_quality.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fp8_quality", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def report(taus: np.ndarray, cycles: int = 10) -> dict[str, Any]:
    columns = {"cycle_tokens": (taus * cycles).tolist(), "cycles": [cycles] * len(taus)}
    return {"prompt_ids_sha256": "same", "tau_trained": taus.mean(), "lossless": True, "per_prompt": columns}


def test_the_difference_is_that_of_questions_averaged_over_seeds(script: ModuleType) -> None:
    draw = np.random.default_rng(0)
    hard_P = draw.normal(3, 1, 400)  # questions differ far more than arms do
    arms = [[report(hard_P + shift + draw.normal(0, 0.1, 400)) for _ in range(3)] for shift in (0.0, 0.05)]
    for runs in arms:
        runs[0]["per_prompt"]["cycles"][7] = 0  # an answer that ended at once
    result = script.compare(arms)
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
    assert "fp8 3." in script.table({**result, "steps": 100})


def test_drafters_that_answered_other_questions_are_not_compared(script: ModuleType) -> None:
    other = {**report(np.ones(4)), "prompt_ids_sha256": "other"}
    with pytest.raises(AssertionError, match="same questions"):
        script.compare([[report(np.ones(4))], [other]])


def test_a_trials_second_half_is_timed(script: ModuleType, tmp_path: Path) -> None:
    seconds = (50.0, 1.0, 2.0, 4.0)
    lines = [f'{{"event": "step", "since": {{"s": {s}, "steps": 10}}}}' for s in seconds]
    (tmp_path / "events.jsonl").write_text("\n".join(['{"event": "started"}', *lines]))
    assert script._seconds_a_step(tmp_path) == pytest.approx(6 / 20)
