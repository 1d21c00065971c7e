"""The verb `generate` on the command line."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from paceline.cli_options import (
    AsJson,
    Number,
    Overwrite,
    Revision,
    Target,
    TemplateArg,
    Thinking,
    choose_device,
    finish,
    read_template_arg,
)
from paceline.observe.console import Console
from paceline.records import UserError

_OWN = "Default: what the model's generation_config.json says."


def generate(
    prompts: Annotated[Path, typer.Argument(help='JSONL file, a line {"prompt": text} or {"messages": [...]}.')],
    out: Annotated[Path, typer.Option(help="Folder of completions to write, or to go on with.")],
    target: Target,
    revision: Revision = None,
    thinking: Thinking = "default",
    template_arg: TemplateArg = None,
    turns: Annotated[
        Literal["all", "last"],
        typer.Option(help="all: every question is answered anew. last: given answers stay, the last is answered."),
    ] = "all",
    samples: Annotated[int, typer.Option(min=1, help="Completions of each prompt.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 512,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Longest prompt with its answer, in tokens. Default: the target's limit.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help=f"0: greedy. {_OWN}")] = None,
    top_p: Annotated[float | None, typer.Option(help=_OWN)] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help=_OWN)] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of what is drawn.")] = 0,
    on_length: Annotated[
        Literal["keep", "drop"], typer.Option(help="What becomes of answers that reach --max-new-tokens.")
    ] = "keep",
    on_loop: Annotated[
        Literal["keep", "drop"], typer.Option(help="What becomes of answers that end in a loop.")
    ] = "keep",
    max_quarantined: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of refused prompts above which the command fails.")
    ] = 0.01,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Ask refused prompts once more, and what is missing.")
    ] = False,
    rows: Annotated[int, typer.Option(min=1, help="Prompts that are decoded at once on each device.")] = 64,
    device: Annotated[
        list[str] | None,
        typer.Option(help="Device of a replica, cpu or cuda:0; give several. Default: a GPU if there is one."),
    ] = None,
    dtype: Annotated[
        Number, typer.Option(help="Number format of the target. Near ties in bfloat16 depend on the batch.")
    ] = "bfloat16",
    server: Annotated[
        list[str] | None,
        typer.Option(
            help="URL of an OpenAI-compatible server that answers instead; give several. Key: PACELINE_API_KEY."
        ),
    ] = None,
    served_name: Annotated[
        str | None, typer.Option(help="What servers call the target. Default: its name or folder.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests under way at all servers together.")] = 64,
    server_timeout: Annotated[float, typer.Option(min=1.0, help="Seconds that an answer may take.")] = 1800.0,
    overwrite: Overwrite = False,
    json: AsJson = False,
) -> None:
    """Let the target answer prompts itself, token ids kept; run again after a kill, it goes on."""
    if server and device:
        raise UserError("--device is for the built-in engine, got it with --server. Leave one of them out.")
    devices = [choose_device(one) for one in device] if device else [choose_device("cpu" if server else None)]
    from paceline.recipes.generate import generate_completions
    from paceline.recipes.generate_asked import Asked
    from paceline.recipes.texts import generated_text

    asked = Asked(
        model=target,
        revision=revision,
        dtype=dtype,
        thinking=thinking,
        template_args=dict(map(read_template_arg, template_arg or [])),
        turns=turns,
        samples=samples,
        max_new_tokens=max_new_tokens,
        max_length=max_length,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        on_length=on_length,
        on_loop=on_loop,
        devices=devices,
        rows=rows,
        max_quarantined=max_quarantined,
        servers=server or (),
        served_name=served_name,
        concurrency=concurrency,
        server_timeout_s=server_timeout,
    )
    console = Console(json=json)
    try:
        summary = generate_completions(
            prompts, out, asked, console=console, overwrite=overwrite, retry_errors=retry_errors
        )
    except KeyboardInterrupt:
        console.line(f"  what was finished is kept in {out}: run the same command again to go on")
        raise
    finish(console, json, summary, generated_text(summary))
