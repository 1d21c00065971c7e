"""The panel at several sizes, read back from what a terminal of that size would show."""

import io
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from told_run import Event, begin, sample_event, step_event, told

from paceline.observe.panel import panel
from paceline.observe.state import RunState

LONG = "target replica 0 on cuda:0 failed while running: " + "a reason that goes on and on, " * 20
BUSY = [
    *begin(),
    step_event(1219, 1010.0, total_steps=4000),
    told("evaluated", 1011.0, steps=1000, tau=2.51, prompts=32, s=2.0, estimate=2.4, best=True),
    told("checkpoint", 1012.0, steps=1200, bytes=1, write_s=1.0, copy_s=1.0),
    sample_event(1013.0, {"data": 0.02}, {"features": 0.31}),
    told("replica_failed", 1014.0, message=LONG, restarted=True, restarts_left=2),
]


def shown(events: list[Event], width: int, **more: Any) -> list[str]:
    state, out = RunState(), io.StringIO()
    for event in events:
        state.apply(event)
    # Much wider than the panel is made for: no line is cut by the terminal.
    Console(file=out, width=500).print(panel(state, now=1015.0, width=width, **more))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [1, 10, 24, 40, 60, 80, 120, 200])
@pytest.mark.parametrize("upto", range(0, len(BUSY) + 1, 3))
def test_no_line_is_longer_than_the_width(width: int, upto: int) -> None:
    assert max(map(cell_len, shown(BUSY[:upto], width))) <= width


@pytest.mark.parametrize("height", range(1, 20))
def test_no_more_lines_than_the_height(height: int) -> None:
    lines = shown(BUSY, 60, height=height)
    assert len(lines) == min(height, len(shown(BUSY, 60)))
    assert any("step 1,220/4,000" in line for line in lines)  # goes last


def test_at_80_columns_all_is_there() -> None:
    text = "\n".join(" ".join(line.split()) for line in shown(BUSY, 80))
    for part in (
        "/runs/one",
        "running 0:00:15",
        "step 1,220/4,000 ━",
        " 30 % eta 0:23:10",
        "loss 2.5000",
        "τ estimate 1.50",
        "slots 1/3/5 40/8/0 %",
        "true τ 2.51 (step 1,000)",
        "lr 1.0e-03",
        "tokens/s 200",
        "blocks/s 10.0",
        "MFU 20.0 %",
        "target replica 0 cuda:0 running 98 % 2 % data 1.0/8.0 GiB 50 %",
        "drafter rank 0 cuda:1 running 69 % 31 % features 1.0/8.0 GiB 50 %",
        "queue 1.0 MiB of 2.0 GiB",
        "Drafters wait 31 % for features: add a target replica",
    ):
        assert part in text


def test_at_40_columns_every_role_is_there() -> None:
    lines = shown(BUSY, 40)
    assert "target 0   cuda:0  running  98 %   2 %" in lines
    assert "drafter 0  cuda:1  running  69 %  31 %" in lines
    assert "cuda:0 1.0/8.0 GiB 50 %" in "\n".join(lines)


def test_a_start_tells_its_stages_and_how_long_a_role_takes() -> None:
    lines = shown(begin()[:5], 80)
    assert "✓ dataset opened 0.2 s" in lines
    assert "target replica 0  cuda:0  loading 15 s" in [line.rstrip() for line in lines]
    assert "busy" not in "\n".join(lines)


def test_how_far_loading_is_is_told_with_its_time() -> None:
    events = [*begin()[:5], told("loading", 1001.0, role="target replica 0", device="cuda:0", share=0.456)]
    assert "target replica 0  cuda:0  loading 46 % 15 s" in [line.rstrip() for line in shown(events, 80)]
    assert "%" not in "".join(shown(begin()[:7], 80)[3:]), "that of an earlier state does not stay"


def test_a_run_that_ended_says_so_and_its_clock_stands() -> None:
    events = [*BUSY, told("failed", 1020.0, message="Nothing goes any more.")]
    lines = shown(events, 80)
    assert lines[0].endswith("failed  0:00:20")
    assert "Nothing goes any more." in lines


def test_a_run_that_is_silent_says_so() -> None:
    state = RunState()
    for event in BUSY:
        state.apply(event)
    out = io.StringIO()
    Console(file=out, width=80).print(panel(state, now=1014.0 + 90, width=80))
    assert "silent for 0:01:30" in out.getvalue()
