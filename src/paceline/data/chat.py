"""Conversations to token ids and a loss mask, with the target's own chat template.

The mask is True on what the target generates in an assistant turn, its end-of-turn token included. It comes from the
template's own `{% generation %}` markers where it has them, else from renderings that differ by one turn; it is never
searched for in the text. The whole conversation is tokenized once, so ids are those of the conversation as it stands.

Shapes: S tokens of a conversation.
"""

import re
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
from jaxtyping import Bool, Int
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from paceline.records import UserError

ROLES = ("system", "user", "assistant", "tool")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Message = dict[str, Any]


class BadRow(UserError):
    """A row that cannot be used: `reason` is the kind that is counted, the text says what is wrong with this one."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


class ChatEncoder:
    """A tokenizer with a chat template, ready to encode many conversations."""

    def __init__(self, tokenizer: Any) -> None:
        """Look at the tokenizer once.

        Raises:
            UserError: the tokenizer has no offsets.
        """
        if not tokenizer.is_fast:
            raise UserError(
                f"Tokenizer {tokenizer.name_or_path} gives no character offsets, which the loss mask needs. "
                "Save it as a fast tokenizer (tokenizer.json)."
            )
        self.tokenizer = tokenizer
        self.special_ids = np.array(sorted(_special_ids(tokenizer)), dtype=np.int64)

    @property
    def mask_rule(self) -> str:
        """Name where the loss mask of a conversation comes from."""
        template = self.tokenizer.chat_template
        if template is None:
            return "given ids"
        return "generation markers" if _has_markers(self.tokenizer) else "turn prefixes"

    def encode(self, messages: object) -> tuple[Int[np.ndarray, " S"], Bool[np.ndarray, " S"]]:
        """Return the conversation's ids and which of them the assistant generates.

        Raises:
            BadRow: the messages are malformed, or the template does not say where their answers lie.
            UserError: the tokenizer has no chat template.
        """
        turns = check_messages(messages)
        answers = [turn for turn in turns if turn["role"] == "assistant"]
        if not answers or any(
            not (turn.get("content") or "").strip() and not turn.get("tool_calls") for turn in answers
        ):
            raise BadRow("empty completion", "A conversation needs an assistant message, and none of them empty.")
        text = _render(self.tokenizer, turns)
        marked = _has_markers(self.tokenizer)
        spans = self._marked_spans(turns) if marked else self._answer_spans(turns, text)
        encoded = _tokenize(self.tokenizer, text, offsets=True)
        ids_S = np.array(encoded["input_ids"], dtype=np.int64)
        offsets_S2 = np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        mask_S = np.zeros(len(ids_S), dtype=bool)
        for inside in _tokens_inside(offsets_S2, spans):
            mask_S[inside if marked else self._up_to_stop(ids_S, inside)] = True
        return ids_S, mask_S

    def _marked_spans(self, turns: list[Message]) -> list[tuple[int, int]]:
        """Return the characters that the template itself marks as generated.

        Not from `return_assistant_tokens_mask`: up to transformers 5.15 a blank at a span's start empties that mask.
        """
        rendered: Any = render_jinja_template(  # annotated as str, returns texts and spans
            [turns],
            chat_template=chat_template(self.tokenizer),
            return_assistant_tokens_mask=True,
            **self.tokenizer.special_tokens_map,
        )
        return cast(list[tuple[int, int]], rendered[1][0])

    def _answer_spans(self, turns: list[Message], text: str) -> list[tuple[int, int]]:
        """Return the characters of each assistant turn: from where generation would begin to the end of the turn."""
        spans = []
        for i, turn in enumerate(turns):
            if turn["role"] != "assistant":
                continue
            before = _render(self.tokenizer, turns[:i], generate=True)
            upto = _render(self.tokenizer, turns[: i + 1])
            if not (upto.startswith(before) and text.startswith(upto)):
                raise BadRow(
                    "template not prefix-stable",
                    f"The chat template renders what comes before message {i + 1} (assistant) differently once later "
                    "text follows, so its answer cannot be located. End the conversation at its first answer, give "
                    "prompt_ids and completion_ids, or add {% generation %} markers to the template.",
                )
            spans.append((len(before), len(upto)))
        return spans

    def _up_to_stop(self, ids_S: Int[np.ndarray, " S"], inside: Int[np.ndarray, " t"]) -> Int[np.ndarray, " u"]:
        """Keep a turn's tokens up to its last special one: what follows the stop token is never generated."""
        stops = inside[np.isin(ids_S[inside], self.special_ids)]
        if len(stops) == 0:
            raise BadRow(
                "no end-of-turn token",
                "The chat template closes an assistant turn without a special token, so nothing ends a completion. "
                "Declare the turn's last token special in the tokenizer, or give prompt_ids and completion_ids.",
            )
        return inside[inside <= stops[-1]]


def prompt_ids(tokenizer: Any, messages: object) -> list[int]:
    """Return the ids after which the target generates its answer to the messages.

    Raises:
        BadRow: the messages are malformed.
        UserError: the tokenizer has no chat template.
    """
    encoded = _tokenize(tokenizer, _render(tokenizer, check_messages(messages), generate=True), offsets=False)
    return cast(list[int], encoded["input_ids"])


def check_messages(messages: object) -> list[Message]:
    """Return the messages, known to be objects with a known role and a text (or tool calls).

    Raises:
        BadRow: they are not.
    """
    if not isinstance(messages, list) or not messages:
        raise BadRow("malformed messages", f"messages must be a list with entries, got {_short(messages)}.")
    for i, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRow("malformed messages", f"Message {i} must be an object with a role, got {_short(message)}.")
        if message["role"] not in ROLES:
            raise BadRow("unknown role", f"Message {i} has role {message['role']!r}. Use one of {', '.join(ROLES)}.")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise BadRow("malformed messages", f"Message {i} must have a text as content, got {_short(content)}.")
    return messages


def chat_template(tokenizer: Any) -> str:
    """Return the template a conversation is rendered with.

    Raises:
        UserError: the tokenizer has none.
    """
    if not tokenizer.chat_template:
        raise UserError(
            f"Tokenizer {tokenizer.name_or_path} has no chat template, which messages and prompt/completion rows need. "
            "Use an instruction-tuned target, or give prompt_ids and completion_ids."
        )
    return cast(str, tokenizer.get_chat_template())


def _has_markers(tokenizer: Any) -> bool:
    return _GENERATION.search(chat_template(tokenizer)) is not None


def _render(tokenizer: Any, turns: list[Message], *, generate: bool = False) -> str:
    chat_template(tokenizer)
    try:
        text = cast(str, tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=generate))
        text.encode()
    except TemplateError as error:
        raise BadRow("refused by the chat template", f"The chat template refuses the messages: {error}.") from None
    except UnicodeEncodeError:
        raise BadRow("not Unicode", "The messages hold half of a surrogate pair, which is no character.") from None
    return text


def _tokenize(tokenizer: Any, text: str, *, offsets: bool) -> Any:
    # The template has written every special token; verbose=False: the length limit is checked elsewhere.
    return tokenizer(text, add_special_tokens=False, return_offsets_mapping=offsets, verbose=False)


def _tokens_inside(offsets_S2: Int[np.ndarray, "S 2"], spans: list[tuple[int, int]]) -> Iterator[Int[np.ndarray, " t"]]:
    """Yield the tokens that lie wholly inside each span of characters."""
    end_S = offsets_S2[:, 1]
    # Byte-level tokenizers trim blanks off offsets; a token really begins where the one before it ends.
    start_S = np.minimum(offsets_S2[:, 0], np.concatenate([[0], end_S[:-1]]))
    for start, end in spans:
        yield np.flatnonzero((start_S >= start) & (end_S <= end))


def _special_ids(tokenizer: Any) -> set[int]:
    added = tokenizer.added_tokens_decoder
    return {*tokenizer.all_special_ids, *(index for index, token in added.items() if token.special)}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
