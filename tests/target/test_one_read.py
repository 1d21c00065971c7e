"""Replicas that start together read a target's files once, and each has all of it for itself."""

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.records import UserError
from paceline.target.load import TargetFacts, load_trunk
from paceline.target.one_read import OneRead

TAP = 4


class Counted:
    """load_trunk, of which the first `broken` calls fail."""

    def __init__(self, broken: int = 0) -> None:
        self.asked: list[str] = []
        self.broken = broken
        self.made: list[weakref.ref[Any]] = []

    def __call__(self, facts: TargetFacts, deepest_tap: int, **how: Any) -> Any:
        self.asked.append(str(how["device"]))
        if len(self.asked) <= self.broken:
            raise UserError(f"file {len(self.asked)} is damaged")
        trunk = load_trunk(facts, deepest_tap, **how)
        self.made.append(weakref.ref(trunk))
        return trunk


def side_by_side(one: Callable[[int], Any], count: int) -> list[Any]:
    """Return what each of several threads returned or raised."""
    found: list[Any] = [None] * count

    def body(at: int) -> None:
        try:
            found[at] = one(at)
        except Exception as error:
            found[at] = error

    threads = [threading.Thread(target=body, args=(at,)) for at in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def tensors(trunk: Any) -> dict[str, torch.Tensor]:
    return {**dict(trunk.named_parameters()), **dict(trunk.named_buffers())}


def test_files_are_read_once_and_everybody_has_what_is_in_them(tiny: TargetFacts) -> None:
    load = Counted()
    shared = OneRead(3, load)
    told: list[list[float]] = [[], [], []]
    trunks = side_by_side(lambda at: shared(tiny, TAP, dtype=torch.float32, device="cpu", on_loaded=told[at].append), 3)
    assert load.asked == ["cpu"]
    wanted = load_trunk(tiny, TAP, dtype=torch.float32, device="cpu")
    ids = torch.arange(4, 30)[None]
    with torch.inference_mode():
        out = wanted(ids, use_cache=False).last_hidden_state
        assert all(torch.equal(trunk(ids, use_cache=False).last_hidden_state, out) for trunk in trunks)
    for trunk in trunks:
        own = tensors(trunk)
        assert own.keys() == tensors(wanted).keys()
        assert all(torch.equal(own[name], tensor) for name, tensor in tensors(wanted).items())
        assert not any(parameter.requires_grad for parameter in trunk.parameters())
    places = [{tensor.data_ptr() for tensor in tensors(trunk).values()} for trunk in trunks]
    assert len(set.union(*places)) == sum(map(len, places)), "nobody's weights are anybody else's"
    assert all(own == sorted(own) and own[-1] > 0.5 for own in told)
    assert sorted(own[0] for own in told) == [0.0, 0.5, 0.5], "one has read, the others have waited for it"


def test_weights_go_to_each_ones_device(tiny: TargetFacts) -> None:
    shared = OneRead(2)
    where = ("cpu", "meta")
    trunks = side_by_side(lambda at: shared(tiny, TAP, dtype=torch.bfloat16, device=where[at]), 2)
    for trunk, device in zip(trunks, where, strict=True):
        assert {tensor.device.type for tensor in tensors(trunk).values()} == {device}
        assert {parameter.dtype for parameter in trunk.parameters()} == {torch.bfloat16}


def test_the_hosts_copy_goes_with_the_last_and_who_comes_later_reads(tiny: TargetFacts) -> None:
    load = Counted()
    shared = OneRead(2, load)
    kept = [shared(tiny, TAP, dtype=torch.float32, device="cpu")]
    gc.collect()
    assert load.made[0]() is not None, "the other one will want it"
    kept.append(shared(tiny, TAP, dtype=torch.float32, device="cpu"))
    gc.collect()
    assert load.made[0]() is None
    anew = shared(tiny, TAP, dtype=torch.float32, device="cpu")
    assert len(load.asked) == 2
    assert load.made[1]() is anew


def test_each_has_an_error_of_its_own(tiny: TargetFacts) -> None:
    load = Counted(broken=3)
    shared = OneRead(3, load)
    found = side_by_side(lambda at: shared(tiny, TAP, dtype=torch.float32, device="cpu"), 3)
    assert sorted(map(str, found)) == [f"file {n} is damaged" for n in (1, 2, 3)]


@pytest.mark.parametrize("broken", [0, 1])
def test_who_comes_after_an_error_reads_anew(tiny: TargetFacts, broken: int) -> None:
    load = Counted(broken)
    shared = OneRead(3, load)
    found = side_by_side(lambda at: shared(tiny, TAP, dtype=torch.float32, device="cpu"), 3)
    assert sum(isinstance(one, UserError) for one in found) == broken
    assert len(load.asked) == broken + 1
