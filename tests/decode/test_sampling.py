"""Choosing tokens, against transformers' own processors and probabilities."""

import json
from pathlib import Path

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper
from transformers.generation import TopPLogitsWarper

from paceline.decode.sampling import Sampling, choose, keep, noise_key, sampling_of, uniform
from paceline.records import UserError


def logits(rows: int, vocab: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * spread


def warped(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Transformers' scores, in its order."""
    ids = torch.zeros(len(scores), 1, dtype=torch.int64)
    scores = TemperatureLogitsWarper(sampling.temperature)(ids, scores)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(ids, scores)
    return TopPLogitsWarper(sampling.top_p)(ids, scores) if sampling.top_p < 1 else scores


SETTINGS = [
    Sampling(1.0),
    Sampling(0.6, 20, 0.95),
    Sampling(1.0, 50),
    Sampling(1.5, 0, 0.8),
    Sampling(0.3, 5, 0.3),
    Sampling(2.0, 1000, 0.99),
    Sampling(1.0, 1, 1.0),
    Sampling(1.0, 0, 1e-6),
]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_tokens_that_can_be_drawn_are_those_of_transformers(sampling: Sampling) -> None:
    scores = logits(64, 300)
    ours = keep(scores / sampling.temperature, sampling.top_k, sampling.top_p)
    assert torch.equal(ours, warped(scores, sampling))


def test_equal_scores_at_the_edge_of_top_k_stay_together_as_in_transformers() -> None:
    scores = logits(32, 300).bfloat16().float()
    assert torch.equal(keep(scores, 20, 1.0), warped(scores, Sampling(1.0, 20)))
    assert ((keep(scores, 20, 1.0) > -torch.inf).sum(-1) > 20).any()
    kept = keep(scores, 0, 0.9)
    for row, before in zip(kept, scores, strict=True):
        assert torch.equal(row > -torch.inf, before >= row[row > -torch.inf].min())


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
@pytest.mark.parametrize("along", ["rows", "places"])
def test_tokens_are_drawn_in_proportion_to_their_probability(sampling: Sampling, along: str) -> None:
    count, vocab = 20_000, 60
    scores = logits(1, vocab, 1.5)
    same = torch.full((count,), noise_key(0, "a", 0))
    noise = torch.tensor([noise_key(0, i, 0) for i in range(count)]) if along == "rows" else same
    places = torch.arange(count) if along == "places" else torch.full((count,), 7)
    drawn = choose(scores.expand(count, vocab), sampling, noise, places)
    counts = torch.bincount(drawn, minlength=vocab)
    expected = warped(scores, sampling).softmax(-1)[0] * count
    assert not counts[expected == 0].any()
    often = expected >= 5
    chi = ((counts - expected)[often] ** 2 / expected[often]).sum().item()
    freedom = int(often.sum()) - 1
    assert chi < freedom + 4 * (2 * freedom) ** 0.5 + 1e-6


def test_a_token_outside_top_k_is_never_drawn_from_a_large_vocabulary() -> None:
    scores = logits(1, 49_152)
    count = 500
    noise = torch.tensor([noise_key(1, i, 0) for i in range(count)])
    drawn = choose(scores.expand(count, -1), Sampling(5.0, 50), noise, torch.zeros(count, dtype=torch.int64))
    assert set(drawn.tolist()) <= set(scores[0].topk(50).indices.tolist())
    assert len(set(drawn.tolist())) > 25


def test_many_rows_are_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, places = logits(50, 300), torch.arange(50)
    noise = torch.tensor([noise_key(1, i, 0) for i in range(50)])
    whole = choose(scores, Sampling(1.0, 50, 0.9), noise, places)
    monkeypatch.setattr("paceline.decode.sampling._MOST_SCORES", 7 * 300)
    assert torch.equal(choose(scores, Sampling(1.0, 50, 0.9), noise, places), whole)


def test_temperature_zero_is_the_likeliest_token() -> None:
    scores = logits(8, 100)
    none = torch.zeros(8, dtype=torch.int64)
    assert torch.equal(choose(scores, Sampling(), none, none), scores.argmax(-1))


def splitmix64(state: int) -> int:
    """As published by Vigna, in whole numbers without a limit."""
    mask = 2**64 - 1
    z = state & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_noise_is_splitmix64() -> None:
    noise = [noise_key(3, i, 0) for i in range(200)]
    places = [i * 37 for i in range(200)]
    expected = [(splitmix64(n + p * 0x9E3779B97F4A7C15) >> 40) / 2**24 for n, p in zip(noise, places, strict=True)]
    assert uniform(torch.tensor(noise), torch.tensor(places)).tolist() == expected
    assert min(noise) < 0 < max(noise)


def test_keys_of_noise_differ() -> None:
    keys = [noise_key(seed, key, copy) for seed in (0, 1) for key in (0, 1, "0", "1", "01") for copy in (0, 1, 2)]
    assert len(set(keys)) == len(keys)
    assert noise_key(0, "a", 0) == noise_key(0, "a", 0)


def folder_with(tmp_path: Path, **settings: object) -> Path:
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_a_model_that_asks_for_nothing_is_greedy(tmp_path: Path) -> None:
    assert sampling_of(tmp_path) == (Sampling(), ())
    assert sampling_of(folder_with(tmp_path, eos_token_id=[2, 3])) == (Sampling(), ())
    assert sampling_of(folder_with(tmp_path, do_sample=False, repetition_penalty=1.0)) == (Sampling(), ())


def test_the_models_settings_are_the_defaults_and_explicit_ones_come_first(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, do_sample=True, temperature=0.6, top_k=20, top_p=0.95)
    assert sampling_of(folder)[0] == Sampling(0.6, 20, 0.95)
    assert sampling_of(folder, temperature=None, top_k=5, seed=9)[0] == Sampling(0.6, 5, 0.95, seed=9)
    assert sampling_of(folder, temperature=0.0)[0] == Sampling()
    assert sampling_of(folder_with(tmp_path, do_sample=True))[0] == Sampling(1.0, 50, 1.0)
    assert sampling_of(folder_with(tmp_path), temperature=0.5, top_p=0.5)[0] == Sampling(0.5, 50, 0.5)


def test_settings_that_are_not_followed_are_named(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, do_sample=True, repetition_penalty=1.1, min_p=0.05, typical_p=1.0)
    assert sampling_of(folder)[1] == ("min_p=0.05", "repetition_penalty=1.1")


@pytest.mark.parametrize(
    ("explicit", "message"),
    [
        ({"temperature": -1.0}, "temperature must be 0"),
        ({"temperature": 1.0, "top_k": -1}, "top_k must be at least 0"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p must lie above 0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p must lie above 0"),
        ({"temperature": 1e-30}, "temperature must be 0"),
        ({"temperature": float("nan")}, "temperature must be 0"),
        ({"seed": -1}, "seed must lie in 0"),
        ({"top_k": 5}, "top_k says nothing where nothing is drawn"),
        ({"temperature": 0.0, "top_p": 0.5}, "top_p says nothing where nothing is drawn"),
    ],
)
def test_settings_without_a_meaning_are_refused(tmp_path: Path, explicit: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        sampling_of(tmp_path, **explicit)


def test_a_damaged_generation_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match="generation_config.json cannot be read"):
        sampling_of(tmp_path)
