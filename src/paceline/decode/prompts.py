"""Prompts laid out as one right-padded batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.records import UserError


def check_prompts(prompts: Sequence[Sequence[int]]) -> None:
    """Refuse an empty prompt, where there is nothing to continue, and an empty list of them.

    Raises:
        UserError: there is no prompt, or one has no tokens.
    """
    if not prompts:
        raise UserError("There must be at least one prompt to decode, got none. Name a file that holds prompts.")
    empty = [i for i, prompt in enumerate(prompts) if len(prompt) == 0]
    if empty:
        raise UserError(f"Prompt {empty[0] + 1} of {len(prompts)} has no tokens. Remove it or give it text.")


def pad_right(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids [R, T] padded with 0, positions [R, T] and the place of each prompt's last token [R]."""
    longest = max(len(prompt) for prompt in prompts)
    ids_RT = torch.tensor([list(prompt) + [0] * (longest - len(prompt)) for prompt in prompts], device=device)
    positions_RT = torch.arange(longest, device=device).expand(len(prompts), longest)
    last_R = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
    return ids_RT, positions_RT, last_R


def reach_for(longest: int, step: int = 64) -> int:
    """Round a length up, so that cache reads have few distinct shapes."""
    return -(-longest // step) * step
