"""Quantized checkpoints: which methods there are, and what plain numbers their tensors stand for.

Every weight is made plain as it is read, by the method's own arithmetic, so that features, head and embedding come from
the numbers that the quantized model serves with. What a server quantizes besides, activations and the key/value cache,
stays as it is. A weight is spread over several tensors of the files, its parts; a tensor that belongs to nothing known
here is refused, because a permutation or a rotation that is left out would show as low acceptance only.

Shapes: O outputs, I inputs of a linear layer, G groups of inputs that share a scale.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from paceline.records import UserError

Parts = dict[str, Tensor]
Settings = Mapping[str, Any]  # what config.json says of the quantization


@dataclass(frozen=True, slots=True)
class Method:
    """How a method stores a weight: the endings of its tensors' names, and how they make it plain."""

    name: str
    endings: tuple[str, ...]  # the first ones of these that are there hold the numbers; the others belong to them
    roots: tuple[str, ...]
    plain: Callable[[Parts, str, Settings], Tensor]  # of the parts by ending, the module's name and the settings
    becomes: str = ".weight"  # the ending of the plain tensor's name
    # Rule and value where the settings ask for what is not followed here, as in "must have 4 bits", "3 bits".
    check: Callable[[Settings], tuple[str, str] | None] = lambda settings: None
    package: str = ""  # that reads it
    extra: str = ""  # which of paceline's extras brings the package


# They quantize activations or the cache, or say again what the settings say.
_BESIDE = (
    ".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale", ".output_zero_point",
    ".activation_scale", ".k_scale", ".v_scale", ".q_scale", ".kv_scale",
)  # fmt: skip
_FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors names them


# ------------------------------------------------------------------------------------------------------- what is there


def settings_of(folder: Path) -> Settings:
    """Return what config.json says of a quantization; empty where the target is not quantized."""
    try:
        tree = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text = tree.get("text_config") or {}
        found = [one.get(key) for one in (tree, text) for key in ("quantization_config", "compression_config")]
    except (OSError, ValueError, AttributeError, RecursionError):  # said by who reads the configuration
        return {}
    return next((one for one in found if isinstance(one, dict) and one), {})


def check_quantized(folder: Path, name: str) -> None:
    """Refuse a target whose numbers cannot be made plain here; reads config.json only.

    Raises:
        UserError: its method is not known, its settings are not followed, or a package is missing.
    """
    if settings := settings_of(folder):
        method_of(settings, folder, name)


def method_of(settings: Settings, folder: Path, name: str) -> Method:
    """Return the method that config.json names.

    Raises:
        UserError: see check_quantized.
    """
    told = _name_of(settings)
    where = f"(quantization_config in {folder / 'config.json'})"
    method = METHODS.get(told)
    if method is None:
        known = ", ".join([*METHODS, "gguf"])
        raise UserError(
            f"A target must be quantized with a method whose weights can be made plain here ({known}), and {name} is "
            f"with {told} {where}. Use the checkpoint that it was made from, or one quantized with one of these."
        )
    if broken := method.check(settings):
        rule, value = broken
        raise UserError(
            f"A target quantized with {told} {rule}, and {name} has {value} {where}. Use the checkpoint that it was "
            "made from, or one quantized in another way."
        )
    need(method.package, method.extra, f"Target {name} is quantized with {told} {where}")
    return method


def need(package: str, extra: str, why: str) -> None:
    """Refuse to go on without a package.

    Raises:
        UserError: it is not installed; what to install is said.
    """
    if package and find_spec(package) is None:
        raise UserError(
            f"{why}, which takes the package {package.replace('_', '-')}, and it is not installed. Install it with "
            f"`pip install 'paceline[{extra}]'`."
        )


def _name_of(settings: Settings) -> str:
    if settings.get("load_in_4bit") or settings.get("_load_in_4bit"):
        return "bitsandbytes 4-bit"
    if settings.get("load_in_8bit") or settings.get("_load_in_8bit"):
        return "bitsandbytes 8-bit"
    return str(settings.get("quant_method", "none that is named"))


def group(names: Iterable[str], method: Method) -> dict[str, dict[str, str]]:
    """Return for each plain name its parts, names in the files by ending; one without an ending is plain as it is."""
    endings = sorted(method.endings, key=len, reverse=True)
    grouped: dict[str, dict[str, str]] = {}
    for name in names:
        if name.endswith(_BESIDE):
            continue
        ending = next((one for one in endings if name.endswith(one)), None)
        if ending is None:
            grouped[name] = {"": name}
        else:
            grouped.setdefault(name.removesuffix(ending) + method.becomes, {})[ending] = name
    return {name: _whole(parts, method) for name, parts in grouped.items()}


def _whole(parts: dict[str, str], method: Method) -> dict[str, str]:
    return {"": parts[".weight"]} if parts.keys() == {".weight"} else parts


def make_plain(plain_name: str, parts: Parts, method: Method, settings: Settings, where: Path) -> Tensor:
    """Return a weight made plain, on the CPU.

    Raises:
        UserError: some of its tensors are missing or of another shape than they should be.
    """
    module = plain_name.removesuffix(method.becomes)
    try:
        if not any(root in parts for root in method.roots):
            raise ValueError(f"there is no {' or '.join(method.roots)}")
        return method.plain(parts, module, settings)
    except (KeyError, ValueError, RuntimeError, AssertionError, IndexError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(
            f"What {where} holds of {module} ({', '.join(sorted(parts))}) is not stored as {method.name} stores it "
            f"({reason}). Use the checkpoint that it was made from, or one quantized in another way."
        ) from None


def check_float(dtype: str, name: str, where: Path) -> None:
    """Refuse a tensor that is no plain numbers and no part of a weight.

    Raises:
        UserError: it is one.
    """
    if dtype not in _FLOATS:
        raise UserError(
            f"Every tensor of a quantized target must belong to a weight that can be made plain, and {name} in {where} "
            f"({dtype}) belongs to none that is known here. Use the checkpoint that it was made from."
        )


# ---------------------------------------------------------------------------------------------------------- the methods


def _fp8(parts: Parts, _module: str, settings: Settings) -> Float[Tensor, "O I"]:
    """Blocks of a matrix share a scale; at its right and lower edge they may be cut."""
    weight, scale = parts[".weight"].float(), parts[".weight_scale_inv"].float()
    if scale.numel() == 1:
        return weight.mul_(scale.reshape(()))
    height, width = settings.get("weight_block_size") or (128, 128)
    rows, columns = weight.shape
    if scale.shape != (math.ceil(rows / height), math.ceil(columns / width)):
        raise ValueError(f"{tuple(scale.shape)} scales for {rows} x {columns} in blocks of {height} x {width}")
    for at, row in enumerate(scale):  # in place: these are gigabytes
        weight[at * height : (at + 1) * height] *= row.repeat_interleave(width)[:columns]
    return weight


def _unpacked(packed: Int[Tensor, "A B"], shifts: Sequence[int], bits: int, *, downwards: bool = False) -> Tensor:
    """Return the unsigned numbers of 32-bit words, those of a word side by side, or one under the other."""
    if packed.dtype != torch.int32:
        raise ValueError(f"words of {packed.dtype}")
    by = torch.tensor(shifts, dtype=torch.int32)
    spread = packed[:, None] >> by[:, None] if downwards else packed[..., None] >> by
    return (spread & (1 << bits) - 1).flatten(0, 1) if downwards else (spread & (1 << bits) - 1).flatten(1)


def _scaled(
    numbers_IO: Tensor, zeros_GO: Tensor, scales_GO: Tensor, group_I: Int[Tensor, " I"] | None
) -> Float[Tensor, "O I"]:
    """Return what numbers stand for; without `group_I` groups have the same size and follow one another."""
    plain_IO, zeros_GO, scales_GO = numbers_IO.float(), zeros_GO.float(), scales_GO.float()
    if group_I is None:
        plain_IO.view(len(scales_GO), -1, plain_IO.shape[1]).sub_(zeros_GO[:, None]).mul_(scales_GO[:, None])
    else:
        plain_IO.sub_(zeros_GO[group_I]).mul_(scales_GO[group_I])
    return plain_IO.T


_AWQ_SHIFTS = [0, 16, 4, 20, 8, 24, 12, 28]  # of the first number in a word of eight, the second, ...


def _awq(parts: Parts, _module: str, settings: Settings) -> Float[Tensor, "O I"]:
    """Words hold eight outputs of an input, out of order; scales and zeros are those of a group of inputs."""
    numbers_IO, zeros_GO = (_unpacked(parts[part], _AWQ_SHIFTS, 4) for part in (".qweight", ".qzeros"))
    return _scaled(numbers_IO, zeros_GO, parts[".scales"], None)


def _gptq(parts: Parts, _module: str, settings: Settings) -> Float[Tensor, "O I"]:
    """Words hold several inputs of an output, in order; `g_idx` says which group an input belongs to. Up to the format
    gptq_v2 zeros are stored less one."""
    bits = int(settings["bits"])
    shifts = range(0, 32, bits)
    numbers_IO = _unpacked(parts[".qweight"], shifts, bits, downwards=True)
    zeros_GO = _unpacked(parts[".qzeros"], shifts, bits)
    if settings.get("checkpoint_format", "gptq") != "gptq_v2":
        if (zeros_GO == (1 << bits) - 1).any():
            raise ValueError("a zero point of 0 was stored less one, which every library reads differently")
        zeros_GO = zeros_GO + 1
    inputs, size = len(numbers_IO), int(settings.get("group_size", 128))
    size = size if size > 0 else inputs
    in_order_I = torch.arange(inputs) // size
    group_I = parts.get(".g_idx", in_order_I).long()
    ordered = inputs == size * len(zeros_GO) and torch.equal(group_I, in_order_I)
    return _scaled(numbers_IO, zeros_GO, parts[".scales"], None if ordered else group_I)


def _bitsandbytes4(parts: Parts, _module: str, _settings: Settings) -> Tensor:
    from bitsandbytes.functional import QuantState, dequantize_4bit

    state = QuantState.from_dict({name: one for name, one in parts.items() if name != ".weight"}, torch.device("cpu"))
    return dequantize_4bit(parts[".weight"], state)


def _bitsandbytes8(parts: Parts, _module: str, _settings: Settings) -> Float[Tensor, "O I"]:
    from bitsandbytes.functional import int8_vectorwise_dequant

    if ".weight_format" in parts and parts[".weight_format"].item() != 0:
        raise ValueError("weight_format is not 0, row after row")
    return int8_vectorwise_dequant(parts[".weight"], parts[".SCB"].float())


def _mxfp4(parts: Parts, _module: str, _settings: Settings) -> Tensor:
    """All experts' weights of a layer, as the model multiplies with them: blocks of 32 with a power of two each."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    return convert_moe_packed_tensors(parts["_blocks"], parts["_scales"], dtype=torch.float32)


def _compressed(parts: Parts, module: str, settings: Settings) -> Tensor:
    from compressed_tensors.compressors import BaseCompressor

    scheme, told = _scheme(module, settings)
    compressor = BaseCompressor.get_value_from_registry(scheme.format or told)
    asked = {f".{part}" for part in compressor.compression_param_names(scheme)} - set(_BESIDE)
    if asked != parts.keys():
        raise ValueError(f"there should be {', '.join(sorted(asked))}")
    return compressor.decompress({name.removeprefix("."): one for name, one in parts.items()}, scheme)["weight"]


def _scheme(module: str, settings: Settings) -> tuple[Any, str]:
    """Return how a module is quantized, and the format of all that name none: a target that names the module counts
    before one that names its class."""
    from compressed_tensors.utils.match import match_name

    config = _parsed(json.dumps({key: settings[key] for key in _COMPRESSED if key in settings}))
    schemes = list(config.config_groups.values())
    for scheme in schemes:
        if any(match_name(module, target) for target in scheme.targets):
            return scheme, config.format
    for scheme in schemes:
        if "Linear" in scheme.targets:
            return scheme, config.format
    raise ValueError("no group of quantization_config targets it")


_COMPRESSED = ("config_groups", "format", "ignore", "quant_method", "quantization_status")


@lru_cache(maxsize=4)  # asked for each weight, and there may be thousands
def _parsed(settings: str) -> Any:
    from compressed_tensors.quantization import QuantizationConfig

    return QuantizationConfig.model_validate_json(settings)


def _check_compressed(settings: Settings) -> tuple[str, str] | None:
    for key in ("transform_config", "sparsity_config"):
        told = settings.get(key)
        if told and told.get("format", told) != "dense":
            return "must have weights that are neither rotated nor sparse", f"a {key}"
    return None if settings.get("config_groups") else ("must say how weights are stored", "no config_groups")


def _check_awq(settings: Settings) -> tuple[str, str] | None:
    bits, version = settings.get("bits", settings.get("w_bit", 4)), str(settings.get("version", "gemm")).lower()
    return None if (bits, version) == (4, "gemm") else ("must have 4 bits in the layout gemm", f"{bits} in {version}")


def _check_gptq(settings: Settings) -> tuple[str, str] | None:
    told, bits = str(settings.get("checkpoint_format", "gptq")), settings.get("bits")
    if told not in ("gptq", "gptq_v2") or bits not in (2, 4, 8):
        return "must have 2, 4 or 8 bits in the format gptq or gptq_v2", f"{bits} in {told}"
    return ("must have the same bits in all layers", "rules for some (dynamic)") if settings.get("dynamic") else None


def _check_bitsandbytes(settings: Settings) -> tuple[str, str] | None:
    kept = settings.get("bnb_4bit_quant_storage") or "uint8"
    return None if kept == "uint8" else ("must keep its numbers as uint8", f"bnb_4bit_quant_storage {kept}")


_BNB4 = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_BNB4_STATES = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")
_CT = ("", "_packed", "_scale", "_zero_point", "_global_scale", "_shape")

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("fp8", (".weight", ".weight_scale_inv"), (".weight",), _fp8),
        Method("mxfp4", ("_blocks", "_scales"), ("_blocks",), _mxfp4, becomes=""),
        Method(
            "compressed-tensors",
            tuple(f".weight{part}" for part in _CT),
            (".weight", ".weight_packed"),
            _compressed,
            check=_check_compressed,
            package="compressed_tensors",
            extra="quantized",
        ),
        Method("awq", (".qweight", ".qzeros", ".scales"), (".qweight",), _awq, check=_check_awq),
        Method("gptq", (".qweight", ".qzeros", ".scales", ".g_idx"), (".qweight",), _gptq, check=_check_gptq),
        Method(
            "bitsandbytes 4-bit",
            (".weight", *(f".weight.{part}" for part in (*_BNB4, *_BNB4_STATES))),
            (".weight",),
            _bitsandbytes4,
            check=_check_bitsandbytes,
            package="bitsandbytes",
            extra="quantized",
        ),
        Method(
            "bitsandbytes 8-bit",
            (".weight", ".SCB", ".weight_format"),
            (".weight",),
            _bitsandbytes8,
            package="bitsandbytes",
            extra="quantized",
        ),
    )
}
