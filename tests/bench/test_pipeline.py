"""The rows of `paceline bench pipeline`: what is counted, and what the whole run is held against."""

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.bench.pipeline import PipelineWork, Whole, micro_batches, pipeline_rows, role_shares, stream
from paceline.cli import app
from paceline.observe.console import Console
from paceline.recipes.bench_pipeline import run_whole

TINY = PipelineWork("tiny", ("cpu",), ("cpu",), "float32", "eager", 8, False)
DOCUMENTED = "who part shape targets drafters samples_per_s tokens_per_s blocks_per_s useful_tflop tflops peak_share "
DOCUMENTED += "matrix_peak_tflops dtype fp8 policy batches_per_step counted"
OF_THE_WHOLE = "gpus peak_gib reserved_growth_gib of share_of_bound roles target_paths recompiles "
OF_THE_WHOLE += "peer peer_samples_per_s ratio_to_published_peer"


def run(*options: str) -> Any:
    return CliRunner().invoke(app, ["bench", "pipeline", *options])


def test_nothing_is_captured_without_a_gpu() -> None:
    refused = run("--targets", "cpu", "--policy", "captured")
    assert "--policy captured needs GPUs for drafters (--drafters), got cpu." in str(refused.exception)


@pytest.mark.parametrize("option", ["--targets", "--drafters"])
@pytest.mark.parametrize("name", ["", "cuda:00", "cuda:\u0663", "cuda:" + "9" * 5_000, "cpu:0"])
@pytest.mark.parametrize("more", [(), ("--stand-ins",)])
def test_a_device_that_is_none_is_refused_by_its_option(option: str, name: str, more: tuple[str, ...]) -> None:
    refused = run(option, f"cpu,{name}", *more)
    assert f"{option} must be cpu or cuda:N, got {name!r}." in str(refused.exception)


def test_rows_have_what_is_documented_and_fit_one_another() -> None:
    done = run("--targets", "cpu", "--steps", "8", "--json")
    assert done.exit_code == 0, done.output
    target, step, whole = json.loads(done.stdout)
    assert [row["part"] for row in (target, step, whole)] == [
        "target features alone",
        "drafter step alone",
        "whole run",
    ]
    for row in (target, step, whole):
        assert set(DOCUMENTED.split()) <= set(row)
        assert row["tokens_per_s"] == pytest.approx(128 * row["samples_per_s"], rel=1e-2)
    assert set(OF_THE_WHOLE.split()) <= set(whole)
    assert whole["blocks_per_s"] == pytest.approx(8 * whole["samples_per_s"], rel=1e-2)
    bound = 1 / (1 / target["samples_per_s"] + 1 / step["samples_per_s"])
    assert whole["share_of_bound"] == pytest.approx(whole["samples_per_s"] / bound, rel=1e-2)
    assert whole["useful_tflop"] == pytest.approx(target["useful_tflop"] + step["useful_tflop"], abs=3e-6)
    assert whole["recompiles"] == 0
    assert whole["ratio_to_published_peer"] is None  # published at another shape, on a GPU


@pytest.mark.parametrize("colocated", [True, False])
def test_the_whole_is_held_against_both_sides(colocated: bool) -> None:
    """Two targets of 4 ms and two ranks of 10 ms a micro-batch of 2 samples: 1,000 and 400 samples a second."""
    work = replace(TINY, targets=("cpu", "cpu"), drafters=("cpu", "cpu"))
    if not colocated:
        work = replace(work, targets=("meta", "meta"))
    batches = micro_batches(work)
    stamps = [0.5 * at for at in range(5)] + [2.0 + 0.02 * at for at in range(1, 10)] + [9.0]
    rows = pipeline_rows(work, batches, 0.004, 0.010, Whole(stamps, reserved=[0] * len(stamps)), warm=5)
    assert [row["samples_per_s"] for row in rows] == pytest.approx([1000, 400, 200])  # 2 ranks, 2 samples, 20 ms
    of, share = ("harmonic sum of both sides", 200 / (1000 * 400 / 1400)) if colocated else ("slower side", 0.5)
    assert rows[-1]["of"] == of
    assert rows[-1]["share_of_bound"] == pytest.approx(share, abs=1e-4)


def test_a_step_has_a_micro_batch_for_every_rank() -> None:
    work = replace(TINY, drafters=("cpu", "cpu", "cpu"))
    batches = micro_batches(work)
    made = list(stream(work, batches, 4))
    assert [batch.seq for batch in made] == list(range(12))
    assert [batch.step for batch in made] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert [batch.closes_step for batch in made] == [False, False, True] * 4
    assert {batch.lengths for batch in made} == {(128, 128)}


def test_a_step_may_have_more_micro_batches_than_ranks() -> None:
    work = replace(TINY, targets=("meta", "meta"), drafters=("cpu", "cpu"), batches_per_step=5)
    assert (work.step_batches, work.rank_batches) == (5, 3)
    batches = micro_batches(work)
    made = list(stream(work, batches, 2))
    assert [batch.step for batch in made] == [0] * 5 + [1] * 5
    assert [batch.seq for batch in made if batch.closes_step] == [4, 9]
    stamps = [0.1 * at for at in range(12)]
    rows = pipeline_rows(work, batches, 0.004, 0.010, Whole(stamps, reserved=[0] * len(stamps)), warm=2)
    assert rows[-1]["samples_per_s"] == pytest.approx(5 * 2 / 0.1)
    assert rows[-1]["batches_per_step"] == 5


def test_a_run_with_several_micro_batches_a_step_is_as_long_as_it_should_be() -> None:
    work = replace(TINY, batches_per_step=2)
    batches, seen = micro_batches(work), []
    whole, warm = run_whole(work, batches, Console(json=True), more_warm_up=1, on_step=seen.append)
    ahead = warm - 3  # slots hold as many micro-batches ahead, two of which are a step
    assert ahead == 8
    assert len(whole.losses) == len(whole.stamps) == warm + work.steps + ahead
    assert seen == list(range(1, len(whole.losses) + 1))
    assert len(whole.drafters) == 1


def test_shares_are_means_over_the_time_that_is_measured() -> None:
    def sample(seconds: float, busy: float | None) -> dict[str, Any]:
        waits = {} if busy is None else {"features": 1 - busy}
        return {"s": seconds, "roles": [{"role": "drafter rank 0", "busy_share": busy, "waits": waits}]}

    samples = [(1.0, sample(1.0, 0.1)), (3.0, sample(2.0, 0.9)), (4.0, sample(1.0, 0.6)), (9.0, sample(5.0, 0.0))]
    told = role_shares(Whole(samples=[*samples, (4.0, sample(0.5, None))]), 1.0, 4.5)
    assert told == {"drafter rank 0": {"busy_share": 0.8, "waits": {"features": 0.2}}}


def test_devices_are_shared_or_they_are_not() -> None:
    work = replace(TINY, targets=("cuda:0", "cuda:1"), drafters=("cuda:1",))
    with pytest.raises(Exception, match="--targets and --drafters name the same devices or none in common"):
        _ = work.colocated


def test_stand_ins_have_a_row_for_each_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.recipes.bench_pipeline._SLEEPS_S", ((0.02, 0.01), (0.01, 0.02)))
    done = run("--stand-ins", "--targets", "cpu,cpu", "--drafters", "cpu", "--steps", "8", "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert [(row["target_ms"], row["step_ms"]) for row in rows] == [(20, 10), (10, 20)]
    for row, most in zip(rows, (100, 50), strict=True):  # a sleep may last longer, and never less
        assert 0 < row["slower_side_per_s"] <= most * 1.001
        assert row["share_of_bound"] == pytest.approx(row["micro_batches_per_s"] / row["slower_side_per_s"], rel=1e-3)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--shape", "tiny"], "--shape"),
        (["--policy", "eager"], "--policy"),
        (["--dtype", "float32"], "--dtype"),
        (["--batches-per-step", "2"], "--batches-per-step"),
        (["--fp8", "--shape", "qwen3-8b"], "--shape and --fp8"),
    ],
)
def test_stand_ins_refuse_what_they_have_no_use_for(options: list[str], named: str) -> None:
    refused = run("--stand-ins", "--targets", "cpu", *options)
    assert str(refused.exception) == (
        f"--stand-ins measures roles that compute nothing, got {named} too. Leave one or the other out."
    )
