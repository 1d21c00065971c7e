"""A target whose layers lie on two GPUs: features, the order of what is under way, and whole runs."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, save
from target_matrix import batch_of

from paceline.records import TokenBatch
from paceline.target.load import TargetFacts, describe
from paceline.target.model import FeatureTarget
from paceline.target.self_check import check_features

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def batch(seed: int, *lengths: int, packed: bool = False) -> TokenBatch:
    draw = torch.Generator().manual_seed(seed)
    return batch_of([torch.randint(4, 128, (length,), generator=draw) for length in lengths], packed=packed)


@pytest.mark.parametrize("name", ["Qwen3", "Gemma 3", "gpt-oss", "Qwen3-MoE", "Qwen3-Next", "DeepSeek-V3"])
def test_features_are_those_of_one_gpu(name: str, tmp_path: Path) -> None:
    (family,) = (family for family in FAMILIES if family.name == name)
    facts = describe(str(save(family, tmp_path)))
    taps = (0, 2, facts.num_layers - 2)
    one = FeatureTarget(facts, taps, dtype=torch.float32, device="cuda:1")
    two = FeatureTarget(facts, taps, dtype=torch.float32, device="cuda:1", before=("cuda:0",))
    where = [next(layer.parameters()).device.index for layer in two._trunk.layers]
    assert (where[0], where[-1], sorted(where)) == (0, 1, where)
    check_features(two, name, packed=False)
    tokens = batch(0, 9, 27, 1, 4)
    features = two.features(tokens)
    assert features.device == torch.device("cuda:1")
    torch.testing.assert_close(features, one.features(tokens), rtol=1e-4, atol=1e-4)


def test_loading_leaves_neither_gpu_with_more_than_its_layers(tiny: TargetFacts) -> None:
    before = [torch.cuda.memory_allocated(at) for at in range(2)]
    torch.cuda.reset_peak_memory_stats(0)
    torch.cuda.reset_peak_memory_stats(1)
    target = FeatureTarget(tiny, (0, 2, 4), dtype=torch.float32, device="cuda:1", before=("cuda:0",))
    layer = sum(parameter.nbytes for parameter in target._trunk.layers[0].parameters())
    embedding = target._trunk.embed_tokens.weight.nbytes
    for at, weights in enumerate((2 * layer + embedding, 3 * layer)):
        assert torch.cuda.memory_allocated(at) - before[at] <= 1.2 * weights
        assert torch.cuda.max_memory_allocated(at) - before[at] <= 1.2 * weights + layer


def test_micro_batches_that_follow_one_another_keep_their_own_numbers(tiny: TargetFacts) -> None:
    """Copies between GPUs are on streams of their own: a buffer that is used again too early would show here."""
    target = FeatureTarget(tiny, (0, 2, 4), dtype=torch.float32, device="cuda:1", before=("cuda:0",))
    batches = [batch(seed, 200, 300, 100 + seed) for seed in range(24)]
    wanted = [target.features(tokens).cpu() for tokens in batches]
    found: dict[int, torch.Tensor] = {}
    left, lock = iter(range(len(batches))), threading.Lock()

    def work() -> None:
        while True:
            with lock:
                at = next(left, None)
            if at is None:
                return
            found[at] = target.features(batches[at]).cpu()

    for _ in range(5):
        left = iter(range(len(batches)))
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for at, features in enumerate(wanted):
            torch.testing.assert_close(found.pop(at), features, rtol=1e-4, atol=1e-4, msg=f"micro-batch {at}")


def test_both_gpus_work_at_once(tiny: TargetFacts) -> None:
    """Stage 2 of a micro-batch, which waits for a sleeping kernel, does not keep the next one from going through stage
    1. Ids and places are pinned, as the loader's are: else their copies wait."""
    target = FeatureTarget(tiny, (0, 2, 4), dtype=torch.float32, device="cuda:1", before=("cuda:0",))
    tokens = batch(0, 9, 27)
    tokens = replace(tokens, input_ids=tokens.input_ids.pin_memory(), places_T=tokens.places_T.pin_memory())
    target.features(tokens)
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    ends: list[torch.cuda.Event] = []
    target._trunk.layers[1].register_forward_hook(lambda *_: ends.append(torch.cuda.current_stream(0).record_event()))
    with torch.cuda.device(1):
        torch.cuda._sleep(4_000_000_000)  # cycles: seconds
        asleep = torch.cuda.current_stream(1).record_event()
    target.features(tokens)
    target.features(tokens)
    ends[1].synchronize()
    assert not asleep.query(), "the second micro-batch has left stage 1 while GPU 1 still sleeps before the first one"
    torch.cuda.synchronize(1)


@pytest.mark.usefixtures("traceable")
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_fast_path_gives_what_it_gives_on_one_gpu(tiny: TargetFacts, fp8: bool, compiled: bool) -> None:
    tokens = batch(0, 9, 27, 1, 4)
    one = FeatureTarget(tiny, (0, 2, 4), dtype=torch.bfloat16, device="cuda:1")
    two = FeatureTarget(tiny, (0, 2, 4), dtype=torch.bfloat16, device="cuda:1", before=("cuda:0",))
    for target in (one, two):
        assert target.quicken(fp8=fp8) == ""
        assert not compiled or target.compile(tokens, lambda guard: None, f"{fp8} {target is two}") == ""
    wanted = one.features(tokens).float()
    torch.testing.assert_close(two.features(tokens).float(), wanted, rtol=0.05, atol=0.05 * wanted.abs().max().item())


@pytest.mark.usefixtures("traceable")
@pytest.mark.parametrize("fast", ["off", "auto"])
@pytest.mark.parametrize("policy", ["eager", "captured"])
@pytest.mark.parametrize("drafter", ["cuda:0", "cuda:1"])
def test_a_run_on_two_gpus_and_one_learns_the_same(losses: Any, drafter: str, policy: str, fast: str) -> None:
    """On the first GPU features arrive in slots as copies; on the last one the fast path writes them there."""
    more, how = {"policy": policy}, {"fast": fast}
    split = how | {"devices_per_replica": 2}
    one = losses("one", ("cuda:0", "cuda:0"), "float32", slots=768, more=more, target=how)
    two = losses("two", ("cuda:0+cuda:1", drafter), "float32", slots=768, more=more, target=split)
    assert one[-1] < one[0]
    assert two == pytest.approx(one, rel=1e-3)
