"""Conversations that the target answers turn by turn, and the rows that come of them.

What the target is given for a turn is what a server would give it: the conversation so far, its own answers as text,
rendered by the chat template. The ids of prompt and answer are kept as they were. Where a turn's prompt begins with the
prompt and the answer before it, token by token, they share a row, so the target reads the history once in training. A
template that shows earlier answers differently, as Qwen3's does, gives every turn a row of its own.
"""

import threading
from collections.abc import Sequence
from typing import Any, Literal, cast

from paceline.data.chat_template import Template, Tools, chat_template, check_known
from paceline.data.loops import ends_in_loop
from paceline.data.messages import BadRow
from paceline.data.prompt_file import LATER_TURN, Messages, Prompt, check_room
from paceline.records import Completion, UserError

Turns = Literal["all", "last"]
Row = dict[str, Any]

# Why an answer is left out where that is asked for.
CUT = "cut at max_new_tokens"
LOOP = "ends in a loop"


class Asker:
    """Gives the ids after which the target answers, and the text of its answers. Threads may share it."""

    def __init__(
        self,
        tokenizer: Any,
        template_args: dict[str, Any],
        *,
        stop_ids: Sequence[int],
        max_new_tokens: int,
        limit: int,
        limit_name: str,
    ) -> None:
        """`limit` is what prompt and answer may have together, in tokens; `limit_name` names it in messages.

        Raises:
            UserError: the tokenizer has no chat template, or the template does not know an argument.
        """
        self.max_new_tokens, self.limit, self.stop_ids = max_new_tokens, limit, tuple(stop_ids)
        self._tokenizer, self._limit_name = tokenizer, limit_name
        self._template = Template(tokenizer, template_args)
        self._lock = threading.Lock()

    @property
    def decides(self) -> list[Any]:
        """Everything beside the vocabulary that decides the ids of a conversation, as plain data."""
        return self._template.decides

    def ids(self, messages: Messages, tools: Tools) -> list[int]:
        """Return the ids after which the target answers.

        Raises:
            BadRow: the template refuses the messages.
        """
        with self._lock:
            text = self._template.text(messages, tools, generate=True)
            # The template has written every special token; verbose=False: the length is checked here.
            return cast(list[int], self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def first_ids(self, prompt: Prompt, chunk: Messages) -> list[int]:
        """Return the ids after which the target gives its first answer.

        Raises:
            BadRow: they cannot be had, are none, or leave no room for an answer; the message names the prompt's place.
        """
        try:
            ids = self.ids(chunk, prompt.tools)
        except BadRow as error:
            raise BadRow(error.reason, f"{prompt.place}: {error}") from None
        check_room(prompt.place, len(ids), self.max_new_tokens, self._limit_name, self.limit)
        return ids

    def answer_text(self, token_ids: Sequence[int]) -> str:
        """Return what an answer says, its stop token left out and other special tokens kept."""
        words = token_ids[:-1] if token_ids and token_ids[-1] in self.stop_ids else token_ids
        with self._lock:
            return cast(str, self._tokenizer.decode(list(words), clean_up_tokenization_spaces=False))


def thinking_args(tokenizer: Any, thinking: str, template_args: dict[str, Any]) -> dict[str, Any]:
    """Return the template's argument for thinking `on` or `off`; nothing for `default`, which the template decides.

    Raises:
        UserError: the chat template knows no such argument, or it is given twice.
    """
    if thinking == "default":
        return {}
    if "enable_thinking" in template_args:
        raise UserError("Thinking must be set once, got --thinking and --template-arg enable_thinking. Leave one out.")
    try:
        check_known(tokenizer, ["enable_thinking"], chat_template(tokenizer))
    except UserError:
        raise UserError(
            f"--thinking {thinking} needs a chat template that reads enable_thinking, and that of "
            f"{tokenizer.name_or_path} does not. Leave --thinking out."
        ) from None
    return {"enable_thinking": thinking == "on"}


def questions(messages: Messages, turns: Turns) -> list[Messages]:
    """Return what is said before each answer of the target.

    With `all`, each message of the user is answered in turn, and answers that are given are left out. With `last`, a
    conversation stays as it is up to its last question, and so does any with tools' results, which belong to answers
    that are given.
    """
    called = any(message["role"] == "tool" or message.get("tool_calls") for message in messages)
    said = [message for message in messages if message["role"] != "assistant"]
    if turns == "last" or called or all(message["role"] != "user" for message in said):
        return [messages]
    chunks: list[Messages] = [[]]
    for message in said:
        chunks[-1].append(message)
        if message["role"] == "user":
            chunks.append([])
    rest = chunks.pop()  # what follows the last question, a system message perhaps
    chunks[-1] += rest
    return chunks


class Conversation:
    """One conversation under way: what was answered is in `rows`, each ready to be written."""

    def __init__(
        self,
        prompt: Prompt,
        name: str,
        chunks: Sequence[Messages],
        asker: Asker,
        rows: list[Row],
        drops: frozenset[str] = frozenset(),
    ) -> None:
        """`name` is what its rows are called; `rows` is what an earlier command got of it; `drops` see CUT and LOOP."""
        self.rows, self.name = rows, name
        self.dropped: tuple[str, Row] | None = None  # why, and the answer that is not among the rows
        self._prompt, self._asker, self._drops = prompt, asker, drops
        self._history: Messages = []
        if rows:
            self._history = rows[-1]["messages"]
            rows[-1].pop("turns_left", None)  # of a conversation that an error ended
        self.answered = sum(row["turns"] for row in rows)
        self._chunks = list(chunks)[self.answered :]
        self.over = not self._chunks

    @property
    def request_name(self) -> str:
        """What the request for the next answer is called."""
        return f"{self.name}{LATER_TURN}{self.answered + 1}" if self.answered else self.name

    def ask(self) -> list[int] | None:
        """Return the ids after which the target gives its next answer; None if the conversation ends here.

        Raises:
            BadRow: it is the first one, and it cannot be given.
        """
        if self.over:
            return None
        messages = [*self._history, *self._chunks[0]]
        if not self.answered:
            return self._asker.first_ids(self._prompt, messages)
        try:
            ids = self._asker.ids(messages, self._prompt.tools)
        except BadRow:  # an answer that the template cannot show; what was answered before it is kept
            ids = []
        if not ids or len(ids) + self._asker.max_new_tokens > self._asker.limit:
            self._end()
            return None
        return ids

    def answer(self, completion: Completion) -> None:
        """Take the answer. A cut one ends the conversation, and so does one that is dropped."""
        token_ids, finish = completion.token_ids, completion.finish
        history = [*self._history, *self._chunks[0]]
        row: Row = {
            "id": self.request_name,
            "messages": [*history, {"role": "assistant", "content": self._asker.answer_text(token_ids)}],
            **({"tools": self._prompt.tools} if self._prompt.tools else {}),
            "prompt_ids": list(completion.prompt_ids),
            "completion_ids": list(token_ids),
            "finish": finish,
            "loop": ends_in_loop(token_ids, self._asker.stop_ids),
            "turns": 1,
            **({"retokenized": True} if completion.retokenized else {}),
        }
        faults = [*([CUT] if finish == "length" else []), *([LOOP] if row["loop"] else [])]
        if reason := next((fault for fault in faults if fault in self._drops), None):
            self.dropped = (reason, row)
            return self._end()
        if self.rows and (longer := _extended(self.rows[-1], row)):
            self.rows[-1] = longer
        else:
            self.rows.append(row)
        self._history = row["messages"]
        self._chunks.pop(0)
        self.answered += 1
        if finish == "length" or not self._chunks:
            self._end()

    def _end(self) -> None:
        self.over = True
        if self._chunks and self.rows:
            self.rows[-1]["turns_left"] = len(self._chunks)


def answer_tokens(row: Row) -> int:
    """Return how many tokens of a row the target wrote."""
    return len(row["completion_ids"]) if "completion_ids" in row else sum(row["loss_mask"])


def _extended(row: Row, later: Row) -> Row | None:
    """Return one row of a conversation's row and its next answer's, if the ids of the one begin those of the other."""
    if "input_ids" in row:
        ids, mask = row["input_ids"], row["loss_mask"]
    else:
        ids = row["prompt_ids"] + row["completion_ids"]
        mask = [0] * len(row["prompt_ids"]) + [1] * len(row["completion_ids"])
    prompt, completion = later["prompt_ids"], later["completion_ids"]
    if prompt[: len(ids)] != ids:
        return None
    one = {key: value for key, value in later.items() if key not in ("prompt_ids", "completion_ids")}
    return one | {
        "id": row["id"],
        "input_ids": prompt + completion,
        "loss_mask": mask + [0] * (len(prompt) - len(ids)) + [1] * len(completion),
        "loop": row["loop"] or later["loop"],
        "turns": row["turns"] + 1,
        **({"retokenized": True} if "retokenized" in row else {}),
    }
