"""`paceline bench target`: the samples that both sides read, the operations that count, and a tiny measurement."""

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from paceline.bench import target
from paceline.bench.target import Layout, TargetWork, padded_groups, samples_of, token_batches
from paceline.bench.target_shapes import TARGET_SHAPES
from paceline.cli import app
from paceline.records import RunError

TINY = TARGET_SHAPES["tiny"]


def work(layout: Layout, tokens: int = 2500) -> TargetWork:
    return TargetWork(
        TINY, "cpu", "float32", layout, budget=512, tokens=tokens, passes=1, paths=("plain",), stock_compiled=False
    )


def measure(*options: str) -> list[dict[str, Any]]:
    small = ["--device", "cpu", "--tokens", "700", "--budget", "512", "--passes", "1", "--json"]
    done = CliRunner().invoke(app, ["bench", "target", *small, *options])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize("layout", ["bucketed", "trimmed", "packed"])
def test_both_sides_read_the_same_samples_and_ours_the_stock_features(layout: Layout):
    rows = measure("--layout", layout, "--path", "fast", "--path", "plain")
    assert [(row["who"].split()[0], row["layout"]) for row in rows] == [
        ("transformers", "padded"),
        ("transformers", "packed"),
        ("transformers", "single"),
        ("paceline", layout),
        ("paceline", layout),
    ]
    assert len({(row["samples"], row["tokens"], row["useful_tflop"]) for row in rows}) == 1
    assert [row["how"] for row in rows] == ["plain", "plain", "plain", "plain", "fast"]
    best = max(row["tokens_per_s"] for row in rows[:3])
    for ours in rows[3:]:
        assert ours["ratio_to_best_peer"] == pytest.approx(ours["tokens_per_s"] / best, abs=1e-3)
        assert ours["tokens_per_s"] == pytest.approx(ours["tokens"] / ours["pass_ms"] * 1e3, rel=0.01)
        assert ours["relative_error"] < 1e-5
    assert rows[1]["padding"] == rows[2]["padding"] == 0


def test_features_that_are_not_the_stock_ones_end_the_measurement(monkeypatch: pytest.MonkeyPatch):
    plain = target.FeatureTarget.features
    monkeypatch.setattr(target.FeatureTarget, "features", lambda self, tokens: plain(self, tokens) * 1.01)
    with pytest.raises(RunError, match=r"those of the stock forward, but differ by 0\.01 of their size"):
        CliRunner().invoke(
            app,
            [
                "bench",
                "target",
                "--device",
                "cpu",
                "--tokens",
                "100",
                "--budget",
                "512",
                "--passes",
                "1",
                "--path",
                "plain",
            ],
            catch_exceptions=False,
        )


@pytest.mark.parametrize("layout", ["bucketed", "trimmed", "packed"])
def test_batches_hold_mixed_lengths_within_the_budget(layout: Layout):
    batches = token_batches(work(layout))
    assert sum(batch.num_tokens for batch in batches) >= 2500 > sum(batch.num_tokens for batch in batches[:-1])
    assert all(batch.input_ids.numel() <= 512 for batch in batches)
    lengths = [n for batch in batches for n in batch.lengths]
    assert len(set(lengths)) > 6
    assert max(lengths) <= TINY.longest
    for batch in batches:
        assert batch.packed == (layout == "packed" and len(batch.lengths) > 1)
        for row, ids in enumerate(samples_of([batch])):
            if layout != "packed":
                assert torch.equal(batch.input_ids[row, : batch.lengths[row]], ids)
    assert [len(ids) for ids in samples_of(batches)] == lengths


def test_padded_groups_hold_every_sample_once_within_the_budget():
    samples = samples_of(token_batches(work("trimmed")))
    groups = list(padded_groups(samples, 512))
    assert sorted(len(ids) for group in groups for ids in group) == sorted(map(len, samples))
    assert all(len(group) * max(map(len, group)) <= 512 for group in groups)
    assert max(map(len, groups)) > 1


def test_useful_operations_are_those_that_torch_counts_without_the_unseen_half():
    """torch's counter sees every product, and attention with all pairs; of n * n pairs a causal one has n(n + 1)/2."""
    from torch.utils.flop_counter import FlopCounterMode

    n = 24
    model = TINY.decoder(torch.device("cpu"), torch.float32)
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, n, dtype=torch.long), use_cache=False)
    with FlopCounterMode(display=False) as angles:  # a product in some versions of transformers
        model.rotary_emb(torch.zeros(1, n, TINY.hidden_size), torch.arange(n)[None])
    attention = 2 * 2 * TINY.heads * TINY.head_dim * TINY.layers
    seen = counter.get_total_flops() - angles.get_total_flops()
    assert TINY.flops((n,)) == seen - attention * (n * n - n * (n + 1) // 2)
    assert TINY.flops((n, n)) == 2 * TINY.flops((n,))


def test_the_qwen3_shape_is_that_of_the_published_rate():
    """33,000 tokens/s of samples of 3,072 tokens were 461 TFLOP/s."""
    shape = TARGET_SHAPES["qwen3-8b"]
    assert shape.layers == 34
    assert 33_000 * shape.flops((3072,)) / 3072 == pytest.approx(461e12, rel=0.01)
