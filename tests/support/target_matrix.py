"""What works with each family of targets and what is refused: every check raises where the truth is another.

Run as a program it writes the table of docs/targets.md anew.
"""

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from families import EOS, FAMILIES, MASK, VOCAB, Family, save
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from paceline import blocks
from paceline.config import DataSettings, DrafterSettings, TrainSettings
from paceline.decode.draft import DraftSession
from paceline.decode.speculate import speculate
from paceline.drafter.model import Drafter, rotary
from paceline.formats.zlab import export_zlab
from paceline.recipes.init import drafter_for
from paceline.recipes.target_checks import check_data
from paceline.recipes.train_facts import drafter_meta
from paceline.records import BlockSet, FeatureBatch, TokenBatch, UserError
from paceline.target.load import TargetFacts, describe, load_ends
from paceline.target.model import DecodingTarget, FeatureTarget
from paceline.target.self_check import check_features
from paceline.train.step import DrafterStep

DOCUMENT = Path(__file__).parents[2] / "docs" / "targets.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
COMMAND = ".venv/bin/python tests/support/target_matrix.py"
NEW = 24
NEAR = {"rtol": 1e-3, "atol": 1e-3}  # in float32; a token that should not be seen is worth hundreds of times that


@dataclass
class Examined:
    """A family's tiny target and what the checks share of it."""

    family: Family
    folder: Path
    block: int = 4
    trained: Drafter | None = field(default=None, init=False)

    @cached_property
    def facts(self) -> TargetFacts:
        """The target as paceline sees it."""
        return describe(str(self.folder))

    @cached_property
    def shape(self) -> DrafterSettings:
        """The drafter that `paceline init` would write, but small, with the taps of the first and last layers."""
        taps = (0, 2, self.facts.num_layers - 2)
        return drafter_for(self.facts, mask_token_id=MASK, layers=2, block_size=self.block, taps=taps)

    def stock(self, dtype: torch.dtype) -> Any:
        """The model as transformers loads it."""
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype)

    def alone(self, samples: Sequence[torch.Tensor]) -> torch.Tensor:
        """The stock model's hidden states behind the tapped layers, each sample by itself."""
        stock, parts = self.stock(torch.float32), []
        for sample in samples:
            hidden = stock(sample[None], output_hidden_states=True).hidden_states
            parts.append(torch.cat([hidden[tap + 1][0] for tap in self.shape.taps], dim=-1))
        return torch.cat(parts).detach()

    def features(self, batch: TokenBatch, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Features as training captures them, behind the check that a run makes at load."""
        target = FeatureTarget(self.facts, self.shape.taps, dtype=dtype, device="cpu")
        check_features(target, self.family.name, packed=batch.packed)
        return target.features(batch)


def batch_of(samples: Sequence[torch.Tensor], *, packed: bool = False, width: int | None = None) -> TokenBatch:
    """A micro-batch: a row a sample, or all in one, padded to a width, with one block behind each second token."""
    lengths = tuple(map(len, samples))
    ids = torch.zeros(1 if packed else len(samples), width or (sum(lengths) if packed else max(lengths))).long()
    places, starts, anchors = [], [], []
    for at, sample in enumerate(samples):
        begin = sum(lengths[:at]) if packed else at * ids.shape[1]
        ids.view(-1)[begin : begin + len(sample)] = sample
        places += range(begin, begin + len(sample))
        for anchor in range(1, len(sample) - 4, 2):
            starts.append(sum(lengths[:at]))
            anchors.append(sum(lengths[:at]) + anchor)
    flat, start, anchor = torch.cat(list(samples)), torch.tensor(starts), torch.tensor(anchors)
    labels = flat[anchor[:, None] + torch.arange(4)] if anchors else torch.zeros(0, 4).long()
    valid = torch.ones_like(labels, dtype=torch.bool)
    valid[:, 0] = False
    made = BlockSet(start, anchor, anchor - start, flat[anchor] if anchors else anchor, labels, valid)
    return TokenBatch(0, 0, 0, True, tuple(range(len(samples))), ids, lengths, torch.tensor(places), made)


def _samples() -> list[torch.Tensor]:
    """Longer than the windows, one as short as can be, two with the same beginning."""
    generator = torch.Generator().manual_seed(1)
    samples = [torch.randint(4, VOCAB, (n,), generator=generator) for n in (9, 27, 1, 4)]
    return [*samples, torch.cat([samples[1][:6], samples[0]])]


def taps(one: Examined) -> None:
    """Features are the stock model's hidden states, and the same in trimmed and in bucketed batches."""
    samples = _samples()
    wanted = one.alone(samples)
    for width in (None, 64):
        torch.testing.assert_close(one.features(batch_of(samples, width=width)), wanted, **NEAR)


def packed(one: Examined) -> None:
    """Features are the stock model's for samples that share a row."""
    samples = _samples()
    check_data(one.facts.conventions, DataSettings(dataset="", layout="packed"), one.family.name)
    for width in (None, 64):
        found = one.features(batch_of(samples, packed=True, width=width))
        torch.testing.assert_close(found, one.alone(samples), **NEAR)


def ends(one: Examined) -> None:
    """Embedding and head do what the stock model's do; rope and heads are those of published drafters."""
    stock, ids = one.stock(torch.float32), torch.tensor([[5, 9, 100, 9]])
    out = stock(ids, output_hidden_states=True)
    ours = load_ends(one.facts).to("cpu", torch.float32)
    torch.testing.assert_close(ours.embed(ids), out.hidden_states[0], **NEAR)
    torch.testing.assert_close(ours.logits(out.hidden_states[-1]), out.logits, **NEAR)
    shape = one.shape
    assert (shape.rope_theta, (shape.heads, shape.kv_heads, shape.head_dim)) == (one.family.theta, one.family.heads)
    angle = 7 * one.family.theta ** (-2 / shape.head_dim)  # of the second pair, whole head turned, halves layout
    cos, _ = rotary(torch.tensor([[7]]), shape.head_dim, shape.rope_theta, torch.float32)
    for at in (1, 1 + shape.head_dim // 2):
        torch.testing.assert_close(cos[0, 0, 0, at], torch.tensor(angle).cos())


def training(one: Examined) -> None:
    """Ten steps on the same samples: losses are finite and fall."""
    samples = _samples()
    tokens = batch_of(samples)
    train = TrainSettings(context_slots=64, anchor_slots=32, anchors_per_sample=16, dtype="float32")
    one.trained = Drafter(one.shape, one.facts.hidden_size).initialise(0)
    step = DrafterStep(one.trained, load_ends(one.facts), train)
    features = one.features(tokens, torch.float32)
    losses = []
    for _ in range(10):
        step.clear()
        step.load(FeatureBatch(tokens, features, blocks.context_positions(tokens.lengths)))
        step.micro()
        step.update(1e-3)
        losses.append(step.report(tokens, 0.0).loss)
    assert all(torch.tensor(losses).isfinite()), losses
    assert losses[-1] < losses[0], losses


def decoding(one: Examined) -> None:
    """Speculative text is what the stock model's `generate` writes, with the drafter and with half-right drafts."""
    target = DecodingTarget(one.facts, one.shape.taps, dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(4, VOCAB, (n,), generator=generator).tolist() for n in (5, 14, 9)]
    stock, asked = one.stock(torch.float32), {"max_new_tokens": NEW + 4, "do_sample": False, "pad_token_id": 0}
    texts = [stock.generate(torch.tensor([prompt]), eos_token_id=EOS, **asked)[0].tolist() for prompt in prompts]

    def guess(_session: Any, ids_R: Any, anchors_R: Any, _sizes: Any, _reach: int) -> torch.Tensor:
        rows = []
        for token, at in zip(ids_R.tolist(), anchors_R.tolist(), strict=True):
            text = next((text for text in texts if text[at : at + 1] == [token]), [])
            future = (text[at + 1 : at + one.block] + [9] * one.block)[: one.block - 1]
            rows.append([9 if (at + slot) % 5 == 0 else drafted for slot, drafted in enumerate(future)])
        return torch.tensor(rows)

    drafter = one.trained or Drafter(one.shape, one.facts.hidden_size).initialise(0)
    for propose in (DraftSession.propose, guess):
        with mock.patch.object(DraftSession, "propose", propose):
            how = {"max_new_tokens": NEW, "rows": 2}
            done = dict(speculate(target, drafter.eval(), load_ends(one.facts), prompts, **how))
        for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
            assert [*prompt, *done[index].token_ids] == text[: len(prompt) + NEW]
    assert max(n for c in done.values() for n in c.acceptance_lengths) == one.block  # of the half-right ones


def exporting(one: Examined) -> None:
    """The z-lab folder reads as a plain Qwen3 body, with what the target does at its ends, and holds the weights."""
    drafter = one.trained or Drafter(one.shape, one.facts.hidden_size).initialise(0)
    meta = drafter_meta(one.shape, one.facts, 10)
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "export"
        export_zlab(drafter, meta, out, dtype=torch.float32, card="# card\n", max_shard_bytes=10**9)
        config, weights = AutoConfig.from_pretrained(out), load_file(out / "model.safetensors")
    assert (config.model_type, config.rope_parameters) == (
        "qwen3",
        {"rope_type": "default", "rope_theta": one.family.theta},
    )
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == one.family.heads
    again = Drafter.from_weights(one.shape, config.hidden_size, weights)
    for name, parameter in drafter.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter)
    stock = one.stock(torch.float32).config.get_text_config()
    scaled = {"input_embedding_scale": stock.hidden_size**0.5} if "gemma" in stock.model_type else {}
    cap = getattr(stock, "final_logit_softcapping", None)
    keys = ("input_embedding_scale", "final_logit_softcapping")
    told = {key: config.dflash_config[key] for key in keys if key in config.dflash_config}
    assert told == scaled | ({"final_logit_softcapping": cap} if cap else {})


CHECKS: dict[str, Callable[[Examined], None]] = {
    "features": taps,
    "packed rows": packed,
    "ends, rope, heads": ends,
    "training": training,
    "decoding": decoding,
    "export": exporting,
}


def examine(family: Family, place: Path) -> dict[str, str | None]:
    """Return for each check None, which is proven, or why it is refused; what is neither raises."""
    one = Examined(family, save(family, place))
    found: dict[str, str | None] = {}
    for name, check in CHECKS.items():
        try:
            check(one)
            found[name] = None
        except UserError as refused:
            found[name] = str(refused).replace(str(place), family.name)
    return found


def row_of(family: Family, found: dict[str, str | None]) -> str:
    """Return a family's line of the table."""
    return (
        f"| {family.name} | {family.peculiar} | {' | '.join('refused' if why else 'works' for why in found.values())} |"
    )


def reasons_of(found: dict[str, str | None]) -> list[str]:
    """Return why a family is refused what it is, a line each."""
    return [f"- {why}" for why in found.values() if why]


def write(document: Path = DOCUMENT) -> None:
    """Write the table and its reasons anew."""
    names = ["family", "peculiar", *CHECKS]
    rows, reasons = [], []
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as place:
            found = examine(family, Path(place))
        rows.append(row_of(family, found))
        reasons += reasons_of(found)
    table = [
        f"| {' | '.join(names)} |",
        f"|{' --- |' * len(names)}",
        *rows,
        "",
        "What is refused, and why:",
        "",
        *reasons,
    ]
    head, _, rest = document.read_text().partition(BEGIN)
    document.write_text("\n".join([head + BEGIN, *table, END]) + rest.partition(END)[2])


if __name__ == "__main__":
    from transformers.utils import logging

    logging.disable_progress_bar()
    write()
    sys.exit(0)
