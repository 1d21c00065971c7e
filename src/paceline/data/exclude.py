"""Which training prompts contain an evaluation prompt: overlap in 13-grams of words. Free of torch.

A text is the sequence of its words: runs of letters and digits after NFKC and case folding. A training prompt contains
an evaluation prompt of 13 words or more if they share 13 words in a row; one of 5 to 12 words if it holds all of them
in a row; one of fewer words only if it is equal to it, else each "hi" would drop half a dataset. An evaluation prompt
without any word is left out and counted. Scripts without spaces have long words, so there the check is a coarse one.

Shapes: W words of a text, P evaluation prompts, F words of all of them, E ends (prompts + 1), G different n-grams
of a length, H heads of n-grams of any length, N n-grams of a text, h of them that are known.
"""

import gzip
import hashlib
import json
import re
import unicodedata
import zlib
from collections.abc import Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from jaxtyping import Bool, Int, UInt64

from paceline.records import UserError, many

NGRAM = 13  # words that a training and an evaluation prompt may not share
WHOLE = 5  # words from which an evaluation prompt counts as contained; a shorter one must be the whole training prompt
KEYS = ("prompt", "question", "problem", "turns", "messages", "conversations", "text")
_RULE = b"NFKC casefold alphanumeric runs; 13-grams; whole from 5; equal below\0"
_WORD = re.compile(r"[^\W_]+")
_BASE = np.uint64(0x9E3779B97F4A7C15)  # of the polynomial hash modulo 2**64; any large odd number does

Index = dict[int, tuple[UInt64[np.ndarray, " ..."], Int[np.ndarray, " ..."]]]


def split_words(text: str) -> list[str]:
    """Return the words of a text as they are compared."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


class EvalPrompts:
    """Evaluation prompts, ready to be looked for in many texts. Can be pickled; nothing in it changes.

    N-grams are kept as hashes of word numbers with the place of their first occurrence, and a hit is compared word by
    word. That takes 24 bytes an n-gram, so evaluation sets of a million words still fit beside every worker.
    """

    def __init__(self, prompts: Sequence[tuple[str, str]]) -> None:
        """Take (place, text) pairs. Of several prompts that a text contains, the first of them is named."""
        split = [(place, split_words(text)) for place, text in prompts]
        kept = [(place, words) for place, words in split if words]
        self.prompts = len(kept)
        self.wordless = len(split) - len(kept)
        self._places = [place for place, _ in kept]
        self._number: dict[str, int] = {}  # from 1 up; 0 stands for words that no evaluation prompt holds
        digest = hashlib.sha256(_RULE)
        numbers: list[int] = []
        ends = [0]
        self._equal: dict[tuple[str, ...], int] = {}
        for index, (_, words) in enumerate(kept):
            digest.update(" ".join(words).encode() + b"\n")
            numbers += [self._number.setdefault(word, len(self._number) + 1) for word in words]
            ends.append(len(numbers))
            if len(words) < WHOLE:
                self._equal.setdefault(tuple(words), index)
        self.digest = digest.hexdigest()
        self._words_F: Int[np.ndarray, " F"] = np.array(numbers, dtype=np.int64)
        self._ends_E: Int[np.ndarray, " E"] = np.array(ends, dtype=np.int64)
        self._index, self._heads_H = self._make_index()

    @property
    def counts(self) -> dict[str, int]:
        """Prompts that are looked for, and those without words, which cannot be."""
        return {"compared": self.prompts, "wordless": self.wordless}

    @property
    def counted(self) -> str:
        """The same in words."""
        said = f"Rows are compared with {self.prompts:,} of {many(self.prompts + self.wordless, 'evaluation prompt')}"
        return f"{said}; left out, without words: {self.wordless:,}." if self.wordless else f"{said}."

    def find(self, text: str) -> str | None:
        """Return the place (file:line) of the first evaluation prompt that the text contains."""
        words = split_words(text)
        if len(words) < WHOLE:  # then it can contain none of the longer ones
            equal = self._equal.get(tuple(words))
            return None if equal is None else self._places[equal]
        words_W = np.fromiter(map(self._number.get, words, repeat(0)), dtype=np.int64, count=len(words))
        found = []
        for count, hash_N in _hashes(words_W):
            if count == WHOLE and not _known(self._heads_H, hash_N)[1].any():
                return None  # nearly every text ends here
            if count in self._index:
                found.append(self._first_of(count, hash_N, words_W))
        return min((hit for hit in found if hit is not None), default=(0, None))[1]

    def _first_of(
        self, count: int, hash_N: UInt64[np.ndarray, " N"], words_W: Int[np.ndarray, " W"]
    ) -> tuple[int, str] | None:
        """Return the first prompt that shares an n-gram of `count` words with the text: its number and its place."""
        known_G, start_G = self._index[count]
        at_N, known_N = _known(known_G, hash_N)
        hits_h = np.flatnonzero(known_N)
        starts_h = start_G[at_N[hits_h]]
        for i in np.argsort(starts_h, kind="stable"):  # the hash of another n-gram may be the same
            mine, its = int(hits_h[i]), int(starts_h[i])
            if np.array_equal(words_W[mine : mine + count], self._words_F[its : its + count]):
                prompt = int(np.searchsorted(self._ends_E, its, side="right")) - 1
                return prompt, self._places[prompt]
        return None

    def _make_index(self) -> tuple[Index, UInt64[np.ndarray, " H"]]:
        """Return the hashes to look for: by length, sorted, with where each first stands; and those of their heads."""
        lengths_P = np.diff(self._ends_E)
        starts = {n: self._ends_E[:-1][lengths_P == n] for n in range(WHOLE, NGRAM)}
        windows_P = np.maximum(lengths_P - NGRAM + 1, 0)
        before_P = np.cumsum(windows_P) - windows_P
        starts[NGRAM] = np.arange(windows_P.sum()) + np.repeat(self._ends_E[:-1] - before_P, windows_P)
        index: Index = {}
        heads_H = np.zeros(0, dtype=np.uint64)
        for count, hash_F in _hashes(self._words_F):
            if count == WHOLE:  # every n-gram that is looked for begins with one of these
                heads_H = np.unique(hash_F[np.concatenate(list(starts.values()))])
            if len(starts.get(count, ())):
                known_G, first_G = np.unique(hash_F[starts[count]], return_index=True)
                index[count] = (known_G, starts[count][first_G])
        return index, heads_H


def read_eval_sets(paths: Sequence[Path]) -> EvalPrompts:
    """Return the prompts of JSONL files (`.jsonl`, `.jsonl.gz`); blank lines are left out.

    A line is an object with one of KEYS, the first of them that it has: a text, a list of texts, or messages (role and
    content, or from and value), of which the user's count. Each text is an evaluation prompt of its own.

    Raises:
        UserError: a file or a line is not as it should be; the message names file and line.
    """
    prompts: list[tuple[str, str]] = []
    for path in paths:
        before = len(prompts)
        prompts += [(place, text) for place, line in _lines(path) for text in _texts(line, place)]
        if len(prompts) == before:
            raise UserError(f"Evaluation set {path} holds no prompt. Give a JSONL file, one JSON object a line.")
    return EvalPrompts(prompts)


def _hashes(words_W: Int[np.ndarray, " W"]) -> Iterator[tuple[int, UInt64[np.ndarray, " G"]]]:
    """Yield the hashes of all n-grams of 1, 2, ... NGRAM words, as far as the text has such."""
    word_W = words_W.astype(np.uint64)
    hash_G = np.zeros(len(word_W) + 1, dtype=np.uint64)
    for count in range(1, min(NGRAM, len(word_W)) + 1):
        hash_G = hash_G[:-1] * _BASE + word_W[count - 1 :]
        yield count, hash_G


def _known(
    known_G: UInt64[np.ndarray, " G"], hash_N: UInt64[np.ndarray, " N"]
) -> tuple[Int[np.ndarray, " N"], Bool[np.ndarray, " N"]]:
    """Return where each hash stands among the sorted known ones, and whether it does."""
    if not len(known_G):
        return np.zeros(len(hash_N), dtype=np.int64), np.zeros(len(hash_N), dtype=bool)
    at_N = np.minimum(np.searchsorted(known_G, hash_N), len(known_G) - 1)
    return at_N, known_G[at_N] == hash_N


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (file:line, line) of the lines that are not blank."""
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise UserError(f"An evaluation set must end in .jsonl or .jsonl.gz, got {path}. Convert it to JSON lines.")
    if path.exists() and not path.is_file():  # a pipe would be waited for, and a device has no end
        raise UserError(f"Evaluation set {path} must be a regular file. Write its lines to one.")
    number = 0
    try:
        with cast(IO[bytes], gzip.open(path) if path.suffix == ".gz" else path.open("rb")) as file:
            for number, line in enumerate(file, 1):  # bytes: only "\n" ends a line, U+2028 may stand inside one
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield f"{path}:{number}", text
    except FileNotFoundError:
        raise UserError(f"There is no evaluation set {path}. Give a JSONL file, one prompt a line.") from None
    except UnicodeDecodeError as error:
        wrong = error.object[error.start]
        raise UserError(f"{path}:{number} is not UTF-8 (byte 0x{wrong:02x}). Convert the file to UTF-8.") from None
    except (OSError, EOFError, zlib.error) as error:  # the last two: a gzip file that was cut or damaged
        raise UserError(f"{path}:{number + 1} cannot be read: {error}. Check the evaluation set.") from None


def _texts(line: str, place: str) -> list[str]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON: {error}. Correct the line.") from None
    if not isinstance(row, dict):
        raise UserError(f"{place} must be a JSON object with a prompt, found {type(row).__name__}. Correct the line.")
    for key in KEYS:
        if row.get(key) is not None:
            texts = _user_texts(row[key])
            if not texts:
                found = str(row[key])[:60]
                raise UserError(
                    f"{place}: {key} must be a text, a list of texts, or messages with one of the user's, "
                    f"found {found}. Correct the line."
                )
            return texts
    if null := next((key for key in KEYS if key in row), None):
        raise UserError(
            f"{place}: {null} must hold a prompt, but its value is null. Give the prompt, or drop the line."
        )
    found = ", ".join(map(str, row))[:80] or "(none)"
    raise UserError(f"{place} must have one of the keys {', '.join(KEYS)}, found {found}. Rename the prompt's key.")


def _user_texts(value: Any) -> list[str]:
    """Return the texts that a user wrote; none if the value is nothing of the kind."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        return []
    if all(isinstance(item, str) for item in value):
        return value
    if not all(isinstance(item, dict) for item in value):
        return []
    mine = [item for item in value if item.get("role", item.get("from")) in ("user", "human")]
    texts = [item.get("content", item.get("value")) for item in mine]
    return texts if all(isinstance(text, str) for text in texts) else []
