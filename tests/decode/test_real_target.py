"""Losslessness on a real model: speculative greedy equals plain greedy, token for token, on 20 real prompts in fp32.

The drafts are the target's own continuation with random mistakes, so blocks are accepted whole, in part and not at
all. Plain decoding is compared with transformers' own `generate` on some of the prompts.
"""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.data.chat import prompt_ids
from paceline.decode import draft
from paceline.decode.generate import generate
from paceline.decode.speculate import speculate
from paceline.drafter.model import Drafter
from paceline.recipes.init import drafter_for
from paceline.recipes.prompts import reasoning_prompts
from paceline.runtime.profile import cache_folder
from paceline.target.load import describe, load_ends, load_tokenizer
from paceline.target.model import DecodingTarget
from paceline.target.smollm2 import fetch_smollm2

NEW, B = 24, 8


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return fetch_smollm2(cache_folder(), lambda text: None)


@pytest.mark.slow  # a minute; tiny targets and every protocol are in test_speculate.py
def test_speculative_decoding_of_smollm2_is_lossless(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = describe(str(smollm2))
    tokenizer = load_tokenizer(str(smollm2))
    questions = reasoning_prompts(20, seed=99)
    prompts = [prompt_ids(tokenizer, [{"role": "user", "content": question}]) for question in questions]
    shape = drafter_for(facts, mask_token_id=3, taps=(1, 14, 27), layers=1, block_size=B)
    target = DecodingTarget(facts, shape.taps, dtype=torch.float32, device="cpu")
    plain = dict(generate(target, prompts, max_new_tokens=NEW, rows=20))

    chance = random.Random(0)
    known = [[*c.prompt_ids, *c.token_ids] for _, c in sorted(plain.items())]

    def propose(self, anchor_ids_R, anchors_R, sizes_R, reach):  # type: ignore[no-untyped-def]
        rows = []
        for token, anchor in zip(anchor_ids_R.tolist(), anchors_R.tolist(), strict=True):
            whole = next((ids for ids in known if ids[anchor : anchor + 1] == [token] and chance.random() < 0.7), [])
            future = whole[anchor + 1 : anchor + B]
            rows.append([t if chance.random() < 0.9 else 17 for t in future] + [17] * (B - 1 - len(future)))
        return torch.tensor(rows)

    drafter = Drafter(shape, facts.hidden_size).initialise(0)
    untouched = dict(speculate(target, drafter, load_ends(facts), prompts[:3], max_new_tokens=8, rows=3))
    assert all(c.token_ids == plain[index].token_ids[:8] for index, c in untouched.items())

    monkeypatch.setattr(draft.DraftSession, "propose", propose)
    done = dict(speculate(target, drafter, load_ends(facts), prompts, max_new_tokens=NEW, rows=10))
    assert {index: c.token_ids for index, c in done.items()} == {index: c.token_ids for index, c in plain.items()}
    lengths = [length for c in done.values() for length in c.acceptance_lengths]
    assert {1, B} < set(lengths)

    stock = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    for index in (0, 7, 13):
        out = stock.generate(torch.tensor([prompts[index]]), max_new_tokens=NEW, do_sample=False)
        assert tuple(out[0, len(prompts[index]) :].tolist()) == plain[index].token_ids
