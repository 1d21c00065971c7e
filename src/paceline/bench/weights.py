"""The random weights of a measured step: ours and those of peers are the same, so their first losses are, too."""

import torch

from paceline.bench.shapes import Shape
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import Drafter


def random_drafter(shape: Shape, device: torch.device) -> Drafter:
    """Return a float32 drafter as a run begins with one."""
    return Drafter(shape.drafter, shape.hidden_size).initialise(0).to(device)


def random_ends(shape: Shape, device: torch.device, dtype: torch.dtype) -> FrozenEnds:
    """Return embedding and head, one tensor or two."""
    generator = torch.Generator(device=device).manual_seed(1)
    embed_VH = torch.randn(shape.vocab_size, shape.hidden_size, device=device, generator=generator).to(dtype) * 0.02
    return FrozenEnds(embed_VH, embed_VH if shape.tied else embed_VH.clone())
