"""Tiny random targets whose weights are quantized, each stored as its method stores them.

Every maker changes a folder that `families.save` wrote, and returns what the weights that it quantized are worth,
worked out without paceline: by the method's own library, or by the published formula.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from families import FAMILIES, Family, save
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

Weights = dict[str, Tensor]
SIZE = 32  # inputs that share a scale, or the edge of a block


@dataclass(frozen=True, slots=True)
class Quantized:
    """A method, how it stores weights here, and the family whose tiny target it is tried with."""

    method: str
    stored: str
    family: str
    make: Callable[[Path], Weights]
    takes: str = ""  # packages beside paceline

    @property
    def name(self) -> str:
        """What it is called in the table and in test ids."""
        return f"{self.method}, {self.stored}"


def family_of(one: Quantized) -> Family:
    """The family whose configuration is quantized."""
    return next(family for family in FAMILIES if family.name == one.family)


def save_quantized(one: Quantized, folder: Path) -> tuple[Path, Any]:
    """Write the quantized target; return its folder and a stock model in float32 of what its weights are worth."""
    torch.manual_seed(0)
    save(family_of(one), folder)
    config = AutoConfig.from_pretrained(folder)
    worth = one.make(folder)
    before = {name: tensor.float() for name, tensor in load_file(folder / "plain" / "weights").items()}
    assert worth.keys() <= before.keys(), worth.keys() - before.keys()
    assert all(not torch.equal(before[name], worth[name]) for name in worth), "nothing was quantized"
    with torch.device("meta"):
        kind = type(AutoModelForCausalLM.from_config(config))
    stock = kind.from_pretrained(None, config=config, state_dict=before | worth, dtype=torch.float32)
    return folder, stock.eval()


def _linear(weights: Weights) -> Iterator[str]:
    """Names of the layers' matrices without their `.weight`, and of the head: experts and projections, no router."""
    for name, tensor in sorted(weights.items()):
        inside = ".layers." in name and tensor.ndim == 2 and ".mlp.gate.weight" not in name
        if (inside and "conv" not in name and "vision" not in name) or name.endswith("lm_head.weight"):
            yield name.removesuffix(".weight")


def _open(folder: Path) -> Weights:
    weights = load_file(folder / "model.safetensors")
    (folder / "plain").mkdir(exist_ok=True)
    save_file(weights, folder / "plain" / "weights", metadata={"format": "pt"})
    return weights


def _close(folder: Path, weights: Weights, settings: dict[str, Any]) -> None:
    save_file({name: one.contiguous() for name, one in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))


# ----------------------------------------------------------------------------------------- by the published formula


def fp8_blocks(edge: int) -> Callable[[Path], Weights]:
    """As DeepSeek-V3 and Qwen's fp8 checkpoints have it: square blocks that share a scale."""

    def make(folder: Path) -> Weights:
        weights, worth = _open(folder), {}
        for name in _linear(weights):
            weight = weights.pop(f"{name}.weight")
            scales = torch.zeros(-(-weight.shape[0] // edge), -(-weight.shape[1] // edge))
            stored, plain = torch.zeros_like(weight, dtype=torch.float8_e4m3fn), torch.zeros_like(weight)
            for i, j in np.ndindex(*scales.shape):
                at = slice(i * edge, (i + 1) * edge), slice(j * edge, (j + 1) * edge)
                scales[i, j] = weight[at].abs().max() / 448
                stored[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
                plain[at] = stored[at].float() * scales[i, j]
            weights |= {f"{name}.weight": stored, f"{name}.weight_scale_inv": scales}
            worth[f"{name}.weight"] = plain
        told = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [edge, edge]}
        _close(folder, weights, told)
        return worth

    return make


def _grouped(weight: Tensor, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unsigned numbers [O, I], zero points and scales [O, groups] of a matrix."""
    grouped = weight.reshape(weight.shape[0], -1, SIZE)
    low, high = grouped.amin(-1), grouped.amax(-1)
    most = (1 << bits) - 1
    scale = ((high - low) / most).half()
    zero = (-low / scale.float()).round().clamp(1, most)  # 1: stored less one it is not negative
    numbers = (grouped / scale.float()[..., None] + zero[..., None]).round().clamp(0, most)
    return numbers.reshape(weight.shape).int().numpy(), zero.int().numpy(), scale.numpy()


def _words(numbers: np.ndarray, bits: int, order: Sequence[int], axis: int) -> Tensor:
    """32-bit words along an axis, the lowest bits first: `order` says which number of a word's comes first, second."""
    along = np.moveaxis(numbers.astype(np.int64), axis, 0)
    words = sum(along[at :: len(order)] << bits * place for place, at in enumerate(order))
    return torch.from_numpy(np.moveaxis(words.astype(np.uint32).view(np.int32), 0, axis).copy())


def _worth(numbers: np.ndarray, zeros: np.ndarray, scales: np.ndarray, groups: np.ndarray) -> Tensor:
    return torch.from_numpy((numbers - zeros[:, groups]) * scales[:, groups].astype(np.float32)).float()


def awq_gemm(folder: Path) -> Weights:
    """As AutoAWQ has it: words along the outputs, whose eight numbers lie in the order 0 2 4 6 1 3 5 7."""
    weights, worth = _open(folder), {}
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    for name in _linear(weights):
        if name == "lm_head":
            continue
        numbers, zeros, scales = _grouped(weights.pop(f"{name}.weight"), 4)
        weights |= {
            f"{name}.qweight": _words(numbers.T, 4, order, axis=1),
            f"{name}.qzeros": _words(zeros.T, 4, order, axis=1),
            f"{name}.scales": torch.from_numpy(scales).T,
        }
        worth[f"{name}.weight"] = _worth(numbers, zeros, scales, np.arange(numbers.shape[1]) // SIZE)
    told = {"quant_method": "awq", "bits": 4, "group_size": SIZE, "zero_point": True, "version": "gemm"}
    _close(folder, weights, told)
    return worth


def gptq(bits: int, ordered: bool, fresh: bool) -> Callable[[Path], Weights]:
    """As AutoGPTQ has it: words along the inputs; zero points less one, but not in the format gptq_v2 (`fresh`);
    `ordered` inputs belong to groups by activation, not by place."""

    def make(folder: Path) -> Weights:
        weights, worth = _open(folder), {}
        for name in _linear(weights):
            weight = weights.pop(f"{name}.weight")
            inputs = weight.shape[1]
            order = np.random.default_rng(0).permutation(inputs) if ordered else np.arange(inputs)
            by_group, zeros, scales = _grouped(weight[:, torch.from_numpy(order)], bits)
            numbers, groups = np.empty_like(by_group), np.empty(inputs, dtype=np.int64)
            numbers[:, order], groups[order] = by_group, np.arange(inputs) // SIZE
            places = range(32 // bits)
            weights |= {
                f"{name}.qweight": _words(numbers.T, bits, places, axis=0),
                f"{name}.qzeros": _words(zeros.T - (not fresh), bits, places, axis=1),
                f"{name}.scales": torch.from_numpy(scales).T,
                f"{name}.g_idx": torch.from_numpy(groups).int(),
            }
            worth[f"{name}.weight"] = _worth(numbers, zeros, scales, groups)
        told = {"quant_method": "gptq", "bits": bits, "group_size": SIZE, "desc_act": ordered, "lm_head": True}
        _close(folder, weights, told | ({"checkpoint_format": "gptq_v2"} if fresh else {}))
        return worth

    return make


FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mxfp4_experts(folder: Path) -> Weights:
    """As gpt-oss has it: of each expert the transposed matrix, 32 inputs a block, two numbers a byte, the lower bits
    first, and a power of two a block."""
    weights, worth = _open(folder), {}
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        outputs_first = weights.pop(name).transpose(1, 2)
        experts, outputs, inputs = outputs_first.shape
        blocks = torch.zeros(experts, outputs, inputs // 32, 16, dtype=torch.uint8)
        scales = torch.zeros(experts, outputs, inputs // 32, dtype=torch.uint8)
        grid = torch.tensor([*FP4, *(-one for one in FP4)])
        cut = outputs_first.reshape(experts, outputs, -1, 32)
        power = (cut.abs().amax(-1) / 6).log2().ceil()
        nearest = (cut / power.exp2()[..., None])[..., None].sub(grid).abs().argmin(-1)
        blocks[:] = (nearest[..., 0::2] + 16 * nearest[..., 1::2]).to(torch.uint8)
        scales[:] = (power + 127).to(torch.uint8)
        weights |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        worth[name] = (grid[nearest] * power.exp2()[..., None]).reshape(experts, outputs, inputs).transpose(1, 2)
    _close(folder, weights, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return {name: one.contiguous() for name, one in worth.items()}


# -------------------------------------------------------------------------------------- by the method's own library


def compressed(bits: int, kind: str, strategy: str, way: str, **more: Any) -> Callable[[Path], Weights]:
    """As llm-compressor has it; quantized, packed and read back by compressed-tensors."""

    def make(folder: Path) -> Weights:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        arguments = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True} | more
        scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
        compressor = BaseCompressor.get_value_from_registry(way)
        weights, worth = _open(folder), {}
        for name in _linear(weights):
            weight = weights.pop(f"{name}.weight")
            parts = {"weight": weight} | _scales(weight, scheme.weights)
            packed = compressor.compress(parts, scheme)
            weights |= {f"{name}.{part}": one for part, one in packed.items()}
            worth[f"{name}.weight"] = compressor.decompress(packed, scheme)["weight"].float()
        group = {"targets": ["Linear"], "weights": arguments}
        told = {"quant_method": "compressed-tensors", "format": way, "quantization_status": "compressed"}
        _close(folder, weights, told | {"config_groups": {"group_0": group}, "ignore": []})
        return worth

    return make


def _scales(weight: Tensor, arguments: Any) -> Weights:
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    size = arguments.group_size or weight.shape[1]
    grouped = weight.reshape(weight.shape[0], -1, size)
    low, high = grouped.amin(-1), grouped.amax(-1)
    made: Weights = {}
    if arguments.strategy == "tensor_group":
        made["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
    scale, zero = calculate_qparams(low, high, arguments, made.get("weight_global_scale"))
    made["weight_scale"] = scale
    return made if arguments.symmetric else made | {"weight_zero_point": zero}


def bitsandbytes(bits: int, **more: Any) -> Callable[[Path], Weights]:
    """As transformers and bitsandbytes write it, a head of its own too; numbers by the published formula."""

    def make(folder: Path) -> Weights:
        from transformers import BitsAndBytesConfig

        names = [*_linear(_open(folder))]
        left = ["vision_tower", *([] if "lm_head" in names else ["lm_head"])]
        asked = BitsAndBytesConfig(**{f"load_in_{bits}bit": True}, llm_int8_skip_modules=left, **more)
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=asked, dtype=torch.float32)
        model.save_pretrained(folder)
        stored = load_file(folder / "model.safetensors")
        worth_of = _worth_of_four_bits if bits == 4 else _worth_of_eight_bits
        shapes = {name: one.shape for name, one in load_file(folder / "plain" / "weights").items()}
        return {f"{name}.weight": worth_of(stored, name).reshape(shapes[f"{name}.weight"]) for name in names}

    return make


def _worth_of_eight_bits(stored: Weights, name: str) -> Tensor:
    return stored[f"{name}.weight"].float() * stored[f"{name}.SCB"][:, None].float() / 127


def _worth_of_four_bits(stored: Weights, name: str) -> Tensor:
    """Two numbers a byte, the higher bits first; some share a scale, and quantized scales share one again."""
    parts = {
        key.removeprefix(f"{name}.weight."): one for key, one in stored.items() if key.startswith(f"{name}.weight.")
    }
    told = json.loads(bytes(next(one for key, one in parts.items() if key.startswith("quant_state")).tolist()))
    scales = parts["absmax"]
    if scales.dtype == torch.uint8:
        each = parts["nested_absmax"].repeat_interleave(told["nested_blocksize"])[: len(scales)]
        scales = parts["nested_quant_map"][scales.long()] * each + told["nested_offset"]
    packed = stored[f"{name}.weight"].flatten().long()
    numbers = torch.stack([packed >> 4, packed & 15], dim=1).flatten()
    return parts["quant_map"][numbers] * scales.repeat_interleave(told["blocksize"])


def gguf_file(kind: str) -> Callable[[Path], Weights]:
    """As llama.cpp's converter writes it: Llama's queries and keys with their halves interleaved."""

    def make(folder: Path) -> Weights:
        import gguf

        from paceline.target.smollm2 import LAYER_NAMES

        weights, config = _open(folder), json.loads((folder / "config.json").read_text())
        model, how = config["model_type"], gguf.GGMLQuantizationType[kind]
        writer = gguf.GGUFWriter(folder / "model.gguf", model)
        for key, value in {
            "context_length": config["max_position_embeddings"],
            "embedding_length": config["hidden_size"],
            "block_count": config["num_hidden_layers"],
            "feed_forward_length": config["intermediate_size"],
            "attention.head_count": config["num_attention_heads"],
            "attention.head_count_kv": config["num_key_value_heads"],
            "vocab_size": config["vocab_size"],
            "rope.dimension_count": config["head_dim"],
        }.items():
            writer.add_uint32(f"{model}.{key}", value)
        names = {ours: theirs for theirs, ours in LAYER_NAMES.items()}
        names |= {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
        ends = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
        worth = {}
        for name, tensor in weights.items():
            module = name.removesuffix(".weight")
            layer, _, inner = module.removeprefix("model.layers.").partition(".")
            called = ends.get(module) or f"blk.{layer}.{names[inner]}"
            rows = tensor.float()
            turned = model == "llama" and inner in ("self_attn.q_proj", "self_attn.k_proj")
            heads = config["num_attention_heads" if "q_proj" in inner else "num_key_value_heads"]
            if turned:
                rows = rows.reshape(heads, 2, -1, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
            if tensor.ndim == 1:
                writer.add_tensor(f"{called}.weight", rows.numpy())
                continue
            blocks = gguf.quants.quantize(rows.numpy(), how)
            writer.add_tensor(f"{called}.weight", blocks, raw_dtype=how)
            back = torch.from_numpy(gguf.quants.dequantize(blocks, how))
            if turned:
                back = back.reshape(heads, -1, 2, back.shape[1]).transpose(1, 2).reshape(back.shape)
            worth[name] = back.contiguous()
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        (folder / "model.safetensors").unlink()
        return worth

    return make


NF4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
PACKED = {"group_size": SIZE}
QUANTIZED = [
    Quantized("fp8", "blocks", "Qwen3", fp8_blocks(32)),
    Quantized("fp8", "blocks, experts", "DeepSeek-V3", fp8_blocks(8)),
    Quantized("mxfp4", "experts", "gpt-oss", mxfp4_experts),
    *(
        Quantized("compressed-tensors", stored, family, make, "compressed-tensors")
        for stored, family, make in (
            ("int4, packed", "Qwen3", compressed(4, "int", "group", "pack-quantized", **PACKED)),
            (
                "int4, packed, zero points",
                "Llama 3",
                compressed(4, "int", "group", "pack-quantized", **PACKED, symmetric=False),
            ),
            ("int8", "Qwen2.5", compressed(8, "int", "channel", "int-quantized")),
            ("fp8, experts", "Qwen3-MoE", compressed(8, "float", "channel", "float-quantized")),
            ("nvfp4", "Qwen3", compressed(4, "float", "tensor_group", "nvfp4-pack-quantized", group_size=16)),
        )
    ),
    Quantized("awq", "4 bits, gemm", "Qwen2.5", awq_gemm),
    Quantized("gptq", "4 bits", "Qwen3", gptq(4, ordered=False, fresh=False)),
    Quantized("gptq", "8 bits, ordered by activation, gptq_v2", "Llama 3", gptq(8, ordered=True, fresh=True)),
    *(
        Quantized("bitsandbytes", stored, family, make, "bitsandbytes")
        for stored, family, make in (
            ("4 bits, nf4, double", "Qwen3", bitsandbytes(4, **NF4)),
            ("4 bits, fp4", "Gemma 3 that sees", bitsandbytes(4, bnb_4bit_quant_type="fp4")),
            ("8 bits", "Qwen2.5", bitsandbytes(8)),
        )
    ),
    Quantized("gguf", "Q8_0", "Llama 3", gguf_file("Q8_0"), "gguf, accelerate"),
    Quantized("gguf", "Q5_0", "SmolLM2", gguf_file("Q5_0"), "gguf, accelerate"),
    Quantized("gguf", "Q4_0", "Qwen3", gguf_file("Q4_0"), "gguf, accelerate"),
]
