"""`paceline bench decode`: speculative and plain decoding, one prompt at a time, against the `dflash` package's loop.

Both sides have the same weights, prompts and limits, are greedy, and take turns; a time is that of whole completions,
prompt passes included, with the device's work done. One pass of each comes first and does not count: it allocates,
and captures graphs.

Without a run the weights are random, and either no draft is right or, with `right`, every one: the final norms of
target and drafter are zeros then, so both always say token 0, at the cost of any other.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import nn

from paceline.bench.dflash_peer import DflashLoop, peer_version
from paceline.bench.generate import random_model, random_prompts
from paceline.checkpoint.drafter import DrafterMeta, find_drafter
from paceline.config import DrafterSettings
from paceline.data.prompt_file import as_prompts, encode_prompts
from paceline.decode.engine import Engine
from paceline.decode.prompts import reach_for
from paceline.decode.requests import Request
from paceline.decode.rows import wait
from paceline.decode.sampling import GREEDY
from paceline.decode.stats import Stats
from paceline.decode.steps import Drafts
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import Drafter
from paceline.observe.console import Console
from paceline.records import Completion
from paceline.runtime.devices import device_name
from paceline.runtime.linear import twin
from paceline.target.conventions import find_conventions
from paceline.target.load import describe, load_causal, load_tokenizer
from paceline.target.model import DecodingTarget

SMALL = {"layers": 2, "block_size": 8, "taps": (1, 8, 14, 20, 27), "mask_token_id": 3}
LARGE = {"layers": 5, "block_size": 16, "taps": (1, 9, 17, 25, 33), "mask_token_id": 151_669}


@dataclass(frozen=True, slots=True)
class Work:
    """What is measured."""

    shape: str  # smollm2 or qwen3-8b, or a run's folder
    right: bool  # with random weights: every draft is right
    prompt_file: Path | None  # of a run
    device: str
    dtype: str
    prompts: int
    tokens: int
    repeats: int
    captured: bool


@dataclass(frozen=True, slots=True, eq=False)
class Models:
    """Target and drafter, loaded, and what is asked of them."""

    model: Any  # transformers' own
    drafter: Drafter
    meta: DrafterMeta
    prompts: list[list[int]]
    stop_ids: tuple[int, ...]


Side = Callable[[Sequence[int]], Completion]


def bench_decode(work: Work, console: Console) -> dict[str, Any]:
    """Measure both sides and return tokens a second, acceptance lengths and ratios."""
    device = torch.device(work.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    console.stage(f"{work.shape} on {work.device} in {work.dtype}")
    models = _run(work) if work.prompt_file else _random(work)
    sides = _ours(models, work)
    peer = peer_version()
    if peer is None:
        console.line("dflash is not installed, so there is nothing to compare with: pip install --no-deps dflash")
    else:
        sides |= _theirs(models, work)
    done: dict[str, list[Completion]] = {}
    for name, side in sides.items():
        console.stage(f"{name}: a pass that does not count")
        done[name] = [side(prompt) for prompt in models.prompts]
    seconds = _times(sides, models.prompts, device, work.repeats, console)
    return {
        "shape": work.shape,
        "drafts": "the run's" if work.prompt_file else "all right" if work.right else "none right",
        "device": device_name(device),
        "torch": torch.__version__,
        "dflash_version": peer,
        "dtype": work.dtype,
        "captured": work.captured,
        "block_size": models.meta.settings.block_size,
        "prompts": len(models.prompts),
        "tokens": work.tokens,
        "repeats": work.repeats,
        "counted": "whole completions one at a time, prompt passes included, on both sides",
        **_figures(done, seconds),
    }


def _run(work: Work) -> Models:
    assert work.prompt_file is not None
    run = Path(work.shape)
    found = find_drafter(run)
    meta = found.meta
    facts = describe(meta.target)
    dtype = getattr(torch, work.dtype)
    asked = encode_prompts(
        load_tokenizer(meta.target),
        as_prompts(work.prompt_file)[: work.prompts],
        max_new_tokens=work.tokens,
        max_positions=facts.max_positions,
    )
    drafter = Drafter.from_weights(meta.settings, meta.hidden_size, found.weights()).to(work.device, dtype)
    model = load_causal(facts, dtype=dtype, device=work.device)
    return Models(model, drafter, meta, [list(prompt) for prompt in asked], facts.eos_ids)


def _random(work: Work) -> Models:
    torch.manual_seed(0)
    model = random_model(work.shape, work.device, work.dtype)
    config = model.config
    of_target = {
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "rope_theta": config.rope_parameters["rope_theta"],
    }
    settings = DrafterSettings.model_validate(of_target | (SMALL if work.shape == "smollm2" else LARGE))
    drafter = Drafter(settings, config.hidden_size).initialise(0).eval().requires_grad_(False)
    drafter = drafter.to(work.device, getattr(torch, work.dtype))
    if work.right:
        for norm in (drafter.norm, model.model.norm):
            nn.init.zeros_(norm.weight)
    meta = DrafterMeta(
        settings=settings,
        target=work.shape,
        target_revision="random",
        num_target_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        steps=0,
    )
    return Models(model, drafter, meta, random_prompts(work.prompts, config.vocab_size), ())


def _ours(models: Models, work: Work) -> dict[str, Side]:
    taps = models.meta.settings.taps
    target = DecodingTarget.around(twin(models.model), models.stop_ids, taps)
    does = find_conventions(models.model.config.get_text_config(), type(models.model).__name__)
    tables = (models.model.get_input_embeddings().weight, models.model.get_output_embeddings().weight)
    ends = FrozenEnds(*tables, does.embed_scale, does.logit_cap)
    slots = reach_for(max(map(len, models.prompts)) + work.tokens)

    def side(drafts: Drafts | None) -> Side:
        engine = Engine(target, GREEDY, rows=1, slots=slots, drafts=drafts, captured=work.captured)

        def complete(prompt: Sequence[int]) -> Completion:
            engine.stats = Stats()
            return next(completion for _, completion in engine.run([Request(0, prompt, work.tokens)]))

        return complete

    return {"ours": side(Drafts(models.drafter, ends)), "ours_plain": side(None)}


def _theirs(models: Models, work: Work) -> dict[str, Side]:
    loop = DflashLoop(models.model, models.drafter, models.meta)

    def side(plain: bool) -> Side:
        return lambda prompt: loop.complete(prompt, work.tokens, models.stop_ids, plain=plain)

    return {"dflash": side(False), "dflash_plain": side(True)}


def _times(
    sides: dict[str, Side], prompts: Sequence[Sequence[int]], device: torch.device, repeats: int, console: Console
) -> dict[str, list[float]]:
    """Return the seconds of each side in each repeat. Sides take turns prompt by prompt, so that a machine that slows
    down slows all of them, and begin with another one in each repeat."""
    seconds: dict[str, list[float]] = {name: [0.0] * repeats for name in sides}
    for repeat in range(repeats):
        console.stage(f"repeat {repeat + 1} of {repeats}")
        names = list(sides)
        names = names[repeat % len(names) :] + names[: repeat % len(names)]
        for prompt in prompts:
            for name in names:
                wait(device)
                began = time.perf_counter()
                sides[name](prompt)
                wait(device)
                seconds[name][repeat] += time.perf_counter() - began
    return seconds


def _figures(done: dict[str, list[Completion]], seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return medians over repeats; a ratio is the median of the repeats' own ratios."""
    figures: dict[str, Any] = {}
    for name, completions in done.items():
        cycles = [c.acceptance_lengths for c in completions if c.acceptance_lengths]
        figures[name] = {"tokens_per_s": round(sum(len(c.token_ids) for c in completions) / median(seconds[name]), 2)}
        if cycles:
            figures[name] |= {
                "tau": round(fmean(fmean(lengths) for lengths in cycles), 3),
                "cycles": sum(map(len, cycles)),
                "ms_a_cycle": round(1e3 * median(seconds[name]) / sum(map(len, cycles)), 3),
            }

    def ratio(slow: str, fast: str) -> float:
        a, b = (sum(len(c.token_ids) for c in done[name]) for name in (slow, fast))
        return round(median(b * x / (a * y) for x, y in zip(seconds[slow], seconds[fast], strict=True)), 3)

    figures["ours_over_ours_plain"] = ratio("ours_plain", "ours")
    if "dflash" in done:
        figures["ours_over_dflash"] = ratio("dflash", "ours")
        figures["ours_plain_over_dflash_plain"] = ratio("dflash_plain", "ours_plain")
        figures["dflash_over_dflash_plain"] = ratio("dflash_plain", "dflash")
        pairs = list(zip(done["ours"], done["dflash"], strict=True))
        figures["same_completions"] = sum(a.token_ids == b.token_ids for a, b in pairs)
        figures["same_cycles"] = sum(a.acceptance_lengths == b.acceptance_lengths for a, b in pairs)
    return figures
