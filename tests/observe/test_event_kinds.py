"""docs/events.md, the code that writes events and the code that reads them name the same kinds."""

import ast
from collections.abc import Iterator
from pathlib import Path

from paceline.observe import lines, state
from paceline.observe.report import history

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src/paceline").rglob("*.py"))
READERS_OWN = {"unreadable"}  # made in place of a line that is damage


def documented() -> list[str]:
    """Return the kinds of the table, in its order."""
    table = (ROOT / "docs/events.md").read_text().split("## Reading")[0].split("| event | when |")[1]
    return [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]


def written() -> Iterator[str]:
    """Yield the kinds in calls of what writes an event or tells somebody who does: a kind, then values by name."""
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Call) and node.keywords and node.args and isinstance(node.args[0], ast.Constant):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name in ("write", "tell", "_tell") and isinstance(node.args[0].value, str):
                    yield node.args[0].value


def test_a_kind_is_documented_once() -> None:
    assert len(documented()) == len(set(documented()))


def test_every_kind_that_is_written_is_documented_and_the_reverse() -> None:
    roles = {"failed"}  # a state of a role by that name, and an event
    assert set(written()) - roles == set(documented()) - roles


def test_readers_know_no_kind_that_is_not_documented() -> None:
    known = {*lines._SENTENCES, *lines._MADE, *state._HANDLERS, *state.FAULTS, *history.LISTED, *history._TAKES}
    assert known - READERS_OWN <= set(documented())


def test_a_report_lists_every_fault_that_a_panel_shows() -> None:
    assert state.FAULTS <= history.LISTED
    assert all(kind in lines._SENTENCES or kind in lines._MADE for kind in history.LISTED)
