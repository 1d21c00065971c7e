"""The command line: one verb a function. Recipes, and with them torch, are imported only once a verb runs."""

import inspect
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from paceline import __version__
from paceline.cli_bench import bench
from paceline.cli_evaluate import evaluate
from paceline.cli_generate import generate
from paceline.cli_options import (
    AsJson,
    Checkpoint,
    MaskToken,
    Number,
    Overwrite,
    Revision,
    Target,
    TemplateArg,
    finish,
    read_template_arg,
)
from paceline.cli_plan import plan
from paceline.cli_report import report
from paceline.cli_watch import watch
from paceline.config import RunSettings
from paceline.config_file import load_settings
from paceline.observe.console import Console
from paceline.records import INTERRUPTED_STATUS, Hung, Interrupted, PacelineError, UserError, many

# Threads that may be inside torch or a write when a command ends.
_BUSY_THREADS = ("target replica", "drafter rank", "generation", "checkpoint")

app = typer.Typer(
    help="Train DFlash drafters: small models that make a large language model decode several times faster.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

app.add_typer(bench, name="bench")


@app.callback(invoke_without_command=True)
def _main(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.command()
def init(
    target: Target,
    out: Annotated[Path, typer.Option(help="Settings file to write.")] = Path("RUN.yaml"),
    revision: Revision = None,
    dataset: Annotated[str, typer.Option(help="Dataset folder that `prepare` wrote or will write.")] = "dataset",
    run_dir: Annotated[str, typer.Option(help="Folder of the run.")] = "runs/first",
    mask_token_id: MaskToken = None,
    overwrite: Overwrite = False,
    json: AsJson = False,
) -> None:
    """Look at a target and write a complete, commented RUN.yaml for it."""
    from paceline.recipes.init import init as recipe
    from paceline.recipes.init_outlook import outlook

    console = Console(json=json)
    settings = recipe(
        target,
        out,
        revision=revision,
        dataset=dataset,
        run_dir=run_dir,
        mask_token_id=mask_token_id,
        overwrite=overwrite,
    )
    told = {"outlook": outlook(settings, console)}
    finish(console, json, {"settings": str(out), **settings.model_dump(mode="json"), **told}, f"Wrote {out}.")


@app.command()
def demo(
    run_dir: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("runs/demo"),
    size: Annotated[Literal["ci", "cpu", "gpu"] | None, typer.Option(help="Default: gpu where there is one.")] = None,
    json: AsJson = False,
) -> None:
    """Train, evaluate and export a real drafter for SmolLM2-135M, on two CPU cores or one GPU."""
    from paceline.recipes.demo import demo as recipe
    from paceline.recipes.demo_sizes import default_size
    from paceline.recipes.texts import demo_text

    console = Console(json=json)
    report = recipe(run_dir, size_name=size or default_size(), console=console)
    finish(console, json, report, demo_text(report, run_dir))


@app.command()
def prepare(
    sources: Annotated[
        list[Path], typer.Argument(help="JSONL, Parquet or Arrow files, or folders of them; with --verify, datasets.")
    ],
    settings: Annotated[
        Path | None, typer.Option(help="RUN.yaml with the dataset, target, mask token and data.on_long; options win.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Dataset folder to write.")] = None,
    target: Annotated[str | None, typer.Option(help="Target model, as in `init`.")] = None,
    revision: Revision = None,
    max_length: Annotated[int | None, typer.Option(min=2, help="Longest sample, in tokens. Default: 4096.")] = None,
    on_long: Annotated[
        Literal["refuse", "truncate"] | None, typer.Option(help="What becomes of longer samples. Default: refuse.")
    ] = None,
    turns: Annotated[Literal["all", "last"], typer.Option(help="Answers that are learnt from.")] = "all",
    mask_reasoning: Annotated[bool, typer.Option("--mask-reasoning", help="Do not learn from reasoning.")] = False,
    template_arg: TemplateArg = None,
    exclude: Annotated[
        list[Path] | None, typer.Option(help="Evaluation set (JSONL): prompts that contain one of its are left out.")
    ] = None,
    on_bad: Annotated[Literal["quarantine", "stop"], typer.Option(help="What becomes of bad rows.")] = "quarantine",
    max_quarantined: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of bad rows above which the command fails.")
    ] = 0.01,
    mask_token_id: MaskToken = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that tokenize. Default: one a core.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Check the checksums of datasets; write nothing.")] = False,
    overwrite: Overwrite = False,
    json: AsJson = False,
) -> None:
    """Turn conversations, or what `generate` wrote, into a dataset of tokenized completions."""
    console = Console(json=json)
    if verify:
        _check_alone(prepare, locals(), "verify", {"sources", "json"})
        _verify(sources, console, json)
        return
    said = _said(settings, out)
    out, target = out or said.get("out"), target or said.get("target")
    if out is None or target is None:
        raise UserError("`prepare` needs --out and --target. Add them, or --settings with a RUN.yaml that names them.")
    template_args = dict(map(read_template_arg, template_arg or []))
    from paceline.data.chat import ChatOptions
    from paceline.recipes.prepare import prepare_dataset
    from paceline.recipes.texts import prepared_text

    with console.progress("prepare") as tick:
        summary = prepare_dataset(
            sources,
            out,
            target=target,
            revision=revision or said.get("revision"),
            max_length=max_length or said.get("max_length", 4096),
            on_long=on_long or said.get("on_long", "refuse"),
            mask_token_id=said.get("mask_token_id") if mask_token_id is None else mask_token_id,
            options=ChatOptions(turns=turns, mask_reasoning=mask_reasoning, template_args=template_args),
            exclude_sets=exclude or [],
            on_bad=on_bad,
            max_quarantined=max_quarantined,
            workers=workers or len(os.sched_getaffinity(0)),
            overwrite=overwrite,
            on_progress=tick,
            on_note=console.line,
        )
    for note in summary["notes"]:
        console.line(note)
    finish(console, json, summary, prepared_text(summary))


app.command()(generate)


app.command()(plan)


@app.command()
def train(
    settings: Annotated[
        Path,
        typer.Argument(metavar="RUN.yaml", help="Settings file; `init` writes one. To resume, also a run's folder."),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Settings to change, train.lr=1e-3.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's newest checkpoint.")] = False,
    resume_previous: Annotated[
        bool, typer.Option("--resume-previous", help="The same, or from the one before it if the newest is damaged.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Train a drafter: target replicas feed it their features, every role in a thread of its own."""
    from paceline.recipes.train_stop import stoppable

    with stoppable() as imported:
        tree = (_resumed if resume or resume_previous else load_settings)(settings, overrides or [])
        from paceline.recipes.train import train as recipe

        imported()
        console = Console(json=json)
        summary = recipe(tree, console=console, resume=resume, resume_previous=resume_previous)
    steps = many(summary["train_steps"], "step")
    finish(console, json, summary, f"Trained {steps}; the drafter is in {summary['drafter']}.")


app.command()(watch)
app.command()(evaluate)


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run, finished or with --checkpoint.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write. Default: RUN_DIR/export, or RUN_DIR/export-speculators.")
    ] = None,
    format: Annotated[
        Literal["zlab", "speculators", "all"],
        typer.Option(help="Layout; all: zlab to --out, and speculators beside it as OUT-speculators."),
    ] = "zlab",
    max_shard_size: Annotated[str, typer.Option(help="Largest weight file, such as 500MB.")] = "5GB",
    dtype: Annotated[Number, typer.Option(help="Number format of the written weights.")] = "bfloat16",
    checkpoint: Checkpoint = None,
    overwrite: Overwrite = False,
    json: AsJson = False,
) -> None:
    """Write the drafter as a folder that serving engines load, and check it by reading it back.

    z-lab's code, SGLang and vLLM load the layout zlab; the speculators package and vLLM load speculators.
    """
    from paceline.recipes import export as recipe
    from paceline.recipes.texts import exported_text

    said: dict[str, Any] = {
        "dtype": dtype,
        "overwrite": overwrite,
        "max_shard_size": max_shard_size,
        "checkpoint": checkpoint,
    }
    if format == "all":
        summary = recipe.export_all(run_dir, out, **said)
    else:
        summary = recipe.export(run_dir, out, layout=format, **said)
    finish(Console(json=json), json, summary, exported_text(summary))


app.command()(report)


@app.command()
def doctor(
    out: Annotated[Path | None, typer.Option(help="Where to write the machine's profile. Default: the cache.")] = None,
    json: AsJson = False,
) -> None:
    """Try what this machine can do, one to four minutes; what is found decides train.policy: auto."""
    from paceline.recipes.doctor import doctor as recipe

    console = Console(json=json)
    finish(console, json, recipe(console=console, out=out), "")


def _check_alone(verb: Callable[..., None], given: dict[str, Any], flag: str, beside: set[str]) -> None:
    """Refuse options beside one that leaves nothing for them to do."""
    for name, parameter in inspect.signature(verb).parameters.items():
        if name not in {flag, *beside} and given[name] not in (parameter.default, []):
            raise UserError(
                f"--{flag} writes nothing and goes with datasets alone, got --{name.replace('_', '-')} too. Leave one "
                "of them out."
            )


def _verify(folders: list[Path], console: Console, json: bool) -> None:
    from paceline.recipes.prepare import verify_datasets

    with console.progress("verify") as tick:
        summary = verify_datasets(folders, tick)
    held = (many(summary["shards"], "shard"), f"{summary['bytes']:,} bytes", many(summary["rows"], "row"))
    text = f"{', '.join(held)}: all as their manifests say."
    if bad := summary["rows_without_anchors"]:
        text += f" `train` sets {many(bad, 'row')} aside, without two supervised tokens in a row."
    finish(console, json, summary, text)


def _resumed(path: Path, overrides: list[str]) -> RunSettings:
    """Return the settings of a run to go on with, from RUN.yaml or from the run's folder, wherever it lies now."""
    if not path.is_dir():
        return load_settings(path, overrides)
    saved = path / "settings.yaml"
    if not saved.is_file():
        raise UserError(f"{path} is no run folder: it has no settings.yaml. Name one, or a RUN.yaml.")
    return load_settings(saved, overrides).model_copy(update={"run_dir": str(path)})


def _said(settings: Path | None, out: Path | None) -> dict[str, Any]:
    """Return what a RUN.yaml says of the dataset to write."""
    if settings is None:
        return {}
    tree = load_settings(settings)
    if out is None and len(tree.data.folders) > 1:
        raise UserError(
            f"`prepare` writes one dataset, but data.dataset of {settings} lists {len(tree.data.folders)}. "
            "Name the one to write with --out."
        )
    return {
        "out": Path(tree.data.folders[0]),
        "target": tree.target.model,
        "revision": tree.target.revision,
        "max_length": tree.data.max_length,
        "on_long": tree.data.on_long,
        "mask_token_id": tree.drafter.mask_token_id,
    }


def main() -> None:
    """Run the command line. Exit status: 2 bad input, 1 a run that failed, 75 one that can go on, 130 interrupted."""
    # Read by OpenMP when torch is loaded. Roles that share few cores stall one another while their threads spin: a step
    # beside another busy process took 0.75 s instead of 4.6 s with this, on an idle machine about as long as before.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        app(prog_name="paceline")  # also for `python -m paceline`
    except UserError as error:
        _fail(error, 2)
    except Interrupted as error:
        _fail(error, INTERRUPTED_STATUS, "stopped")
    except PacelineError as error:
        _fail(error, 1)
    except OSError as error:  # a full or broken disk, a folder without permission
        bad_input = isinstance(error, FileExistsError | IsADirectoryError | NotADirectoryError)
        _fail(f"{error.strerror or error}: {error.filename}" if error.filename else error, 2 if bad_input else 1)
    except KeyboardInterrupt:  # before typer looks out for it, or after
        _fail("interrupted", 130)
    except SystemExit as end:
        if end.code == 130:  # typer's answer to Ctrl-C
            _fail("interrupted", 130)
        if isinstance(end.code, int | None):
            _leave_if_busy(end.code or 0)  # a replica that hangs may have been left behind
        raise
    except Exception as error:
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which is not imported here
            raise
        _fail(f"The device's memory is full: {error} Lower --rows or use a larger device.", 1)


def _fail(error: object, status: int, what: str = "error") -> None:
    line = " ".join(str(error).split())
    # Names and values out of files that others wrote are no orders for the terminal.
    plain = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in line)
    print(f"{what}: {plain}", file=sys.stderr)
    _leave_if_busy(status, hung=isinstance(error, Hung))
    sys.exit(status)


def _leave_if_busy(status: int, *, hung: bool = False) -> None:
    """End the process at once if a thread may be inside torch, which would abort the interpreter's end and change the
    status, or may never end.
    """
    if hung or any(thread.name.startswith(_BUSY_THREADS) for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
