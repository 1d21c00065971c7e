"""Drafter ranks on two devices of one process: NCCL sums what they have, and the run is that of one rank."""

import threading
from typing import Any

import pytest
import torch

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
