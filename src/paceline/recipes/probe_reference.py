"""What `paceline evaluate --probe --reference` finds: how far features are from those of another model, tap by tap."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.probe.parity import tap_errors
from paceline.probe.parity_features import training_features
from paceline.records import UserError
from paceline.target.load import TargetFacts, describe
from paceline.target.model import FeatureTarget


def open_reference(reference: str, facts: TargetFacts) -> TargetFacts:
    """Return the facts of the model that features are compared with.

    Raises:
        UserError: it has another shape than the target, and so other features.
    """
    found = describe(reference)
    pairs = {
        "a hidden size": (found.hidden_size, facts.hidden_size),
        "layers": (found.num_layers, facts.num_layers),
        "a vocabulary": (found.vocab_size, facts.vocab_size),
    }
    for what, (other, own) in pairs.items():
        if other != own:
            raise UserError(
                f"--reference must be a model of the target's shape, with {what} of {own:,}, and {reference} has "
                f"{other:,}. Name the model that {facts.name} was made from."
            )
    return found


def against_reference(
    reference: TargetFacts,
    taps: Sequence[int],
    features: Sequence[Tensor],
    some: Sequence[Sequence[int]],
    *,
    dtype: torch.dtype,
    device: str,
) -> dict[str, Any]:
    """Return the relative error of the target's features by tap, on the same prompts and in the same format."""
    target = FeatureTarget(reference, taps, dtype=dtype, device=device)
    errors = tap_errors(taps, features, training_features(target, some))
    return {
        "target": reference.name,
        "revision": reference.revision,
        "taps": [{"tap": tap, "relative_error": error} for tap, error in errors.items()],
    }
