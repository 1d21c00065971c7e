"""The estimate of what an engine occupies, against the tensors of one."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.decode.engine import Engine, kept_slots
from paceline.decode.memory import engine_memory
from paceline.decode.requests import Request
from paceline.decode.sampling import GREEDY
from paceline.decode.steps import Drafts
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import Drafter
from paceline.target.model import DecodingTarget, FeatureTarget
from paceline.target.weights import weight_entries


def held(tensors: Iterable[Tensor]) -> int:
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


@pytest.mark.parametrize("name", ["tiny", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_stays_is_counted_to_the_byte(
    request: pytest.FixtureRequest, shape: Any, name: str, dtype: torch.dtype
) -> None:
    facts = request.getfixturevalue(name)
    shape = shape.model_copy(update={"taps": (0, 2, 3)})
    target = DecodingTarget(facts, shape.taps, dtype=dtype, device="cpu")
    ends = FrozenEnds(target.model.get_input_embeddings().weight, target.model.lm_head.weight)
    drafter = Drafter(shape, facts.hidden_size).initialise(0).to(dtype)
    engine = Engine(target, GREEDY, rows=3, slots=70, drafts=Drafts(drafter, ends))
    list(engine.run([Request(0, (5,) * 9, 4)]))
    entries = sum(weight.numel() for weight in drafter.parameters())
    memory = engine_memory(
        facts.sizes(weight_entries(facts.folder)),
        shape,
        drafter_entries=entries,
        rows=3,
        longest=9,
        slots=kept_slots(70, shape.block_size),
        itemsize=dtype.itemsize,
    )
    step: Any = engine._step
    assert memory.target == held(target.model.parameters())
    assert memory.target_cache == held([*step._cache.keys, *step._cache.values])
    assert memory.drafter == held(drafter.parameters())
    assert memory.drafter_cache == step._drafts._store.nbytes
    assert memory.total == sum(memory.parts().values()) > memory.target + memory.target_cache
    trunk = FeatureTarget(facts, shape.taps, dtype=dtype, device="cpu")._trunk
    norm = facts.hidden_size  # the final norm is in the files and not in the trunk
    assert weight_entries(facts.folder, deepest=3) - norm == sum(weight.numel() for weight in trunk.parameters())
