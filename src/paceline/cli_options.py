"""Options that several verbs share, and how a verb ends. Free of torch until a device is asked for."""

import json as jsonlib
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import typer

from paceline.observe.console import Console
from paceline.records import UserError

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON; progress goes to standard error.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is at the output's place.")]
Target = Annotated[str, typer.Option(help="Target model: a folder, or a hub id together with --revision.")]
Revision = Annotated[str | None, typer.Option(help="Commit of the hub id.")]
Device = Annotated[
    str | None, typer.Option(help="Where to run, such as cpu or cuda:0. Default: a GPU if there is one.")
]
Checkpoint = Annotated[
    str | None,
    typer.Option(
        metavar="latest|best|STEPS",
        help="Weights of that checkpoint, also of a run that is not finished. Default: the finished drafter.",
    ),
]
Number = Literal["float32", "bfloat16"]
MaskToken = Annotated[
    int | None, typer.Option(min=0, help="Token id of the mask: an embedding row that data never uses.")
]
Thinking = Annotated[
    Literal["on", "off", "default"], typer.Option(help="Whether the target thinks; default: as its template has it.")
]
TemplateArg = Annotated[
    list[str] | None, typer.Option(metavar="KEY=VALUE", help="Argument of the chat template, enable_thinking=false.")
]


def choose_device(wanted: str | None, option: str = "--device") -> str:
    """Return the device that an option names, or a GPU if there is one.

    Raises:
        UserError: there is no such device.
    """
    import torch

    from paceline.runtime.devices import check_device

    if wanted is None:
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    check_device(wanted, option)
    return wanted


def refuse_idle(beside: str, why: str, given: Mapping[str, object]) -> None:
    """Refuse options beside one that leaves nothing for them to do; `given` has None or False for what was left out.

    Raises:
        UserError: some were given.
    """
    idle = [option for option, value in given.items() if value is not None and value is not False]
    if idle:
        raise UserError(f"{beside} {why}, got {' and '.join(idle)} too. Leave one or the other out.")


def check_captured(captured: bool | None, device: str) -> None:
    """Refuse CUDA graphs that are asked for where there is no GPU.

    Raises:
        UserError: they are.
    """
    if captured and not device.startswith("cuda"):
        raise UserError(f"--captured needs a GPU (--device), got {device}. Leave it out, or name a GPU.")


def read_template_arg(text: str) -> tuple[str, Any]:
    """Return name and value of a --template-arg.

    Raises:
        UserError: it is not of the form key=value.
    """
    key, sep, raw = text.partition("=")
    if not sep or not key.isidentifier():
        raise UserError(f"--template-arg has the form key=value, got {text!r}.")
    spelled = {"true": "true", "false": "false"}.get(raw.lower(), raw)  # as Python and others spell them
    try:
        return key, jsonlib.loads("null" if raw == "None" else spelled)
    except ValueError:
        return key, raw
    except RecursionError:
        raise UserError(f"--template-arg {key} must be a plain value, got {raw[:20]}..., nested too deeply.") from None


def finish(console: Console, json: bool, result: object, text: str) -> None:
    """Print a verb's result: as JSON, where numbers that are not finite are null, or in words."""
    if json:
        console.result(jsonlib.dumps(plain(result), indent=2))
    elif text:
        console.line(text)


def plain(value: object) -> object:
    """Return a value with null for numbers that are not finite, which JSON has none of."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
