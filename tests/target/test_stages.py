"""A target whose layers lie on several devices gives what it gives on one, with a micro-batch under way on each."""

import gc
import itertools
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from families import FAMILIES, save
from target_matrix import batch_of
from transformers import AutoModelForCausalLM

from paceline.records import TokenBatch, UserError
from paceline.target.fast import FastTrunk
from paceline.target.load import TargetFacts, describe
from paceline.target.model import FeatureTarget
from paceline.target.self_check import check_features
from paceline.target.stages import Stages, load_stages, split_layers

TAPS = (0, 2, 4)
FAST = ("Gemma 2", "gpt-oss", "Qwen3-Next", "Qwen3-MoE", "Gemma 3 that sees")
LONG_S = 60


def batch(*lengths: int, packed: bool = False, width: int | None = None) -> TokenBatch:
    draw = torch.Generator().manual_seed(1)
    samples = [torch.randint(4, 128, (length,), generator=draw) for length in lengths]
    return batch_of(samples, packed=packed, width=width)


def made(facts: TargetFacts, devices: int, taps: tuple[int, ...] = TAPS) -> FeatureTarget:
    return FeatureTarget(facts, taps, dtype=torch.float32, device="cpu", before=("cpu",) * (devices - 1))


# ---------------------------------------------------------------------------------------------------- which layer where


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_the_largest_stage_is_as_small_as_can_be(stages: int) -> None:
    draw = torch.Generator().manual_seed(stages)
    for count in range(stages, 9):
        sizes = torch.randint(1, 20, (count,), generator=draw).tolist()
        for first in (0, 7, 100):
            parts = split_layers(sizes, first, stages)

            def largest(parts: tuple[int, ...], sizes: list[int] = sizes, first: int = first) -> int:
                ends = list(itertools.accumulate(parts))
                return max(sum(sizes[e - p : e]) + (0 if e - p else first) for e, p in zip(ends, parts, strict=True))

            ways = [way for way in itertools.product(range(1, count + 1), repeat=stages) if sum(way) == count]
            assert (len(parts), sum(parts), min(parts) > 0) == (stages, count, True)
            assert largest(parts) == min(map(largest, ways))


def test_more_devices_than_layers_are_refused(tiny: TargetFacts) -> None:
    with pytest.raises(
        UserError, match=r"devices_per_replica must not exceed the layers .* tap \(2\), got 3. Lower it"
    ):
        made(tiny, 3, taps=(1,))


def test_layers_with_weights_in_common_are_refused(tiny: TargetFacts) -> None:
    trunk, _ = load_stages(tiny, 4, dtype=torch.float32, devices=["cpu"] * 2)
    trunk.layers[4].mlp = trunk.layers[0].mlp
    with pytest.raises(UserError, match="layers of this target have weights in common. Set it to 1"):
        Stages(["cpu", "cpu"], (2, 3)).place(trunk)


# ------------------------------------------------------------------------------------------------------- what they give


@pytest.mark.parametrize("family", [pytest.param(f, id=f.name) for f in FAMILIES if f.name in FAST])
def test_features_are_those_of_one_device_to_the_bit(family: Any, tmp_path: Path) -> None:
    facts = describe(str(save(family, tmp_path)))
    taps = (0, 2, facts.num_layers - 2)
    one = made(facts, 1, taps)
    for devices in (2, 3):
        split = made(facts, devices, taps)
        check_features(split, family.name, packed=False)
        for tokens in (batch(9, 27, 1, 4), batch(9, 27, 1, 4, width=64)):
            assert torch.equal(split.features(tokens), one.features(tokens))


def test_packed_rows_have_the_features_of_one_device(tiny: TargetFacts) -> None:
    tokens = batch(9, 27, 1, 4, packed=True, width=64)
    assert torch.equal(made(tiny, 3).features(tokens), made(tiny, 1).features(tokens))


@pytest.mark.parametrize("name", ["Gemma 3", "Qwen3", "GLM-4", "Phi-3", "LFM2"])
@pytest.mark.parametrize("packed", [False, True])
def test_all_that_a_layer_reads_is_on_its_device(name: str, packed: bool, tmp_path: Path) -> None:
    """The device `meta` stands for a second one: torch refuses products of tensors on both."""
    (family,) = (family for family in FAMILIES if family.name == name)
    facts = describe(str(save(family, tmp_path)))
    target = FeatureTarget(facts, TAPS, dtype=torch.float32, device="meta", before=("cpu",))
    layers = target._trunk.layers
    assert [next(layer.parameters()).device.type for layer in layers] == ["cpu"] * 2 + ["meta"] * 3
    features = target.features(batch(9, 27, packed=packed))
    assert (features.device.type, features.shape) == ("meta", (36, 3 * 64))


@pytest.mark.parametrize("fp8", [False, True])
def test_the_fast_path_gives_what_it_gives_on_one_device(tiny: TargetFacts, fp8: bool) -> None:
    one, *others = (
        FeatureTarget(tiny, TAPS, dtype=torch.bfloat16, device="cpu", before=("cpu",) * count) for count in range(3)
    )
    assert one.quicken(fp8=fp8) == ""
    for other in others:
        assert other.quicken(fp8=fp8) == ""
        for tokens in (batch(9, 27, 1, 4), batch(9, 27, packed=True)):
            assert torch.equal(other.features(tokens), one.features(tokens))
            room_TD = torch.zeros_like(one.features(tokens))
            assert other.features(tokens, room_TD) is room_TD
            assert torch.equal(room_TD, one.features(tokens))
        assert other.kernel == one.kernel


def test_all_that_a_layer_of_the_fast_path_reads_is_on_its_device(tiny: TargetFacts) -> None:
    target = FeatureTarget(tiny, TAPS, dtype=torch.float32, device="meta", before=("cpu",))
    features = FastTrunk(target._trunk, TAPS, target._stages).features(batch(9, 27))
    assert (features.device.type, features.shape) == ("meta", (36, 3 * 64))


# ------------------------------------------------------------------------------------------------------------ under way


def test_a_stage_works_on_the_next_micro_batch_while_another_works_on_the_one_before(tiny: TargetFacts) -> None:
    """The first micro-batch stays in the last stage until the third has come into the first one, with one between."""
    target = made(tiny, 3)
    batches = [batch(length) for length in (5, 6, 7)]
    wanted = [target.features(tokens) for tokens in batches]
    (first, *_), (second, *_), (last, *_) = target._stages.ranges
    came: dict[tuple[int, int], threading.Event] = {
        (tokens, layer): threading.Event() for tokens in (5, 6, 7) for layer in (first, second, last)
    }
    inside, crowded, late = Counter[int](), [], []
    lock = threading.Lock()

    def watch(layer: int) -> None:
        def arrives(_module: Any, args: tuple[torch.Tensor, ...], _named: Any) -> None:
            tokens = args[0].shape[1]
            with lock:
                inside[layer] += 1
                crowded.extend([layer] if inside[layer] > 1 else [])
            came[tokens, layer].set()
            if (tokens, layer) == (5, last):
                late.extend(one for one in ((6, second), (7, first)) if not came[one].wait(LONG_S))

        def leaves(*_: Any) -> None:
            with lock:
                inside[layer] -= 1

        target._trunk.layers[layer].register_forward_pre_hook(arrives, with_kwargs=True)
        target._trunk.layers[layer].register_forward_hook(leaves)

    for layer in (first, second, last):
        watch(layer)
    found: dict[int, torch.Tensor] = {}

    def read(at: int) -> None:
        found[at] = target.features(batches[at])

    threads = []
    for at in range(3):
        threads.append(threading.Thread(target=read, args=(at,), daemon=True))
        threads[-1].start()
        assert came[5 + at, first].wait(LONG_S)
    for thread in threads:
        thread.join(LONG_S)
    assert (late, crowded) == ([], [])
    assert all(torch.equal(found[at], wanted[at]) for at in range(3))


def test_where_a_forward_fails_is_said_and_the_next_one_goes_through(tiny: TargetFacts) -> None:
    target = made(tiny, 2)
    wanted = target.features(batch(5))
    hook = target._trunk.layers[3].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        target.features(batch(5))
    assert target.where(threading.current_thread()) == "layers 2 to 4 on cpu"
    hook.remove()
    assert torch.equal(target.features(batch(5)), wanted)
    assert target.where(threading.current_thread()) == ""


# -------------------------------------------------------------------------------------------------------------- loading


@pytest.fixture
def sharded(tiny_folder: Path, tmp_path: Path) -> TargetFacts:
    AutoModelForCausalLM.from_pretrained(tiny_folder).save_pretrained(tmp_path, max_shard_size="200KB")
    facts = describe(str(tmp_path))
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    return facts


class Reads:
    """Counts what transformers reads of which file, through safetensors' own functions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: Counter[str] = Counter()
        self.tensors: Counter[str] = Counter()
        reads = self

        class Opened:
            def __init__(self, path: Any, *args: Any, **named: Any) -> None:
                self._file = safetensors.safe_open(path, *args, **named)
                reads.files[Path(path).name] += 1

            def __getattr__(self, name: str) -> Any:
                return getattr(self._file, name)

            def __enter__(self) -> "Opened":
                return self

            def __exit__(self, *_: Any) -> None:
                pass

            def get_slice(self, name: str) -> Any:
                return Sliced(name, self._file.get_slice(name))

        class Sliced:
            def __init__(self, name: str, own: Any) -> None:
                self._name, self._own = name, own

            def __getattr__(self, name: str) -> Any:
                return getattr(self._own, name)

            def __getitem__(self, place: Any) -> torch.Tensor:
                reads.tensors[self._name] += 1
                return self._own[place]

        monkeypatch.setattr("transformers.modeling_utils.safe_open", Opened)


def test_each_file_is_read_once(sharded: TargetFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    load_stages(sharded, 4, dtype=torch.float32, devices=["cpu"] * 3)
    assert set(reads.files) == {path.name for path in sharded.folder.glob("*.safetensors")}
    assert set(reads.files.values()) == set(reads.tensors.values()) == {1}


def test_no_second_copy_is_made_and_what_is_not_needed_is_let_go_of(sharded: TargetFacts) -> None:
    """A weight that is read in another format is a copy. At no time do those of the host exceed what belongs there by
    more than what is under way: nothing behind the deepest tap, and nothing of another device, which `meta` is here."""
    seen: list[int] = []

    def look(_share: float) -> None:
        made = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
        seen.append(sum(one.nbytes for one in made if one.device.type == "cpu" and one.dtype == torch.float64))

    gc.collect()
    gc.freeze()  # what is there already is not looked at
    try:
        trunk, _ = load_stages(sharded, 3, dtype=torch.float64, devices=["cpu", "meta"], on_loaded=look)
    finally:
        gc.unfreeze()
    layer = sum(parameter.nbytes for parameter in trunk.layers[0].parameters())
    kept = sum(parameter.nbytes for parameter in trunk.parameters() if parameter.device.type == "cpu")
    assert (kept < 3 * layer, len(trunk.layers), len(seen)) == (True, 4, 1 + 6 * 11 + 1)
    assert max(seen) < kept + layer
