"""A tokenizer's chat template with the arguments that it is always given: conversations to text.

The text holds every special token, so it is tokenized without adding any. It depends on the conversation alone: a
template that writes today's date, as Llama 3's does, is given a fixed one.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, cast

from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from paceline.data.messages import BadRow, Message
from paceline.records import UserError

Tools = list[dict[str, Any]] | None

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_RESERVED = {"messages", "conversations", "tools", "documents", "chat_template", "tokenize"} | {
    "add_generation_prompt",
    "continue_final_message",
    "return_assistant_tokens_mask",
    "strftime_now",
}
# Put before a template, it hides transformers' function of this name, which says what day it is. A function of our own
# cannot be given to a template. The line's end is dropped (trim_blocks), so a template begins as it does without this.
_DIRECTIVES = [f"%{sign}{letter}" for sign in ("", "-") for letter in "dmyYbBaAHIMSpjfUWuwxXcDFTRe"]
_FIXED_DAY = (
    "{% macro strftime_now(format) %}{% for part in format.split('%%') %}{{ '%' if not loop.first }}{{ part"
    + "".join(f" | replace({each!r}, {datetime(2025, 1, 1).strftime(each)!r})" for each in _DIRECTIVES)
    + " }}{% endfor %}{% endmacro %}\n"
)
# What a template can raise over the values of a row; TemplateError covers raise_exception and undefined names.
_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


def chat_template(tokenizer: Any, tools: Tools = None) -> str:
    """Return the template a conversation is rendered with.

    Raises:
        UserError: the tokenizer has none.
    """
    if not tokenizer.chat_template:
        raise UserError(
            f"Tokenizer {tokenizer.name_or_path} has no chat template, which messages and prompt/completion rows need. "
            "Use an instruction-tuned target, or give prompt_ids and completion_ids."
        )
    return cast(str, tokenizer.get_chat_template(tools=tools))


def check_known(tokenizer: Any, arguments: Iterable[str], template: str) -> None:
    """Refuse arguments that a template would ignore.

    Raises:
        UserError: the template's text does not mention one of them.
    """
    words = set(re.findall(r"\w+", template))
    if unknown := sorted(name for name in arguments if name not in words):
        raise UserError(
            f"A chat template argument must be one that the chat template reads, and that of {tokenizer.name_or_path} "
            f"never mentions {unknown[0]} (--template-arg). Correct its name or leave it out."
        )


class Template:
    """The template of a tokenizer, ready to render many conversations."""

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any]) -> None:
        """Look at the tokenizer once.

        Raises:
            UserError: it has no chat template, or an argument is one that paceline sets itself or that the template
                does not know.
        """
        if wrong := sorted(_RESERVED & arguments.keys()):
            raise UserError(
                f"A chat template argument must not be one that paceline sets itself, got {wrong[0]}. Leave it out."
            )
        # Some tokenizers have a template of their own for conversations with tools.
        self._plain, self._with_tools = chat_template(tokenizer), chat_template(tokenizer, [{}])
        check_known(tokenizer, arguments, f"{self._plain} {self._with_tools}")
        self._arguments = {**tokenizer.special_tokens_map, **arguments}

    @property
    def decides(self) -> list[Any]:
        """Everything that decides the text of a conversation, as plain data."""
        return [self._plain, self._with_tools, self._arguments]

    def is_marked(self, tools: Tools = None) -> bool:
        """Return whether the template marks what is generated in such a conversation."""
        return _GENERATION.search(self._for(tools)) is not None

    @cached_property
    def keeps_history(self) -> bool:
        """Whether an answer is rendered alike in the last place and in an earlier one; True if that cannot be seen."""
        talk = [{"role": role, "content": digit} for digit in "01" for role in ("user", "assistant")]
        try:
            return self.text(talk, None).startswith(self.text(talk[:2], None))
        except BadRow:
            return True

    def text(self, turns: Sequence[Message], tools: Tools, *, generate: bool = False) -> str:
        """Return the conversation's text, with `generate` the opening of the next answer behind it.

        Raises:
            BadRow: the template refuses the messages.
        """
        return self._render(turns, tools, add_generation_prompt=generate)[0]

    def marked_text(self, turns: Sequence[Message], tools: Tools) -> tuple[str, list[tuple[int, int]]]:
        """Return the conversation's text and the characters that the template itself marks as generated.

        Not from `return_assistant_tokens_mask` of the tokenizer: up to transformers 5.15 a blank at a span's start
        empties that mask.

        Raises:
            BadRow: the template refuses the messages.
        """
        return self._render(turns, tools, return_assistant_tokens_mask=True)

    def _render(self, turns: Sequence[Message], tools: Tools, **how: bool) -> tuple[str, list[tuple[int, int]]]:
        template = self._for(tools)
        try:
            # Not apply_chat_template, which refuses a conversation without messages.
            rendered: Any = render_jinja_template(  # annotated as str, returns texts and spans
                conversations=[list(turns)],
                chat_template=_FIXED_DAY + template if "strftime_now" in template else template,
                **{"tools": tools, **how, **self._arguments},
            )
            texts, spans = cast(tuple[list[str], list[list[tuple[int, int]]]], rendered)
        except RecursionError:
            raise BadRow(
                "nested too deeply",
                "The tools or messages nest objects or lists too deeply for the chat template. Flatten them.",
            ) from None
        except _REFUSALS as error:
            raise BadRow("refused by the chat template", f"The chat template refuses the messages: {error}.") from None
        check_unicode(texts[0])
        return texts[0], spans[0] if spans else []

    def _for(self, tools: Tools) -> str:
        return self._with_tools if tools else self._plain


def check_unicode(text: str) -> None:
    """Refuse text that no tokenizer can read.

    Raises:
        BadRow: it holds half of a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRow("not Unicode", "The messages hold half of a surrogate pair, which is no character.") from None
