"""Peers' DFlash training modules as they are measured beside ours: the same weights, samples, anchors and labels.

The packages are no dependencies: `pip install --no-deps` brings them, and nothing that they depend on is needed. Their
modules run in a process of their own, because what imports their packages leaves stand-ins in `sys.modules`.

Shapes: R samples of S tokens each, A anchors of a sample, D feature width, H width, V vocabulary.
"""

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from paceline.bench.shapes import Shape
from paceline.records import FeatureBatch, UserError

PeerName = Literal["specforge", "speculators"]
TESTED = {"specforge": "0.2.0", "speculators": "0.9.0"}
assert set(TESTED) == set(get_args(PeerName))


def check_peer(name: PeerName) -> None:
    """Refuse a peer that is not here in the version whose module is known.

    Raises:
        UserError: it is not installed, or another version is.
    """
    tested = TESTED[name]
    try:
        found = version(name)
    except PackageNotFoundError:
        found = "none"
    if found != tested:
        raise UserError(
            f"--peer {name} needs the package {name} {tested}, found {found}: `pip install --no-deps {name}=={tested}`."
        )


@dataclass(frozen=True, slots=True, eq=False)
class PeerBatch:
    """One micro-batch of samples of one length, on the device."""

    ids_RS: Tensor  # int64
    supervised_RS: Tensor  # float32, 1 where a token may be a label
    anchors_RA: Tensor  # int64, positions in the sample
    features_RSD: Tensor


def peer_batch(batch: FeatureBatch, device: torch.device) -> PeerBatch:
    """Return a micro-batch of samples of one length as a peer takes it."""
    tokens, own = batch.tokens, batch.tokens.blocks
    R, S = tokens.input_ids.shape
    anchors_RA = own.position_K.view(R, -1)
    # What lies behind a sample's first candidate is supervised; the first candidate is an anchor or before the first.
    first_R = anchors_RA.min(dim=1).values
    supervised_RS = (torch.arange(S) >= first_R[:, None]).float()
    return PeerBatch(
        tokens.input_ids.to(device),
        supervised_RS.to(device),
        anchors_RA.to(device),
        batch.features_TD.to(device).view(R, S, -1),
    )


def qwen3_config(shape: Shape) -> Any:
    """Return the drafter's shape in the terms that both peers read it in."""
    own = shape.drafter
    from transformers import Qwen3Config  # a second of start-up, which our own step is measured with

    return Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=own.intermediate_size,
        num_hidden_layers=own.layers,
        num_attention_heads=own.heads,
        num_key_value_heads=own.kv_heads,
        head_dim=own.head_dim,
        rms_norm_eps=own.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": own.rope_theta},
        max_position_embeddings=40_960,
        layer_types=["full_attention"] * own.layers,
        tie_word_embeddings=False,
    )


def import_around(package: str, emptied: Sequence[str]) -> None:
    """Let parts of a package be imported without what some of its packages import first ("" is the package itself).

    These imports need engines and clients that training modules do not.
    """
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.origin is not None
    for part in emptied:
        name = f"{package}.{part}" if part else package
        module: Any = ModuleType(name)
        module.__path__ = [str(Path(found.origin).parent.joinpath(*part.split(".")))]
        sys.modules[name] = module


def frozen(weight: Tensor) -> dict[str, nn.Parameter]:
    """Return a state that makes a module use this very tensor, untrained."""
    return {"weight": nn.Parameter(weight, requires_grad=False)}


def shared_linear(weight_VH: Float[Tensor, "V H"]) -> nn.Linear:
    """Return an untrained projection onto the vocabulary around a tensor."""
    with torch.device("meta"):
        linear = nn.Linear(weight_VH.shape[1], weight_VH.shape[0], bias=False)
    linear.load_state_dict(frozen(weight_VH), assign=True)
    return linear.requires_grad_(False)


def shared_embedding(weight_VH: Float[Tensor, "V H"]) -> nn.Embedding:
    """Return an untrained embedding around a tensor."""
    return nn.Embedding.from_pretrained(weight_VH, freeze=True)


def flat_anchors(anchors_RA: Int[Tensor, "R A"], length: int) -> Int[Tensor, " RA"]:
    """Return anchors as places in the samples laid end to end."""
    return (anchors_RA + length * torch.arange(len(anchors_RA), device=anchors_RA.device)[:, None]).flatten()
