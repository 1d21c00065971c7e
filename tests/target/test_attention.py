"""Attention over the row cache and the matrix products of the CPU, against plain formulas."""

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.records import UserError
from paceline.target.attention import row_attention
from paceline.target.linear import use_onednn
from paceline.target.model import DecodingTarget, check_plain_attention


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
    with pytest.raises(NotImplementedError, match="Module asks for s_aux"):
        row_attention(nn.Module(), states, states, states, None, s_aux=torch.zeros(2))


def test_products_by_onednn_are_those_of_nn_linear() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(48, 100), nn.Linear(48, 100, bias=False), nn.Linear(48, 100).double()]
    model = nn.ModuleList(layers).requires_grad_(False)
    x = torch.randn(3, 5, 48)
    expected = [layer(x.to(layer.weight.dtype)) for layer in layers]
    use_onednn(model)
    for layer, wanted in zip(layers, expected, strict=True):
        for part in (slice(None), slice(0, 2)):
            torch.testing.assert_close(layer(x[:, part].to(layer.weight.dtype)), wanted[:, part])
    assert [("forward" in vars(layer)) for layer in layers] == [torch.backends.mkldnn.is_available()] * 2 + [False]


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
    logits = target.prefill(ids, lasts, cache, torch.tensor([4, 0, 2]))
    torch.testing.assert_close(logits, expected)


def test_a_rotary_embedding_that_looks_at_the_batch_is_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UserError, match="Target x scales its rotary embedding .* \\(rope_type dynamic\\)"):
        check_plain_attention(_config(rope_parameters=rope), "x")
    check_plain_attention(_config(), "x")
