"""The verb `evaluate` on the command line."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli_options import (
    AsJson,
    Checkpoint,
    Device,
    Number,
    TemplateArg,
    Thinking,
    choose_device,
    finish,
    read_template_arg,
)
from paceline.observe.console import Console
from paceline.records import RunError, UserError

if TYPE_CHECKING:  # it loads torch
    from paceline.recipes.evaluate_asked import Asking


def evaluate(
    run_dir: Annotated[
        Path, typer.Argument(help="Folder of a run, finished or with --checkpoint; may be left out with --server.")
    ],
    prompts: Annotated[
        str | None,
        typer.Argument(help='JSONL file, a line {"prompt": text} or {"messages": [...]}; or gsm8k, humaneval.'),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Prompts to take, in an order drawn by --seed. Default: all.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of what is drawn.")] = 0,
    thinking: Thinking = "default",
    template_arg: TemplateArg = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="Of what is drawn. Default: 0, greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Probability that is drawn from. Default: 1, all.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Most likely tokens that are drawn from. Default: 0, all.")] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Prompts that are decoded at once. Default: 8.")] = None,
    timed_prompts: Annotated[
        int | None, typer.Option(min=0, help="Prompts timed one by one against plain decoding. Default: 8.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="Another run, or its evaluation.json on the same prompts, to compare with.")
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="Check the conventions between drafter, target and data instead.")
    ] = False,
    reference: Annotated[
        str | None, typer.Option(help="Model that a quantized target was made from; --probe compares features.")
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(help="URL of a running SGLang or vLLM to measure instead. Key: PACELINE_API_KEY."),
    ] = None,
    served_name: Annotated[
        str | None, typer.Option(help="What the server calls the target. Default: the first of its models.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests under way at the server. Default: 1.")
    ] = None,
    server_timeout: Annotated[
        float | None, typer.Option(min=1.0, help="Seconds that an answer may take. Default: 600.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Folder of the target. Default: where the run had it, or what is served.")
    ] = None,
    checkpoint: Checkpoint = None,
    device: Device = None,
    dtype: Annotated[
        Number | None, typer.Option(help="Number format; only float32, the default, is exactly lossless.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Measure acceptance by true speculative decoding, and check that its output is the target's own."""
    run, source = _places(run_dir, prompts, alone=server is not None)
    _check_goes_with(
        {"--server": server is not None, "--probe": probe},
        {
            "--probe": probe or None,
            "--against": against,
            "--reference": reference,
            "--device": device,
            "--checkpoint": checkpoint,
            "--dtype": dtype,
            "--rows": rows,
            "--timed-prompts": timed_prompts,
            "--temperature": temperature,
            "--top-p": top_p,
            "--top-k": top_k,
            "--served-name": served_name,
            "--concurrency": concurrency,
            "--server-timeout": server_timeout,
        },
    )
    from paceline.decode.sampling import Sampling
    from paceline.recipes.evaluate_asked import Asking

    asking = Asking(
        max_new_tokens,
        limit=limit,
        seed=seed,
        thinking=thinking,
        template_args=dict(map(read_template_arg, template_arg or [])),
        sampling=Sampling(temperature or 0.0, top_k or 0, 1.0 if top_p is None else top_p, seed),
    )
    console = Console(json=json)
    if server is not None:
        from paceline.recipes.evaluate_server import AskedServer, evaluate_server, server_text

        asked = AskedServer(server, served_name, concurrency or 1, server_timeout or 600.0)
        served = evaluate_server(run, source, asking, asked, console=console, target=target)
        return finish(console, json, served, server_text(served))
    assert run is not None, "only a server goes without"
    where = choose_device(device)
    how: dict[str, Any] = {"device": where, "dtype": dtype or "float32", "moved_to": target, "checkpoint": checkpoint}
    if probe:
        return _probe(run, source, asking, console, json, reference=reference, **how)
    timed = 8 if timed_prompts is None else timed_prompts
    return _measure(run, source, asking, console, json, rows=rows or 8, timed_prompts=timed, against=against, **how)


def _probe(run: Path, source: str, asking: "Asking", console: Console, json: bool, **how: Any) -> None:
    from paceline.recipes.evaluate_probe import evaluate_probe
    from paceline.recipes.probe_texts import probe_error, probe_text

    findings = evaluate_probe(run, source, asking, console=console, **how)
    finish(console, json, findings, probe_text(findings))
    if error := probe_error(findings):
        raise error


def _measure(run: Path, source: str, asking: "Asking", console: Console, json: bool, **how: Any) -> None:
    from paceline.checkpoint.drafter import evaluation_name
    from paceline.recipes.evaluate import evaluate as recipe
    from paceline.recipes.evaluate_texts import evaluation_text

    report = recipe(run, source, asking, untrained_prompts=0, console=console, **how)
    finish(console, json, report, evaluation_text(report))
    if report["lossless"] is False:
        raise RunError(
            f"Speculative and plain decoding differ in {report['mismatches']:,} of {report['prompts']:,} "
            f"answers, first at (prompt, token) {report['first_difference']}, by more than a near tie in "
            f"{report['dtype']}: see {run / evaluation_name(report['checkpoint'])}."
        )


def _places(first: Path, second: str | None, *, alone: bool) -> tuple[Path | None, str]:
    """Return the run's folder and the prompts; with a server the prompts may stand alone."""
    if second is not None:
        return first, second
    if alone:
        return None, str(first)
    raise UserError(f"`evaluate` needs a run's folder and prompts, got {first} alone. Add a JSONL file or gsm8k.")


# What has nothing to do beside a flag, in the order in which it is refused.
_IDLE = {
    "--server": (
        "--probe",
        "--against",
        "--reference",
        "--device",
        "--checkpoint",
        "--dtype",
        "--rows",
        "--timed-prompts",
    ),
    "--probe": ("--against", "--rows", "--timed-prompts", "--temperature", "--top-p", "--top-k"),
}
_OF_SERVER = ("--served-name", "--concurrency", "--server-timeout")


def _check_goes_with(flags: dict[str, bool], options: dict[str, object]) -> None:
    """Refuse options that were given, which are not None, and would have nothing to do."""
    for flag, used in flags.items():
        if used and (idle := [name for name in _IDLE[flag] if options[name] is not None]):
            raise UserError(f"{flag} goes without {idle[0]}. Leave one of them out.")
    if not flags["--probe"] and options["--reference"] is not None:
        raise UserError("--reference is of the probe, got it without --probe. Leave it out.")
    if not flags["--server"] and (idle := [name for name in _OF_SERVER if options[name] is not None]):
        raise UserError(f"{idle[0]} is of a server, got it without --server. Leave it out.")
