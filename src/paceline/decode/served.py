"""What a running SGLang or vLLM says of its own speculative decoding while it answers prompts.

Nothing is sent twice: a measurement with a request that failed is none. vLLM counts drafts and accepted tokens for all
requests together (Prometheus counters at /metrics, vllm/v1/spec_decode/metrics.py), SGLang for each (`meta_info` of
/generate, `spec_verify_ct` and `spec_accept_length`, python/sglang/srt/managers/tokenizer_manager.py). An acceptance
length includes the target's own token with both.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeGuard, TypeVar

import httpx2

from paceline.decode.remote import check_url, denied, new_client
from paceline.decode.remote_dialects import Failed, Rejected
from paceline.decode.remote_wire import Denied, exchange, fetch_text
from paceline.decode.sampling import Sampling
from paceline.decode.served_counters import DRAFTS, GENERATED, Counters, read_counters
from paceline.records import RunError, UserError, many

_LAG_S = 2.0  # in which a server's counters must have what it has answered
_LOOK_S = 0.05

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Asked:
    """What is sent to a server."""

    url: str
    prompts: Sequence[Sequence[int]]  # token ids
    max_new_tokens: int
    stop_ids: Sequence[int]
    sampling: Sampling
    concurrency: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer: its tokens, and what SGLang says of it."""

    tokens: int
    told: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Served:
    """What was measured."""

    engine: str
    model: str
    tokens: int
    seconds: float
    tau: float | None  # mean over requests; None: the server does not tell requests apart
    tau_pooled: float
    cycles: int
    per_slot_acceptance: tuple[float, ...] | None  # [k]: share of cycles whose slots 1..k were all accepted
    other_tokens: int  # generated meanwhile for somebody else, and counted with ours

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second, all requests together."""
        return self.tokens / self.seconds


Progress = Callable[[int], object]
_Send = Callable[[Sequence[int], int], Awaitable[Reply]]


def served_model(url: str, name: str | None, timeout_s: float) -> str:
    """Return what a server calls the model that is to be measured: `name`, or the first that it lists.

    Raises:
        UserError: the URL is wrong, there is no server, or it has no such model.
    """
    check_url(url)

    async def ask() -> list[str]:
        async with new_client(timeout_s, 1) as client:
            listed = await exchange(client, f"{_base(url)}/v1/models")
            data = listed.get("data")
            ids = [one.get("id") for one in data if isinstance(one, dict)] if isinstance(data, list) else []
            return [one for one in ids if isinstance(one, str)]

    names = _run(url, ask())
    if not names:
        raise UserError(f"{url} lists no model at /v1/models. Name a running SGLang or vLLM with --server.")
    if name is not None and name not in names:
        raise UserError(f"{url} serves {', '.join(names[:5])}, not {name} (--served-name).")
    return name or names[0]


def measure(asked: Asked, model: str, on_progress: Progress) -> Served:
    """Send every prompt once, `concurrency` at a time, after as many to warm up, and return what the server counted.

    Raises:
        UserError: it is no such server, or one without speculative decoding.
        RunError: a request failed.
    """

    async def work() -> Served:
        async with new_client(asked.timeout_s, asked.concurrency) as client:
            if await _is_vllm(client, asked):
                return await _measure_vllm(client, asked, model, on_progress)
            return await _measure_sglang(client, asked, model, on_progress)

    return _run(asked.url, work())


async def _measure_vllm(client: httpx2.AsyncClient, asked: Asked, model: str, on_progress: Progress) -> Served:
    async def send(prompt: Sequence[int], new: int) -> Reply:
        data = await exchange(client, f"{_base(asked.url)}/v1/completions", _completion_body(asked, model, prompt, new))
        usage = data.get("usage")
        tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if not _is_count(tokens):
            raise Failed("an answer without usage.completion_tokens")
        return Reply(tokens, {})

    async def look() -> Counters:
        return read_counters(await fetch_text(client, f"{_base(asked.url)}/metrics"))

    await _warm_up(asked, send)
    before = await look()
    if not before.has(DRAFTS):
        raise UserError(
            f"{asked.url} (vLLM) counts no drafts: its /metrics has no {DRAFTS}. Start it with --speculative-config, "
            "and without --disable-log-stats."
        )
    replies, seconds = await _send_all(asked, send, on_progress)
    tokens = sum(reply.tokens for reply in replies)
    until = time.monotonic() + _LAG_S
    while True:  # an engine may count a moment after it has answered
        counted = (await look()).since(before)
        if not counted.has(GENERATED) or counted.get(GENERATED) >= tokens or time.monotonic() > until:
            break
        await asyncio.sleep(_LOOK_S)
    if counted.fell or (counted.has(GENERATED) and counted.get(GENERATED) < tokens):
        raise RunError(
            f"{asked.url} (vLLM) counts {counted.get(GENERATED):,.0f} generated tokens more than before, and its "
            f"answers had {tokens:,}: it was started anew meanwhile, or several engines share the address. Measure one "
            "engine, and once more."
        )
    if not counted.drafts:
        raise RunError(
            f"{asked.url} (vLLM) drafted nothing for {many(len(replies), 'answer')}: longer ones are needed."
        )
    return Served(
        "vLLM",
        model,
        tokens,
        seconds,
        None,
        counted.tau,
        counted.drafts,
        counted.per_slot,
        max(0, round(counted.get(GENERATED)) - tokens),
    )


async def _measure_sglang(client: httpx2.AsyncClient, asked: Asked, model: str, on_progress: Progress) -> Served:
    async def send(prompt: Sequence[int], new: int) -> Reply:
        data = await exchange(client, f"{_base(asked.url)}/generate", _generate_body(asked, prompt, new))
        told = data.get("meta_info")
        if not isinstance(told, dict) or not _is_count(told.get("completion_tokens")):
            raise Failed("an answer without meta_info.completion_tokens")
        for key, fits in _TOLD.items():
            if told.get(key) is not None and not fits(told[key]):
                raise Failed(f"an answer whose meta_info.{key} is {repr(told[key])[:60]}")
        return Reply(told["completion_tokens"], told)

    try:
        warmed = await _warm_up(asked, send)
    except Rejected as error:
        raise UserError(
            f"{asked.url} is neither vLLM (no vllm: counters at /metrics) nor SGLang (/generate: {error}). Only these "
            "two say how many drafts they accept."
        ) from None
    if not any("spec_verify_ct" in reply.told for reply in warmed):
        raise UserError(
            f"{asked.url} (SGLang) counts no drafts: meta_info of /generate has no spec_verify_ct. Start it with "
            "--speculative-algorithm DFLASH."
        )
    replies, seconds = await _send_all(asked, send, on_progress)
    cycled = [(reply.tokens, reply.told.get("spec_verify_ct") or 0, reply.told) for reply in replies]
    cycled = [one for one in cycled if one[1]]
    if not cycled:
        raise RunError(
            f"{asked.url} (SGLang) drafted nothing for {many(len(replies), 'answer')}: longer ones are needed."
        )
    cycles = sum(verified for _, verified, _ in cycled)
    return Served(
        "SGLang",
        model,
        sum(reply.tokens for reply in replies),
        seconds,
        fmean(float(told.get("spec_accept_length") or tokens / verified) for tokens, verified, told in cycled),
        sum(tokens for tokens, _, _ in cycled) / cycles,
        cycles,
        _slots([told for _, _, told in cycled]),
        0,
    )


def _slots(told: Sequence[dict[str, Any]]) -> tuple[float, ...] | None:
    """Return per-slot acceptance from each request's histogram of accepted drafts a cycle; None if one has none."""
    found = [next((one[name] for name in _HISTOGRAMS if one.get(name)), None) for one in told]
    if any(histogram is None for histogram in found):
        return None
    histograms = [histogram for histogram in found if histogram is not None]
    longest = max(map(len, histograms))
    counts = [sum(histogram[at] for histogram in histograms if at < len(histogram)) for at in range(longest)]
    return tuple(sum(counts[at:]) / sum(counts) for at in range(longest)) if sum(counts) else None


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_length(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


def _is_histogram(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


_HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_accept_histogram")  # the newer name first
# What is read of meta_info, where it is there.
_TOLD: dict[str, Callable[[object], bool]] = {
    "spec_verify_ct": _is_count,
    "spec_accept_length": _is_length,
    **dict.fromkeys(_HISTOGRAMS, _is_histogram),
}


# Sending


async def _is_vllm(client: httpx2.AsyncClient, asked: Asked) -> bool:
    try:
        return "vllm:" in await fetch_text(client, f"{_base(asked.url)}/metrics")
    except Rejected:  # SGLang has that page only when it is asked for
        return False


async def _warm_up(asked: Asked, send: _Send) -> list[Reply]:
    some = [asked.prompts[at % len(asked.prompts)] for at in range(asked.concurrency)]
    return list(await asyncio.gather(*(send(prompt, asked.max_new_tokens) for prompt in some)))


async def _send_all(asked: Asked, send: _Send, on_progress: Progress) -> tuple[list[Reply], float]:
    free = asyncio.Semaphore(asked.concurrency)
    done = 0

    async def one(at: int, prompt: Sequence[int]) -> Reply:
        nonlocal done
        async with free:
            try:
                reply = await send(prompt, asked.max_new_tokens)
            except Denied as error:
                raise UserError(denied(asked.url, error)) from None
            except (Failed, Rejected) as error:
                raise RunError(
                    f"{asked.url} did not answer prompt {at + 1} of {len(asked.prompts)}: {error}."
                ) from None
        done += 1
        on_progress(done)
        return reply

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(at, prompt)) for at, prompt in enumerate(asked.prompts)]
    return [task.result() for task in tasks], time.perf_counter() - began


def _completion_body(asked: Asked, model: str, prompt: Sequence[int], new: int) -> dict[str, Any]:
    """Ask vLLM's /v1/completions; what is not OpenAI's stands in for the model's generation_config.json."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": new,
        **_sampling(asked.sampling),
        "repetition_penalty": 1.0,
        "stop_token_ids": list(asked.stop_ids),
        "stream": False,
    }


def _generate_body(asked: Asked, prompt: Sequence[int], new: int) -> dict[str, Any]:
    """Ask SGLang's own /generate, which says in `meta_info` what became of the drafts."""
    sampling = {"max_new_tokens": new, "stop_token_ids": list(asked.stop_ids), **_sampling(asked.sampling)}
    return {"input_ids": list(prompt), "sampling_params": sampling, "stream": False}


def _sampling(sampling: Sampling) -> dict[str, Any]:
    top_k = 1 if sampling.greedy else sampling.top_k or -1
    return {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": top_k, "min_p": 0.0}


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _run(url: str, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Run to the end, and say of the first thing that went wrong what it is."""
    try:
        return asyncio.run(work)
    except Denied as error:
        raise UserError(denied(url, error)) from None
    except (Failed, Rejected) as error:
        raise UserError(f"{url} does not answer: {error}. Name a running SGLang or vLLM with --server.") from None
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
