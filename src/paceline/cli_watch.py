"""The verb `watch` on the command line."""

import json as jsonlib
import sys
from typing import Annotated, Any

import typer

from paceline.cli_options import AsJson, finish, plain
from paceline.observe.console import Console
from paceline.records import RunError, UserError


def watch(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Folder of a run, or ssh://\\[user@]host[:port]/path.")],
    once: Annotated[bool, typer.Option("--once", help="Look once instead of following the run.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, max=3600.0, help="Seconds between two looks.")] = 2.0,
    via: Annotated[
        str | None,
        typer.Option(help="Command that runs another one where the folder is, such as 'docker exec NAME'."),
    ] = None,
    web: Annotated[
        bool, typer.Option("--web", help="Serve a live page for this machine's browser, until Ctrl-C.")
    ] = False,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of the page on 127.0.0.1. Default: a free one.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Look at a run from outside: where it stands, what each role does, and whether it is still alive.

    Exit status: 0 finished, 3 under way, 1 failed or killed, 75 stopped and can go on, 2 bad input.
    """
    from paceline.observe.place import find_place
    from paceline.observe.showing import Json, Once, Panel, PlainLines, Show
    from paceline.recipes.watch import watch as recipe

    _check_page(web, port, once=once, json=json)
    console = Console(json=json)
    terminal = console.rich.is_terminal and not json

    def write(state: dict[str, Any]) -> None:
        if once:
            finish(console, True, state, "")
        else:
            console.result(jsonlib.dumps(plain(state)))

    show: Show
    if web:
        from paceline.observe.web import Page

        show = Page(console.line, title=run, port=port or 0)
    elif json:
        show = Json(write, console, once=once)
    elif once:
        show = Once(console)
    else:
        show = Panel(console) if terminal else PlainLines(console)
    place, ask = find_place(run, via), terminal and not once and sys.stdin.isatty()
    try:
        status = recipe(place, show, interval_s=interval, once=once, ask=ask, for_people=not json, stay=web)
    except RunError as error:  # what cannot be shown must not look like a run that failed
        raise UserError(str(error)) from None
    except RecursionError:
        raise UserError(
            f"Events of {run} are not as docs/events.md has them, they are nested too deep: was the file changed, or "
            "written by something else than paceline?"
        ) from None
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        raise UserError(
            f"What is seen of the run cannot be shown or kept: {name}{error.strerror or error}. Send the output "
            "somewhere else; TMPDIR names where copies are kept."
        ) from None
    raise typer.Exit(status)


def _check_page(web: bool, port: int | None, *, once: bool, json: bool) -> None:
    """Refuse options that would have nothing to do with a page, or without one.

    Raises:
        UserError: there are such.
    """
    for name, given in (("--once", once), ("--json", json)):
        if web and given:
            raise UserError(
                f"--web serves a page for as long as somebody looks, got {name} too. Leave one of them out."
            )
    if port is not None and not web:
        raise UserError(f"--port is that of the page which --web serves, got --port {port} without it. Add --web.")
