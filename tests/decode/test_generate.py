"""Greedy completions against transformers' own."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.decode.generate import generate
from paceline.records import Completion, UserError
from paceline.target.load import TargetFacts
from paceline.target.model import DecodingTarget


def stock_greedy(facts: TargetFacts, prompt: list[int], new: int, dtype: torch.dtype) -> list[int]:
    """The model run whole for every token: slow and without any cache."""
    model = AutoModelForCausalLM.from_pretrained(facts.folder, dtype=dtype)
    ids = list(prompt)
    for _ in range(new):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in facts.eos_ids:
            break
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(4, 128, (n,), generator=generator).tolist() for n in (5, 2, 9, 3, 7, 4, 1)]


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_completions_equal_the_stock_models(tiny: TargetFacts, prompts: list[list[int]], rows: int) -> None:
    target = DecodingTarget(tiny, (), dtype=torch.float64, device="cpu")
    done = dict(generate(target, prompts, max_new_tokens=20, rows=rows))
    for index, prompt in enumerate(prompts):
        expected = stock_greedy(tiny, prompt, 20, torch.float64)
        finish = "stop" if expected[-1] in tiny.eos_ids else "length"
        assert done[index] == Completion(tuple(prompt), tuple(expected), finish)


def test_a_stop_token_ends_a_row_and_lets_another_in(tiny: TargetFacts, prompts: list[list[int]]) -> None:
    target = DecodingTarget(tiny, (), dtype=torch.float64, device="cpu")
    plain = dict(generate(target, prompts, max_new_tokens=20, rows=2))
    stop = plain[0].token_ids[4]
    target.stop_ids = (*tiny.eos_ids, stop)
    stopped = dict(generate(target, prompts, max_new_tokens=20, rows=2))
    for index, whole in plain.items():
        cut = whole.token_ids.index(stop) + 1 if stop in whole.token_ids else len(whole.token_ids)
        assert stopped[index].token_ids == whole.token_ids[:cut]
    assert stopped[0].finish == "stop"


def test_an_empty_prompt_is_refused(tiny: TargetFacts) -> None:
    target = DecodingTarget(tiny, (), dtype=torch.float32, device="cpu")
    with pytest.raises(UserError, match="Prompt 2 of 2 has no tokens"):
        list(generate(target, [[5], []], max_new_tokens=2, rows=2))
