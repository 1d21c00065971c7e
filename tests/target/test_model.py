"""Taps and the row cache against the stock transformers model."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.records import BlockSet, TokenBatch, UserError
from paceline.target.load import TargetFacts, load_causal, load_ends
from paceline.target.model import DecodingTarget, FeatureTarget, check_taps


@pytest.fixture(params=["tiny", "tied"])
def facts(request: pytest.FixtureRequest) -> TargetFacts:
    return request.getfixturevalue(request.param)


def _stock(facts: TargetFacts) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(facts.folder, dtype=torch.float64)


def test_taps_equal_the_stock_models_hidden_states(facts: TargetFacts) -> None:
    taps = (0, 2, facts.num_layers - 2)  # first and last allowed included
    ids = torch.randint(4, 128, (2, 11), generator=torch.Generator().manual_seed(0))
    expected = _stock(facts)(ids, output_hidden_states=True).hidden_states
    features = FeatureTarget(facts, taps, dtype=torch.float64, device="cpu").features(batch_of(list(ids)))
    wanted = torch.cat([expected[tap + 1] for tap in taps], dim=-1).flatten(0, 1)
    torch.testing.assert_close(features, wanted, rtol=1e-12, atol=1e-12)


def batch_of(samples: list[torch.Tensor], *, packed: bool = False, width: int | None = None) -> TokenBatch:
    """What a target reads of a micro-batch: a row a sample, or all in one, padded to a width."""
    lengths = tuple(map(len, samples))
    if packed:
        flat = torch.cat(samples)
        ids = torch.zeros(1, width or len(flat), dtype=torch.int64)
        ids[0, : len(flat)] = flat
        places = list(range(len(flat)))
    else:
        ids = torch.zeros(len(samples), width or max(lengths), dtype=torch.int64)
        places = []
        for i, sample in enumerate(samples):
            ids[i, : len(sample)] = sample
            places += [i * ids.shape[1] + t for t in range(len(sample))]
    none = torch.zeros(0, dtype=torch.int64)
    blocks = BlockSet(none, none, none, none, none.view(0, 4), none.view(0, 4).bool())
    return TokenBatch(0, 0, 0, True, tuple(range(len(samples))), ids, lengths, torch.tensor(places), blocks)


WAYS = {
    "trimmed": {},
    "bucketed": {"width": 40},
    "packed": {"packed": True},
    "packed with a padded tail": {"packed": True, "width": 64},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("attention", "dtype", "near"),
    [
        ("sdpa", torch.float64, 1e-10),
        ("sdpa", torch.float32, 2e-5),
        ("eager", torch.float64, 2e-5),  # its softmax is float32 all the same
    ],
)
def test_features_are_those_of_each_sample_alone(
    facts: TargetFacts, way: str, attention: str, dtype: torch.dtype, near: float
) -> None:
    """In the stock model; the third sample is as short as can be, two have the same beginning, and padding is seen."""
    taps = (1, 3)
    generator = torch.Generator().manual_seed(1)
    samples = [torch.randint(4, 128, (n,), generator=generator) for n in (9, 17, 1, 4)]
    samples.append(torch.cat([samples[1][:6], samples[0]]))
    target = FeatureTarget(facts, taps, dtype=dtype, device="cpu")
    target._trunk.set_attn_implementation(attention)
    features = target.features(batch_of(samples, **WAYS[way]))
    stock = _stock(facts)
    wanted = []
    for sample in samples:
        hidden = stock(sample[None], output_hidden_states=True).hidden_states
        wanted.append(torch.cat([hidden[tap + 1][0] for tap in taps], dim=-1))
    assert features.shape == (46, 2 * facts.hidden_size)
    torch.testing.assert_close(features.double(), torch.cat(wanted), rtol=near, atol=near)


def test_the_trunk_ends_at_the_deepest_tap(facts: TargetFacts) -> None:
    target = FeatureTarget(facts, (1,), dtype=torch.float32, device="cpu")
    assert len(target._trunk.layers) == 2
    assert not hasattr(target._trunk, "lm_head")


@pytest.mark.parametrize("taps", [(-1,), (5,)])
def test_taps_out_of_range_are_refused(tiny: TargetFacts, taps: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"drafter.taps must lie in 0\.\.4 .* got \[(-1|5)\]"):
        check_taps(taps, tiny)


def test_rows_at_different_places_get_the_stock_models_logits_and_features(facts: TargetFacts) -> None:
    taps = (0, 3)
    stock = _stock(facts)
    target = DecodingTarget(facts, taps, dtype=torch.float64, device="cpu")
    generator = torch.Generator().manual_seed(2)
    rows = [torch.randint(4, 128, (n,), generator=generator) for n in (6, 3, 9)]
    cache = target.new_cache(rows=3, slots=32)
    # 1. prompts of different lengths, right-padded
    padded = torch.stack([torch.nn.functional.pad(row, (0, 9 - len(row))) for row in rows])
    last = torch.tensor([len(row) - 1 for row in rows])
    logits, features = target.prefill(padded, last, cache, torch.arange(3))
    assert features is not None
    for i, row in enumerate(rows):
        whole = stock(row[None], output_hidden_states=True)
        torch.testing.assert_close(logits[i], whole.logits[0, -1], rtol=1e-9, atol=1e-9)
        wanted = torch.cat([whole.hidden_states[tap + 1][0] for tap in taps], dim=-1)
        torch.testing.assert_close(features[i, : len(row)], wanted, rtol=1e-9, atol=1e-9)
    # 2. four wrong tokens for each row, as a rejected draft, then four others in the same places
    ends = torch.tensor([len(row) for row in rows])
    place = ends[:, None] + torch.arange(4)
    target.forward(torch.full((3, 4), 9), place, cache, first_row=0, reach=32)
    new = torch.randint(4, 128, (3, 4), generator=generator)
    logits, features = target.forward(new, place, cache, first_row=0, reach=20)
    assert features is not None
    for i, row in enumerate(rows):
        whole = stock(torch.cat([row, new[i]])[None], output_hidden_states=True)
        torch.testing.assert_close(logits[i], whole.logits[0, -4:], rtol=1e-9, atol=1e-9)
        wanted = torch.cat([whole.hidden_states[tap + 1][0, -4:] for tap in taps], dim=-1)
        torch.testing.assert_close(features[i], wanted, rtol=1e-9, atol=1e-9)
    # 3. a row that moved onto another one goes on as before
    cache.move([2], [0])
    logits, _ = target.forward(new[2:, :1], place[2:, :1] + 4, cache, first_row=0, reach=20)
    whole = stock(torch.cat([rows[2], new[2], new[2, :1]])[None])
    torch.testing.assert_close(logits[0, 0], whole.logits[0, -1], rtol=1e-9, atol=1e-9)


def test_ends_are_the_models_embedding_and_head(facts: TargetFacts) -> None:
    model = load_causal(facts, dtype=torch.float32, device="cpu")
    ends = load_ends(facts)
    assert torch.equal(ends.embed_VH, model.get_input_embeddings().weight)
    assert torch.equal(ends.head_VH, model.get_output_embeddings().weight)
    assert (ends.head_VH is ends.embed_VH) == model.config.tie_word_embeddings
