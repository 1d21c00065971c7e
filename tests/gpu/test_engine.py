"""The decoding engine on a CUDA device: captured steps give what eager ones and transformers' generate give."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from gpu_requests import DEVICE, complete, requests, waiting_is_an_error
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from paceline.decode.engine import Engine
from paceline.decode.requests import Request, taking
from paceline.decode.sampling import Sampling, choose, noise_key
from paceline.records import Completion
from paceline.runtime.compiling import warm_compiler
from paceline.runtime.gate import Gate
from paceline.target.model import DecodingTarget

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("traceable")]

DRAWN = Sampling(temperature=1.2, top_k=50, top_p=0.95, seed=3)
STOPS = (7, 70, 700)
SHAPE = {
    "vocab_size": 1000,
    "hidden_size": 384,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.fixture(params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    torch.manual_seed(0)
    kinds = {"llama": (LlamaForCausalLM, LlamaConfig), "qwen3": (Qwen3ForCausalLM, Qwen3Config)}
    kind, config = kinds[request.param]
    return kind(config(**SHAPE)).eval().requires_grad_(False).to(DEVICE)


@pytest.mark.parametrize("sampling", [Sampling(), DRAWN], ids=["greedy", "drawn"])
def test_captured_equals_eager(model: torch.nn.Module, sampling: Sampling) -> None:
    target = DecodingTarget.around(model, STOPS)
    eager = complete(Engine(target, sampling, rows=32, slots=400), requests())
    engine = Engine(target, sampling, rows=32, slots=400, captured=True)
    assert complete(engine, requests()) == eager
    assert engine.stats.captured == len(engine._units) > 2
    assert {c.finish for c in eager.values()} == {"stop", "length"}


def test_greedy_completions_are_those_of_transformers(model: torch.nn.Module) -> None:
    asked = requests(12)
    expected = {}
    for request in asked:
        ids = torch.tensor([request.prompt_ids], device=DEVICE)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request.max_new_tokens,
            do_sample=False,
            eos_token_id=list(STOPS),
            pad_token_id=0,
        )
        expected[request.key] = tuple(out[0, ids.shape[1] :].tolist())
    engine = Engine(DecodingTarget.around(model, STOPS), Sampling(), rows=8, slots=400, captured=True)
    assert {key: c.token_ids for key, c in complete(engine, asked).items()} == expected


def test_compiled_and_captured_equals_eager(model: torch.nn.Module) -> None:
    warm_compiler("cuda:0")
    target = DecodingTarget.around(model, STOPS)
    eager = complete(Engine(target, Sampling(), rows=16, slots=400), requests(24))
    engine = Engine(target, Sampling(), rows=16, slots=400, captured=True, compiled=True)
    assert complete(engine, requests(24)) == eager


@pytest.mark.parametrize("sampling", [Sampling(), DRAWN], ids=["greedy", "drawn"])
def test_a_step_never_waits_for_the_device(model: torch.nn.Module, sampling: Sampling) -> None:
    engine = Engine(DecodingTarget.around(model, STOPS), sampling, rows=8, slots=128)
    complete(engine, [Request(i, (5,) * 20, 40) for i in range(8)])
    with waiting_is_an_error():
        with pytest.raises(RuntimeError, match="synchroniz"):  # so the mode sees what waits
            engine._rows.place_R[0].item()
        for _ in range(3):
            engine._step.advance(8, 128)


def test_a_token_outside_top_k_is_never_drawn() -> None:
    """Sums over a vocabulary are made in parallel and waver in their last bit, also where nothing is added."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    scores = torch.randn(1, 151_936, device=DEVICE, generator=generator) * 3
    allowed = torch.zeros(151_936, dtype=torch.bool, device=DEVICE)
    allowed[scores[0].topk(50).indices] = True
    places = torch.arange(512, device=DEVICE)
    for copy in range(100):
        noise = torch.full_like(places, noise_key(0, "a", copy))
        drawn = choose(scores.expand(512, -1), Sampling(5.0, 50), noise, places)
        assert allowed[drawn].all()


def test_two_engines_of_one_device_capture_beside_each_other(model: torch.nn.Module) -> None:
    """Their graphs are captured while the other one decodes; the gate keeps them apart."""
    expected = complete(Engine(DecodingTarget.around(model, STOPS), DRAWN, rows=16, slots=400), requests())
    gate, take = Gate(), taking(requests())

    def work(_: int) -> dict[int | str, Completion]:
        torch.cuda.set_device(DEVICE)
        engine = Engine(DecodingTarget.around(model, STOPS), DRAWN, rows=16, slots=400, captured=True, gate=gate)
        return {r.key: c for r, c in engine.serve(lambda count: take(min(count, 4)))}

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(work, range(2))
    assert one | other == expected
    assert not set(one) & set(other)


def test_memory_is_flat_once_the_graphs_are_there(model: torch.nn.Module) -> None:
    engine = Engine(DecodingTarget.around(model, STOPS), DRAWN, rows=32, slots=400, captured=True)
    for _ in range(2):  # a capture gives back what prompt passes had reserved, so they reserve it once more
        complete(engine, requests())
    before = torch.cuda.memory_reserved(DEVICE)
    for _ in range(3):
        complete(engine, requests())
    assert torch.cuda.memory_reserved(DEVICE) <= before + (64 << 20)
