"""The table of docs/targets.md says what is so; representatives in the fast tests, all families in the slow ones."""

from pathlib import Path

import pytest
from families import FAMILIES, Family
from target_matrix import BEGIN, COMMAND, DOCUMENT, END, examine, reasons_of, row_of

FAST = ("Gemma 2", "gpt-oss", "Qwen3-Next")
EACH = [pytest.param(f, id=f.name, marks=() if f.name in FAST else pytest.mark.slow) for f in FAMILIES]
HINT = f"docs/targets.md says something else. If it is out of date, write it anew with `{COMMAND}`."


@pytest.mark.parametrize("family", EACH)
def test_a_familys_row_is_what_the_checks_find(family: Family, tmp_path: Path) -> None:
    found = examine(family, tmp_path)
    lines = DOCUMENT.read_text().splitlines()
    assert row_of(family, found) in lines, HINT
    assert set(reasons_of(found)) <= set(lines), HINT


def test_the_table_has_a_row_for_each_family() -> None:
    table = DOCUMENT.read_text().partition(BEGIN)[2].partition(END)[0]
    rows = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines() if line[:1] == "|"]
    assert rows[2:] == [family.name for family in FAMILIES], HINT
