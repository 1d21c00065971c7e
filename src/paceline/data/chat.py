"""Conversations to token ids and a loss mask, with the target's own chat template.

The mask is True on what the target generates in an assistant turn, its end-of-turn token included. It comes from the
template's own `{% generation %}` markers where it has them, else from renderings that differ by one turn; it is never
searched for in the text. The whole conversation is tokenized once, so ids are those of the conversation as it stands.
A token that lies across the border of an answer is not supervised.

Shapes: S tokens of a conversation.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, cast

import numpy as np
from jaxtyping import Bool, Int

from paceline.data import chat_spans
from paceline.data.chat_spans import Span
from paceline.data.chat_template import Template, Tools, chat_template, check_known, check_unicode
from paceline.data.messages import BadRow, read_messages, read_tools
from paceline.data.preformatted import Frame, find_frame
from paceline.records import UserError

__all__ = ["BadRow", "ChatEncoder", "ChatOptions", "Masked", "Rendered", "chat_template", "prompt_ids"]

Masked = tuple[Int[np.ndarray, " S"], Bool[np.ndarray, " S"]]  # ids int32, what is supervised

_PROBE = [{"role": role, "content": digit} for digit in "01" for role in ("user", "assistant")]


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How conversations are rendered and what of them is supervised.

    `mask_reasoning` leaves out an answer's beginning up to the last character of its reasoning, the opening marker
    included; the closing marker and what follows stay supervised. An answer without reasoning, or whose reasoning the
    template drops, stays as it is, empty markers included. Reasoning is a message's `reasoning_content`, or a
    <think>…</think> that its content begins with.
    """

    turns: Literal["all", "last"] = "all"  # last: only the last message of the assistant
    mask_reasoning: bool = False
    template_args: dict[str, Any] = field(default_factory=dict)  # passed to the template, as enable_thinking=False


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation's text and which of its characters are supervised; None: answers are located by their tokens."""

    text: str
    spans: tuple[Span, ...] | None


class ChatEncoder:
    """A tokenizer with a chat template and options, ready to encode many conversations; it can be pickled."""

    def __init__(self, tokenizer: Any, options: ChatOptions | None = None) -> None:
        """Look at the tokenizer once.

        Raises:
            UserError: the tokenizer has no offsets, or the options set what they must not.
        """
        if not tokenizer.is_fast:
            raise UserError(
                f"Tokenizer {tokenizer.name_or_path} gives no character offsets, which the loss mask needs. "
                "Save it as a fast tokenizer (tokenizer.json)."
            )
        self.tokenizer = tokenizer
        self.options = options or ChatOptions()
        self.special_ids = np.array(sorted(_special_ids(tokenizer)), dtype=np.int64)
        self._special = frozenset(self.special_ids.tolist())
        self._template = Template(tokenizer, self.options.template_args) if tokenizer.chat_template else None
        if self._template is None:
            check_known(tokenizer, self.options.template_args, "")
        self._frame: Frame | None = None  # of preformatted text, once there is some

    @property
    def mask_rule(self) -> str:
        """Name where the loss mask of a conversation comes from, and the options in force."""
        source = "given ids"
        if self._template is not None:
            source = "generation markers" if self._template.is_marked() else "turn prefixes"
        options = self.options
        parts = [source, *(["last turn only"] if options.turns == "last" else [])]
        parts += ["reasoning masked"] if options.mask_reasoning else []
        return "; ".join(parts + [f"{name}={value!r}" for name, value in sorted(options.template_args.items())])

    @property
    def decides(self) -> list[Any]:
        """Everything beside the vocabulary that decides ids and mask of a conversation, as plain data."""
        template = self._template.decides if self._template else None
        return [template, self.special_ids.tolist(), asdict(self.options)]

    def render(self, messages: object, tools: Tools = None) -> Rendered:
        """Return the conversation's text and the characters that are supervised.

        Raises:
            BadRow: the messages are malformed, or the template does not say where their answers lie.
            UserError: the tokenizer has no chat template.
        """
        turns, tools = read_messages(messages), read_tools(tools)
        last_only = self.options.turns == "last"
        answers = [turn for turn in turns if turn["role"] == "assistant"][-1 if last_only else 0 :]
        if not answers or any(not turn["content"].strip() and not turn.get("tool_calls") for turn in answers):
            raise BadRow("empty completion", "A conversation needs an assistant message, and none of them empty.")
        template = self._needed_template()
        locate = chat_spans.marked_spans if template.is_marked(tools) else chat_spans.answer_spans
        text, spans = locate(template, turns, tools, last_only=last_only, mask_reasoning=self.options.mask_reasoning)
        return Rendered(text, spans)

    def preformatted(self, text: str) -> Rendered:
        """Return a text that the template has rendered elsewhere; its answers are located when it is tokenized.

        Raises:
            BadRow: it is no text.
            UserError: the tokenizer has no chat template, the template's answers cannot be found in a text, or
                reasoning is to be masked.
        """
        if self.options.mask_reasoning:
            raise UserError(
                "Masking reasoning needs messages, got preformatted text, which does not say what reasoning is. "
                "Give messages, or leave the reasoning supervised."
            )
        if not isinstance(text, str) or not text:
            raise BadRow("empty completion", "Preformatted text must be a text with an answer in it.")
        check_unicode(text)
        self._needed_frame()
        return Rendered(text, None)

    def tokenize(self, rendered: Sequence[Rendered]) -> list[Masked | BadRow]:
        """Return the ids of each text (int32) and which of them are supervised, or why there are none.

        All texts are one call of the tokenizer, which spreads them over cores unless it is told not to.
        """
        encodings = self._encode_batch([one.text for one in rendered])
        return [self._masked(one, encoding) for one, encoding in zip(rendered, encodings, strict=True)]

    def encode(self, messages: object, tools: Tools = None) -> Masked:
        """Return the conversation's ids and which of them are supervised.

        Raises:
            BadRow: the messages are malformed, or the template does not say where their answers lie.
            UserError: the tokenizer has no chat template.
        """
        (done,) = self.tokenize([self.render(messages, tools)])
        if isinstance(done, BadRow):
            raise done
        return done

    def _needed_template(self) -> Template:
        return self._template or Template(self.tokenizer, {})  # the latter says that there is none

    def _needed_frame(self) -> Frame:
        """Return what stands around answers, once it is seen to give the mask that messages give."""
        if self._frame is None:
            frame = find_frame(
                self._needed_template(), lambda text: cast(list[int], self._encode_batch([text])[0].ids), self._special
            )
            rendered = self.render(_PROBE)
            self._frame = frame
            (from_messages, from_text) = self.tokenize([rendered, Rendered(rendered.text, None)])
            if (
                isinstance(from_messages, BadRow)
                or isinstance(from_text, BadRow)
                or not np.array_equal(from_messages[1], from_text[1])
            ):
                self._frame = None
                raise UserError(
                    "The chat template must open and close all answers alike to find them in preformatted text, and "
                    f"that of {self.tokenizer.name_or_path} does not. Give messages instead."
                )
        return self._frame

    def _encode_batch(self, texts: list[str]) -> list[Any]:
        backend = self.tokenizer.backend_tokenizer
        # Whoever used the tokenizer before may have left limits in it.
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        # The template has written every special token.
        return cast(list[Any], backend.encode_batch(texts, add_special_tokens=False))

    def _masked(self, rendered: Rendered, encoding: Any) -> Masked | BadRow:
        ids = encoding.ids
        ids_S = np.array(ids, dtype=np.int32)
        mask_S = np.zeros(len(ids_S), dtype=bool)
        try:
            if rendered.spans is None:
                ranges = self._framed(rendered.text, ids_S, encoding)
            else:
                ranges = [self._supervised(span, ids, encoding) for span in rendered.spans]
        except BadRow as error:
            return error
        for first, behind in ranges:
            mask_S[first:behind] = True
        return ids_S, mask_S

    def _framed(self, text: str, ids_S: Int[np.ndarray, " S"], encoding: Any) -> list[tuple[int, int]]:
        found = list(self._needed_frame().answers(ids_S, text, encoding))
        if not found:
            raise BadRow(
                "empty completion",
                "Preformatted text needs an answer opened as the chat template opens it, and has none. Render the "
                "text with this target's chat template.",
            )
        kept = found[-1:] if self.options.turns == "last" else found
        return [(_first_from(encoding, len(ids_S), start), stop + 1) for start, stop in kept]

    def _supervised(self, span: Span, ids: list[int], encoding: Any) -> tuple[int, int]:
        """Return the first token of a span and the one behind its last."""
        first = _first_from(encoding, len(ids), span.start)
        behind = bisect_right(range(len(ids)), span.end, lo=first, key=lambda at: encoding.token_to_chars(at)[1])
        if span.stop == "given":
            return first, behind
        if span.stop == "next":
            stop = behind if behind < len(ids) and ids[behind] in self._special else None
        else:  # what follows the stop token is never generated
            stop = next((at for at in range(behind - 1, first - 1, -1) if ids[at] in self._special), None)
        if stop is None:
            raise BadRow(
                "no end-of-turn token",
                "The chat template closes an assistant turn without a special token, so nothing ends a completion. "
                "Declare the turn's last token special in the tokenizer, or give prompt_ids and completion_ids.",
            )
        return first, stop + 1


def prompt_ids(
    tokenizer: Any, messages: object, tools: Tools = None, template_args: dict[str, Any] | None = None
) -> list[int]:
    """Return the ids after which the target generates its answer to the messages.

    Raises:
        BadRow: the messages are malformed.
        UserError: the tokenizer has no chat template.
    """
    turns, tools = read_messages(messages), read_tools(tools)
    text = Template(tokenizer, template_args or {}).text(turns, tools, generate=True)
    # The template has written every special token; verbose=False: the length limit is checked elsewhere.
    return cast(list[int], tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _first_from(encoding: Any, tokens: int, start: int) -> int:
    """Return the first token that begins at a character or behind it."""

    def begins(at: int) -> int:
        # Byte-level tokenizers trim blanks off offsets; a token really begins where the one before it ends.
        own = cast(int, encoding.token_to_chars(at)[0])
        return min(own, encoding.token_to_chars(at - 1)[1]) if at else 0

    return bisect_left(range(tokens), start, key=begins)


def _special_ids(tokenizer: Any) -> set[int]:
    added = tokenizer.added_tokens_decoder
    return {*tokenizer.all_special_ids, *(index for index, token in added.items() if token.special)}
