"""A tokenizer's chat template with the arguments that it is always given: conversations to text.

The text holds every special token, so it is tokenized without adding any.
"""

import re
from collections.abc import Mapping, Sequence
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
}
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


class Template:
    """The template of a tokenizer, ready to render many conversations."""

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any]) -> None:
        """Look at the tokenizer once.

        Raises:
            UserError: it has no chat template, or an argument is one that paceline sets itself.
        """
        if wrong := sorted(_RESERVED & arguments.keys()):
            raise UserError(
                f"A chat template argument must not be one that paceline sets itself, got {wrong[0]}. Leave it out."
            )
        # Some tokenizers have a template of their own for conversations with tools.
        self._plain, self._with_tools = chat_template(tokenizer), chat_template(tokenizer, [{}])
        self._arguments = {**tokenizer.special_tokens_map, **arguments}

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
        try:
            # Not apply_chat_template, which refuses a conversation without messages.
            rendered: Any = render_jinja_template(  # annotated as str, returns texts and spans
                conversations=[list(turns)],
                chat_template=self._for(tools),
                **{"tools": tools, **how, **self._arguments},
            )
            texts, spans = cast(tuple[list[str], list[list[tuple[int, int]]]], rendered)
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
