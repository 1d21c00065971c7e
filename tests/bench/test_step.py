"""The rows of `paceline bench step`: what is counted, what peers are given, and what they are held against."""

import json
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from paceline.bench import peers, step, timing
from paceline.bench.features import feature_batches
from paceline.bench.peer_step import PeerOptimizer
from paceline.bench.peers import peer_batch
from paceline.bench.shapes import SHAPES
from paceline.bench.work import CLIP, RATE
from paceline.cli import app
from paceline.config import TrainSettings
from paceline.records import RunError

CPU = torch.device("cpu")


def run(*options: str) -> Any:
    return CliRunner().invoke(app, ["bench", "step", "--device", "cpu", *options])


def test_a_row_has_what_is_documented(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step, "_in_process", lambda work, job, *arguments: job(work, *arguments))
    done = run("--shape", "tiny-2x128", "--policy", "eager", "--steps", "4", "--json")
    assert done.exit_code == 0, done.output
    [row] = json.loads(done.stdout)
    documented = "who policy shape step_ms blocks_per_s tokens_per_s useful_tflop tflops matrix_peak_tflops peak_share "
    documented += "peak_gib ratio_to_best_peer recompiles first_loss dtype optimizer clip fp8 counted batches steps"
    documented += " recompute offload"
    assert set(documented.split()) <= set(row)
    assert (row["who"], row["ratio_to_best_peer"], row["batches"], row["steps"]) == ("paceline", None, 4, 4)
    assert row["blocks_per_s"] == pytest.approx(16 / row["step_ms"] * 1e3, rel=1e-3)
    assert row["tokens_per_s"] == pytest.approx(256 / row["step_ms"] * 1e3, rel=1e-3)
    assert row["first_loss"] == pytest.approx(6.2, abs=0.2)  # ln 500: nothing is learnt yet


def test_nothing_is_captured_without_a_gpu():
    refused = run("--shape", "tiny", "--policy", "eager", "--policy", "captured")
    assert "--policy captured needs a GPU (--device), got cpu." in str(refused.exception)


def test_ours_is_held_against_the_fastest_peer(monkeypatch: pytest.MonkeyPatch):
    speeds = {"objective_chunk_blocks 128": 50.0, "objective_chunk_blocks 0": 60.0, "eager": 90.0}

    def measured(work: object, job: object, *arguments: object) -> dict[str, Any]:
        policy = next(str(name) for name in arguments if name in {*speeds, "defaults"})
        if policy not in speeds:
            raise RunError("The step of speculators (defaults) failed: OutOfMemoryError: too large")
        return {"who": str(arguments[0]), "policy": policy, "blocks_per_s": speeds[policy]}

    monkeypatch.setattr(step, "_in_process", measured)
    monkeypatch.setattr(step, "check_peer", lambda name: None)
    chosen = ["--shape", "tiny-2x128", "--policy", "eager", "--peer", "specforge", "--peer", "speculators", "--json"]
    rows = json.loads(run(*chosen).stdout)
    assert [row["policy"] for row in rows] == [
        "objective_chunk_blocks 128",
        "objective_chunk_blocks 0",
        "defaults",
        "eager",
    ]
    assert "OutOfMemoryError: too large" in rows[2]["failed"]
    assert [row.get("ratio_to_best_peer") for row in rows] == [None, None, None, 1.5]


def test_a_policy_that_fails_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch):
    """What the eager step needs at large shapes no GPU has, and it comes first."""
    able = {"compiled"}

    def measured(work: object, job: object, policy: str, since: float) -> dict[str, Any]:
        if policy not in able:
            raise RunError(f"The step failed: OutOfMemoryError: {policy}")
        return {"who": "paceline", "policy": policy, "blocks_per_s": 9.0}

    monkeypatch.setattr(step, "_in_process", measured)
    both = ["--shape", "tiny", "--policy", "eager", "--policy", "compiled", "--json"]
    rows = json.loads(run(*both).stdout)
    assert [(row["policy"], row["blocks_per_s"], row.get("failed")) for row in rows] == [
        ("eager", None, "The step failed: OutOfMemoryError: eager"),
        ("compiled", 9.0, None),
    ]
    able.clear()
    assert str(run(*both).exception) == "The step failed: OutOfMemoryError: compiled"


@pytest.mark.parametrize(
    ("options", "found", "message"),
    [
        (
            ["--shape", "tiny-2x128", "--peer", "specforge"],
            "0.3.0",
            "--peer specforge needs the package specforge 0.2.0, found 0.3.0: "
            "`pip install --no-deps specforge==0.2.0`.",
        ),
        (
            ["--shape", "tiny", "--peer", "speculators"],
            "0.9.0",
            "--peer takes a --shape whose samples have one length, which nobody has to pad (tiny-2x128, "
            "qwen3-8b-2x3072, qwen3-8b-8x550), got tiny.",
        ),
        (
            ["--shape", "tiny-2x128", "--peer", "specforge", "--noise", "1", "--hog"],
            "0.2.0",
            "--peer measures both sides with nothing beside them, got --noise and --hog too. Leave one or the other "
            "out.",
        ),
        (["--peer", "eagle"], "", "--peer is one of specforge, speculators, got 'eagle'."),
        (
            ["--optimizer-state", "bf16", "--dtype", "float32"],
            "",
            "--optimizer-state bf16 keeps weights in bfloat16, got --dtype float32. Leave one of them out.",
        ),
        (
            ["--optimizer-state", "bf16", "--moments", "8bit"],
            "",
            "--optimizer-state bf16 keeps moments in bfloat16, got --moments 8bit. Leave one of them out.",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(
    monkeypatch: pytest.MonkeyPatch, options: list[str], found: str, message: str
):
    monkeypatch.setattr(peers, "version", lambda name: found)
    assert str(run(*options).exception) == message


def test_a_peer_is_given_the_same_samples_anchors_and_labels():
    shape = SHAPES["tiny-2x128"]
    batch = feature_batches(shape, CPU, torch.float32)[1]
    given, own = peer_batch(batch, CPU), batch.tokens.blocks
    R, S = given.ids_RS.shape
    assert (R, S) == (2, 128)
    assert torch.equal(given.features_RSD.flatten(0, 1), batch.features_TD)
    for k, (row, anchor) in enumerate((r, a) for r in range(R) for a in given.anchors_RA[r].tolist()):
        assert own.anchor_K[k] == row * S + anchor
        assert given.ids_RS[row, anchor] == own.token_K[k]
        for slot in range(1, shape.drafter.block_size):
            counts = anchor + slot < S and bool(given.supervised_RS[row, anchor + slot])
            assert counts == own.valid_KB[k, slot]
            if counts:
                assert given.ids_RS[row, anchor + slot] == own.labels_KB[k, slot]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("master", [True, False])
def test_peers_optimizer_is_adamw(dtype: torch.dtype, clip: bool, master: bool):
    """In two steps with unlike gradients; where there are float32 copies, what bfloat16 cannot hold is not lost."""
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 0.5, 3.0]).to(dtype))
    optimizer = PeerOptimizer([weight], master=master, clip=clip)
    wanted = weight.detach().double()
    mean, square = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for count, gradient in enumerate((torch.tensor([3.0, 0.0, -4.0, 0.0]), torch.tensor([0.5, 0.25, 0.0, -0.125])), 1):
        weight.grad = gradient.to(dtype)
        optimizer.step()
        assert weight.grad is None
        g = gradient.double() / (max(1.0, gradient.norm().item() / CLIP) if clip else 1.0)
        mean, square = 0.9 * mean + 0.1 * g, 0.999 * square + 0.001 * g**2
        step_ = (mean / (1 - 0.9**count)) / ((square / (1 - 0.999**count)).sqrt() + 1e-8)
        wanted = wanted * (1 - RATE * 0.01) - RATE * step_
    if dtype == torch.float32:
        torch.testing.assert_close(weight.detach().double(), wanted, rtol=0, atol=3e-7)
    elif master:
        torch.testing.assert_close(optimizer._stepped[0].detach().double(), wanted, rtol=0, atol=3e-7)
        assert torch.equal(weight.detach(), optimizer._stepped[0].detach().bfloat16())
    else:
        assert torch.equal(weight.detach(), torch.tensor([1.0, -2.0, 0.5, 3.0]).bfloat16())  # too small a step for it


def test_rounds_are_whole_and_times_are_those_of_one_call(monkeypatch: pytest.MonkeyPatch):
    clock = iter([0.0, 6.0, 10.0, 13.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    called: list[int] = []
    assert timing.round_times(called.append, 3, 4, CPU) == ([2.0, 1.0], 6)
    assert called == [0, 1, 2, 0, 1, 2]


def test_rates_are_of_useful_operations(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(timing, "matrix_peak", lambda device: 8e14)
    told = timing.rates(3e14, 0.75, CPU)
    assert told == {"useful_tflop": 300.0, "tflops": 400.0, "matrix_peak_tflops": 800.0, "peak_share": 0.5}


def test_what_small_cards_need_is_measured_and_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step, "_in_process", lambda work, job, *arguments: job(work, *arguments))
    monkeypatch.setattr(torch, "compile", lambda function, **rest: function)
    seen: list[TrainSettings] = []
    made = step.DrafterStep
    monkeypatch.setattr(step, "DrafterStep", lambda *given, **more: seen.append(given[2]) or made(*given, **more))
    options = ["--recompute", "layers", "--moments", "8bit", "--offload", "moments"]
    done = run("--shape", "tiny-2x128", "--policy", "compiled", "--steps", "2", "--json", *options)
    assert done.exit_code == 0, done.output
    [row] = json.loads(done.stdout)
    assert (row["recompute"], row["offload"]) == ("layers", "moments")
    assert row["optimizer"] == "adamw, weights in fp32, moments in 8 bits"
    assert [(one.recompute, one.moments, one.offload) for one in seen] == [("layers", "8bit", "moments")]
    assert row["first_loss"] == pytest.approx(6.2, abs=0.2)


def test_fp8_is_refused_where_there_is_none():
    refused = run("--shape", "tiny", "--policy", "compiled", "--fp8")
    assert str(refused.exception) == "--fp8 needs a GPU (--device), got cpu. Leave it out."
