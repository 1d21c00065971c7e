"""Attention over the row cache and the matrix products of the CPU, against plain formulas."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.records import UserError
from paceline.target.attention import row_attention
from paceline.target.model import DecodingTarget, check_row_cache


@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize("new", [1, 4])
def test_rows_read_what_the_mask_lets_them(heads: int, new: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, groups, slots, width = 3, 2, 10, 8

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    query, key, value = (
        draw(rows, heads, new, width),
        draw(rows, groups, slots, width),
        draw(rows, groups, slots, width),
    )
    seen = torch.arange(slots) <= torch.tensor([[2, 3, 4, 5], [0, 1, 2, 3], [5, 6, 7, 8]])[:, :new, None]
    bias = torch.zeros(rows, 1, new, slots, dtype=torch.float64).masked_fill(~seen[:, None], -torch.inf)
    read, _ = row_attention(nn.Module(), query, key, value, bias, scaling=0.3)
    for row in range(rows):
        for head in range(heads):
            group = head // (heads // groups)
            for token in range(new):
                last = int(seen[row, token].sum())
                weights = (key[row, group, :last] @ query[row, head, token] * 0.3).softmax(0)
                torch.testing.assert_close(read[row, token, head], weights @ value[row, group, :last])


def test_a_model_that_asks_for_another_attention_is_told() -> None:
    states = torch.zeros(1, 2, 1, 8)
    with pytest.raises(UserError, match="the target's Module asks for position_bias"):
        row_attention(nn.Module(), states, states, states, None, position_bias=torch.zeros(2))


@pytest.mark.parametrize("prompt", [True, False])
def test_capped_scores_and_sinks_are_those_of_the_formula(prompt: bool) -> None:
    """And a value may have another width than a key."""
    generator = torch.Generator().manual_seed(1)
    query, key = (torch.randn(2, n, 5, 8, dtype=torch.float64, generator=generator) for n in (4, 2))
    value = torch.randn(2, 2, 5, 6, dtype=torch.float64, generator=generator)
    sinks = torch.randn(4, dtype=torch.float64, generator=generator)
    bias = torch.full((5, 5), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    read, _ = row_attention(
        nn.Module(), query, key, value, None if prompt else bias, scaling=0.3, softcap=1.5, s_aux=sinks
    )
    for row in range(2):
        for head in range(4):
            for token in range(5):
                scores = (key[row, head // 2, : token + 1] @ query[row, head, token] * 0.3 / 1.5).tanh() * 1.5
                shares = torch.cat([scores, sinks[head : head + 1]]).softmax(0)[:-1]
                torch.testing.assert_close(read[row, token, head], shares @ value[row, head // 2, : token + 1])
    plain, _ = row_attention(nn.Module(), query, key, value, bias, scaling=0.3)
    assert plain.shape == read.shape == (2, 5, 4, 6)


def _config(**more: object) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=50, **more
    )


def test_a_target_around_a_loaded_model_reads_as_the_model_does() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(_config()).double().eval().requires_grad_(False)
    ids = torch.randint(0, 50, (3, 7))
    lasts = torch.tensor([6, 2, 4])
    expected = torch.stack([model(ids[i : i + 1, : last + 1]).logits[0, -1] for i, last in enumerate(lasts)])
    target = DecodingTarget.around(model, [7, 8])
    assert (target.stop_ids, target.vocab_size, target.max_positions) == ((7, 8), 50, 2048)
    cache = target.new_cache(5, 16)
    logits, features = target.prefill(ids, lasts, cache, torch.tensor([4, 0, 2]))
    assert features is None
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize(
    ("rope", "limit", "advice"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "2,048", "For texts up to 2,048 tokens set it to default in a copy"),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 1024,
            },
            "1,024",
            "Use a target whose rope_type is default, linear, llama3 or yarn.",
        ),
    ],
)
def test_a_rotary_embedding_that_looks_at_the_batch_is_refused(rope: dict[str, Any], limit: str, advice: str) -> None:
    with pytest.raises(UserError) as refused:
        check_row_cache(_config(rope_parameters={"rope_theta": 1e4, **rope}), "x")
    assert str(refused.value).startswith(
        f"Target x has rope_parameters.rope_type {rope['rope_type']} in config.json, which turns all rows of a batch "
        f"by other angles once one is longer than {limit} tokens: decoding with it is not supported yet. {advice}"
    )
    check_row_cache(_config(), "x")


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ],
)
def test_a_target_that_scales_its_angles_by_a_fixed_rule_decodes_as_transformers_does(rope: dict[str, Any]) -> None:
    torch.manual_seed(0)
    scaled = _config(rope_parameters={"rope_theta": 1e4, **rope}, max_position_embeddings=64)
    model = LlamaForCausalLM(scaled).double().eval().requires_grad_(False)
    ids = torch.randint(0, 50, (1, 40))
    expected = model(ids).logits
    target = DecodingTarget.around(model, [7])
    cache, places = target.new_cache(1, 64), torch.arange(40)[None]
    for part in (slice(0, 10), slice(10, 11), slice(11, 40)):
        logits, _ = target.forward(ids[:, part], places[:, part], cache, first_row=0, reach=64)
        torch.testing.assert_close(logits, expected[:, part])
