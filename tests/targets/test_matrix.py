"""The table of docs/targets.md says what is so; representatives in the fast tests, all families in the slow ones."""

from importlib.metadata import version
from pathlib import Path

import pytest
from families import FAMILIES, Family
from target_matrix import BEGIN, COMMAND, DOCUMENT, END, examine, reasons_of, row_of

FAST = ("Gemma 2", "gpt-oss", "Qwen3-Next")
EACH = [pytest.param(f, id=f.name, marks=() if f.name in FAST else pytest.mark.slow) for f in FAMILIES]
ROOT = Path(__file__).parents[2]
HINT = f"docs/targets.md says something else. If it is out of date, write it anew with `{COMMAND}`."


@pytest.mark.parametrize("family", EACH)
def test_a_familys_row_is_what_the_checks_find(family: Family, tmp_path: Path) -> None:
    found = examine(family, tmp_path)
    lines, row = DOCUMENT.read_text().splitlines(), row_of(family, found)
    if of_the_tested_set():
        assert row in lines, HINT
        assert set(reasons_of(found)) <= set(lines), HINT
    else:  # another transformers may do less for a family, and then nothing more is done with it
        (stated,) = (line for line in lines if line.split(" | ")[0] == row.split(" | ")[0])
        for now, said in zip(row.split(" | ")[2:], stated.split(" | ")[2:], strict=True):
            assert now.strip(" |") in (said.strip(" |"), "refused"), row


def of_the_tested_set() -> bool:
    """Return whether the table is that of the transformers that is installed."""
    return f"transformers=={version('transformers')}" in (ROOT / "constraints.txt").read_text().splitlines()


def test_the_table_has_a_row_for_each_family() -> None:
    table = DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines() if line[:1] == "|"]
    assert rows[2:] == [family.name for family in FAMILIES], HINT
