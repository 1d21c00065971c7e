"""`paceline bench generate`: the decoding engine against transformers' own generate, and against what memory allows.

Weights are random and nothing stops early: the speed is that of the shape. Every completion has the same length, so
rows end together unless there are more prompts than rows.
"""

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, Qwen3ForCausalLM

from paceline.bench.target_shapes import TARGET_SHAPES
from paceline.decode.engine import Engine
from paceline.decode.prompts import reach_for
from paceline.decode.requests import Request
from paceline.decode.sampling import Sampling
from paceline.decode.stats import Stats
from paceline.observe.console import Console
from paceline.records import many
from paceline.runtime.devices import device_name
from paceline.target.model import DecodingTarget

PROMPT_TOKENS = (16, 96)  # shortest and longest
_QWEN3_8B_LAYERS = 36  # all of them, where features need fewer
SAMPLED = Sampling(temperature=0.6, top_k=20, top_p=0.95)  # what Qwen3's generation_config asks for


@dataclass(frozen=True, slots=True)
class Work:
    """What is measured."""

    shape: str  # smollm2 or qwen3-8b
    device: str
    dtype: str
    rows: int
    prompts: int
    tokens: int  # of every completion
    sampled: bool
    captured: bool
    compiled: bool
    against_batch: int  # of transformers' generate; 0: leave it out
    continuous: bool  # also measure transformers' generate_batch


def bench_generate(work: Work, console: Console) -> dict[str, Any]:
    """Measure the engine and transformers' generate on the same prompts and weights."""
    device = torch.device(work.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    console.stage(f"{work.shape} on {work.device}, random weights in {work.dtype}")
    torch.manual_seed(0)
    model = random_model(work.shape, work.device, work.dtype)
    prompts = random_prompts(work.prompts, model.config.vocab_size)
    theirs: dict[str, Any] = {}
    stock: list[list[int]] = []
    if work.against_batch:
        console.stage(f"transformers' generate at batch {work.against_batch}")
        theirs, stock = _stock(model, prompts, work)
    if work.continuous:
        console.stage("transformers' generate_batch")
        theirs["transformers_continuous_tokens_per_s"] = _continuous(model, prompts, work)
    console.stage(f"the engine at {many(work.rows, 'row')}")
    ours, made = _engine(model, prompts, work)
    if stock:
        theirs["ratio"] = round(ours["tokens_per_s"] / theirs["transformers_tokens_per_s"], 2)
        theirs["same_completions"] = sum(a == b for a, b in zip(made, stock, strict=True))
    return {
        "shape": work.shape,
        "device": device_name(device),
        "torch": torch.__version__,
        "dtype": work.dtype,
        "rows": work.rows,
        "prompts": work.prompts,
        "tokens": work.tokens,
        "sampled": work.sampled,
        "captured": work.captured,
        "compiled": work.compiled,
        **ours,
        **theirs,
    }


def random_model(shape: str, device: str, number: str) -> Any:
    """Return a frozen transformers model with random weights."""
    dtype = getattr(torch, number)
    with torch.device(device):
        if shape == "smollm2":
            model = LlamaForCausalLM._from_config(smollm2_config(), dtype=dtype)
        else:
            model = Qwen3ForCausalLM._from_config(TARGET_SHAPES["qwen3-8b"].config(_QWEN3_8B_LAYERS), dtype=dtype)
    return model.eval().requires_grad_(False)


def smollm2_config() -> LlamaConfig:
    """Return SmolLM2-135M's shape."""
    return LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )


def random_prompts(count: int, vocab_size: int) -> list[list[int]]:
    """Return random prompts, longest first, which is the order that either side likes best."""
    rng = np.random.default_rng(0)
    lengths = np.sort(rng.integers(PROMPT_TOKENS[0], PROMPT_TOKENS[1] + 1, count))[::-1]
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]


def _stock(model: Any, prompts: list[list[int]], work: Work) -> tuple[dict[str, Any], list[list[int]]]:
    device = torch.device(work.device)
    model.set_attn_implementation("sdpa")
    drawn = {"temperature": SAMPLED.temperature, "top_k": SAMPLED.top_k, "top_p": SAMPLED.top_p}
    how = {"do_sample": True, **drawn} if work.sampled else {"do_sample": False}

    def complete(batch: list[list[int]], tokens: int) -> list[list[int]]:
        longest = max(map(len, batch))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in batch], device=device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in batch], device=device)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, pad_token_id=0, **how)
        return out[:, longest:].tolist()

    complete(prompts[: work.against_batch], 4)
    began = time.perf_counter()
    made: list[list[int]] = []
    for at in range(0, len(prompts), work.against_batch):
        made += complete(prompts[at : at + work.against_batch], work.tokens)
    seconds = time.perf_counter() - began
    rate = len(prompts) * work.tokens / seconds
    return {"transformers_batch": work.against_batch, "transformers_tokens_per_s": round(rate, 1)}, made


def _continuous(model: Any, prompts: list[list[int]], work: Work) -> float:
    """Return tokens a second of transformers' continuous batching, greedy, its own start-up included."""
    model.set_attn_implementation("sdpa")
    config = GenerationConfig(max_new_tokens=work.tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    began = time.perf_counter()
    done = model.generate_batch(prompts, generation_config=config)
    seconds = time.perf_counter() - began
    return round(sum(len(output.generated_tokens) for output in done.values()) / seconds, 1)


def _engine(model: Any, prompts: list[list[int]], work: Work) -> tuple[dict[str, Any], list[list[int]]]:
    device = torch.device(work.device)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    engine = Engine(
        DecodingTarget.around(model, ()),
        SAMPLED if work.sampled else Sampling(),
        rows=work.rows,
        slots=reach_for(PROMPT_TOKENS[1] + work.tokens),
        captured=work.captured,
        compiled=work.compiled,
    )
    first_s, _ = _timed(engine, prompts, work.tokens if cuda else 4)  # captures what the second pass replays
    captured = engine.stats.captured
    engine.stats = Stats()
    seconds, made = _timed(engine, prompts, work.tokens)
    stats = engine.stats
    peak = torch.cuda.max_memory_allocated(device) if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    bandwidth = _copy_bandwidth(device)
    weights, slot = read_bytes(model)
    least_s = (weights * stats.steps + slot * stats.slot_steps) / bandwidth
    return {
        "tokens_per_s": round(stats.tokens / seconds, 1),
        "decode_tokens_per_s": round((stats.tokens - len(prompts)) / stats.decode_s, 1),
        "step_ms": round(1e3 * stats.decode_s / stats.steps, 3),
        "seconds": round(seconds, 2),
        "first_pass_s": round(first_s, 2),
        "graphs": captured,
        "prefill_share": round(stats.prefill_s / seconds, 4),
        "decode_share": round(stats.decode_s / seconds, 4),
        "roofline_share": round(least_s / stats.decode_s, 4),
        "copy_gb_s": round(bandwidth / 1e9, 1),
        "gib_a_step": round((weights + slot * stats.slot_steps / stats.steps) / 2**30, 3),
        "peak_gib": round(peak / 2**30, 2),
    }, made


def _timed(engine: Engine, prompts: Sequence[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
    began = time.perf_counter()
    made = {r.key: list(c.token_ids) for r, c in engine.run(Request(i, p, tokens) for i, p in enumerate(prompts))}
    return time.perf_counter() - began, [made[i] for i in range(len(prompts))]


def read_bytes(model: Any) -> tuple[int, int]:
    """Return what a decode step must read at least: bytes of weights, and of keys and values for each cache slot.

    An input embedding of its own does not count: a step reads a few of its rows.
    """
    config = model.config
    weights = sum(p.nbytes for p in model.parameters())
    if not config.tie_word_embeddings:
        weights -= model.get_input_embeddings().weight.nbytes
    width = config.num_key_value_heads * config.head_dim
    return weights, 2 * config.num_hidden_layers * width * model.dtype.itemsize


def _copy_bandwidth(device: torch.device) -> float:
    """Return bytes a second that a large copy reads and writes here."""
    source = torch.ones(2**30 if device.type == "cuda" else 2**29, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    copy.copy_(source)
    wait()
    began = time.perf_counter()
    for _ in range(10):
        copy.copy_(source)
    wait()
    return 10 * 2 * source.nbytes / (time.perf_counter() - began)
