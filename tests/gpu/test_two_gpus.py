"""Drafter ranks on two devices of one process: NCCL sums what they have, and the run is that of one rank."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.probe.entries import BY_NAME
from paceline.probe.examine import examine
from paceline.probe.finding import Bench
from paceline.target.load import TargetFacts, load_trunk
from paceline.target.one_read import OneRead
from paceline.train.ranks import Meeting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("traceable"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def test_ranks_get_the_sum_of_the_ranks() -> None:
    generator = torch.Generator().manual_seed(0)
    kinds = (torch.float32, torch.float64, torch.long)
    given = [
        [(100 * torch.randn(1000, generator=generator)).to(device=f"cuda:{rank}", dtype=kind) for kind in kinds]
        for rank in range(2)
    ]
    want = [one.cpu() + other.cpu() for one, other in zip(*given, strict=True)]
    meeting = Meeting(2)
    for _ in range(3):
        buffers = [[tensor.clone() for tensor in own] for own in given]
        threads = [threading.Thread(target=meeting.reduce, args=(rank, buffers[rank])) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for rank in range(2):
            for tensor, sum_ in zip(buffers[rank], want, strict=True):
                assert tensor.device.index == rank
                torch.testing.assert_close(tensor.cpu(), sum_, rtol=1e-6, atol=0)


@pytest.mark.parametrize("policy", ["eager", "compiled", "captured"])
def test_two_ranks_train_as_one(losses: Any, policy: str) -> None:
    more = {"policy": policy, "batches_per_step": 2, "max_steps": 12}
    one = losses("one", ("cuda:0", "cuda:0"), "float32", slots=768, more=more)
    two = losses("two", ("cuda:0", "cuda:0", "cuda:1"), "float32", slots=768, more=more)
    assert one[-1] < one[0]
    assert two == pytest.approx(one, rel=2e-3)


def test_the_doctors_probes_of_two_gpus(tmp_path: Path) -> None:
    names = ("torch", "peer-copies", "nccl", "capture-two-gpus", "shared-compile")
    bench = Bench(devices=0, cache=str(tmp_path), runs=str(tmp_path), scratch=str(tmp_path))
    found = {result.name: result for result in examine(bench, lambda _: None, [BY_NAME[name] for name in names])}
    assert [found[name].verdict for name in names[:-1]] == ["ok"] * 4, found
    assert found["shared-compile"].verdict in ("ok", "degraded"), found["shared-compile"].observed


def test_replicas_on_two_gpus_read_the_files_once_and_have_the_same(tiny: TargetFacts) -> None:
    shared = OneRead(2)
    given = [shared(tiny, 4, dtype=torch.bfloat16, device=f"cuda:{index}") for index in range(2)]
    wanted = load_trunk(tiny, 4, dtype=torch.bfloat16, device="cpu").state_dict()
    for index, trunk in enumerate(given):
        assert {tensor.device.index for tensor in trunk.state_dict().values()} == {index}
        assert all(torch.equal(tensor.cpu(), wanted[name]) for name, tensor in trunk.state_dict().items())
