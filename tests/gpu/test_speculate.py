"""Speculative decoding on a CUDA device: captured cycles give what eager ones and plain decoding give."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from gpu_requests import DEVICE, VOCAB, complete, requests, waiting_is_an_error
from transformers import Qwen3Config, Qwen3ForCausalLM

from paceline.config import DrafterSettings
from paceline.decode import draft
from paceline.decode.engine import Engine
from paceline.decode.requests import Request
from paceline.decode.sampling import Sampling
from paceline.decode.steps import Drafts
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import Drafter
from paceline.records import Completion
from paceline.target.load import TargetFacts, describe
from paceline.target.model import DecodingTarget

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("traceable")]

DRAWN = Sampling(temperature=1.2, top_k=50, top_p=0.95, seed=3)
BOTH = pytest.mark.parametrize("sampling", [Sampling(), DRAWN], ids=["greedy", "drawn"])
STOPS = (7, 70, 700)
WIDTH, MASK, B = 256, 999, 8
TAPS = (0, 1, 2)


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> TargetFacts:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=list(STOPS),
    )
    folder = tmp_path_factory.mktemp("qwen3")
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return describe(str(folder))


@pytest.fixture
def target(facts: TargetFacts) -> DecodingTarget:
    return DecodingTarget(facts, TAPS, dtype=torch.float32, device=str(DEVICE))


@pytest.fixture
def drafts(target: DecodingTarget) -> Drafts:
    shape = DrafterSettings(
        block_size=B,
        layers=2,
        taps=TAPS,
        mask_token_id=MASK,
        heads=4,
        kv_heads=2,
        head_dim=64,
        intermediate_size=512,
        rope_theta=10_000.0,
    )
    ends = FrozenEnds(target.model.get_input_embeddings().weight, target.model.lm_head.weight)
    return Drafts(Drafter(shape, WIDTH).initialise(0).to(DEVICE).eval().requires_grad_(False), ends)


@pytest.fixture
def mostly_right(target: DecodingTarget, monkeypatch: pytest.MonkeyPatch) -> Callable[[Sampling], None]:
    """Return a function that adds the answers of plain decoding, with mistakes, to what the drafter proposes: all on
    the device, so that it is captured with the cycle."""
    proposed = draft.DraftSession.propose

    def teach(sampling: Sampling) -> None:
        table = torch.full((512, VOCAB, B - 1), -1, device=DEVICE)
        chance = random.Random(0)
        for completion in complete(Engine(target, sampling, rows=32, slots=400), requests()).values():
            text = [*completion.prompt_ids, *completion.token_ids]
            for anchor in range(len(completion.prompt_ids), len(text) - 1):
                future = [token if chance.random() < 0.9 else 11 for token in text[anchor + 1 : anchor + B]]
                table[anchor, text[anchor], : len(future)] = torch.tensor(future, device=DEVICE)

        def propose(self, anchor_ids_R, anchors_R, sizes_R, reach):  # type: ignore[no-untyped-def]
            own_RK = proposed(self, anchor_ids_R, anchors_R, sizes_R, reach)
            known_RK = table[anchors_R, anchor_ids_R]
            return torch.where(known_RK >= 0, known_RK, own_RK)

        monkeypatch.setattr(draft.DraftSession, "propose", propose)

    return teach


def plainly(completion: Completion) -> Completion:
    return replace(completion, acceptance_lengths=(), accepted_drafts=())


@BOTH
@pytest.mark.parametrize("rows", [1, 32])
def test_captured_equals_eager_and_plain(target, drafts, mostly_right, sampling: Sampling, rows: int) -> None:
    asked = requests(80 if rows > 1 else 8)
    plain = complete(Engine(target, sampling, rows=rows, slots=400), asked)
    mostly_right(sampling)
    eager = complete(Engine(target, sampling, rows=rows, slots=400, drafts=drafts), asked)
    assert {key: plainly(c) for key, c in eager.items()} == plain
    engine = Engine(target, sampling, rows=rows, slots=400, drafts=drafts, captured=True)
    assert complete(engine, asked) == eager
    assert engine.stats.captured == len(engine._units) > 1
    assert {1, B} < {length for c in eager.values() for length in c.acceptance_lengths}


@BOTH
def test_a_cycle_never_waits_for_the_device(target, drafts, sampling: Sampling) -> None:
    target.stop_ids = ()
    engine = Engine(target, sampling, rows=8, slots=128, drafts=drafts)
    complete(engine, [Request(i, (5,) * 20, 40) for i in range(8)])
    with waiting_is_an_error():
        with pytest.raises(RuntimeError, match="synchroniz"):  # so the mode sees what waits
            engine._rows.place_R[0].item()
        for _ in range(3):
            engine._step.advance(8, 128)


def test_memory_is_flat_once_the_graphs_are_there(target, drafts) -> None:
    engine = Engine(target, DRAWN, rows=32, slots=400, drafts=drafts, captured=True)
    for _ in range(2):  # a capture gives back what prompt passes had reserved, so they reserve it once more
        complete(engine, requests())
    before = torch.cuda.memory_reserved(DEVICE)
    for _ in range(3):
        complete(engine, requests())
    assert torch.cuda.memory_reserved(DEVICE) <= before + (64 << 20)
