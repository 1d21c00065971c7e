"""A target's weights on disk, by the names that transformers gives them, each read as one plain tensor.

Weights lie in *.safetensors files, or in one GGUF file beside the config.json and the tokenizer of the model that it
was made from: those that a GGUF file holds itself say less (see smollm2.py).
"""

import json
import math
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.records import UserError
from paceline.target.conventions import BUILDING
from paceline.target.quantized import (
    Method,
    check_float,
    check_quantized,
    group,
    make_plain,
    method_of,
    need,
    settings_of,
)
from paceline.target.reading import GGUF_READER, gguf_bar_told_to

# Said each time: where it is not, transformers asks whoever sits at the terminal whether to run a target's own code.
FROM: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
# transformers draws weights that files lack and, so asked, those of another shape: who loads looks at what it tells.
TOLD: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
# Before a decoder's names in files: its own, or those of models that also see.
PLACES = ("model.", "", "model.language_model.", "language_model.model.", "language_model.")


def check_files(folder: Path) -> None:
    """Refuse a target folder without weights that are read here.

    Raises:
        UserError: there are none, or several GGUF files.
    """
    if any(folder.glob("*.safetensors")):
        return
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        raise UserError(
            f"Target folder {folder} must hold one GGUF file, and there are {len(files)} ({files[0].name}, ...). Merge "
            "the parts of one model with `llama-gguf-split --merge`, and leave other models out."
        )
    if not files:
        raise UserError(f"Target folder {folder} has no *.safetensors file. Convert its weights to safetensors first.")


def check_weights(folder: Path, name: str) -> None:
    """Refuse weights that are quantized in a way that is not read here; reads config.json and the files' headers.

    Raises:
        UserError: the method or architecture is not known, its settings are not followed, or a package is missing.
    """
    file = gguf_file(folder)
    if file is None:
        check_quantized(folder, name)
        if is_quantized(folder):  # the files need not be here yet
            PlainWeights(folder, name)
        return
    for package in ("gguf", "accelerate"):
        need(package, "quantized", f"The weights of target {name} are a GGUF file ({file})")
    from gguf import GGUFReader

    field = _read_gguf(file, GGUFReader).get_field("general.architecture")
    told = str(field.contents()) if field else "nothing"
    if not _transformers_reads(told):
        raise UserError(
            f"A GGUF file must hold an architecture that transformers reads from one, and {file} holds {told}. Convert "
            "it to safetensors, or use the checkpoint that it was made from."
        )


def _transformers_reads(architecture: str) -> bool:
    older = import_module(GGUF_READER)
    try:
        from transformers.integrations.gguf.utils import is_gguf_arch_supported
    except ImportError:  # up to transformers 5.23
        return architecture in older.GGUF_SUPPORTED_ARCHITECTURES
    return is_gguf_arch_supported(architecture) or architecture in older.GGUF_SUPPORTED_ARCHITECTURES


def gguf_file(folder: Path) -> Path | None:
    """Return the GGUF file that holds a target's weights, None where safetensors do."""
    return None if any(folder.glob("*.safetensors")) else next(folder.glob("*.gguf"), None)


def tensor_files(folder: Path) -> dict[str, Path]:
    """Return which safetensors file holds which tensor.

    Raises:
        UserError: a file is damaged.
    """
    files: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as tensors:
                files |= dict.fromkeys(tensors.keys(), path)
        except SafetensorError as error:
            raise UserError(f"{path} is damaged: {error}. Fetch or convert the target again.") from None
    return files


def is_quantized(folder: Path) -> bool:
    """Return whether a target's weights must be made plain."""
    return bool(settings_of(folder)) or gguf_file(folder) is not None


class StoredWeights:
    """The weights of a target that is not quantized, as they lie in its files."""

    def __init__(self, folder: Path) -> None:
        self._files = tensor_files(folder)

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def read(self, name: str) -> Tensor:
        """Return one weight."""
        with safe_open(self._files[name], framework="pt") as tensors:
            return tensors.get_tensor(name)


class PlainWeights:
    """A quantized target's weights by their plain names; safetensors only."""

    def __init__(self, folder: Path, name: str) -> None:
        """Read the headers; `name` is the target's, for messages.

        Raises:
            UserError: the method is not known here, a file is damaged, or a tensor is no numbers and no part of a
                weight.
        """
        self._folder = folder
        self._settings = settings_of(folder)
        self._method: Method = method_of(self._settings, folder, name)
        self._files = _listed(folder, tensor_files(folder))
        self._parts = group(self._files, self._method)
        self._open: dict[Path, Any] = {}
        for part in (parts[""] for parts in self._parts.values() if "" in parts):
            check_float(self._file(part).get_slice(part).get_dtype(), part, self._files[part])

    def __contains__(self, name: object) -> bool:
        return name in self._parts

    def read(self, name: str) -> Tensor:
        """Return one weight.

        Raises:
            UserError: it is not stored as its method stores weights.
        """
        parts = self._parts[name]
        if parts.keys() == {""}:
            return self._file(parts[""]).get_tensor(parts[""])
        tensors = {ending: self._file(one).get_tensor(one) for ending, one in parts.items()}
        return make_plain(name, tensors, self._method, self._settings, self._folder)

    def all(self, dtype: torch.dtype, on_loaded: Callable[[float], None]) -> dict[str, Tensor]:
        """Return all weights in a dtype; see `read`. `on_loaded` learns which share of them is there."""
        weights = {}
        for done, name in enumerate(self._parts):
            on_loaded(done / len(self._parts))
            weights[name] = self.read(name).to(dtype).contiguous()
        return weights

    def _file(self, name: str) -> Any:
        """Return the open file of a tensor; to open one reads its header, which is long where experts are many."""
        path = self._files[name]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path]


def _listed(folder: Path, files: dict[str, Path]) -> dict[str, Path]:
    """Leave out files that transformers does not read, such as a copy in another library's names."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        wanted = {"model.safetensors"}
    elif index.is_file():
        wanted = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    else:
        return files
    return {name: path for name, path in files.items() if path.name in wanted}


def load_plain(
    kind: Any, folder: Path, name: str, dtype: torch.dtype, on_loaded: Callable[[float], None] = lambda share: None
) -> tuple[Any, dict[str, Any]]:
    """Return a transformers model of a quantized target, with plain weights on the CPU, and what transformers tells of
    the loading; under BUILDING.

    `kind` is transformers' AutoModel or AutoModelForCausalLM; `on_loaded` learns which share of the weights is there.

    Raises:
        UserError: a weight cannot be made plain.
    """
    config = plain_config(folder)
    asked: dict[str, Any] = {"config": config, "dtype": dtype, **TOLD}
    with torch.device("meta"):
        built = kind.from_config(config, trust_remote_code=False)
    if file := gguf_file(folder):
        with gguf_bar_told_to(on_loaded):
            model, told = kind.from_pretrained(folder, gguf_file=file.name, **_dequantized(), **asked, **FROM)
        # Some versions of transformers take a quantized weight of any shape.
        shapes = {name: weight.shape for name, weight in built.named_parameters()}
        other = {(name,) for name, weight in model.named_parameters() if weight.shape != shapes[name]}
        told["mismatched_keys"] = {*told["mismatched_keys"], *other}
    else:
        weights = PlainWeights(folder, name).all(dtype, on_loaded)
        model, told = type(built).from_pretrained(None, state_dict=weights, **asked)
    return model, told


def plain_config(folder: Path) -> Any:
    """Return a quantized target's configuration as that of a plain model."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, **FROM)
    for one in (config, config.get_text_config()):
        vars(one).pop("quantization_config", None)
    if file := gguf_file(folder):  # which may hold a head although the original ties it
        config.tie_word_embeddings = not gguf_has_head(file)
    return config


def _dequantized() -> dict[str, Any]:
    """Ask for plain weights where transformers would leave a GGUF file's packed, for kernels that it fetches."""
    import transformers

    made = getattr(transformers, "GgufConfig", None)
    return {"quantization_config": made(dequantize=True)} if made else {}


def gguf_has_head(path: Path) -> bool:
    """Return whether a GGUF file holds a head beside the embedding, whatever the original's config.json says."""
    return _GGUF_HEAD in _gguf_tensors(path)


_GGUF_EMBEDDING, _GGUF_HEAD = "token_embd.weight", "output.weight"


def _gguf_tensors(path: Path) -> dict[str, Any]:
    from gguf import GGUFReader

    return {tensor.name: tensor for tensor in _read_gguf(path, GGUFReader).tensors}


def _read_gguf(path: Path, reader: Any) -> Any:
    try:
        return reader(path)
    except (ValueError, OSError, IndexError) as error:
        raise UserError(f"{path} is damaged: {error}. Fetch it again.") from None


def gguf_ends(path: Path) -> tuple[Tensor, Tensor | None]:
    """Return embedding and head of a GGUF file; no head where it is the embedding. No converter changes their order."""
    from gguf.quants import dequantize

    found = _gguf_tensors(path)
    embed, head = (
        torch.from_numpy(dequantize(one.data, one.tensor_type)) if (one := found.get(name)) is not None else None
        for name in (_GGUF_EMBEDDING, _GGUF_HEAD)
    )
    if embed is None:
        raise UserError(f"{path} holds no {_GGUF_EMBEDDING}: it is no language model that is known here.")
    return embed, head


def weight_entries(folder: Path, *, deepest: int | None = None) -> int:
    """Return how many weights a target has, by the headers of its files, or where it is quantized by its architecture;
    with `deepest` those of its trunk up to that layer, without the head."""
    return sum(
        count
        for name, count in (_built(folder) if is_quantized(folder) else _headers(folder)).items()
        if deepest is None
        or not ("lm_head." in name or ((layer := re.search(r"\blayers\.(\d+)\.", name)) and int(layer[1]) > deepest))
    )


def layer_entries(folder: Path, deepest: int) -> tuple[int, list[int]]:
    """Return how many weights the embedding of a target's decoder has, and each of its layers up to one; see
    `weight_entries`."""
    embedding, layers = 0, [0] * (deepest + 1)
    for name, count in (_built(folder) if is_quantized(folder) else _headers(folder)).items():
        layer = layer_of(name)
        if layer is None:
            embedding += count if is_embedding(name) else 0
        elif layer <= deepest:
            layers[layer] += count
    return embedding, layers


_LAYER = re.compile(rf"^(?:{'|'.join(map(re.escape, PLACES))})layers\.(\d+)\.")


def layer_of(name: str) -> int | None:
    """Return the layer of a target's decoder that a weight belongs to; None of one that belongs to none."""
    found = _LAYER.match(name)
    return int(found[1]) if found else None


def is_embedding(name: str) -> bool:
    """Return whether a weight is an embedding of a target's decoder."""
    return any(name.startswith(place + "embed_tokens") for place in PLACES)


def _headers(folder: Path) -> dict[str, int]:
    counts = {}
    for name, path in tensor_files(folder).items():
        with safe_open(path, framework="pt") as tensors:
            counts[name] = math.prod(tensors.get_slice(name).get_shape())
    return counts


def _built(folder: Path) -> dict[str, int]:
    """Count what is plain once loaded."""
    from transformers import AutoModelForCausalLM

    config = plain_config(folder)
    with BUILDING, torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return {name: one.numel() for name, one in model.named_parameters()}
