"""Whether drafter, target and data follow the same conventions: what each check compares, and what it says.

A drafter that trains well and is not accepted is nearly always off by a convention: a tap, a head, an angle, the mask
token, a template. Each check holds what paceline does against something that does not come from paceline: a plain
forward of transformers, the files of the target, what a dataset wrote down when it was made.

Shapes: T tokens of a prompt, H target width, D = m * H, V vocabulary, E head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from paceline.config import DrafterSettings
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import rotary
from paceline.records import many
from paceline.target.load import TargetFacts, decoder_of

State = Literal["ok", "off", "unchecked"]
# The same numbers by other kernels; relative for features, absolute for log-probabilities.
FEATURE_ERROR = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
LOGPROB_ERROR = {torch.float32: 1e-2, torch.bfloat16: 0.5}
_ANGLE_POSITIONS = 512
_ANGLE_ERROR = 1e-3


@dataclass(frozen=True, slots=True)
class Check:
    """What was found of one convention."""

    convention: str
    state: State
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Plain:
    """What transformers itself computes for a prompt."""

    hidden: Sequence[Float[Tensor, "T H"]]  # embedding, then each layer's output; the last is behind the final norm
    logits_TV: Float[Tensor, "T V"]


@torch.no_grad()
def plain_forward(model: Any, ids: Sequence[int]) -> Plain:
    """Run a transformers model as anybody would."""
    out = model(torch.tensor([list(ids)], device=model.device), output_hidden_states=True, use_cache=False)
    return Plain([layer[0] for layer in out.hidden_states], out.logits[0])


@torch.no_grad()
def rebuilt_logits(
    model: Any, ids: Sequence[int], feature_TH: Float[Tensor, "T H"], layer: int, ends: FrozenEnds
) -> Float[Tensor, "T V"]:
    """Return the logits that follow from the captured output of `layer`: through the layers above it, the target's
    final norm and the head that the drafter uses."""
    body = decoder_of(model)

    def put(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = feature_TH[None].to(model.device, model.dtype)
        if args:
            return (given, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": given}

    hook = body.layers[layer + 1].register_forward_pre_hook(put, with_kwargs=True)
    try:
        hidden_TH = body(torch.tensor([list(ids)], device=model.device), use_cache=False)[0][0]
    finally:
        hook.remove()
    return ends.logits(hidden_TH)


def check_features(name: str, taps: Sequence[int], features: Sequence[Tensor], plain: Sequence[Plain]) -> Check:
    """Hold captured features against the hidden states of a plain forward: tap j is hidden_states[j + 1]."""
    worst = 0.0
    for at, tap in enumerate(taps):
        parts = [one.chunk(len(taps), dim=-1)[at] for one in features]
        states = [torch.cat([one.hidden[index] for one in plain]) for index in range(len(plain[0].hidden))]
        part = torch.cat(parts).float()
        errors = [((part - state.float()).norm() / state.float().norm()).item() for state in states]
        limit = FEATURE_ERROR[plain[0].hidden[0].dtype]
        if not errors[tap + 1] <= limit:
            nearest = min(range(len(errors)), key=errors.__getitem__)
            what = f"tap {tap} is not hidden_states[{tap + 1}] of a plain forward (error {errors[tap + 1]:.1g})"
            if errors[nearest] <= limit:
                what = f"tap {tap} gives hidden_states[{nearest}], not [{tap + 1}]: off by {nearest - tap - 1:+d}"
            return Check(name, "off", what)
        worst = max(worst, errors[tap + 1])
    return Check(name, "ok", f"taps {list(taps)} are hidden_states[tap + 1] of a plain forward (error {worst:.1g})")


def tap_errors(
    taps: Sequence[int], features: Sequence[Float[Tensor, "T D"]], reference: Sequence[Float[Tensor, "T D"]]
) -> dict[int, float]:
    """Return by tap how far features are from another model's, relative to those, over all tokens."""
    own, others = (torch.cat(list(some)).double().chunk(len(taps), dim=-1) for some in (features, reference))
    return {
        tap: ((part - other).norm() / other.norm()).item() for tap, part, other in zip(taps, own, others, strict=True)
    }


def check_logprobs(rebuilt: Sequence[Tensor], plain: Sequence[Plain], layer: int) -> Check:
    """Hold log-probabilities rebuilt from features against the target's own, for each position's likeliest token."""
    worst = _worst_logprob(rebuilt, plain)
    what = f"from layer {layer}'s features through final norm and head"
    if not worst <= LOGPROB_ERROR[plain[0].logits_TV.dtype]:
        return Check("log-probabilities", "off", f"{what}: not the target's own, off by up to {worst:.2g}")
    return Check("log-probabilities", "ok", f"{what}: the target's own (largest difference {worst:.1g})")


def check_head(ends: FrozenEnds, plain: Sequence[Plain], model: Any) -> Check:
    """Hold the drafter's embedding and head against the model's: tied or not, and the same logits."""
    tied = ends.head_VH is ends.embed_VH
    own_tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    words = {True: "the embedding", False: "a tensor of its own"}
    if tied != own_tied and not torch.equal(ends.head_VH.to(model.device), model.get_output_embeddings().weight):
        return Check("head", "off", f"the drafter's head is {words[tied]}, the target's is {words[own_tied]}")
    worst = _worst_logprob([ends.logits(one.hidden[-1]) for one in plain], plain)
    if not worst <= LOGPROB_ERROR[plain[0].logits_TV.dtype]:
        return Check("head", "off", f"the drafter's head gives other log-probabilities, off by up to {worst:.2g}")
    embed = model.get_input_embeddings().weight
    if not torch.equal(ends.embed_VH.to(embed.device), embed):
        return Check("head", "off", "the drafter's embedding is not the target's")
    return Check("head", "ok", f"head and embedding are the target's, the head is {words[tied]}")


def check_rope(settings: DrafterSettings, facts: TargetFacts, model: Any, positions: int = _ANGLE_POSITIONS) -> Check:
    """Hold the drafter's rotary angles against the target's table, where both are plain and equally wide."""
    theta = f"theta {settings.rope_theta:,.10g}"
    if settings.rope_theta != facts.rope_theta:
        return Check("rope", "off", f"the drafter has {theta}, the target {facts.rope_theta:,.10g}")
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if "full_attention" in rope:
        return Check("rope", "ok", f"{theta} as the target's full attention layers; its other layers have their own")
    kind = rope.get("rope_type", "default")
    if kind != "default":
        return Check(
            "rope", "ok", f"{theta} as the target; the target scales its angles ({kind}), the drafter does not"
        )
    places_1P: Int[Tensor, "1 P"] = torch.arange(positions, device=model.device)[None]
    own = rotary(places_1P, settings.head_dim, settings.rope_theta, torch.float32)
    table = decoder_of(model).rotary_emb(torch.zeros(1, device=model.device), places_1P)
    if table[0].shape[-1] != settings.head_dim:
        return Check("rope", "ok", f"{theta} as the target; heads of other widths have other angles")
    errors_P = torch.stack([(a[0, 0] - b[0]).abs().amax(-1) for a, b in zip(own, table, strict=True)]).amax(0)
    worst = errors_P.max().item()
    if not worst <= _ANGLE_ERROR:
        at = int((errors_P > _ANGLE_ERROR).nonzero()[0])
        return Check("rope", "off", f"{theta} as the target, but other angles from position {at} on ({worst:.2g})")
    return Check("rope", "ok", f"{theta}, the target's angles at positions 0..{positions - 1}")


def check_mask(
    settings: DrafterSettings, facts: TargetFacts, prompts: Sequence[Sequence[int]], in_data: dict[str, int | None]
) -> Check:
    """Hold the mask token against embedding, stop tokens, prompts and datasets; `in_data` has for each dataset the row
    that holds it, None if none does."""
    mask, what = settings.mask_token_id, f"token {settings.mask_token_id}"
    wrong = ""
    if mask >= facts.vocab_size:
        wrong = f"is no row of the embedding (0..{facts.vocab_size - 1})"
    elif mask in facts.eos_ids:
        wrong = "is a stop token of the target"
    elif (at := next((at for at, ids in enumerate(prompts) if mask in ids), None)) is not None:
        wrong = f"occurs in prompt {at + 1}"
    elif held := next(((folder, row) for folder, row in in_data.items() if row is not None), None):
        wrong = f"occurs in row {held[1]} of {held[0]}"
    if wrong:
        return Check("mask token", "off", f"{what} {wrong}")
    where = many(len(in_data), "dataset") if in_data else "no dataset (none is here)"
    return Check(
        "mask token", "ok", f"{what} is a row of the embedding; not in {many(len(prompts), 'prompt')}, nor in {where}"
    )


def check_made(what: str, now: str | None, made: dict[str, str | None]) -> Check:
    """Hold a checksum against the one that each dataset wrote down; None: nothing was written down."""
    told = {folder: then for folder, then in made.items() if then}
    if not told or now is None:
        reason = "no dataset of the run is here" if not made else "the data names none"
        return Check(what, "unchecked", reason)
    if other := next((folder for folder, then in told.items() if then != now), None):
        then = told[other]
        return Check(what, "off", f"{now[:12]} now, but {other} was made with {str(then)[:12]}")
    return Check(what, "ok", f"{now[:12]}, as when the data was made")


def _worst_logprob(rebuilt: Sequence[Tensor], plain: Sequence[Plain]) -> float:
    worst = 0.0
    for logits_TV, one in zip(rebuilt, plain, strict=True):
        best_T1 = one.logits_TV.argmax(-1, keepdim=True)
        own_T1 = one.logits_TV.float().log_softmax(-1).gather(1, best_T1)
        again_T1 = logits_TV.float().log_softmax(-1).gather(1, best_T1)
        worst = max(worst, (own_T1 - again_T1).abs().max().item())
    return worst
