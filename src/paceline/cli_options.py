"""Options that several verbs share, and how a verb ends. Free of torch until a device is asked for."""

import json as jsonlib
from typing import Annotated, Literal

import typer

from paceline.observe.console import Console

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON; progress goes to standard error.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is at the output's place.")]
Target = Annotated[str, typer.Option(help="Target model: a folder, or a hub id together with --revision.")]
Revision = Annotated[str | None, typer.Option(help="Commit of the hub id.")]
Device = Annotated[
    str | None, typer.Option(help="Where to run, such as cpu or cuda:0. Default: a GPU if there is one.")
]
Number = Literal["float32", "bfloat16"]
MaskToken = Annotated[
    int | None, typer.Option(min=0, help="Token id of the mask: an embedding row that data never uses.")
]


def choose_device(wanted: str | None) -> str:
    """Return the device that --device names, or a GPU if there is one.

    Raises:
        UserError: there is no such device.
    """
    import torch

    from paceline.runtime.devices import check_device

    if wanted is None:
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    check_device(wanted, "--device")
    return wanted


def finish(console: Console, json: bool, result: object, text: str) -> None:
    """Print a verb's result: as JSON, or in words."""
    if json:
        typer.echo(jsonlib.dumps(result, indent=2))
    elif text:
        console.line(text)
