"""Find a target on disk, say what it is, and load the parts of it that a stage needs.

A target is a folder with config.json and *.safetensors, or a hub id with a revision whose files are already in the
local cache or can be fetched. Loading for training keeps the layers up to the deepest tap and no head.
"""

import hashlib
import json
import os
from collections.abc import Callable, Container
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.drafter.ends import FrozenEnds
from paceline.records import TargetSizes, UserError
from paceline.target.conventions import BUILDING, Conventions, find_conventions
from paceline.target.reading import DeviceOf, bars_told_to, put_by_name, quiet
from paceline.target.weights import (
    FROM,
    PLACES,
    TOLD,
    PlainWeights,
    StoredWeights,
    check_files,
    check_weights,
    gguf_ends,
    gguf_file,
    is_quantized,
    load_plain,
    tensor_files,
)


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What the rest of the program needs to know of a target without loading its weights."""

    name: str
    folder: Path
    revision: str  # see `fingerprint`
    num_layers: int
    hidden_size: int
    vocab_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float
    max_positions: int
    eos_ids: tuple[int, ...]
    conventions: Conventions
    own_head_shape: bool  # whether heads, kv_heads and head_dim are those of attention as drafters have it

    def sizes(self, entries: int, layers: int | None = None) -> TargetSizes:
        """Return the sizes of all its layers or of a run of `layers`, whose weights have `entries` numbers."""
        return TargetSizes(
            entries=entries,
            layers=self.num_layers if layers is None else layers,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
        )


def resolve(model: str, revision: str | None = None) -> Path:
    """Return the folder of a target.

    Raises:
        UserError: the folder lacks a config or safetensors, or the hub id cannot be had.
    """
    folder = Path(model).expanduser()
    if folder.exists() and revision is not None:
        raise UserError(f"Target {model} is a folder, so a revision ({revision}) says nothing. Leave it out.")
    if folder.suffix == ".gguf":
        raise UserError(
            f"A target is a folder, and {model} is a file. Put it into a folder with config.json and the tokenizer's "
            "files of the model that it was made from, and name that."
        )
    if not folder.exists():
        if folder.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
            raise UserError(f"There is no target folder {model}. Give a folder or a hub id such as Qwen/Qwen3-8B.")
        folder = _snapshot(model, revision)
    if not (folder / "config.json").is_file():
        raise UserError(f"Target folder {folder} has no config.json. Give the folder that holds the model's files.")
    check_files(folder)
    return folder


def _snapshot(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
    if revision is None:
        raise UserError(
            f"There is no folder {model} here. Give the target's folder, or with a hub id its commit (target.revision, "
            "--revision)."
        )
    try:  # what lies in the local cache needs no network
        return Path(snapshot_download(model, revision=revision, allow_patterns=wanted, local_files_only=True))
    except LocalEntryNotFoundError:
        pass  # not there, or only a part: fetch
    except Exception as error:  # no id at all
        raise UserError(
            f"Target {model} is neither a folder nor a hub id: {' '.join(str(error).split())[:200]}"
        ) from None
    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=wanted))
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"Target {model} at revision {revision} is neither a folder, nor in the local cache, nor could it be "
            f"fetched ({type(error).__name__}: {reason}). Give a folder or check the id and the connection."
        ) from None


def describe(model: str, revision: str | None = None) -> TargetFacts:
    """Return the facts of a target; reads its config and the headers of its weight files."""
    folder = resolve(model, revision)
    config = load_config(folder)
    check_weights(folder, model)
    tensor_files(folder)  # a damaged file is named before anything is built
    try:
        heads = config.num_attention_heads
        return TargetFacts(
            name=model,
            folder=folder,
            revision=fingerprint(folder),
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            intermediate_size=_mlp_width(config),
            rope_theta=float(_rope_theta(config)),
            max_positions=config.max_position_embeddings,
            eos_ids=_eos_ids(folder, config),
            conventions=find_conventions(config, model),
            own_head_shape=_plain_heads(config),
        )
    except AttributeError as error:
        raise UserError(f"{folder / 'config.json'} does not describe a decoder with attention: {error}.") from None


def load_config(folder: Path) -> Any:
    """Return the text decoder's configuration."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        whole = AutoConfig.from_pretrained(folder, **FROM)
        text = whole.get_text_config()
    except Exception as error:
        _check_own_code(folder / "config.json")
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{folder / 'config.json'} cannot be read as a model configuration: {reason}") from None
    if whole.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(
            f"A target must be a language model that writes from left to right, and transformers knows none of the "
            f"model_type {whole.model_type} in {folder / 'config.json'}. Use another target."
        )
    return text


def architectures(folder: Path) -> list[str]:
    """Return the names that config.json gives a target's model class, as they stand there."""
    found = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures")
    return [str(name) for name in found or []]


def _check_own_code(path: Path) -> None:
    """Refuse a target that brings code of its own and cannot be loaded without.

    Raises:
        UserError: it does.
    """
    try:
        own = json.loads(path.read_text(encoding="utf-8")).get("auto_map")
    except (OSError, ValueError, AttributeError, RecursionError):
        return
    if own:
        raise UserError(
            f"A target's own code is never run, and {path} asks for it (auto_map). Use a target whose architecture "
            "transformers has itself."
        )


def load_tokenizer(model: str, revision: str | None = None) -> Any:
    """Return the target's fast tokenizer."""
    from transformers import AutoTokenizer

    folder = resolve(model, revision)
    # Without any of these transformers makes an empty tokenizer up.
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")):
        raise UserError(f"Target folder {folder} has no tokenizer.json. Put the model's tokenizer files beside it.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **FROM)
    except Exception as error:
        _check_own_code(folder / "tokenizer_config.json")
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"Target folder {folder} has no tokenizer that loads: {reason}") from None
    if not tokenizer.is_fast:
        raise UserError(f"The tokenizer of {folder} has no tokenizer.json (a fast tokenizer is needed).")
    return tokenizer


def load_trunk(
    facts: TargetFacts,
    deepest_tap: int,
    *,
    dtype: torch.dtype,
    device: str | DeviceOf,
    on_loaded: Callable[[float], None] = lambda share: None,
) -> Any:
    """Return the frozen decoder up to and including its deepest tapped layer; no head, no final norm. It is on one
    device, or each weight on that of its name if it could be put there (see put_by_name).

    `on_loaded` learns which share of the tensors is there, more often than anybody wants to know.
    """
    from transformers import AutoModel

    trunk = decoder_of(_load(AutoModel, facts, dtype, device, on_loaded))
    del trunk.layers[deepest_tap + 1 :]
    for name, _ in [*trunk.named_children()]:
        if "norm" in name:  # the final one, by any name: what comes before the layers only scales (see conventions)
            setattr(trunk, name, nn.Identity())  # the last output is a raw layer output, as the taps are
    return trunk


def load_causal(facts: TargetFacts, *, dtype: torch.dtype, device: str) -> Any:
    """Return the whole frozen model with its head, for decoding."""
    from transformers import AutoModelForCausalLM

    return _load(AutoModelForCausalLM, facts, dtype, device)


def _load(
    kind: Any,
    facts: TargetFacts,
    dtype: torch.dtype,
    device: str | DeviceOf,
    on_loaded: Callable[[float], None] = lambda share: None,
) -> Any:
    quiet()
    with BUILDING, put_by_name(device) if callable(device) else nullcontext():
        # No attention is named: transformers takes sdpa, or eager where an architecture's attention is more than that.
        if is_quantized(facts.folder):
            model, told = load_plain(kind, facts.folder, facts.name, dtype, on_loaded)
        else:
            with bars_told_to(on_loaded):
                model, told = kind.from_pretrained(facts.folder, dtype=dtype, use_safetensors=True, **TOLD, **FROM)
        _check_whole(told, facts)
        model.eval().requires_grad_(False)
        if not callable(device):
            model.to(device)
    if not isinstance(getattr(decoder_of(model), "layers", None), nn.ModuleList):
        raise UserError(f"Target {facts.name} ({type(model).__name__}) has no list of decoder layers to tap.")
    return model


def _check_whole(told: dict[str, Any], facts: TargetFacts) -> None:
    lacking = sorted({*told["missing_keys"], *(name for name, *_ in told["mismatched_keys"])})
    if lacking:
        raise UserError(
            f"The weights of a target must be those that its config.json describes, and {len(lacking)} of {facts.name} "
            f"are not in its files or have another shape, {lacking[0]} among them. Fetch or convert it again."
        )


def decoder_of(model: Any) -> Any:
    """Return the text decoder of a transformers model, which may also hold a head or a vision tower."""
    body = getattr(model, model.base_model_prefix, model)
    return body if hasattr(body, "layers") else model.get_decoder()


def load_ends(facts: TargetFacts) -> FrozenEnds:
    """Return the target's embedding and head (one tensor where they are tied), on the CPU in the files' dtype, or as
    plain numbers where they are quantized."""
    file = gguf_file(facts.folder)
    embed_VH, head_VH = gguf_ends(file) if file else _read_ends(facts)
    if embed_VH.shape != (facts.vocab_size, facts.hidden_size):
        raise UserError(
            f"The embedding of {facts.name} must be {facts.vocab_size} x {facts.hidden_size}, as config.json says, and "
            f"that of its files is {' x '.join(map(str, embed_VH.shape))}. Put the model's own config.json beside them."
        )
    # A file may hold both although the config ties them; what is in the file counts, as for transformers.
    if head_VH is None or torch.equal(embed_VH, head_VH):
        head_VH = embed_VH
    return FrozenEnds(embed_VH, head_VH, facts.conventions.embed_scale, facts.conventions.logit_cap)


def _read_ends(facts: TargetFacts) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return embedding and head; no head where it is the embedding."""
    from transformers import AutoModelForCausalLM

    config = load_config(facts.folder)
    with BUILDING, torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    embed = skeleton.get_input_embeddings().weight
    # The first of a tied pair's names is the embedding's; only that one is in the file.
    embed_name = next(name for name, p in skeleton.named_parameters() if p is embed)
    weights = PlainWeights(facts.folder, facts.name) if is_quantized(facts.folder) else StoredWeights(facts.folder)
    embed_in_files = _place(weights, embed_name.removeprefix("model."))
    if embed_in_files is None:
        raise UserError(f"Target folder {facts.folder} has no tensor {embed_name} in its *.safetensors files.")
    head_in_files = _place(weights, "lm_head.weight")
    if head_in_files is None and not skeleton.config.tie_word_embeddings:
        raise UserError(f"Target folder {facts.folder} has no lm_head.weight although its config does not tie it.")
    return weights.read(embed_in_files), weights.read(head_in_files) if head_in_files else None


def _place(weights: Container[str], name: str) -> str | None:
    return next((place + name for place in PLACES if place + name in weights), None)


_WIDEST_HEAD = 128  # of published drafters; wider heads of their targets they do not inherit
_SAMPLED = 1 << 16  # bytes of weights at either end of a file that a fingerprint reads


def fingerprint(folder: Path) -> str:
    """Hash config.json and of every weight file its header, its size and the first and last 64 KiB of its data.

    Cheap, and another training of the same architecture gets another one. An edit in the middle of a file is not seen.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = file.read(8)
            digest.update(header + file.read(int.from_bytes(header, "little")))
            digest.update(file.read(_SAMPLED))
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _SAMPLED))
            digest.update(file.read() + str(size).encode())
    if found := gguf_file(folder):
        with found.open("rb") as file:
            digest.update(file.read(_SAMPLED))
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _SAMPLED))
            digest.update(file.read() + str(size).encode())
    return digest.hexdigest()[:16]


def _plain_heads(config: Any) -> bool:
    """Return whether queries and keys are heads as a drafter has them: not latent, gated or turned in part only."""
    rope = getattr(config, "rope_parameters", None) or {}
    partial = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None))
    latent = getattr(config, "kv_lora_rank", None) is not None
    return not latent and partial in (None, 1, 1.0) and (getattr(config, "head_dim", None) or 0) <= _WIDEST_HEAD


def _mlp_width(config: Any) -> int:
    """Return the width of the target's MLP. Of experts only it has none of its own: then at least three times the
    model's width, as published drafters of such targets."""
    own = getattr(config, "intermediate_size", None) or 0
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    of_expert = experts and getattr(config, "moe_intermediate_size", None) is None  # own is an expert's, then
    least: int = 3 * config.hidden_size
    return max(own, least) if of_expert or not own else own


def _rope_theta(config: Any) -> float:
    """Return the rotary base; of the full attention layers where kinds of layers have bases of their own."""
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    return rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0


def _eos_ids(folder: Path, config: Any) -> tuple[int, ...]:
    from transformers import GenerationConfig

    eos = config.eos_token_id
    if (folder / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id or eos
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list | tuple) else (eos,)
