"""`paceline evaluate --server`: acceptance and speed of a running SGLang or vLLM, from what it counts itself."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.drafter import evaluation_name, find_drafter
from paceline.checkpoint.folder import write_whole
from paceline.data.prompt_sets import Source
from paceline.decode.served import Asked, measure, served_model
from paceline.observe.console import Console
from paceline.recipes.evaluate_asked import Asking, ask
from paceline.recipes.evaluate_texts import asked_lines, slot_lines
from paceline.records import UserError, many
from paceline.target.load import TargetFacts, describe, load_tokenizer

SERVER_NAME = "evaluation-server.json"


@dataclass(frozen=True, slots=True)
class AskedServer:
    """Which server is measured, and with how many requests at once."""

    url: str
    served_name: str | None = None
    concurrency: int = 1
    timeout_s: float = 600.0


def evaluate_server(
    run: Path | None,
    prompts: Source,
    asking: Asking,
    server: AskedServer,
    *,
    console: Console,
    target: str | None = None,
) -> dict[str, Any]:
    """Send the prompts as token ids and return what the server counted; with a run, RUN/evaluation-server.json too."""
    # 1. What is asked: rendered here, so that it is token for token what `evaluate` without a server asks.
    meta = find_drafter(run).meta if run else None
    if meta:
        target = target or meta.target
    model = served_model(server.url, server.served_name, server.timeout_s)
    facts = describe(target) if target else _served_target(server.url, model)
    questions = ask(prompts, asking, load_tokenizer(facts.name), facts)

    # 2. The server answers.
    asked = Asked(
        server.url,
        questions.ids,
        asking.max_new_tokens,
        facts.eos_ids,
        asking.sampling,
        server.concurrency,
        server.timeout_s,
    )
    with console.progress(f"ask {server.url}", len(questions.ids)) as tick:
        served = measure(asked, model, tick)

    # 3. What it says.
    report = {
        **questions.described,
        "target": facts.name,
        "server": server.url,
        "engine": served.engine,
        "served_name": served.model,
        "concurrency": server.concurrency,
        "tau": served.tau,  # per request
        "tau_pooled": served.tau_pooled,
        "cycles": served.cycles,
        "per_slot_acceptance": served.per_slot_acceptance,
        "tokens": served.tokens,
        "seconds": served.seconds,
        "tokens_per_s": served.tokens_per_s,
        "other_tokens": served.other_tokens,
        "offline": _offline(run, questions.described) if run else None,
    }
    if run:
        write_whole(run / SERVER_NAME, json.dumps(report, indent=2) + "\n")
    return report


def server_text(report: dict[str, Any]) -> str:
    """Return what a server said, in 80 columns."""
    pooled = f"{report['tau_pooled']:.2f} pooled over {many(report['cycles'], 'cycle')}"
    each = f"{report['tau']:.2f}, mean of {many(report['prompts'], 'request')}; " if report["tau"] is not None else ""
    lines = [
        *asked_lines(report),
        f"server    {report['engine']} at {report['server'][:60]}",
        f"acceptance length {each}{pooled}",
        *slot_lines((report["per_slot_acceptance"] or ())[1:]),
        f"speed {report['tokens_per_s']:,.1f} tokens/s: {report['tokens']:,} in {report['seconds']:,.1f} s, "
        f"{many(report['concurrency'], 'request')} at once",
    ]
    if report["other_tokens"]:
        lines.append(
            f"It generated {many(report['other_tokens'], 'token')} for others meanwhile, which are in its counts:\n"
            "measure a server that does nothing else."
        )
    if offline := report["offline"]:
        lines.append(
            f"`evaluate` on the same prompts: {offline['tau_trained']:.2f}, {offline['tau_pooled']:.2f} pooled"
        )
    return "\n".join(lines)


def _served_target(url: str, model: str) -> TargetFacts:
    """Return the target that a server calls by the name of its folder."""
    try:
        return describe(model)
    except UserError:
        raise UserError(
            f"{url} serves {model}, which is no target folder here, and prompts are rendered with the target's chat "
            "template. Say with --target where it lies, or name a run."
        ) from None


def _offline(run: Path, described: dict[str, Any]) -> dict[str, Any] | None:
    """Return what the run's own evaluation says, if it is one of the same prompts and answers' length."""
    try:
        tree = json.loads((run / evaluation_name(None)).read_text())
        same = ("prompt_ids_sha256", "max_new_tokens", "temperature", "top_p", "top_k")
        if all(tree[key] == described[key] for key in same):
            return {key: tree[key] for key in ("tau_trained", "tau_pooled", "dtype")}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass  # there is none, or one of an earlier version: nothing to hold the server against
    return None
