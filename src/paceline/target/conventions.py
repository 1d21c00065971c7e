"""What an architecture does between tokens and layers and between layers and logits, found by trying it.

A drafter takes the target's embedding rows in and leaves its states to the target's head, so it must do what the target
does at both ends. Names of settings say little of an architecture that nobody here has seen. So transformers builds the
decoder with its real configuration and width but without its layers and with a tiny vocabulary, which takes some
milliseconds, and a few tokens go through: what reaches the first layer is held against the embedding's rows, and
the logits against the head's product. What is neither a plain row, nor a scaled one, nor a capped product is refused.

Shapes: T tokens, H width, V vocabulary.
"""

import copy
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.records import UserError

# transformers builds a model under process-wide switches (default dtype, patched initialisers, meta device). Two roles
# that build at once leave each other with wrong dtypes, untied heads or weights on the meta device.
BUILDING = threading.Lock()

ATTENTION = ("full_attention", "sliding_attention")  # layers whose only memory is keys and values by position
_TRIED_VOCABULARY = 64
_NEAR = 1e-4  # relative; the same numbers by other operations


@dataclass(frozen=True, slots=True)
class Conventions:
    """What a drafter and the stages around it must know of a target's architecture."""

    embed_scale: float = 1.0  # an embedding row times this is what the first layer reads
    logit_cap: float = 0.0  # logits are softly capped at this; 0: not at all
    memory: tuple[str, ...] = ()  # kinds of layers that remember by other means than keys and values
    rope_limit: int = 0  # tokens of the longest sample from which on a batch's angles depend on it; 0: they never do


class _First(nn.Module):
    """Stands for all layers: keeps what reaches it and gives it on."""

    def forward(self, hidden_1TH: Tensor, *_: Any, **__: Any) -> Tensor:
        self.seen_1TH = hidden_1TH
        return hidden_1TH


def find_conventions(config: Any, name: str) -> Conventions:
    """Try the architecture of a text decoder's configuration; `name` is the target's, for messages.

    Raises:
        UserError: it does what drafters here do not follow.
    """
    memory = _memory(config, name)
    try:
        embedded, raw, logits = _try(config)
    except Exception as error:  # whatever a model's own code may raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(
            f"A drafter needs a decoder that goes from its embedding through a list of layers to its head, and "
            f"model_type {config.model_type} of {name} does not ({reason}). Use another target."
        ) from None
    return Conventions(
        _scale(*embedded, config, name), _cap(raw, logits, config, name), memory, rope_of_batch(config)[1]
    )


@torch.no_grad()
def _try(config: Any) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """Return embedding rows and what reaches the first layer; then the head's product and the logits."""
    from transformers import AutoModelForCausalLM

    small = copy.deepcopy(config)
    small.num_hidden_layers, small.vocab_size, small.pad_token_id = 0, _TRIED_VOCABULARY, None
    small.dtype = torch.float32
    with BUILDING:
        model = AutoModelForCausalLM.from_config(small, trust_remote_code=False).float().eval()
    body, first = model.get_decoder(), _First()
    body.layers.append(first)
    body.config.num_hidden_layers = 1
    embed, head = model.get_input_embeddings(), model.get_output_embeddings()
    generator = torch.Generator().manual_seed(0)
    embed.weight.normal_(generator=generator)
    for parameter in head.parameters():  # a bias, too, which would be zero else
        parameter.normal_(generator=generator)
    taken: list[Tensor] = []
    head.register_forward_pre_hook(lambda _module, args: taken.append(args[0]))
    ids_1T = torch.tensor([[7, 31, 11, 7, 50]])
    logits_1TV = model(ids_1T, use_cache=False).logits
    return (embed.weight[ids_1T], first.seen_1TH), taken[0] @ head.weight.T, logits_1TV


def _scale(rows: Tensor, seen: Tensor, config: Any, name: str) -> float:
    if rows.shape == seen.shape:
        scale = ((rows.double() * seen).sum() / (rows.double() ** 2).sum()).item()
        if _near(seen, rows * scale):
            return 1.0 if abs(scale - 1) < _NEAR else scale
    raise UserError(
        f"A drafter reads embedding rows as the target's first layer does, but {config.model_type} ({name}) does more "
        "to them than to scale them (positions, a norm or a projection), which drafters here do not follow. Use "
        "another target."
    )


def _cap(raw: Tensor, logits: Tensor, config: Any, name: str) -> float:
    if _near(logits, raw):
        return 0.0
    cap = getattr(config, "final_logit_softcapping", None)
    if cap and _near(logits, cap * torch.tanh(raw / cap)):
        return float(cap)
    raise UserError(
        f"A drafter turns states into logits as the target does, but {config.model_type} ({name}) does more than to "
        "multiply by its head and to cap softly (a bias, a factor), which drafters here do not follow. Use another "
        "target."
    )


def _near(found: Tensor, wanted: Tensor) -> bool:
    return found.shape == wanted.shape and bool((found - wanted).norm() <= _NEAR * wanted.norm())


def _memory(config: Any, name: str) -> tuple[str, ...]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    others = tuple(sorted(set(getattr(config, "layer_types", None) or ()) - set(ATTENTION)))
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if getattr(kind, "_is_stateful", False) and not others:
        raise UserError(
            f"Of a target with recurrent layers config.json must list them (layer_types), and that of {name} "
            f"({config.model_type}) does not: use another target."
        )
    return others


def rope_of_batch(config: Any) -> tuple[str, int]:
    """Return the rope type whose angles depend on the longest sample of a batch, and from how many tokens on they do;
    0: there is none."""
    rope = getattr(config, "rope_parameters", None) or {}
    for one in [rope, *rope.values()]:  # kinds of layers may have their own
        kind = one.get("rope_type") if isinstance(one, dict) else None
        if kind in ("dynamic", "longrope"):
            return kind, one.get("original_max_position_embeddings") or config.max_position_embeddings
    return "", 0
