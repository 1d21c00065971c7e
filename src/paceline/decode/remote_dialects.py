"""How completions are asked of the servers there are, and what their answers say.

A dialect is a path, what is sent to it and how the answer is read. Which of them a server understands is found out with
a completion of one token: those that return token ids come first. Prompts go as token ids wherever a server takes them.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.decode.requests import Request
from paceline.decode.sampling import Sampling, noise_key


class Rejected(Exception):
    """What a server refuses this request for; another try would not help."""


class Failed(Exception):
    """An answer that could not be had or used; another try may help."""

    def __init__(self, cause: str, retry_after_s: float = 0.0) -> None:
        """`retry_after_s`: when the server wants to be asked again."""
        super().__init__(cause)
        self.retry_after_s = retry_after_s


class Garbled(Failed):
    """An answer that is not JSON."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What completions are asked for: of which target, and how tokens are chosen."""

    tokenizer: Any  # the target's; no other thread may use this very object
    stop_ids: tuple[int, ...]
    vocab_size: int
    sampling: Sampling

    def seed(self, request: Request) -> int:
        """Return a request's seed: the same for the same key, copy and sampling seed.

        31 bits: llama.cpp's seeds have 32, of which the highest number means "any".
        """
        return noise_key(self.sampling.seed, request.key, request.copy) & 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said."""

    text: str
    ids: tuple[int, ...] | None  # None: it returns none
    finish: str  # "stop" or "length"
    stopped_at: int | None = None  # the stop token, where that is told
    prompt_tokens: int | None = None  # that the server read
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Dialect:
    """One way to ask."""

    name: str
    path: str
    body: Callable[[Request, Wanted, str], dict[str, Any]]  # what to send; raises Rejected if it cannot be sent so
    read: Callable[[dict[str, Any]], Answer]  # what comes back; raises Failed if it is no answer
    gives_ids: bool = False  # where the server knows it
    lacks: tuple[str, ...] = ()  # settings that cannot be told


def _token_ids(request: Request, wanted: Wanted, model: str) -> dict[str, Any]:
    """Ask with the extensions that vLLM and SGLang share; a server that knows none of them ignores or refuses them.

    `return_token_ids` adds `token_ids` to a choice, stop token included: vLLM from 0.10.2 on (vllm-project/vllm#22587),
    SGLang since July 2026 (sgl-project/sglang#30917).
    """
    return _openai(request, wanted, model) | {
        "top_k": wanted.sampling.top_k or -1,  # all tokens: SGLang refuses 0
        "min_p": 0.0,
        "repetition_penalty": 1.0,  # vLLM would take it from the model's generation_config.json
        "stop_token_ids": list(wanted.stop_ids),
        "skip_special_tokens": False,  # where only text comes back it should say everything
        "return_token_ids": True,
    }


def _llama_cpp(request: Request, wanted: Wanted, model: str) -> dict[str, Any]:
    """Ask llama.cpp's own endpoint, whose `return_tokens` gives ids, stop token included (tools/server/README.md).

    Its /v1/completions takes ids and gives none. Samplers that are on by default are switched off, and so is the reuse
    of earlier prompts, which makes an answer depend on what was asked before it.
    """
    return {
        "model": model,
        "prompt": list(request.prompt_ids),
        "n_predict": request.max_new_tokens,
        "temperature": wanted.sampling.temperature,
        "top_k": wanted.sampling.top_k or -1,
        "top_p": wanted.sampling.top_p,
        "min_p": 0.0,
        "repeat_penalty": 1.0,
        "seed": wanted.seed(request),
        "return_tokens": True,
        "cache_prompt": False,
    }


def _openai(request: Request, wanted: Wanted, model: str) -> dict[str, Any]:
    """Ask with OpenAI's fields only."""
    return {
        "model": model,
        "prompt": list(request.prompt_ids),
        "max_tokens": request.max_new_tokens,
        "temperature": wanted.sampling.temperature,
        "top_p": wanted.sampling.top_p,
        "seed": wanted.seed(request),
        "n": 1,
        "stream": False,
    }


def _transformers(request: Request, wanted: Wanted, model: str) -> dict[str, Any]:
    """Ask `transformers serve`, which takes prompts as text only and settings as JSON in a string.

    That string stands in for the model's generation_config.json; other fields than these are refused
    (transformers/cli/serving/completion.py).
    """
    sampling, stop_ids = wanted.sampling, list(wanted.stop_ids)
    config: dict[str, Any] = {"do_sample": not sampling.greedy}
    if not sampling.greedy:
        config |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    config |= {"eos_token_id": stop_ids or None, "pad_token_id": stop_ids[0] if stop_ids else 0}
    return {
        "model": model,
        "prompt": _as_text(request.prompt_ids, wanted.tokenizer),
        "max_tokens": request.max_new_tokens,
        "seed": wanted.seed(request),
        "generation_config": json.dumps(config),
    }


def _read_choice(data: dict[str, Any]) -> Answer:
    try:
        choice, usage = data["choices"][0], data.get("usage") or {}
        text, finish, given = str(choice["text"]), choice["finish_reason"], choice.get("token_ids")
        prompt_tokens = usage.get("prompt_tokens")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise Failed(f"an answer that is no completion ({json.dumps(data)[:200]})") from None
    if finish not in ("stop", "length"):
        raise Failed(f"an answer that ended with {finish!r}")
    # vLLM calls the stop token stop_reason, SGLang matched_stop; in other cases these are absent, null or a text.
    told = next((choice[key] for key in ("stop_reason", "matched_stop") if isinstance(choice.get(key), int)), None)
    return Answer(text, _ids(given), finish, told, prompt_tokens, data.get("model"))


def _read_llama_cpp(data: dict[str, Any]) -> Answer:
    if data.get("truncated"):
        raise Rejected("the server had no room for the whole answer")
    finish = {"eos": "stop", "word": "stop", "limit": "length"}.get(str(data.get("stop_type")))
    if finish is None or not isinstance(data.get("content"), str):
        raise Failed(f"an answer that ended with {data.get('stop_type')!r}")
    ids = _ids(data.get("tokens") or None)
    return Answer(data["content"], ids, finish, None, data.get("tokens_evaluated"), data.get("model"))


def _ids(given: Any) -> tuple[int, ...] | None:
    if given is None:
        return None
    if not isinstance(given, list) or not all(type(token) is int for token in given):
        raise Failed(f"token ids that are no numbers ({json.dumps(given)[:100]})")
    return tuple(given)


def _as_text(prompt_ids: Sequence[int], tokenizer: Any) -> str:
    """Return the text of which the server's tokenizer makes just these ids, with the start token that it may add."""
    whole = tokenizer.decode(list(prompt_ids), clean_up_tokenization_spaces=False)
    texts = [whole]
    if tokenizer.bos_token and whole.startswith(tokenizer.bos_token):
        texts.append(whole[len(tokenizer.bos_token) :])
    for text in texts:
        if tokenizer(text, verbose=False)["input_ids"] == list(prompt_ids):
            return str(text)
    raise Rejected("the server takes text only, and the prompt's text is not read as the prompt's token ids")


# In the order in which they are tried: the first that returns ids, else the first that works.
DIALECTS = (
    Dialect("vLLM's and SGLang's return_token_ids", "/v1/completions", _token_ids, _read_choice, gives_ids=True),
    # Stop tokens are those of its model file.
    Dialect(
        "llama.cpp's /completion", "/completion", _llama_cpp, _read_llama_cpp, gives_ids=True, lacks=("stop tokens",)
    ),
    Dialect("OpenAI's fields", "/v1/completions", _openai, _read_choice, lacks=("top_k", "stop tokens")),
    Dialect("transformers serve", "/v1/completions", _transformers, _read_choice),
)
