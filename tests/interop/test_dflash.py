"""Exported drafters in the reference implementation: PyPI's dflash 0.1.0, in a virtual environment of its own.

Two small runs are trained and exported by the recipes behind `paceline train` and `paceline export`, and one untrained
drafter of a real model; peer_dflash.py loads the folders there. Compared with ours, in float32: which weights the peer
loads and how it reads the configuration, its hidden states, and the tokens and acceptance lengths of its own loop
against `speculate`.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline import blocks
from paceline.checkpoint.drafter import DrafterMeta, find_drafter, save_drafter
from paceline.config import DrafterSettings, RunSettings
from paceline.data.chat import prompt_ids
from paceline.data.manifest import Origin, tokenizer_fingerprint
from paceline.data.writer import writing
from paceline.decode.draft import DraftSession
from paceline.decode.evaluate import acceptance
from paceline.decode.generate import generate
from paceline.decode.speculate import speculate
from paceline.drafter.attention import Dense
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import Drafter
from paceline.observe.console import Console
from paceline.recipes.export import export
from paceline.recipes.init import drafter_for
from paceline.recipes.mask_token import choose_mask_token
from paceline.recipes.train import train
from paceline.records import Completion
from paceline.runtime.profile import cache_folder
from paceline.target.load import TargetFacts, describe, load_ends, load_tokenizer
from paceline.target.model import DecodingTarget
from paceline.target.smollm2 import fetch_smollm2

pytestmark = pytest.mark.interop

PEER = Path(__file__).with_name("peer_dflash.py")
MASK = 3  # the tiny tokenizers' mask token
NEW = 48
TOLERANCE = 1e-4

# No value is what the peer falls back to where a key is missing: blocks of 16, taps by formula from the number of
# drafter layers, theta 10,000, eps 1e-6, heads of width / heads.
SHAPES = {
    "tiny_folder": DrafterSettings(
        block_size=4,
        layers=2,
        taps=(0, 2, 4),
        mask_token_id=MASK,
        heads=4,
        kv_heads=2,
        head_dim=32,
        intermediate_size=96,
        rope_theta=20000.0,
        rms_norm_eps=1e-5,
    ),
    "tied_folder": DrafterSettings(
        block_size=8,
        layers=3,
        taps=(0, 3),
        mask_token_id=MASK,
        heads=6,
        kv_heads=2,
        head_dim=16,
        intermediate_size=80,
        rope_theta=500.0,
        rms_norm_eps=1e-5,
    ),
}


@dataclass(frozen=True)
class Group:
    """Prompts that are decoded under the same rules."""

    prompts: list[list[int]]
    max_new_tokens: int
    stop_ids: list[int]


@dataclass(frozen=True)
class Exchange:
    """One exported drafter in both implementations."""

    facts: TargetFacts
    run: Path
    exported: dict[str, Any]  # what the export says it wrote
    groups: list[Group]
    hidden: dict[str, tuple[Tensor, Tensor]]  # ours, the peer's
    reply: dict[str, Any]
    inv_freq: Tensor  # the peer's

    def difference(self) -> float:
        """Largest difference of a hidden state."""
        return max(float((ours - peers).abs().max()) for ours, peers in self.hidden.values())


# ------------------------------------------------------------------------------------------------------------ the peer


@pytest.fixture(scope="session")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[dict[str, Any], dict[str, Tensor]]]:
    """Return a function that asks the peer; see peer_dflash.py for questions and answers."""
    python = os.environ.get("PACELINE_INTEROP_PYTHON", "")
    if not Path(python).is_file():
        rule = f"PACELINE_INTEROP_PYTHON must name the Python of the peer's environment, got {python!r}."
        pytest.fail(f"{rule} Run `make interop`, which sets it.", pytrace=False)

    def ask(request: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        folder = tmp_path_factory.mktemp("peer")
        (folder / "request.json").write_text(json.dumps(request))
        save_file(tensors, folder / "request.safetensors")
        done = subprocess.run(
            [python, "-I", PEER, folder],  # -I: nothing of ours can be imported by accident
            capture_output=True,
            text=True,
            timeout=240,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        assert done.returncode == 0, f"the peer ended with status {done.returncode}:\n{done.stderr[-4000:]}"
        return json.loads((folder / "reply.json").read_text()), load_file(folder / "reply.safetensors")

    return ask


def exchange(peer: Callable[..., Any], run: Path, facts: TargetFacts, groups: list[Group]) -> Exchange:
    """Export a run and have the peer draft and generate with it."""
    exported = export(run, None, dtype="float32", overwrite=False)
    drafter, ends = load_drafter(run), load_ends(facts)
    generator = torch.Generator().manual_seed(5)
    sessions, tensors, ours = [], {}, {}
    for session, inputs, hidden in [
        *single_blocks(drafter, facts, generator),
        *growing_contexts(drafter, ends, facts, generator),
    ]:
        sessions.append(session)
        tensors |= inputs
        ours |= hidden
    request = {
        "drafter": exported["folder"],
        "target": str(facts.folder),
        "hidden": sessions,
        "generate": [asdict(group) for group in groups],
    }
    reply, theirs = peer(request, tensors)
    inv_freq = theirs.pop("inv_freq")
    assert ours.keys() == theirs.keys()
    hidden = {key: (ours[key], theirs[key]) for key in ours}
    return Exchange(facts, run, exported, groups, hidden, reply, inv_freq)


def load_drafter(run: Path) -> Drafter:
    found = find_drafter(run)
    return Drafter.from_weights(found.meta.settings, found.meta.hidden_size, found.weights())


Session = tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]  # for the peer, its inputs, our hidden states


@torch.inference_mode()
def single_blocks(drafter: Drafter, facts: TargetFacts, generator: torch.Generator) -> Iterator[Session]:
    """Yield whole and shortened blocks of random embeddings over random features at random ascending positions."""
    B, H = drafter.settings.block_size, drafter.hidden_size
    for context, slots in [(1, B), (7, B), (64, B), (200, B), (33, 2), (16, 1)]:
        key = f"context of {context}, {slots} slots"
        features = torch.randn(1, context, len(drafter.settings.taps) * H, generator=generator)
        embeds = torch.randn(1, slots, H, generator=generator)
        positions = torch.randperm(facts.max_positions, generator=generator)[: context + slots].sort().values[None]
        seen = Dense(torch.ones(1, slots, context + slots, dtype=torch.bool))
        hidden = drafter(embeds, positions[:, context:], drafter.context(features, positions[:, :context]), seen)
        inputs = {f"{key}.features": features, f"{key}.embeds": embeds, f"{key}.positions": positions}
        yield {"cached": False, "steps": [{"key": key}]}, inputs, {key: hidden}


@torch.inference_mode()
def growing_contexts(
    drafter: Drafter, ends: FrozenEnds, facts: TargetFacts, generator: torch.Generator
) -> Iterator[Session]:
    """Yield three rows that draft four blocks each over a cached context, all rows at once in ours.

    Ours takes the features of all slots, rejected ones too, as in decoding; the peer those of accepted tokens only.
    """
    B, D = drafter.settings.block_size, len(drafter.settings.taps) * drafter.hidden_size
    prompts = torch.tensor([2, 30, 9])
    R, longest = len(prompts), int(prompts.max())
    session = DraftSession(drafter, ends, R, slots=128)
    features_RTD = torch.randn(R, longest, D, generator=generator)
    session.extend(features_RTD, torch.arange(longest).expand(R, longest))
    rows: list[Session] = [({"cached": True, "steps": []}, {}, {}) for _ in range(R)]
    anchors_R = prompts
    new_R = prompts  # tokens of features_RTD that the peer has not seen and is to see
    for block in range(4):
        sizes_R = torch.full((R,), B) if block < 3 else torch.tensor([B, 2, B - 1])
        ids_R = torch.randint(4, facts.vocab_size, (R,), generator=generator)
        hidden_RBH = session.hidden(ids_R, anchors_R, sizes_R, reach=64)
        embeds_RBH = ends.embed(blocks.block_ids(ids_R, drafter.settings.mask_token_id, B))
        for r, (to_peer, inputs, hidden) in enumerate(rows):
            key, anchor, new, size = f"row {r}, block {block}", int(anchors_R[r]), int(new_R[r]), int(sizes_R[r])
            to_peer["steps"].append({"key": key, "keep": anchor})
            inputs[f"{key}.features"] = features_RTD[r : r + 1, :new].clone()
            inputs[f"{key}.embeds"] = embeds_RBH[r : r + 1, :size].clone()
            inputs[f"{key}.positions"] = torch.arange(anchor - new, anchor + size)[None]
            hidden[key] = hidden_RBH[r : r + 1, :size]
        features_RTD = torch.randn(R, B, D, generator=generator)
        session.extend(features_RTD, blocks.block_positions(anchors_R, B))
        new_R = torch.randint(1, B + 1, (R,), generator=generator)
        anchors_R = anchors_R + new_R
    yield from rows


# ------------------------------------------------------------------------------------------------------- trained runs


@pytest.fixture(scope="module", params=["tiny_folder", "tied_folder"], ids=["untied", "tied"])
def trained(request: pytest.FixtureRequest, peer: Callable[..., Any], tmp_path_factory: Any) -> Exchange:
    """A drafter trained on its target's own completions for some hundred steps, in both implementations."""
    work = tmp_path_factory.mktemp("trained")
    folder = copy_with_theta(request.getfixturevalue(request.param), work / "target", SHAPES[request.param].rope_theta)
    facts = describe(str(folder))
    generator = torch.Generator().manual_seed(11)
    lengths = torch.randint(2, 9, (64,), generator=generator).tolist()
    prompts = [torch.randint(4, facts.vocab_size, (n,), generator=generator).tolist() for n in lengths]
    target = DecodingTarget(facts, (), dtype=torch.float32, device="cpu")
    plain = sorted(generate(target, prompts, max_new_tokens=NEW, rows=64))
    usable = [c for _, c in plain if len(c.token_ids) > 1 and MASK not in c.token_ids]
    rows, unseen = usable[:24], [c for c in usable[24:] if c.finish == "length"][:3]
    whole = [c for c in rows if c.finish == "length"][:4]
    ended = [c for c in rows if c.finish == "stop"][:1]
    assert (len(whole), len(ended), len(unseen)) == (4, 1, 3)
    settings = RunSettings.model_validate(
        {
            "run_dir": str(work / "run"),
            "target": {"model": str(facts.folder), "dtype": "float32"},
            "drafter": SHAPES[request.param].model_dump(),
            "data": {"dataset": str(write(work / "dataset", facts, rows)), "align": 8, "max_batch": 4},
            "train": {
                "epochs": 40,
                "context_slots": 256,
                "anchor_slots": 48,
                "anchors_per_sample": 12,
                "dtype": "float32",
                "lr": 5e-3,
            },
        }
    )
    train(settings, console=Console(json=True))
    asked = [list(c.prompt_ids) for c in [*whole, *ended, *unseen]]
    eos = list(facts.eos_ids)
    stops = [*eos, whole[0].token_ids[0], whole[1].token_ids[10], unseen[0].token_ids[20]]
    groups = [Group(asked, NEW, eos), Group(asked, NEW, stops), *(Group(asked, limit, eos) for limit in (1, 2, 3, 11))]
    return exchange(peer, work / "run", facts, groups)


def copy_with_theta(source: Path, folder: Path, theta: float) -> Path:
    """Copy a target with another rotary base: a drafter must have its target's, and the fixtures' is the peer's own."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = theta
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write(folder: Path, facts: TargetFacts, completions: list[Completion]) -> Path:
    fingerprint = tokenizer_fingerprint(load_tokenizer(str(facts.folder)))
    origin = Origin(str(facts.folder), facts.revision, fingerprint, None, "given ids", MASK, [], {}, 0)
    with writing(folder) as writer:
        for c in completions:
            mask = np.arange(len(c.prompt_ids) + len(c.token_ids)) >= len(c.prompt_ids)
            writer.add(np.array([*c.prompt_ids, *c.token_ids]), mask, len(blocks.anchor_candidates(mask)))
        writer.complete(origin)
    return folder


def check_reading(exchange: Exchange) -> None:
    """Assert that the peer loaded every weight, and no other, and works with the values that we mean."""
    assert exchange.reply["versions"]["dflash"] == "0.1.0"
    assert {name: found for name, found in exchange.reply["loading"].items() if found} == {}
    assert {"missing_keys", "unexpected_keys", "mismatched_keys"} <= exchange.reply["loading"].keys()
    meta = find_drafter(exchange.run).meta
    shape = meta.settings
    read = dict(exchange.reply["config"])
    assert read.pop("rope").items() >= {"rope_type": "default", "rope_theta": shape.rope_theta}.items()
    assert read == {
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token_id,
        "target_layer_ids": list(shape.taps),
        "num_target_layers": exchange.facts.num_layers,
        "layers": shape.layers,
        "head_dim": shape.head_dim,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "attention_scaling": 1.0,
        "eps": [shape.rms_norm_eps],
        "is_causal": [False] * shape.layers,
        "sliding_window": [None] * shape.layers,
        "dtypes": ["torch.float32"],
        "parameters": exchange.exported["parameters"],
    }
    expected = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim)
    torch.testing.assert_close(exchange.inv_freq.double(), expected, rtol=1e-6, atol=0)


def check_generation(exchange: Exchange, rows: int) -> list[Completion]:
    """Assert equal tokens and acceptance lengths in every group; return ours of the first group."""
    facts, drafter, ends = exchange.facts, load_drafter(exchange.run), load_ends(exchange.facts)
    target = DecodingTarget(facts, drafter.settings.taps, dtype=torch.float32, device="cpu")
    first: list[Completion] = []
    for group, replies in zip(exchange.groups, exchange.reply["generate"], strict=True):
        target.stop_ids = tuple(group.stop_ids)
        ours = dict(speculate(target, drafter, ends, group.prompts, max_new_tokens=group.max_new_tokens, rows=rows))
        done = [ours[index] for index in range(len(group.prompts))]
        for completion, theirs in zip(done, replies, strict=True):
            assert list(completion.token_ids) == theirs["tokens"]
            assert list(completion.acceptance_lengths) == theirs["acceptance_lengths"]
        first = first or done
    return first


def test_the_peer_loads_every_weight_and_reads_the_configuration_as_meant(trained: Exchange) -> None:
    check_reading(trained)


def test_hidden_states_equal_the_peers(trained: Exchange) -> None:
    print(f"largest difference {trained.difference():.1e} over {len(trained.hidden)} blocks")
    for key, (ours, theirs) in trained.hidden.items():
        torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("rows", [1, 3])
def test_the_peers_loop_gives_the_same_tokens_and_acceptance_lengths(trained: Exchange, rows: int) -> None:
    done = check_generation(trained, rows)
    B = find_drafter(trained.run).meta.settings.block_size
    theirs = [reply["acceptance_lengths"] for reply in trained.reply["generate"][0]]
    tau = acceptance(done, B).tau
    assert tau == pytest.approx(fmean(fmean(lengths) for lengths in theirs if lengths))
    print(f"acceptance {tau:.2f} of {B}: {theirs}")


def test_the_comparison_sees_accepted_and_rejected_drafts_and_every_kind_of_end(trained: Exchange) -> None:
    B = find_drafter(trained.run).meta.settings.block_size
    long, stopped, *limited = trained.reply["generate"]
    lengths = [length for reply in long for length in reply["acceptance_lengths"]]
    assert 1.3 < fmean(lengths) < B  # over all cycles
    assert {1, B} < set(lengths)
    assert sum(1 < length < B for reply in long for length in reply["acceptance_lengths"][:-1]) >= 5  # partly right
    # a stop token as the first token, inside a block, and never
    assert [reply["acceptance_lengths"] for reply in stopped].count([]) >= 1
    assert sum(len(a["tokens"]) < len(b["tokens"]) for a, b in zip(stopped, long, strict=True)) >= 3
    assert any(len(reply["tokens"]) == NEW for reply in long)
    for group, replies in zip(trained.groups[2:], limited, strict=True):
        assert max(len(reply["tokens"]) for reply in replies) == group.max_new_tokens


# ------------------------------------------------------------------------------------------------------- a real target


def test_an_untrained_drafter_of_smollm2_is_the_same_in_the_peer(peer: Callable[..., Any], tmp_path: Path) -> None:
    folder = fetch_smollm2(cache_folder(), lambda text: None)
    facts = describe(str(folder))
    shape = drafter_for(facts, mask_token_id=choose_mask_token(facts, None), layers=2, block_size=8)
    drafter = Drafter(shape, facts.hidden_size).initialise(0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.ndim == 1:  # norms start as ones, which would hide one in the place of another
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
    meta = DrafterMeta(
        settings=shape,
        target=str(folder),
        target_revision=facts.revision,
        num_target_layers=facts.num_layers,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        max_positions=facts.max_positions,
        steps=0,
    )
    save_drafter(tmp_path, drafter.state_dict(), meta)
    prompt = prompt_ids(load_tokenizer(str(folder)), [{"role": "user", "content": "What is 12 + 30?"}])
    done = exchange(peer, tmp_path, facts, [Group([prompt], 16, list(facts.eos_ids))])
    check_reading(done)
    print(f"largest difference {done.difference():.1e} over {len(done.hidden)} blocks")
    assert done.difference() <= TOLERANCE
    check_generation(done, rows=1)
