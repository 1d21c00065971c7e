"""vLLM and SGLang as they count their own speculative decoding, as far as a client sees it.

Written from vllm/v1/spec_decode/metrics.py with prometheus_client's text format, and from `meta_info` in
sglang/srt/managers/tokenizer_manager.py. An answer has the tokens and the cycles that `cycles_for` gives its prompt.
"""

import threading
from collections.abc import Sequence
from typing import Any

SLOTS = 4  # drafted tokens a cycle


def cycles_for(prompt: Sequence[int], limit: int) -> list[int]:
    """Return the drafts accepted in each cycle of an answer: 1 token by the prompt pass, then 1 + accepted a cycle."""
    accepted, tokens = [], 1
    while tokens < limit:
        accepted.append(min((sum(prompt) + 3 * len(accepted)) % (SLOTS + 1), limit - tokens - 1))
        tokens += 1 + accepted[-1]
    return accepted


class Vllm:
    """Answers of /v1/completions, and counters that go with them."""

    def __init__(self, *, speculative: bool = True) -> None:
        self.speculative = speculative
        self.drafts = self.generated = 0
        self.per_position = [0] * SLOTS
        self._lock = threading.Lock()

    def respond(self, body: dict[str, Any]) -> dict[str, Any]:
        new = body["max_tokens"]
        self.count(body["prompt"], new)
        told = {"index": 0, "text": "w5", "finish_reason": "length", "logprobs": None}
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": new, "total_tokens": 0}
        return {"id": "cmpl-1", "object": "text_completion", "model": body["model"], "choices": [told], "usage": usage}

    def count(self, prompt: Sequence[int], new: int) -> None:
        with self._lock:
            self.generated += new
            for accepted in cycles_for(prompt, new):
                self.drafts += 1
                for place in range(accepted):
                    self.per_position[place] += 1

    def metrics(self) -> str:
        labels = 'engine="0",model_name="org/tiny"'
        with self._lock:
            lines = [
                "# HELP python_info Python platform information",
                "# TYPE python_info gauge",
                'python_info{implementation="CPython",version="3.12.9"} 1.0',
                "# TYPE vllm:generation_tokens_total counter",
                f"vllm:generation_tokens_total{{{labels}}} {self.generated}.0",
                "# TYPE vllm:time_to_first_token_seconds histogram",
                f'vllm:time_to_first_token_seconds_bucket{{{labels},le="+Inf"}} 7.0',
            ]
            if self.speculative:
                counts = {
                    "num_drafts": self.drafts,
                    "num_draft_tokens": SLOTS * self.drafts,
                    "num_accepted_tokens": sum(self.per_position),
                }
                for name, value in counts.items():
                    whole = f"vllm:spec_decode_{name}"
                    lines += [
                        f"# HELP {whole}_total Number of something.",
                        f"# TYPE {whole}_total counter",
                        f"{whole}_total{{{labels}}} {float(value)}",
                        f"# TYPE {whole}_created gauge",
                        f"{whole}_created{{{labels}}} 1.7640000001e+09",
                    ]
                lines += [
                    f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{place}"}} {float(value)}'
                    for place, value in enumerate(self.per_position)
                ]
        return "\n".join(lines) + "\n"


def sglang(body: dict[str, Any], *, speculative: bool = True, histogram: str | None = "spec_accept_histogram") -> Any:
    """Answer as SGLang's /generate."""
    new = body["sampling_params"]["max_new_tokens"]
    accepted = cycles_for(body["input_ids"], new)
    told: dict[str, Any] = {
        "id": "1",
        "finish_reason": {"type": "length", "length": new},
        "prompt_tokens": len(body["input_ids"]),
        "completion_tokens": new,
        "cached_tokens": 0,
        "e2e_latency": 0.1,
    }
    if speculative:
        told |= {"spec_accept_rate": 0.0, "spec_accept_length": 0, "spec_verify_ct": len(accepted)}
        if accepted:
            told["spec_accept_length"] = new / len(accepted)
            if histogram:
                told[histogram] = [accepted.count(count) for count in range(SLOTS + 1)]
    return {"text": "w5", "output_ids": [5] * new, "meta_info": told}
