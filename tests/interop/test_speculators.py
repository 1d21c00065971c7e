"""Exported drafters in PyPI's speculators 0.9.0, in a virtual environment of its own.

Its own classes load and validate the folder that `paceline export --format speculators` writes; its converter makes the
same of the z-lab folder; and its forward gives our hidden states and logits in float32, over blocks that read features
and see each other as it trains them. peer_speculators.py does that there.
"""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.blocks import block_ids, block_positions
from paceline.checkpoint.drafter import save_drafter
from paceline.config import DrafterSettings
from paceline.drafter.attention import Dense
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import Drafter
from paceline.formats.warm_start import open_warm_start
from paceline.recipes.export import export_all
from paceline.recipes.train_facts import drafter_meta
from paceline.target.load import TargetFacts, describe, load_ends

pytestmark = pytest.mark.interop

PEER = Path(__file__).with_name("peer_speculators.py")
TOLERANCE = 1e-4
S, ANCHORS = 90, [1, 7, 40, 41, 66, 80]
THETA = 20000.0

# No value is the package's default where a key is missing, and the head width is not width / heads.
SHAPES = {
    "tiny_folder": {"block_size": 4, "layers": 2, "taps": (0, 2, 4), "heads": 4, "kv_heads": 2, "head_dim": 32},
    "tied_folder": {"block_size": 6, "layers": 3, "taps": (0, 3), "heads": 6, "kv_heads": 2, "head_dim": 16},
}


@dataclass(frozen=True)
class Exchange:
    """One exported drafter in both."""

    drafter: Drafter
    ends: FrozenEnds
    facts: TargetFacts
    work: Path
    reply: dict[str, Any]
    tensors: dict[str, Tensor]
    ours: dict[str, Tensor]

    def loaded(self, which: str) -> dict[str, Tensor]:
        return {k.removeprefix(f"{which}."): v for k, v in self.tensors.items() if k.startswith(f"{which}.")}


@pytest.fixture(scope="module", params=["tiny_folder", "tied_folder"], ids=["untied", "tied"])
def exchange(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exchange:
    python = os.environ.get("PACELINE_SPECULATORS_PYTHON", "")
    if not Path(python).is_file():
        rule = f"PACELINE_SPECULATORS_PYTHON must name the Python of the package's environment, got {python!r}."
        pytest.fail(f"{rule} Run `make interop`, which sets it.", pytrace=False)
    work = tmp_path_factory.mktemp("speculators")
    facts = describe(str(copy_with_theta(request.getfixturevalue(request.param), work / "target")))
    more = {"mask_token_id": 3, "intermediate_size": 96, "rope_theta": THETA, "rms_norm_eps": 1e-5}
    drafter = random_drafter(DrafterSettings(**SHAPES[request.param], **more), facts)
    save_drafter(work / "run", drafter.state_dict(), drafter_meta(drafter.settings, facts, 0))
    told = export_all(work / "run", None, dtype="float32", overwrite=False)["folders"]
    folders = {folder["format"]: Path(folder["folder"]) for folder in told}
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(4, facts.vocab_size, (1, S), generator=generator)
    features = torch.randn(1, S, len(drafter.settings.taps) * facts.hidden_size, generator=generator)
    asked = {name: str(path) for name, path in folders.items()} | {"target": str(facts.folder), "anchors": ANCHORS}
    (work / "request.json").write_text(json.dumps(asked))
    save_file({"ids": ids, "features": features}, work / "request.safetensors")
    done = subprocess.run(
        [python, "-I", PEER, work],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, f"the peer ended with status {done.returncode}:\n{done.stderr[-4000:]}"
    reply, tensors = json.loads((work / "reply.json").read_text()), load_file(work / "reply.safetensors")
    ends = load_ends(facts)
    return Exchange(drafter, ends, facts, work, reply, tensors, blocks_of(drafter, ends, ids, features))


def copy_with_theta(source: Path, folder: Path) -> Path:
    """Copy a target with another rotary base: a drafter must have its target's, and the fixtures' is the default."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = THETA
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def random_drafter(settings: DrafterSettings, facts: TargetFacts) -> Drafter:
    """Return one whose norms are no ones, which would hide one in the place of another."""
    drafter = Drafter(settings, facts.hidden_size).initialise(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 1:
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
    return drafter.eval().requires_grad_(False)


def blocks_of(drafter: Drafter, ends: FrozenEnds, ids: Tensor, features: Tensor) -> dict[str, Tensor]:
    """Draft every block by itself, over the features before its anchor."""
    B, hidden = drafter.settings.block_size, []
    for anchor in ANCHORS:
        embeds = ends.embed(block_ids(ids[0, anchor : anchor + 1], drafter.settings.mask_token_id, B))
        context = drafter.context(features[:, :anchor], torch.arange(anchor)[None])
        seen = Dense(torch.ones(1, B, anchor + B, dtype=torch.bool))
        hidden.append(drafter(embeds, block_positions(torch.tensor([anchor]), B), context, seen))
    together = torch.cat(hidden, dim=1)
    return {"hidden": together, "logits": ends.logits(together)}


def test_the_package_gives_our_hidden_states_and_logits(exchange: Exchange) -> None:
    assert exchange.reply["versions"]["speculators"] == "0.9.0"
    for name, ours in exchange.ours.items():
        theirs = exchange.tensors[name]
        print(f"{name}: largest difference {float((ours - theirs).abs().max()):.1e} over {len(ANCHORS)} blocks")
        torch.testing.assert_close(theirs, ours, rtol=0, atol=TOLERANCE)
    assert float(exchange.ours["hidden"].std()) > 0.1  # there is something to compare


def test_the_package_validates_what_we_write_and_reads_it_as_meant(exchange: Exchange) -> None:
    shape, config = exchange.drafter.settings, exchange.reply["config"]
    read = {key: config[key] for key in ("block_size", "mask_token_id", "aux_hidden_state_layer_ids")}
    assert read == {
        "block_size": shape.block_size,
        "mask_token_id": 3,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in shape.taps],
    }
    assert config["draft_vocab_size"] == exchange.facts.vocab_size
    assert config["sample_from_anchor"] is False
    proposal = config["speculators_config"]["proposal_methods"][0]
    assert (proposal["proposal_type"], proposal["speculative_tokens"]) == ("greedy", shape.block_size - 1)
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(exchange.facts.folder)


def test_the_package_finds_every_tensor_and_no_other(exchange: Exchange) -> None:
    assert exchange.reply["unexpected"] == {"loaded": [], "converted": []}
    own = ["verifier_lm_head.weight", "verifier_norm.weight"]  # the target's, which it fetches there
    assert exchange.reply["missing"]["loaded"] == own
    assert exchange.reply["missing"]["converted"] == ["embed_tokens.weight", "lm_head.weight", *own]


def test_its_converter_makes_the_same_of_our_z_lab_folder(exchange: Exchange) -> None:
    loaded, converted = exchange.loaded("loaded"), exchange.loaded("converted")
    assert loaded.keys() == converted.keys()
    assert all(torch.equal(loaded[name], converted[name]) for name in loaded)
    for name, parameter in exchange.drafter.named_parameters():
        assert torch.equal(loaded[name], parameter)
    assert torch.equal(loaded["embed_tokens.weight"], exchange.ends.embed_VH)
    assert torch.equal(loaded["lm_head.weight"], exchange.ends.head_VH)


def test_its_converter_writes_the_same_configuration_but_for_causality(exchange: Exchange) -> None:
    """Where it differs, ours is what vLLM has to read: blocks that are seen whole."""
    ours, theirs = exchange.reply["config"], exchange.reply["converted"]
    keys = set(ours) | set(theirs)
    differ = {key for key in keys if ours.get(key) != theirs.get(key)}
    assert differ <= {
        "sliding_window_non_causal",
        "transformer_layer_config",
        "architectures",
        "auto_map",
        "_name_or_path",
    }
    assert (ours["sliding_window_non_causal"], theirs["sliding_window_non_causal"]) == (True, False)
    inner, copied = ours["transformer_layer_config"], theirs["transformer_layer_config"]
    apart = {key for key in set(inner) | set(copied) if inner.get(key) != copied.get(key)}
    assert apart <= {"mask_token_id", "target_layer_ids", "dtype", "_name_or_path"}  # copied from the z-lab folder


def test_a_run_can_start_from_what_the_package_wrote(exchange: Exchange) -> None:
    facts, drafter = exchange.facts, exchange.drafter
    warm = open_warm_start(
        exchange.work / "converted",
        drafter.settings,
        target=facts.name,
        num_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
    )
    assert (warm.layout, warm.notes) == ("speculators", ())
    found = warm.fill(Drafter(drafter.settings, facts.hidden_size))
    theirs = dict(drafter.named_parameters())
    assert all(torch.equal(parameter, theirs[name]) for name, parameter in found.named_parameters())


def test_transformers_alone_knows_the_z_lab_folder_as_qwen3(exchange: Exchange) -> None:
    assert exchange.reply["auto"]["zlab"] == "Qwen3Config"
    # A speculators folder has no model_type, whoever writes it: it is for the package.
    assert exchange.reply["auto"]["speculators"].startswith("ValueError: Unrecognized model")
