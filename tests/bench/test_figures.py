"""Rows of figures as a person reads them: all of them are there, and nothing is wider than 80 columns."""

from typing import Any

import pytest

from paceline.bench.figures import brief, show_rows
from paceline.observe.console import Console

SAME = {"shape": "qwen3-8b-2x3072", "optimizer": "adamw, weights and moments in fp32", "clip": True, "of": None}
SAME |= {
    "counted": "forward, loss, backward, clipping if on, optimizer; features on the device; useful operations only"
}


def step_row(who: str, policy: str, step_ms: float) -> dict[str, Any]:
    return {"who": who, "policy": policy, "step_ms": step_ms, "blocks_per_s": 1e6 / step_ms, "peak_gib": 27.25} | SAME


def printed(rows: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> list[str]:
    show_rows(rows, Console())
    return capsys.readouterr().out.split("\n")


def test_peers_and_policies_with_long_names_fit_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        step_row("specforge 0.2.0", "objective_chunk_blocks 128", 71.2),
        step_row("specforge 0.2.0", "objective_chunk_blocks 0", 81.25),
        {"who": "speculators", "policy": "defaults", "blocks_per_s": None, "failed": "OutOfMemoryError: " + "no " * 30},
        *(step_row("paceline", policy, 55.5) for policy in ("eager", "compiled", "captured")),
    ]
    lines = printed(rows, capsys)
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert "…" not in text
    for figure in ("71.2", "81.25", "55.5", "14,045", "12,308", "18,018", "27.25", "OutOfMemoryError:", "captured"):
        assert figure in text, figure
    assert text.count("objective_chunk_blocks") == 2
    heads = " ".join(line for line in lines if line.split()[:1] == ["who"])
    assert heads.count("paceline") == 3  # each measurement has a column, in one of the tables


def test_what_is_the_same_in_all_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(" ".join(printed([step_row("paceline", name, 5.0) for name in ("a", "b")], capsys)).split())
    assert "policy a b in all of them who paceline step_ms 5 " in text
    assert text.count("useful operations only") == text.count("adamw") == 1
    assert " of " not in text.replace("in all of them", "")  # what nobody measured is no line


def test_one_row_is_one_table_with_its_fields_of_fields(capsys: pytest.CaptureFixture[str]) -> None:
    row = step_row("paceline", "captured", 5.0) | {"targets": ["cuda:0", "cuda:1"]}
    row["roles"] = {"drafter rank 0": {"busy_share": 0.9812, "waits": {"features": 0.0188}}}
    lines = printed([row], capsys)
    assert max(map(len, lines)) <= 80
    told = [" ".join(line.split()) for line in lines if line]
    assert told[:3] == ["who paceline", "policy captured", "step_ms 5"]
    assert {"targets cuda:0, cuda:1", "roles.drafter rank 0.waits.features 0.0188"} <= set(told)


def test_a_line_tells_of_a_row_as_soon_as_it_is_there() -> None:
    row = step_row("paceline", "captured", 5.0)
    assert brief(row, "step_ms", "blocks_per_s") == "  step_ms 5  blocks_per_s 200,000"
    assert brief({"failed": "too large"}, "step_ms") == "  failed: too large"
