"""The page itself: one HTML file with everything in it, and nothing that asks a network.

Whatever comes out of a run folder is text: Jinja2 escapes it in HTML, figures are JSON in which `<` is escaped, and the
page's own policy lets no script run but the three that are written here, known by their checksums.
"""

import base64
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from paceline import __version__
from paceline.observe.reading import read_events, understood
from paceline.observe.report import learning, tables, workings
from paceline.observe.report.files import look_into
from paceline.observe.report.history import History, history
from paceline.observe.report.parts import Figure, Missing, Run, Table, duration, moment, name_of
from paceline.records import UserError

GENERATOR = "paceline report"  # by it a page of ours is known
MOST_RUNS = 8  # as many colours as there are
_DRAW = "paceline.draw();"  # behind each figure, so that it is drawn as soon as it is read
_STATES = {
    "starting": "starting",
    "running": "under way",
    "finished": "finished",
    "failed": "failed",
    "interrupted": "stopped",
}


def open_runs(folders: Sequence[Path], tick: Callable[[int], None] = lambda done: None) -> list[Run]:
    """Return what the folders hold; `tick` gets how many were read.

    Raises:
        UserError: one is not a run's, its events are not as docs/events.md has them, or there are too many to tell
            apart.
    """
    if len(folders) > MOST_RUNS:
        raise UserError(f"A report shows at most {MOST_RUNS} runs, got {len(folders)}. Make several.")
    names = [name_of(folder) for folder in folders]
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UserError("A report takes each run once, but one is named twice. Leave it out.")
    runs = []
    for index, (folder, name) in enumerate(zip(folders, names, strict=True)):
        seen = history(read_events(folder), str(folder))
        with understood(str(folder), "step"):
            steps = seen.steps()
        shown = name if names.count(name) == 1 else str(folder)
        runs.append(Run(index, shown, str(folder), seen, steps, _STATES[seen.state.outcome], look_into(folder)))
        tick(index + 1)
    return runs


def report_page(runs: Sequence[Run], *, now: float | None = None) -> str:
    """Return the page. `now` is the time it says it was made at.

    Raises:
        UserError: Plotly is not installed, or events are not as docs/events.md has them.
    """
    now = time.time() if now is None else now
    library = plotly_js()
    with understood(", ".join(run.place for run in runs), "figures and tables"):
        shared = [learning.loss_figure(runs), learning.acceptance_figure(runs)]
        own = [_own(run, now) for run in runs]
        summary = tables.runs_table(runs)
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.tests |= {kind.__name__.lower(): _is(kind) for kind in (Figure, Missing, Table)}
    environment.filters["data"] = _data
    script = _text("page.js")
    return environment.from_string(_text("page.html")).render(
        generator=GENERATOR,
        version=__version__,
        made=moment(now),
        policy="; ".join(_policy(library, script)),
        style=Markup(_text("page.css")),
        library=Markup(library),
        script=Markup(script),
        draw=Markup(_DRAW),
        runs=runs,
        summary=summary,
        shared=shared,
        own=own,
        evaluations=tables.evaluations_table(runs),
        exports=tables.exports_table(runs),
        settings=tables.settings_tables(runs),
        title=", ".join(run.name for run in runs),
    )


def _own(run: Run, now: float) -> Mapping[str, Any]:
    """Return what the page says of one run alone."""
    return {
        "run": run,
        "parts": [learning.slots_figure(run), *workings.figures_of(run)],
        "faults": tables.faults_tables(run),
        "facts": tables.facts_table(run),
        "said": [*_standing(run.history, now), tables.sums_said(run)],
    }


def plotly_js() -> str:
    """Return Plotly's own script.

    Raises:
        UserError: it is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError(
            "`paceline report` draws with plotly, which is not installed. Install it: pip install 'paceline[report]'."
        ) from None
    return get_plotlyjs()


def is_report(path: Path) -> bool:
    """Return whether a file is a page of ours, which another may take the place of."""
    try:
        with path.open("rb") as file:
            return f'<meta name="generator" content="{GENERATOR}">'.encode() in file.read(2000)
    except OSError:
        return False


def _data(figure: Figure) -> Mapping[str, Any]:
    return {"traces": figure.traces, "layout": figure.layout, "overSteps": figure.over_steps}


def _is(kind: type) -> Any:
    return lambda value: isinstance(value, kind)


def _policy(library: str, script: str) -> list[str]:
    """Return the page's Content-Security-Policy: our scripts run, nobody else's; nothing is loaded."""
    digests = (hashlib.sha256(text.encode()).digest() for text in (library, script, _DRAW))
    hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return ["default-src 'none'", f"script-src {hashes}", "style-src 'unsafe-inline'", "img-src data: blob:"]


def _standing(seen: History, now: float) -> list[str]:
    """Return sentences on where a run stands."""
    state, said = seen.state, []
    if state.outcome in ("starting", "running"):
        said.append(
            f"The run has no end in its events: it is under way, or was killed. Its last event is "
            f"{duration(max(0.0, now - seen.last))} old."
            if seen.began is not None
            else "The run has no events yet."
        )
    if state.message:
        said.append(f"Its last words: {state.message}")
    if state.bottleneck:
        said.append(state.bottleneck)
    return said


def _text(name: str) -> str:
    return files("paceline.observe.report").joinpath(name).read_text(encoding="utf-8")


def summary_of(run: Run) -> dict[str, Any]:
    """Return a run's main numbers as plain data."""
    state = run.history.state
    return {
        "run": run.place,
        "state": state.outcome,
        "step": state.step,
        "total_steps": state.total_steps,
        "loss": state.loss,
        "acceptance": state.acceptance,
        "true_tau": state.true_tau,
        "evaluations": [one.file for one in run.evaluations],
        "exports": [one.folder for one in run.folder.exports],
        "left_out": list(run.folder.unread),
    }
