"""Start a run from another tool's drafter: what its folder is, in what it differs from the settings, its weights.

Sizes decide whether the weights can be used, and taps and rotary base whether they mean anything; block size and mask
token are the user's choice, so a difference there is told and goes on.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.config import DrafterSettings
from paceline.drafter.model import Drafter
from paceline.formats import torchspec
from paceline.formats.foreign import ConfigFile, ForeignDrafter, read_config
from paceline.formats.foreign_weights import (
    Part,
    check_finite,
    check_parts,
    digests,
    find_parts,
    read_parts,
    weight_files,
)
from paceline.formats.speculators import read_speculators
from paceline.formats.zlab import read_zlab
from paceline.records import UserError

_SIZES = ("layers", "heads", "kv_heads", "head_dim", "intermediate_size")


@dataclass(frozen=True, slots=True)
class WarmStart:
    """A drafter to start from, checked against the settings."""

    folder: Path
    layout: str
    sha256: Mapping[str, str]  # of its weight files, by name
    notes: tuple[str, ...]  # sentences about what is another in this run
    parts: Mapping[str, Part]

    def fill(self, drafter: Drafter) -> Drafter:
        """Put the weights into a drafter, in its own dtype, and return it."""
        own = dict(drafter.named_parameters())
        with torch.no_grad():
            for name, tensor in read_parts(self.parts):
                own[name].copy_(tensor)
        return drafter

    def as_dict(self) -> dict[str, Any]:
        """Return what it is, without the weights."""
        said = {"folder": str(self.folder), "layout": self.layout, "sha256": dict(self.sha256)}
        return {**said, "differences": list(self.notes)}


def open_warm_start(
    folder: Path,
    settings: DrafterSettings,
    *,
    target: str,
    num_layers: int,
    hidden_size: int,
    vocab_size: int,
    embed_scale: float = 1.0,
    logit_cap: float = 0.0,
) -> WarmStart:
    """Return the drafter of a folder; the numbers are the target's. Reads every weight once.

    Raises:
        UserError: the folder cannot be understood, is damaged, or holds weights that the settings cannot use.
    """
    config = read_config(folder)
    drafter, renamed = _read(config, folder)
    _check_target(folder, drafter, target, num_layers=num_layers, hidden_size=hidden_size, vocab_size=vocab_size)
    _check_ends(folder, drafter, target, embed_scale, logit_cap)
    _check_settings(folder, drafter, settings)
    parts = find_parts(folder, drafter, renamed)
    own = Drafter(settings, hidden_size).named_parameters()
    check_parts(folder, parts, {name: tuple(parameter.shape) for name, parameter in own})
    check_finite(folder, parts)
    return WarmStart(folder, drafter.layout, digests(weight_files(folder)), _notes(drafter, settings), parts)


def _read(config: ConfigFile, folder: Path) -> tuple[ForeignDrafter, Mapping[str, str]]:
    """Return what a folder says, in whichever layout it is, and names that are others here."""
    if "speculators_model_type" in config:
        return read_speculators(config), {}
    if config.get("model_type") == "dflash":
        return torchspec.read_torchspec(config), torchspec.NAMES
    if "dflash_config" in config or "DFlash" in str(config.get("architectures")):
        return read_zlab(config), {}
    raise UserError(
        f"{folder} (train.init_from) is no DFlash drafter: its config.json has neither dflash_config nor "
        "speculators_model_type, nor DFlash among its architectures. Name the folder of a drafter."
    )


def _check_target(
    folder: Path, drafter: ForeignDrafter, target: str, *, num_layers: int, hidden_size: int, vocab_size: int
) -> None:
    for what, theirs, ours in (
        ("of hidden size", drafter.hidden_size, hidden_size),
        ("with a vocabulary of", drafter.vocab_size, vocab_size),
        ("with layers numbering", drafter.num_target_layers, num_layers),
    ):
        if theirs is not None and theirs != ours:
            raise UserError(
                f"The drafter of {folder} (train.init_from) is for a target {what} {theirs:,}, and {target} "
                f"(target.model) has {ours:,}. Take a drafter of this target."
            )


def _check_ends(folder: Path, drafter: ForeignDrafter, target: str, embed_scale: float, logit_cap: float) -> None:
    for what, none, theirs, ours in (
        ("multiplies embeddings by", "", drafter.embed_scale, embed_scale),
        ("caps logits at", " (0: not)", drafter.logit_cap, logit_cap),
    ):
        if not math.isclose(theirs, ours, rel_tol=1e-3):  # some write a scale as bfloat16 rounds it
            raise UserError(
                f"The drafter of {folder} (train.init_from) {what} {theirs:g}{none}, and {target} (target.model) has "
                f"{ours:g} there. Take a drafter of this target."
            )


def _check_settings(folder: Path, drafter: ForeignDrafter, settings: DrafterSettings) -> None:
    where = f"{folder} (train.init_from)"
    if drafter.taps is None:
        key = "aux_hidden_state_layer_ids" if drafter.layout == "speculators" else "target_layer_ids"
        raise UserError(
            f"{where} does not say which of the target's layers its drafter reads, and tools disagree about the "
            f"default. Add {key} to its config.json."
        )
    if drafter.block_size == 1:
        raise UserError(f"The drafter of {where} has block_size 1, so it drafts nothing. Take another one.")
    pairs = [(key, getattr(drafter, key), getattr(settings, key)) for key in _SIZES]
    pairs.append(("taps", list(drafter.taps), list(settings.taps)))
    others = [f"drafter.{key} {theirs}, not {ours}" for key, theirs, ours in pairs if theirs != ours]
    if others:
        raise UserError(f"Weights of {where} need {'; '.join(others)}. Set that, or take another drafter.")
    if drafter.rope_theta is not None and drafter.rope_theta != settings.rope_theta:
        raise UserError(
            f"The drafter of {where} has the rotary base {drafter.rope_theta:g}, and drafter.rope_theta, which is the "
            f"target's, is {settings.rope_theta:g}: its attention would not find positions. Take another drafter."
        )


def _notes(drafter: ForeignDrafter, settings: DrafterSettings) -> tuple[str, ...]:
    notes = []
    for key, names in (("block_size", "blocks of"), ("mask_token_id", "mask token"), ("rms_norm_eps", "an epsilon of")):
        theirs, ours = getattr(drafter, key), getattr(settings, key)
        if theirs is None:
            notes.append(f"it does not say its {key}; this run has {ours} (drafter.{key})")
        elif theirs != ours:
            notes.append(f"it was trained with {names} {theirs:g}; this run has {ours:g} (drafter.{key})")
    if drafter.rope_theta is None:
        notes.append(f"it does not say its rotary base; this run has {settings.rope_theta:g} (drafter.rope_theta)")
    return (*notes, *(f"it {remark}" for remark in drafter.remarks))
