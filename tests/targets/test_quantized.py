"""Quantized targets give what their weights are worth; some in the fast tests, every row of the table in slow ones."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, save
from quantized_table import BEGIN, COMMAND, END, REFUSED, examined, reason_of, row_of
from quantized_targets import QUANTIZED, Quantized, compressed, family_of, save_quantized
from safetensors.torch import load_file, save_file
from target_matrix import CHECKS, DOCUMENT, Examined, batch_of
from trained_run import run
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.config import RunSettings
from paceline.config_file import dump_settings
from paceline.observe.console import Console
from paceline.recipes.init import init
from paceline.recipes.plan import plan_epoch
from paceline.records import UserError
from paceline.target import quantized
from paceline.target.load import describe, load_causal, load_ends, load_trunk
from paceline.target.model import FeatureTarget
from paceline.target.weights import PlainWeights, weight_entries

FAST = ("fp8, blocks", "awq, 4 bits, gemm", "gptq, 8 bits, ordered by activation, gptq_v2", "gguf, Q8_0")
BY_NAME = {one.name: one for one in QUANTIZED}
HINT = f"docs/targets.md says something else. If it is out of date, write it anew with `{COMMAND}`."


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Examined]:
    """Make a quantized target once; tests that change one take a copy of its folder."""
    made: dict[str, Examined] = {}

    def get(name: str) -> Examined:
        if name not in made:
            made[name] = examined(BY_NAME[name], tmp_path_factory.mktemp("quantized"))
        return made[name]

    return get


@pytest.mark.parametrize("name", FAST)
def test_features_and_ends_are_those_of_what_the_weights_are_worth(
    target: Callable[[str], Examined], name: str
) -> None:
    CHECKS["features"](target(name))
    CHECKS["ends, rope, heads"](target(name))


def test_blocks_at_the_edges_of_a_matrix_may_be_cut() -> None:
    """As in DeepSeek-V3's 576 rows with blocks of 128; and one scale may be that of all."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(70, 50, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, generator=generator).to(torch.bfloat16)
    worth = torch.zeros(70, 50)
    for o in range(70):
        for i in range(50):
            worth[o, i] = float(numbers[o, i]) * float(scales[o // 32, i // 32])
    fp8, settings = quantized.METHODS["fp8"], {"weight_block_size": [32, 32]}

    def plain(scale: torch.Tensor) -> torch.Tensor:
        parts = {".weight": numbers, ".weight_scale_inv": scale}
        return quantized.make_plain("a.weight", parts, fp8, settings, Path("x"))

    assert torch.equal(plain(scales), worth)
    assert torch.equal(plain(torch.tensor(0.5)), numbers.float() / 2)
    with pytest.raises(UserError, match=r"What x holds of a \(.*\) is not stored as fp8 .* 70 x 50 in blocks of 32 x"):
        plain(scales[:2])


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_in_the_table_with_its_reason(name: str, tmp_path: Path) -> None:
    assert reason_of(name, save(FAMILIES[0], tmp_path)) in DOCUMENT.read_text().splitlines(), HINT


def test_the_table_has_a_row_for_each_kind() -> None:
    table = DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0]
    rows = [line.split(" | ")[:3] for line in table.splitlines() if line[:1] == "|"][2:]
    assert rows == [[f"| {one.method}", one.stored, one.family] for one in QUANTIZED], HINT


def with_tokenizer(folder: Path, tiny_folder: Path) -> Path:
    for path in tiny_folder.glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


def test_init_plan_and_train_refuse_it_before_anything_is_written(
    tiny_folder: Path, tmp_path: Path, shape: Any
) -> None:
    folder = with_tokenizer(save(FAMILIES[0], tmp_path / "target"), tiny_folder)
    REFUSED["torchao"](folder)
    asked = {"revision": None, "dataset": "d", "run_dir": "r", "mask_token_id": None, "overwrite": False}
    said = r"must be quantized with a method .* and .*target is with torchao \(quantization_config in .*config.json\)"
    with pytest.raises(UserError, match=said):
        init(str(folder), tmp_path / "RUN.yaml", **asked)
    assert not (tmp_path / "RUN.yaml").exists()
    tree = {"run_dir": "r", "target": {"model": str(folder)}, "drafter": shape.model_dump(), "data": {"dataset": "d"}}
    planned = tmp_path / "planned.yaml"
    planned.write_text(dump_settings(RunSettings.model_validate(tree)))
    with pytest.raises(UserError, match=said):
        plan_epoch(planned, [], seed=None, console=Console(json=False))
    with pytest.raises(UserError, match=said):
        describe(str(folder))  # which `train` calls first


@pytest.mark.parametrize(
    ("method", "package"), [("compressed-tensors", "compressed-tensors"), ("bitsandbytes", "bitsandbytes")]
)
def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, package: str
) -> None:
    folder = save(FAMILIES[0], tmp_path)
    told = json.loads((folder / "config.json").read_text())
    told["quantization_config"] = {"quant_method": method, "load_in_4bit": method == "bitsandbytes"}
    told["quantization_config"] |= {"config_groups": {"group_0": {}}} if method != "bitsandbytes" else {}
    (folder / "config.json").write_text(json.dumps(told))
    monkeypatch.setattr(quantized, "find_spec", lambda name: None)
    said = (
        rf"takes the package {package}, and it is not installed. Install it with `pip install 'paceline\[quantized\]'`"
    )
    with pytest.raises(UserError, match=said):
        describe(str(folder))


def test_a_tensor_that_belongs_to_no_weight_is_refused(target: Callable[[str], Examined], tmp_path: Path) -> None:
    """compressed-tensors' order by activation, say, which its library leaves out when it unpacks."""
    folder = shutil.copytree(target("fp8, blocks").folder, tmp_path / "copy")
    weights = load_file(folder / "model.safetensors")
    order = {"model.layers.0.mlp.down_proj.weight_g_idx": torch.arange(128, dtype=torch.int32)}
    save_file(weights | order, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"down_proj.weight_g_idx in .*model.safetensors \(I32\) belongs to none that"):
        describe(str(folder))


def test_a_target_without_some_of_its_weights_is_refused(target: Callable[[str], Examined], tmp_path: Path) -> None:
    """transformers would draw them; so where quantized weights lie in the files and config.json says nothing of it."""
    folder = shutil.copytree(target("gptq, 8 bits, ordered by activation, gptq_v2").folder, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UserError, match=r"config.json describes, and 42 of .* are not in .*, layers.0.mlp.down_proj.weight"
    ):
        load_trunk(describe(str(folder)), 2, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("name", ["awq, 4 bits, gemm", "gguf, Q8_0"])
def test_a_config_of_another_model_is_refused(target: Callable[[str], Examined], tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(target(name).folder, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    with pytest.raises(UserError, match=r"config.json describes, and 18 of .* have another shape, .*mlp.down_proj"):
        load_causal(describe(str(folder)), dtype=torch.float32, device="cpu")


# --------------------------------------------------------------------------------------------------- what is read of it


def test_how_many_weights_there_are_and_how_far_loading_is(target: Callable[[str], Examined]) -> None:
    one = target("awq, 4 bits, gemm")
    plain = dict(one.stock(torch.float32).named_parameters())
    assert weight_entries(one.folder) == sum(weight.numel() for weight in plain.values())
    trunk = [name for name in plain if "lm_head" not in name and not any(f"layers.{at}." in name for at in (3, 4, 5))]
    assert weight_entries(one.folder, deepest=2) == sum(plain[name].numel() for name in trunk)
    shares: list[float] = []
    load_trunk(one.facts, 2, dtype=torch.float32, device="cpu", on_loaded=shares.append)
    assert shares == pytest.approx([done / len(plain) for done in range(len(plain))])


def test_a_gguf_file_may_hold_a_head_although_the_original_ties_it(
    target: Callable[[str], Examined], tmp_path: Path
) -> None:
    """As Qwen2.5-Coder's do; llama.cpp multiplies with the head that is there."""
    one = target("gguf, Q8_0")
    folder = shutil.copytree(one.folder, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    facts, stock = describe(str(folder)), one.stock(torch.float32)
    ends = load_ends(facts)
    assert torch.equal(ends.head_VH, stock.lm_head.weight)
    assert torch.equal(load_causal(facts, dtype=torch.float32, device="cpu").lm_head.weight, stock.lm_head.weight)
    data = bytearray((folder / "model.gguf").read_bytes())
    data[-1] ^= 1
    (folder / "model.gguf").write_bytes(data)
    assert describe(str(folder)).revision != facts.revision


def test_a_damaged_gguf_file_is_named(target: Callable[[str], Examined], tmp_path: Path) -> None:
    folder = shutil.copytree(target("gguf, Q8_0").folder, tmp_path / "copy")
    data = (folder / "model.gguf").read_bytes()
    (folder / "model.gguf").write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match=r"model.gguf is damaged"):
        describe(str(folder))
    (folder / "model.gguf").write_bytes(
        data.replace(b"\x05\x00\x00\x00\x00\x00\x00\x00llama", b"\x05\x00\x00\x00\x00\x00\x00\x00plamo", 1)
    )
    with pytest.raises(UserError, match=r"that transformers reads from one, and .*model.gguf holds plamo"):
        describe(str(folder))


def test_a_run_learns_from_it_what_it_would_from_what_the_weights_are_worth(
    target: Callable[[str], Examined],
    tiny_folder: Path,
    tmp_path: Path,
    shape: Any,
    write_dataset: Callable[..., Path],
    random_rows: list,
) -> None:
    """Bit for bit, with head and embedding; the quantized target's head is quantized, too."""
    quantized_folder = shutil.copytree(target("fp8, blocks").folder, tmp_path / "quantized")
    target("fp8, blocks").stock(torch.float32).save_pretrained(tmp_path / "plain")
    dataset, learnt = write_dataset(random_rows), []
    for folder in (quantized_folder, tmp_path / "plain"):
        tree: dict[str, Any] = {
            "run_dir": str(tmp_path / f"run-{folder.name}"),
            "target": {"model": str(with_tokenizer(folder, tiny_folder)), "dtype": "float32"},
            "drafter": shape.model_dump(),
            "data": {"dataset": str(dataset), "token_budget": 120, "align": 8, "buckets": 3},
            "train": {"max_steps": 3, "context_slots": 100, "anchor_slots": 16, "anchors_per_sample": 4}
            | {"dtype": "float32", "lr": 1e-2},
            "pipeline": {"targets": ["cpu"], "drafters": ["cpu"]},
        }
        learnt.append(run(RunSettings.model_validate(tree))[1])
    assert learnt[0].keys() == learnt[1].keys()
    assert all(torch.equal(learnt[0][name], learnt[1][name]) for name in learnt[0])


# ----------------------------------------------------------------------------------------------------------------- slow


@pytest.mark.slow
@pytest.mark.parametrize("one", QUANTIZED, ids=lambda one: one.name)
def test_a_row_of_the_table_is_what_the_checks_find(one: Quantized, tmp_path: Path) -> None:
    assert row_of(one, tmp_path) in DOCUMENT.read_text().splitlines(), HINT


# For AWQ and GPTQ transformers takes gptqmodel, which needs a CUDA compiler; their formulas have tests of their own.
STOCK = [one for one in QUANTIZED if one.method not in ("awq", "gptq")]


@pytest.mark.slow
@pytest.mark.parametrize("one", STOCK, ids=lambda one: one.name)
def test_the_stock_model_is_what_transformers_makes_of_the_checkpoint(one: Quantized, tmp_path: Path) -> None:
    """Where it can on a CPU: with its own reading, or with the method's own layers, whose sums are less exact."""
    folder, stock = save_quantized(one, tmp_path)
    where: dict[str, Any] = {}
    if one.method == "gguf":
        where = {"gguf_file": "model.gguf", "config": AutoConfig.from_pretrained(folder)}
    if one.method == "compressed-tensors":
        where["config"] = AutoConfig.from_pretrained(folder)
        where["config"].quantization_config["dequantize"] = True
    native = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        own, plain = (model(ids, output_hidden_states=True).hidden_states[-1] for model in (native, stock))
    assert (own - plain).norm() <= (0.1 if one.method == "bitsandbytes" else 1e-3) * plain.norm()


@pytest.mark.slow
def test_awq_is_read_as_compressed_tensors_reads_it(tmp_path: Path) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter

    folder, _ = save_quantized(BY_NAME["awq, 4 bits, gemm"], tmp_path)
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    converter = AutoAWQConverter.from_autoawq_config(settings)
    weights = converter.process(load_file(folder / "model.safetensors"))
    scheme = converter._build_quant_config().config_groups["config_group_0"]
    compressor, plain = BaseCompressor.get_value_from_registry("pack-quantized"), PlainWeights(folder, "x")
    modules = [name.removesuffix("_packed") for name in weights if name.endswith(".weight_packed")]
    assert len(modules) == 6 * 7
    for name in modules:
        parts = {key.removeprefix(name[: -len("weight")]): one for key, one in weights.items() if key.startswith(name)}
        torch.testing.assert_close(plain.read(name).half(), compressor.decompress(parts, scheme)["weight"])


@pytest.mark.slow
def test_layers_of_one_checkpoint_may_be_quantized_in_different_ways(tmp_path: Path) -> None:
    """A group that names modules counts before one that names their class; what is ignored is plain."""
    family = family_of(BY_NAME["compressed-tensors, int8"])
    eight, four = (
        compressed(8, "int", "channel", "int-quantized"),
        compressed(4, "int", "group", "pack-quantized", group_size=32),
    )
    places = [save(family, tmp_path / name) for name in ("eight", "four")]
    worths = [eight(places[0]), four(places[1])]
    files = [load_file(place / "model.safetensors") for place in places]
    told = [json.loads((place / "config.json").read_text())["quantization_config"] for place in places]
    groups = [one["config_groups"]["group_0"] for one in told]
    mixed = {name: one for name, one in files[0].items() if "mlp" not in name}
    mixed |= {name: one for name, one in files[1].items() if "mlp" in name}
    config = json.loads((places[0] / "config.json").read_text())
    config["quantization_config"] |= {
        "format": "mixed-precision",
        "config_groups": {
            "group_0": groups[0] | {"format": "int-quantized"},
            "group_1": groups[1] | {"format": "pack-quantized", "targets": ["re:.*mlp.*"]},
        },
    }
    (places[0] / "config.json").write_text(json.dumps(config))
    save_file(mixed, places[0] / "model.safetensors", {"format": "pt"})
    plain = PlainWeights(places[0], "x")
    for name in worths[0]:
        assert torch.equal(plain.read(name), worths["mlp" in name][name])


@pytest.mark.parametrize("name", ["fp8, blocks, experts", "gguf, Q8_0"])
def test_on_several_devices_a_quantized_target_gives_the_same(target: Callable[[str], Examined], name: str) -> None:
    facts, how = target(name).facts, {"dtype": torch.float32, "device": "cpu"}
    one, two = (FeatureTarget(facts, (0, 2, 4), before=before, **how) for before in ((), ("cpu",)))
    tokens = batch_of([torch.arange(5, 25), torch.arange(30, 41)])
    assert torch.equal(two.features(tokens), one.features(tokens))
    assert [len(layers) > 0 for layers in two._stages.ranges] == [True, True]
