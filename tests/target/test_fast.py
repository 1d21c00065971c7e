"""The fast path against transformers' own models: the same features, whatever the layout, or a word on why not."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES
from torch import Tensor, nn
from transformers import AutoModel

from paceline.config import TargetSettings
from paceline.records import BlockSet, TokenBatch, UserError
from paceline.runtime.compiling import forbid_recompiles
from paceline.runtime.gate import Gate
from paceline.target import fast as fast_module
from paceline.target import layers as layers_module
from paceline.target import varlen
from paceline.target.fast import FastTrunk
from paceline.target.feature_cache import NoCache
from paceline.target.layers import why_not_plain
from paceline.target.load import TargetFacts
from paceline.target.model import FeatureTarget
from paceline.target.products import Matrix, check_fp8, gated_product, in_fp8, product
from paceline.target.replica import Pace, TargetReplica, pace_of
from paceline.target.varlen import kernel_for

TAPS = (0, 2, 4)
LENGTHS = (9, 17, 1, 4, 23)
LAYOUTS: dict[str, dict[str, Any]] = {"trimmed": {}, "bucketed": {"width": 40}, "packed": {"packed": True}}
OF = {family.name: family.config for family in FAMILIES}
WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 3}
PLAIN: dict[str, Callable[[], Any]] = {
    **{name: OF[name] for name in ("Llama 3", "SmolLM2", "Mistral", "Qwen2.5", "Qwen3")},
    "Llama with all biases": lambda: made("LlamaConfig", attention_bias=True, mlp_bias=True),
    "Qwen3 with windows": lambda: made("Qwen3Config", **WINDOWS),
    "one head group": lambda: made("LlamaConfig", num_key_value_heads=1),
}
SHAPE = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "head_dim": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2, "pad_token_id": None}


def made(kind: str, **more: Any) -> Any:
    return getattr(transformers, kind)(**{**SHAPE, **HEADS, **more})


def trunk_of(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """A decoder up to its fifth layer whose biases and norms are random, so that none is idle."""
    torch.manual_seed(0)
    model = AutoModel.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter) * 0.2)
    del model.layers[5:]
    model.norm = nn.Identity()
    return model.to(dtype)


def batch_of(lengths: tuple[int, ...], *, packed: bool = False, width: int = 0, seed: int = 0) -> TokenBatch:
    draw = torch.Generator().manual_seed(seed)
    samples = [torch.randint(4, 128, (length,), generator=draw) for length in lengths]
    rows = [torch.cat(samples)] if packed else samples
    S = width or max(map(len, rows))
    ids_RS = torch.stack([nn.functional.pad(row, (0, S - len(row))) for row in rows])
    places_T = torch.stack([torch.arange(S) < len(row) for row in rows]).flatten().nonzero()[:, 0]
    none = torch.zeros(0, dtype=torch.int64)
    blocks = BlockSet(none, none, none, none, none.view(0, 4), none.view(0, 4).bool())
    return TokenBatch(0, 0, 0, True, tuple(range(len(lengths))), ids_RS, lengths, places_T, blocks)


def samples_of(batch: TokenBatch) -> Iterator[Tensor]:
    yield from batch.input_ids.flatten()[batch.places_T].split(batch.lengths)


def stock(trunk: Any, batch: TokenBatch) -> Tensor:
    """What transformers says of every sample alone."""
    parts = []
    for sample in samples_of(batch):
        hidden = trunk(sample[None], output_hidden_states=True, use_cache=False).hidden_states
        parts.append(torch.cat([hidden[tap + 1][0] for tap in TAPS], dim=-1))
    return torch.cat(parts)


def errors(found: Tensor, wanted: Tensor) -> Tensor:
    """The relative error of each token."""
    return (found.double() - wanted.double()).norm(dim=-1) / wanted.double().norm(dim=-1)


def off(found: Tensor, wanted: Tensor) -> float:
    """The largest relative error of a token."""
    return float(errors(found, wanted).max())


@pytest.mark.parametrize("name", PLAIN)
def test_features_are_those_of_each_sample_alone_in_float32(name: str) -> None:
    trunk = trunk_of(PLAIN[name]())
    batches = [batch_of(LENGTHS, **layout) for layout in LAYOUTS.values()]
    wanted = stock(trunk, batches[0])
    assert why_not_plain(trunk, fp8=False) == ""
    fast = FastTrunk(trunk, TAPS)
    found = [fast.features(batch) for batch in batches]
    assert off(found[0], wanted) <= 1e-5
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2]), "only real tokens are computed, whatever the layout"


@pytest.mark.parametrize("name", PLAIN)
def test_in_bfloat16_features_are_no_further_from_the_truth_than_the_plain_paths(name: str) -> None:
    batch = batch_of(LENGTHS)
    truth = stock(trunk_of(PLAIN[name]()), batch)
    trunk = trunk_of(PLAIN[name](), torch.bfloat16)
    plain = stock(trunk, batch)
    found = FastTrunk(trunk, TAPS).features(batch)
    assert found.dtype == torch.bfloat16
    assert off(found, plain) <= 0.05
    assert off(found, truth) <= 1.5 * off(plain, truth)


def test_a_sample_does_not_depend_on_what_lies_beside_it() -> None:
    fast = FastTrunk(trunk_of(PLAIN["Qwen3 with windows"]()), TAPS)
    alone = torch.cat([fast.features(batch_of((17,), seed=seed)) for seed in (1, 2)])
    one, other = batch_of((17,), seed=1), batch_of((17,), seed=2)
    together = batch_of((17, 17))
    together.input_ids.copy_(torch.cat([one.input_ids, other.input_ids]))
    assert off(fast.features(together), alone) <= 1e-5


@pytest.mark.parametrize("name", ["Qwen2.5", "Qwen3"])
def test_weights_are_held_once_and_the_modules_compute_as_before(name: str) -> None:
    trunk, batch = trunk_of(PLAIN[name]()), batch_of(LENGTHS)
    before, bytes_before = stock(trunk, batch), held(trunk)
    fast = FastTrunk(trunk, TAPS)
    assert torch.equal(stock(trunk, batch), before)
    assert held(trunk) == bytes_before
    mine = {part.data_ptr() for layer in fast._layers.weights for part in flat(layer)}
    assert mine <= {parameter.data_ptr() for parameter in trunk.parameters()}, "all are the modules' own"


def held(trunk: Any) -> int:
    """Bytes of all storages that the parameters have, each once."""
    return sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in trunk.parameters()}.values())


def flat(weights: Any) -> list[Tensor]:
    if isinstance(weights, Tensor):
        return [weights]
    return [part for item in weights or () for part in flat(item)]


@pytest.mark.parametrize("name", [name for name in OF if name not in PLAIN and "sees" not in name])
def test_any_other_family_keeps_the_plain_path_and_says_why(name: str) -> None:
    config = OF[name]()
    trunk = AutoModel.from_config(config).eval()
    kind = type(trunk.layers[0]).__name__
    assert why_not_plain(trunk, fp8=False) == f"layers of the class {kind} are not known to be plain"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda layer: setattr(layer.mlp, "act_fn", nn.GELU()), "layer 2 has the activation GELU"),
        (lambda layer: layer.add_module("extra", nn.Identity()), "layer 2 has parts that a plain one has not"),
        (lambda layer: setattr(layer.mlp, "up_proj", Odd(64, 128, bias=False)), "layer 2 has products that are no pl"),
        (lambda layer: setattr(layer.self_attn.q_norm, "variance_epsilon", 1.0), "layer 2 has norms of different eps"),
        (lambda layer: setattr(layer.self_attn, "scaling", 1.0), "its layers are of different shapes"),
        (
            lambda layer: setattr(layer.self_attn.k_proj, "bias", nn.Parameter(torch.ones(32))),
            "layer 2 has biases of s",
        ),
    ],
)
def test_a_layer_that_is_changed_is_not_plain(change: Callable[[Any], None], reason: str) -> None:
    trunk = trunk_of(PLAIN["Qwen3"]())
    change(trunk.layers[2])
    assert why_not_plain(trunk, fp8=False).startswith(reason)


class Odd(nn.Linear):
    """A product of some other library."""


def test_sizes_that_fp8_does_not_take_are_named() -> None:
    trunk = trunk_of(made("Qwen3Config", intermediate_size=120))
    assert why_not_plain(trunk, fp8=False) == ""
    assert why_not_plain(trunk, fp8=True).startswith("mlp.gate_proj of layer 0 has sizes that are no multiples of 16")


def test_a_target_is_fast_from_the_check_on(tiny: TargetFacts) -> None:
    target = FeatureTarget(tiny, TAPS, dtype=torch.float32, device="cpu")
    batch = batch_of(LENGTHS, packed=True)
    plain = target.features(batch)
    assert not target.is_fast
    assert target.quicken() == ""
    assert target.is_fast
    found = target.features(batch)
    assert 0 < off(found, plain) <= 1e-5, "by other operations"
    assert off(target.read(batch), plain) == 0, "the plain path is still there"


@pytest.mark.parametrize("fault", ["turned the other way", "no kernel"])
def test_a_fast_path_that_gives_something_else_is_not_taken(
    tiny: TargetFacts, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    turned = layers_module._turned

    def broken(*args: Any, **more: Any) -> Any:
        raise RuntimeError("no kernel image\nis available")

    if fault == "no kernel":
        monkeypatch.setattr(fast_module, "samples_apart", broken)
        expected = "RuntimeError: no kernel image is available"
    else:
        monkeypatch.setattr(layers_module, "_turned", lambda x, cos, sin: turned(x, cos, -sin))
        expected = "its features differ from transformers' own by "
    target = FeatureTarget(tiny, TAPS, dtype=torch.float32, device="cpu")
    plain = target.features(batch_of(LENGTHS))
    assert target.quicken().startswith(expected)
    assert not target.is_fast
    assert torch.equal(target.features(batch_of(LENGTHS)), plain)


def test_a_product_in_fp8_is_near_and_keeps_every_rows_scale() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(64, 96, generator=draw) * torch.logspace(-3, 3, 64)[:, None]
    weight = torch.randn(48, 96, generator=draw) * torch.logspace(2, -2, 48)[:, None]
    bias = torch.randn(48, generator=draw)
    matrix = in_fp8(Matrix(weight.bfloat16(), None, bias.bfloat16()))
    assert (matrix.weight_NK.dtype, matrix.weight_NK.nbytes) == (torch.float8_e4m3fn, 48 * 96)
    found, wanted = product(x.bfloat16(), matrix).double(), x.double() @ weight.double().T
    error = (found - wanted - bias.double()).abs() / (x.double().abs() @ weight.double().T.abs() + bias.double().abs())
    assert error.max() <= 0.04, "e4m3 has three bits behind the first one"
    assert (product(torch.zeros(16, 96).bfloat16(), matrix) == bias.bfloat16()).all()


@pytest.mark.parametrize("widest", [0, 1 << 15])
def test_what_is_gated_in_fp8_is_near_and_keeps_every_rows_scale(widest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.target.products.WIDEST8", widest)
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(48, 128, generator=draw) * torch.logspace(-2, 1, 48)[:, None]
    weight, bias = torch.randn(32, 64, generator=draw), torch.randn(32, generator=draw)
    gate, up = rows.bfloat16().double().chunk(2, dim=-1)
    wanted = (gate * torch.sigmoid(gate) * up) @ weight.bfloat16().double().t() + bias.bfloat16()
    found = gated_product(rows.bfloat16(), in_fp8(Matrix(weight.bfloat16(), None, bias.bfloat16())))
    assert found.dtype == torch.bfloat16
    assert off(found, wanted) <= 0.1
    plain = gated_product(rows.bfloat16(), Matrix(weight.bfloat16(), None, bias.bfloat16()))
    assert off(plain, wanted) <= 0.01


def test_a_target_in_fp8_holds_half_and_is_near(tiny: TargetFacts) -> None:
    target = FeatureTarget(tiny, TAPS, dtype=torch.bfloat16, device="cpu")
    batch = batch_of(LENGTHS)
    plain, trunk = target.features(batch), target._trunk
    assert target.quicken(fp8=True) == ""
    assert trunk.layers[0].mlp.down_proj.weight.numel() == 0, "the products' own weights are let go of"
    assert target.features(batch).dtype == torch.bfloat16
    assert 0.005 < errors(target.features(batch), plain).median() <= 0.2
    own = [
        part for layer in target._fast._layers.weights for part in flat(layer) if part.ndim == 2 and part.shape[1] > 1
    ]
    assert {part.dtype for part in own} == {torch.float8_e4m3fn}


def test_the_kernel_is_the_fastest_that_takes_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda:0")
    half, whole = torch.bfloat16, torch.float32
    generation, there = [9, 0], [True]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: tuple(generation))
    monkeypatch.setattr(varlen.importlib.util, "find_spec", lambda name: there[0] or None)
    assert kernel_for(cpu, half, 128, windows=False) == "sample by sample"
    assert kernel_for(gpu, whole, 128, windows=False) == "sample by sample"
    assert kernel_for(gpu, half, 512, windows=False) == "sample by sample"
    assert kernel_for(gpu, half, 20, windows=False) == "sample by sample"
    assert kernel_for(gpu, half, 128, windows=False) == "FlashAttention 3"
    assert kernel_for(gpu, half, 128, windows=True) == "FlashAttention 2"
    assert kernel_for(gpu, torch.float16, 128, windows=False) == "FlashAttention 2"
    there[0] = False
    assert kernel_for(gpu, half, 128, windows=False) == "FlashAttention 2"
    generation[0] = 7
    assert kernel_for(gpu, half, 128, windows=False) == "sample by sample"


@pytest.mark.parametrize("kernel", ["FlashAttention 2", "FlashAttention 3"])
def test_what_a_kernel_leaves_behind_the_last_sample_is_cleared(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not written there: in the next layer a value that is no number would be multiplied by nothing."""

    def unwritten(q: Tensor, *_: Any) -> Tensor:
        return torch.full_like(q, torch.nan)

    monkeypatch.setattr(varlen, "_fa2", unwritten)
    monkeypatch.setattr(varlen, "_fa3", unwritten)
    q = torch.ones(128, 2, 8)
    ends = varlen.Ends((3, 20), torch.tensor([0, 3, 23], dtype=torch.int32))
    found = varlen.samples_apart(q, q, q, ends, window=0, scale=1.0, kernel=kernel)
    assert found[:23].isnan().all()
    assert (found[23:] == 0).all()


def test_how_a_replica_computes_follows_from_device_and_policy() -> None:
    usual, none = TargetSettings(model="m"), TargetSettings(model="m", fast="off")
    assert pace_of(usual, "cpu", "eager") == Pace()
    assert pace_of(usual, "cpu", "compiled") == Pace(fast=True, compiled=True)
    assert pace_of(usual, "cuda:1", "eager") == Pace(fast=True)
    assert pace_of(usual, "cuda:1", "captured") == Pace(fast=True, compiled=True)
    assert pace_of(none, "cuda:1", "captured") == Pace()
    eight = TargetSettings(model="m", fp8="on")
    assert pace_of(eight, "cpu", "compiled") == Pace(fast=True, compiled=True, fp8=True)
    with pytest.raises(UserError, match=r"target.fp8: on .* on cpu \(pipeline.targets\) runs with train.policy: compi"):
        pace_of(eight, "cpu", "eager")


def test_an_old_gpu_is_refused_for_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an A10")
    with pytest.raises(UserError, match=r"target.fp8: on needs .* 8.9 or newer, and cuda:0 \(an A10\) has 8.6"):
        check_fp8(torch.device("cuda:0"), "target.fp8")


def replica_of(facts: TargetFacts, pace: Pace, told: list[str], **more: Any) -> TargetReplica:
    return TargetReplica(
        0,
        "cpu",
        facts=facts,
        taps=TAPS,
        dtype=torch.bfloat16 if pace.fp8 else torch.float32,
        wire=torch.float32,
        largest=batch_of(LENGTHS),
        source=iter(()),
        cache=NoCache(),
        deliver=lambda batch: True,
        gate=Gate(),
        on_split=lambda replica, tokens, parts: None,
        pace=pace,
        on_path=lambda replica, reason: told.append(reason),
        **more,
    )


def test_a_replica_tells_which_path_it_takes(tiny: TargetFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    replica_of(tiny, Pace(), told).load()
    assert told == [], "nothing is told of what was not asked for"
    replica_of(tiny, Pace(fast=True), told).load()
    assert told == [""]
    monkeypatch.setattr("paceline.target.model.why_not_plain", lambda trunk, fp8: "it is odd")
    replica_of(tiny, Pace(fast=True), told).load()
    replica_of(tiny, Pace(fast=True, compiled=True), told).load()
    assert told == ["", "it is odd", "it is odd"], "once it is certain, which it is before anything is compiled"
    with pytest.raises(UserError, match=r"target.fp8: on is a part of the fast path, which .* cannot take: it is odd"):
        replica_of(tiny, Pace(fast=True, fp8=True), told).load()


def test_what_is_compiled_is_tried_before_it_is_used(tiny: TargetFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled_wrongly(self: FastTrunk, alarm: Callable[[str], None], who: str) -> None:
        self._behind = [lambda x, weights, shape: x.new_zeros(len(x), weights.down.weight_NK.shape[1])]

    monkeypatch.setattr(FastTrunk, "compile", compiled_wrongly)
    told: list[str] = []
    replica = replica_of(tiny, Pace(fast=True, compiled=True), told)
    replica.load()
    assert told == []
    replica.warm()
    assert len(told) == 1
    assert told[0].startswith("its features differ from transformers' own by ")
    assert (replica._target.is_fast, replica.attention) == (False, None)


@pytest.mark.slow
@pytest.mark.usefixtures("traceable")
@pytest.mark.parametrize("fp8", [False, True])
def test_compiled_once_it_takes_any_number_of_tokens(tiny: TargetFacts, fp8: bool) -> None:
    told: list[str] = []
    alarms: list[str] = []
    plain = FeatureTarget(tiny, TAPS, dtype=torch.bfloat16 if fp8 else torch.float32, device="cpu")
    replica = replica_of(tiny, Pace(fast=True, compiled=True, fp8=fp8), told, alarm=alarms.append)
    replica.load()
    assert told == [], "only once it is compiled"
    replica.warm()
    assert told == [""]
    again = replica_of(tiny, Pace(fast=True, compiled=True, fp8=fp8), told, alarm=alarms.append)
    again.load()
    with forbid_recompiles():
        for lengths in (LENGTHS, (1,), (127,), (128,), (129, 300), (1,) * 9):
            batch = batch_of(lengths)
            error_T = errors(replica._target.features(batch), plain.features(batch))
            assert error_T.median() <= (0.2 if fp8 else 1e-5)
        again.warm()  # one that takes the place of another finds all that was compiled
    assert (replica._target.recompiles, again._target.recompiles, alarms) == (0, 0, [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_taps_are_written_where_there_is_room_for_them(dtype: torch.dtype) -> None:
    """Between others' rows, which stay; rounded as a copy would round them."""
    fast = FastTrunk(trunk_of(PLAIN["Qwen3"]()), TAPS)
    batch = batch_of(LENGTHS)
    wanted = fast.features(batch)
    memory = torch.full((batch.num_tokens + 5, wanted.shape[1]), 7.0, dtype=dtype)
    room = memory[2 : 2 + batch.num_tokens]
    assert fast.features(batch, room) is room
    assert torch.equal(room, wanted.to(dtype))
    assert (memory[:2] == 7).all()
    assert (memory[2 + batch.num_tokens :] == 7).all()
