"""What `paceline generate` is asked for, and what of it decides the rows."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from paceline.data.conversation import CUT, LOOP, Asker, Turns, thinking_args
from paceline.data.manifest import tokenizer_fingerprint
from paceline.decode.sampling import Sampling, sampling_of
from paceline.records import UserError
from paceline.target.load import TargetFacts

OnFault = Literal["keep", "drop"]


@dataclass(frozen=True, slots=True)
class Asked:
    """Settings of the verb. None: what the model's generation_config.json says, or its own limit."""

    model: str
    revision: str | None = None
    dtype: str = "bfloat16"
    thinking: Literal["on", "off", "default"] = "default"
    template_args: dict[str, Any] = field(default_factory=dict)
    turns: Turns = "all"
    samples: int = 1
    max_new_tokens: int = 512
    max_length: int | None = None  # tokens of a prompt and its answer
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0
    on_length: OnFault = "keep"
    on_loop: OnFault = "keep"
    # These do not decide what a row is.
    devices: Sequence[str] = ("cpu",)
    rows: int = 64
    max_quarantined: float = 0.01
    servers: Sequence[str] = ()  # base URLs; none: the built-in engine on `devices`
    served_name: str | None = None
    concurrency: int = 64  # requests under way at all servers together
    server_timeout_s: float = 1800.0  # of an answer

    @property
    def engine(self) -> str:
        """What answers, as the folder remembers it."""
        return "remote" if self.servers else "built-in"

    @property
    def drops(self) -> frozenset[str]:
        """Why answers are left out."""
        faults = ((CUT, self.on_length), (LOOP, self.on_loop))
        return frozenset(fault for fault, setting in faults if setting == "drop")

    def sampling(self, facts: TargetFacts) -> tuple[Sampling, tuple[str, ...]]:
        """Return how tokens are chosen, and what the model asks for besides that is not followed.

        Raises:
            UserError: a setting is out of its range, or all samples of a prompt would be one and the same.
        """
        sampling, ignored = sampling_of(
            facts.folder, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, seed=self.seed
        )
        if self.samples > 1 and sampling.greedy:
            raise UserError(
                f"Several completions of a prompt need sampling, got --samples {self.samples} with greedy decoding. "
                "Set --temperature above 0."
            )
        return sampling, ignored

    def asker(self, facts: TargetFacts, tokenizer: Any, slots: int | None = None) -> Asker:
        """Return what renders conversations; `slots` is a limit that was found to be enough.

        Raises:
            UserError: the chat template does not go with the settings.
        """
        limit, name = facts.max_positions, f"the target's {facts.max_positions:,} positions"
        if self.max_length is not None and self.max_length < limit:
            limit, name = self.max_length, f"--max-length {self.max_length:,}"
        return Asker(
            tokenizer,
            {**thinking_args(tokenizer, self.thinking, self.template_args), **self.template_args},
            stop_ids=facts.eos_ids,
            max_new_tokens=self.max_new_tokens,
            limit=limit if slots is None else slots,
            limit_name=name,
        )

    def decides(
        self, facts: TargetFacts, tokenizer: Any, sampling: Sampling, asker: Asker, prompts: str
    ) -> dict[str, Any]:
        """Return everything that decides the rows; `prompts` is the checksum of the prompt file."""
        template = json.dumps(asker.decides, sort_keys=True, default=str).encode()
        return {
            "prompts": prompts,
            "revision": facts.revision,
            "tokenizer": tokenizer_fingerprint(tokenizer),
            "thinking": self.thinking,
            "template_args": self.template_args,
            "chat_template": hashlib.sha256(template).hexdigest(),
            "turns": self.turns,
            "samples": self.samples,
            "max_new_tokens": self.max_new_tokens,
            "max_length": asker.limit,
            **asdict(sampling),
            "on_length": self.on_length,
            "on_loop": self.on_loop,
            "engine": self.engine,
            "dtype": None if self.servers else self.dtype,  # a server's is not known
        }
