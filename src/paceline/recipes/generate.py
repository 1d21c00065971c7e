"""`paceline generate`: prompts in, a folder of the target's own completions out, token ids kept."""

from collections.abc import Callable, Sequence
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.data.completions import SHARD_LINES, VERSION, Ledger, check_same
from paceline.data.completions_writer import CompletionsWriter, claimed, clear
from paceline.data.prompt_file import Messages, PromptLines
from paceline.data.survey import survey
from paceline.decode.remote import Limits, Remote
from paceline.decode.sampling import Sampling
from paceline.observe.console import Console
from paceline.pipeline.conversing import Completer, Conversations, check_refused
from paceline.recipes.generate_asked import Asked
from paceline.recipes.generate_engine import BuiltIn
from paceline.records import UserError
from paceline.target.load import TargetFacts, describe, load_tokenizer

# Returns what answers, of target, tokenizer, sampling and the tokens of the longest conversation.
MakeCompleter = Callable[[TargetFacts, Any, Sampling, int], Completer]


def generate_completions(
    prompts: Path | Sequence[Messages],
    out: Path,
    asked: Asked,
    *,
    console: Console,
    overwrite: bool = False,
    retry_errors: bool = False,
    make: MakeCompleter | None = None,
    shard_lines: int = SHARD_LINES,
) -> dict[str, Any]:
    """Answer every prompt into the folder `out`, or what is missing of it, and return a summary (plain data).

    `make` is for another engine than the one that is asked for; `shard_lines` is for a folder that is new.

    Raises:
        UserError: the settings, the prompt file or what is in the folder do not allow it, or too many prompts do not.
        RunError: a replica or the disk failed; what was finished is kept.
    """
    # 1. What is asked for.
    lines = PromptLines(prompts)
    facts = describe(asked.model, asked.revision)
    tokenizer = load_tokenizer(asked.model, asked.revision)
    sampling, ignored = asked.sampling(facts)
    asker = asked.asker(facts, tokenizer)
    decides = asked.decides(facts, tokenizer, sampling, asker, lines.sha256())
    made_with = {"target": facts.name, "prompts": lines.name, "not_followed": list(ignored), **_versions()}
    if ignored:
        console.line(f"The target's generation_config.json sets {', '.join(ignored)} too, which is not followed.")

    # 2. What is there already.
    with claimed(out, overwrite=overwrite) as ledger:
        if ledger is None or overwrite:
            with console.progress("look at prompts") as tick:
                looked = survey(lines, asker, asked.turns, shard_lines, tick)
                ledger = Ledger(VERSION, decides, made_with, shard_lines, looked)
                check_refused(ledger, asked.max_quarantined)
        check_same(out, ledger, decides)
        check_refused(ledger, asked.max_quarantined)
        if overwrite:
            clear(out)
        with console.progress("check shards") as tick:
            opened = CompletionsWriter(out, ledger, tick)
        with closing(opened) as writer:
            retried = writer.retry_errors() if retry_errors else 0
            for note in writer.notes:
                console.line(note)

            # 3. What is missing.
            found = writer.found
            if ledger.open_shards:
                left = ledger.conversations - writer.total.conversations
                completer = (make or _engine(asked, left, console))(facts, tokenizer, sampling, ledger.survey.slots)
                asker = asked.asker(facts, tokenizer, ledger.survey.slots)
                talks = Conversations(lines, asker, writer, turns=asked.turns, drops=asked.drops)
                _run(talks, completer, writer, asked.max_quarantined, console)
            if lines.sha256() != decides["prompts"]:
                raise UserError(f"{lines.name} changed while it was read. Restore it, or generate into another folder.")
    return _summary(out, ledger, writer, found=found, retried=retried)


def _engine(asked: Asked, left: int, console: Console) -> MakeCompleter:
    """Return what makes the engine that is asked for; `left` conversations have no answer yet."""

    def built_in(facts: TargetFacts, _: Any, sampling: Sampling, slots: int) -> Completer:
        rows = min(asked.rows, max(left, 1))  # each row's cache is allocated whether there is a prompt for it or not
        return BuiltIn(facts, asked.devices, sampling=sampling, dtype=asked.dtype, rows=rows, slots=slots)

    def remote(facts: TargetFacts, tokenizer: Any, sampling: Sampling, _: int) -> Completer:
        return Remote(
            asked.servers,
            model=facts.name,
            tokenizer=tokenizer,
            stop_ids=facts.eos_ids,
            vocab_size=facts.vocab_size,
            sampling=sampling,
            served_name=asked.served_name,
            limits=Limits(concurrency=asked.concurrency, timeout_s=asked.server_timeout_s),
            on_note=console.line,
        )

    return remote if asked.servers else built_in


def _run(talks: Conversations, completer: Completer, writer: CompletionsWriter, share: float, console: Console) -> None:
    of = writer.ledger.conversations
    with console.progress("generate", of) as tick:

        def show() -> None:
            done = writer.total.conversations
            tick(done, note=completer.note(None if console.shows_time_left else of - done))

        show()
        talks.run(completer, share, show)


def _summary(out: Path, ledger: Ledger, writer: CompletionsWriter, *, found: int, retried: int) -> dict[str, Any]:
    total = writer.total
    return {
        "completions": str(out),
        "prompts": sum(ledger.survey.prompts),
        "conversations": total.conversations,
        "rows": total.rows,
        "tokens_generated": total.tokens,
        "stopped": total.stopped,
        "cut_at_max_new_tokens": total.cut,
        "loops": total.loops,
        "retokenized": total.retokenized,
        "turns_not_asked": total.turns_left,
        "quarantined": total.reasons,
        "found": found,
        "retried": retried,
        "shards": len(ledger.shards),
        "asked": ledger.asked,
    }


def _versions() -> dict[str, str]:
    others = {name: version(name) for name in ("torch", "transformers", "tokenizers", "jinja2")}
    return {"paceline": __version__, **others}
