"""Both sides of `paceline bench decode`: the figures by hand, and the whole measurement on a tiny shape."""

import json
from typing import Any

import pytest
from tiny_bench import shrink
from typer.testing import CliRunner

from paceline.bench import decode, generate
from paceline.cli import app
from paceline.records import Completion


@pytest.fixture
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink(monkeypatch)
    monkeypatch.setattr(generate, "PROMPT_TOKENS", (3, 9))


def measure(*options: str) -> dict[str, Any]:
    shown = ["--device", "cpu", "--count", "2", "--tokens", "9", "--repeats", "2", "--json"]
    done = CliRunner().invoke(app, ["bench", "decode", *shown, *options])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.usefixtures("tiny_shape")
@pytest.mark.parametrize(("options", "tau"), [((), 1), (("--right",), 4)])
def test_without_the_peer_ours_is_measured_against_plain(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], tau: int
) -> None:
    monkeypatch.setattr(decode, "peer_version", lambda: None)
    result = measure(*options)
    assert (result["prompts"], result["tokens"], result["block_size"]) == (2, 9, 4)
    assert result["dflash_version"] is None
    assert "dflash" not in result
    assert result["ours"]["tau"] == tau
    assert result["ours"]["cycles"] == 2 * 8 / tau
    assert result["ours_over_ours_plain"] > 0


def test_figures_are_medians_and_ratios_those_of_repeats() -> None:
    one = Completion((5,), tuple(range(9)), "length", (4, 3, 1))
    other = Completion((5,), tuple(range(3)), "length", (2,))
    plain = [Completion((5,), c.token_ids, c.finish) for c in (one, other)]
    seconds = {"ours": [1.0, 2.0, 9.0], "dflash": [2.0, 6.0, 9.0]}
    seconds |= {"ours_plain": [4.0, 4.0, 4.0], "dflash_plain": [8.0, 8.0, 12.0]}
    done = {"ours": [one, other], "ours_plain": plain, "dflash": [one, plain[1]], "dflash_plain": plain}
    figures = decode._figures(done, seconds)
    assert figures["ours"] == {"tokens_per_s": 6, "tau": pytest.approx((8 / 3 + 2) / 2, abs=1e-3), "cycles": 4} | {
        "ms_a_cycle": 500
    }
    assert figures["dflash_plain"] == {"tokens_per_s": 1.5}
    assert figures["ours_over_dflash"] == 2  # of 2, 3 and 1
    assert figures["ours_plain_over_dflash_plain"] == 2
    assert figures["ours_over_ours_plain"] == 2  # of 4, 2 and 4 / 9
    assert (figures["same_completions"], figures["same_cycles"]) == (2, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--run", "r"], "--run and --prompts go together, got --run alone. Add --prompts."),
        (["--prompts", "p"], "--run and --prompts go together, got --prompts alone. Add --run."),
        (["--run", "r", "--prompts", "p", "--right"], "--run measures that run's own weights, got --right too."),
        (
            ["--run", "r", "--prompts", "p", "--right", "--shape", "smollm2"],
            "--run measures that run's own weights, got --shape and --right too. Leave one or the other out.",
        ),
        (["--device", "cpu", "--captured"], "--captured needs a GPU (--device), got cpu. Leave it out, or name a GPU."),
    ],
)
def test_options_that_do_not_fit_are_refused(options: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", "decode", *options])
    assert message in str(done.exception)
