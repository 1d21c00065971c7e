"""A small drafter, and where its exports lie."""

from pathlib import Path

import pytest
import torch
from small_drafter import META, SHAPE, H, V

from paceline.checkpoint.drafter import DrafterMeta
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import Drafter
from paceline.formats.speculators import export_speculators
from paceline.formats.zlab import export_zlab


@pytest.fixture
def meta() -> DrafterMeta:
    return META


@pytest.fixture
def drafter() -> Drafter:
    """Norms are no ones, so that one in the place of another is seen."""
    drafter = Drafter(SHAPE, H).initialise(0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 1:
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
    return drafter


@pytest.fixture
def ends() -> FrozenEnds:
    """A head that is not the embedding."""
    generator = torch.Generator().manual_seed(1)
    return FrozenEnds(torch.randn(V, H, generator=generator), torch.randn(V, H, generator=generator))


@pytest.fixture
def zlab(drafter: Drafter, tmp_path: Path) -> Path:
    folder = tmp_path / "zlab"
    export_zlab(drafter, META, folder, dtype=torch.float32, card="# card\n", max_shard_bytes=10**9)
    return folder


@pytest.fixture
def speculators(drafter: Drafter, ends: FrozenEnds, tmp_path: Path) -> Path:
    folder = tmp_path / "speculators"
    export_speculators(
        drafter,
        META,
        ends,
        folder,
        verifier="org/target",
        verifier_architectures=["Qwen3ForCausalLM"],
        dtype=torch.float32,
        card="# card\n",
        max_shard_bytes=10**9,
    )
    return folder
