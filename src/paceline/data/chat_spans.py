"""Where the answers lie in a rendered conversation, found by comparing renderings and never by looking for text.

An answer begins where the conversation before it ends when rendered with the opening of the next answer, and it ends
where the conversation up to it ends. Both hold only if those renderings are prefixes of the whole one. Some templates
write an earlier answer differently once later turns follow (Qwen3 leaves its reasoning out). Such an answer is located
by variation: the conversation is rendered once more with a single character, which occurs nowhere in it, in place of
the answer's content. What stands before and behind that character has to be what the whole rendering begins and ends
with, and the content lies between.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.data.chat_template import Template, Tools
from paceline.data.messages import BadRow, Message

_PRIVATE_USE = range(0xE000, 0xF900)  # characters that mean nothing
_THINK, _END_THINK = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Span:
    """Characters of a text that are supervised.

    `stop` says where the answer's last token is. "given": it ends with the span. "inside": the last special token of
    the span. "next": the token behind the span, which has to be a special one.
    """

    start: int
    end: int
    stop: Literal["given", "inside", "next"]


def marked_spans(
    template: Template, turns: Sequence[Message], tools: Tools, *, last_only: bool, mask_reasoning: bool
) -> tuple[str, tuple[Span, ...]]:
    """Return the text and the supervised characters of a template with markers.

    Raises:
        BadRow: the template refuses the messages or does not render an answer's reasoning or content.
    """
    text, pairs = template.marked_text(turns, tools)
    answers = _answers(turns)
    if last_only:
        # No answer follows, so every marked part that ends behind the start of the last content belongs to it.
        start, _ = _around_content(template, turns, tools, answers[-1], text, keep_reasoning=True)
        pairs = [pair for pair in pairs if pair[1] > start]
        answers = answers[-1:]
    check_rendered(template, turns, tools, text)
    if mask_reasoning:
        for at in answers:
            hidden = _reasoning(template, turns, tools, at, text)
            if hidden is not None:
                pairs = [(hidden[1] if a <= hidden[0] and hidden[1] <= b else a, b) for a, b in pairs]
    return text, tuple(Span(start, end, "given") for start, end in pairs)


def answer_spans(
    template: Template, turns: Sequence[Message], tools: Tools, *, last_only: bool, mask_reasoning: bool
) -> tuple[str, tuple[Span, ...]]:
    """Return the text and the supervised characters of a template without markers.

    Raises:
        BadRow: the template refuses the messages or does not say where their answers lie.
    """
    text = template.text(turns, tools)
    answers = _answers(turns)
    check_rendered(template, turns, tools, text)
    spans = []
    for at in answers[-1:] if last_only else answers:
        span = _answer_span(template, turns, tools, at, text, mask_reasoning=mask_reasoning)
        hidden = _reasoning(template, turns, tools, at, text) if mask_reasoning else None
        if hidden is not None and hidden[0] >= span.start:
            span = Span(hidden[1], span.end, span.stop)
        spans.append(span)
    return text, tuple(spans)


def check_rendered(template: Template, turns: Sequence[Message], tools: Tools, text: str) -> None:
    """See that tools, tool calls, and the reasoning of an answer that no question follows are in the text.

    An earlier answer may lose its reasoning: that is how its template shows history.

    Raises:
        BadRow: something is not.
    """
    advice = (
        "that the chat template does not render, so they would be lost. Use a template that does, or leave them out"
    )
    if tools and _renders_as(template, turns, None, text):
        raise BadRow("tools not rendered", f"The row has tools {advice} of the row.")
    without_calls = [{key: value for key, value in turn.items() if key != "tool_calls"} for turn in turns]
    if without_calls != turns and _renders_as(template, without_calls, tools, text):
        raise BadRow("tool calls not rendered", f"The messages have tool calls {advice} of the row.")
    at = _answers(turns)[-1]
    reasoning = turns[at].get("reasoning_content")
    if not reasoning or any(turn["role"] == "user" for turn in turns[at:]):
        return
    other = {**turns[at], "reasoning_content": f"{reasoning}0"}
    if _renders_as(template, _with(turns, at, other), tools, text):
        raise BadRow(
            "reasoning not rendered",
            f"Message {at + 1} (assistant) has reasoning that the chat template does not render, so it would be lost. "
            "Use a template that renders reasoning_content, or leave the reasoning out of the row.",
        )


def _renders_as(template: Template, turns: Sequence[Message], tools: Tools, text: str) -> bool:
    try:
        return template.text(turns, tools) == text
    except BadRow:
        return False


def _answers(turns: Sequence[Message]) -> list[int]:
    return [at for at, turn in enumerate(turns) if turn["role"] == "assistant"]


def _answer_span(
    template: Template, turns: Sequence[Message], tools: Tools, at: int, text: str, *, mask_reasoning: bool
) -> Span:
    before = _opening(template, turns[:at], tools)
    opened = before is not None and text.startswith(before)
    last = at == len(turns) - 1
    # Rendering what a template is known to rewrite would only cost time.
    upto = text if last else template.text(turns[: at + 1], tools) if template.keeps_history else None
    closed = upto is not None and text.startswith(upto)
    if before is not None and upto is not None and opened and closed and len(before) <= len(upto):
        return Span(len(before), len(upto), "inside")
    # Without its reasoning the varied answer shows where the answer begins, with it where its content does.
    keep_reasoning = opened or mask_reasoning
    try:
        start, end = _around_content(template, turns, tools, at, text, keep_reasoning=keep_reasoning)
    except BadRow:
        if keep_reasoning or before is None or not _has_reasoning(turns[at]):
            raise
        raise BadRow(
            "reasoning not expected",
            f"Message {at + 1} (assistant) has reasoning, to which the generation prompt that the chat template writes "
            "there (with its arguments) does not lead. Mask reasoning, leave it out of the row, or change arguments.",
        ) from None
    if before is not None and opened and len(before) <= end:
        start = len(before)
    return Span(start, len(upto), "inside") if upto is not None and closed else Span(start, end, "next")


def _opening(template: Template, before: Sequence[Message], tools: Tools) -> str | None:
    """Return what stands before an answer; None if the template refuses to render so few messages."""
    try:
        return template.text(before, tools, generate=True)
    except BadRow:
        return None


def _around_content(
    template: Template, turns: Sequence[Message], tools: Tools, at: int, text: str, *, keep_reasoning: bool
) -> tuple[int, int]:
    """Return where an answer's content, and the tool calls behind it, begin and end in the text."""
    turn, kept, inline = turns[at], {}, ""
    if keep_reasoning:
        kept = {key: turn[key] for key in ("reasoning_content",) if key in turn}
        inline = "".join(_inline_reasoning(turn))
    found = _vary(template, turns, tools, at, text, lambda it: {"role": "assistant", "content": inline + it, **kept})
    if found is None:
        raise _unstable(at)
    return found


def _reasoning(
    template: Template, turns: Sequence[Message], tools: Tools, at: int, text: str
) -> tuple[int, int] | None:
    """Return where an answer's reasoning lies in the text; None if it has none or the template leaves it out."""
    turn = turns[at]
    if turn.get("reasoning_content"):
        return _vary(template, turns, tools, at, text, lambda it: {**turn, "reasoning_content": it})
    head, inner, tail = _inline_reasoning(turn)
    if not inner:
        return None
    rest = turn["content"][len(head + inner + tail) :]
    return _vary(template, turns, tools, at, text, lambda it: {**turn, "content": f"{head}{it}{tail}{rest}"})


def _inline_reasoning(turn: Message) -> tuple[str, str, str]:
    """Return the <think>…</think> that a content begins with: what opens it, the reasoning, what closes it.

    Blanks belong to what is around the reasoning, so that a template treats another reasoning alike. All are empty
    where there is none.
    """
    head, mark, rest = turn["content"].partition(_THINK)
    inner, end_mark, tail = rest.partition(_END_THINK)
    if head.strip() or not mark or not end_mark or not inner.strip():
        return "", "", ""
    left, right = inner[: len(inner) - len(inner.lstrip())], inner[len(inner.rstrip()) :]
    blanks = tail[: len(tail) - len(tail.lstrip())]
    return head + mark + left, inner.strip(), right + end_mark + blanks


def _has_reasoning(turn: Message) -> bool:
    return bool(turn.get("reasoning_content") or _inline_reasoning(turn)[1])


def _vary(
    template: Template, turns: Sequence[Message], tools: Tools, at: int, text: str, varied: Callable[[str], Message]
) -> tuple[int, int] | None:
    """Return the characters of the text in whose place a varied message has another text; None: it is not rendered.

    Raises:
        BadRow: the text does not begin and end as the varied rendering does, or holds every character to vary it by.
    """
    free = (character for character in map(chr, _PRIVATE_USE) if character not in text)
    mark, second = next(free, None), next(free, None)
    if mark is None or second is None:
        raise BadRow(
            "no free character",
            "The messages hold all characters of Unicode's private use area (U+E000 to U+F8FF), of which two that are "
            "not in them are needed to locate answers. Leave some out.",
        )
    other = template.text(_with(turns, at, varied(mark)), tools)
    before, found, behind = other.partition(mark)
    if not found and other == template.text(_with(turns, at, varied(second)), tools):
        return None
    end = len(text) - len(behind)
    if not found or len(before) > end or not (text.startswith(before) and text.endswith(behind)):
        raise _unstable(at)
    return len(before), end


def _unstable(at: int) -> BadRow:
    return BadRow(
        "template not prefix-stable",
        f"The chat template renders what lies around message {at + 1} (assistant) differently with another answer or "
        "once later text follows, so the answer cannot be located. End the conversation at its first answer, give "
        "prompt_ids and completion_ids, or add {% generation %} markers to the template.",
    )


def _with(turns: Sequence[Message], at: int, turn: Message) -> list[Message]:
    return [*turns[:at], turn, *turns[at + 1 :]]
