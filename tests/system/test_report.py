"""A report in a browser: its figures hold the events' numbers, it follows the dark scheme, fits a phone, takes keys."""

import json
import math
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from browser import TIMEOUT_MS, Browser
from made_runs import HOSTILE, eventful, last_told, poisoned, write_events
from playwright.sync_api import Page

from paceline.observe.report.page import open_runs, report_page

pytestmark = pytest.mark.system

FIGURES = ["slots", "buckets", "states", "work", "memory", "utilisation"]
TRACES = """name => document.getElementById(`plot-${name}`).data.map(
    ({name, x, y, z, visible, marker}) =>
        ({name, x: x && [...x], y: y && [...y], z, visible, colour: marker?.color}))"""
SHOWN = "name => document.querySelectorAll(`#plot-${name} svg.main-svg`).length"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A long eventful run, one under way, and one as an older paceline told it."""
    folder = tmp_path_factory.mktemp("runs")
    old = [event for event in eventful(300, seed=9) if event["event"] in ("started", "plan", "role", "step")]
    return [
        write_events(folder / "long", eventful(9000)),
        write_events(folder / "under-way", eventful(2000, seed=4)[:-300]),
        write_events(folder / "old", old),
    ]


@pytest.fixture(scope="module")
def one(runs: list[Path]) -> str:
    return page_of(runs[:1], "one")


@pytest.fixture(scope="module")
def several(runs: list[Path]) -> str:
    return page_of(runs, "several")


def page_of(runs: list[Path], name: str) -> str:
    path = runs[0].parent / f"{name}.html"
    path.write_text(report_page(open_runs(runs)), encoding="utf-8")
    return path.as_uri()


def drawn(page: Page, name: str) -> list[dict[str, Any]]:
    """What Plotly itself has of a figure."""
    return page.evaluate(TRACES, name)


def named(traces: list[dict[str, Any]], ending: str) -> dict[str, Any]:
    (found,) = [trace for trace in traces if (trace["name"] or "").endswith(ending)]
    return found


def test_every_figure_is_drawn(browser: Browser, one: str) -> None:
    page = browser.open(one)
    assert page.evaluate("document.documentElement.dataset.figures") == "8"
    for name in ["loss", "acceptance", *(f"{name}-0" for name in FIGURES)]:
        assert page.evaluate(SHOWN, name) > 0, name
        box = page.locator(f"#plot-{name}").bounding_box()
        assert box is not None
        assert box["height"] >= 200
        assert box["width"] > 1000
        assert page.locator(f"#plot-{name}").get_attribute("aria-label")
    browser.screenshot(page, "report-light")


def test_the_figures_hold_the_events_numbers(browser: Browser, one: str, runs: list[Path]) -> None:
    page = browser.open(one)
    told = last_told(runs[0])
    steps = told["step"]
    for figure, ending, key in (
        ("loss", "long: training loss", "loss"),
        ("acceptance", "long: estimate", "acceptance"),
    ):
        found = named(drawn(page, figure), ending)
        assert 2000 <= len(found["x"]) <= 4002
        values = {
            n: event[key] if isinstance(event[key], float) and math.isfinite(event[key]) else None
            for n, event in steps.items()
        }
        assert [values[x] for x in found["x"]] == found["y"]
        known = [value for value in values.values() if value is not None]
        shown = [value for value in found["y"] if value is not None]
        assert (min(shown), max(shown), found["x"][0], found["x"][-1]) == (min(known), max(known), 1, 9000)
    held = named(drawn(page, "loss"), "held-out loss")
    assert dict(zip(held["x"], held["y"], strict=True)) == {n: event["loss"] for n, event in told["held_out"].items()}
    true = named(drawn(page, "acceptance"), "true τ while training")
    assert dict(zip(true["x"], true["y"], strict=True)) == {n: event["tau"] for n, event in told["evaluated"].items()}
    (slots,) = drawn(page, "slots-0")
    last = [event for n, event in steps.items() if (n - 1) * 150 // 8999 >= 149]
    for slot in range(15):
        share = sum(e["accepted_K"][slot] for e in last) / sum(e["available_K"][slot] for e in last)
        assert slots["z"][slot][-1] == pytest.approx(share)
    events = [json.loads(line) for line in (runs[0] / "events.jsonl").read_text().splitlines()]
    gpus = [event["gpus"][2]["memory_used_bytes"] / 2**30 for event in events if event["event"] == "sample"]
    assert named(drawn(page, "memory-0"), "cuda:2")["y"] == gpus
    plan = next(event for event in events if event["event"] == "plan")
    assert drawn(page, "buckets-0")[0]["y"] == [bucket["samples"] for bucket in plan["buckets"]]


def test_runs_lie_over_one_another_and_can_be_hidden_with_keys(browser: Browser, several: str) -> None:
    page = browser.open(several)
    assert page.evaluate("document.documentElement.dataset.figures") == str(2 + 6 + 6 + 3)
    colours = {trace["colour"] for trace in drawn(page, "loss")}
    assert len(colours) == 3
    browser.screenshot(page, "report-several")
    page.locator('input[name="run"][value="1"]').focus()
    page.keyboard.press("Space")
    visible = {trace["name"].partition(":")[0]: trace["visible"] for trace in drawn(page, "loss")}
    assert visible == {"long": True, "under-way": False, "old": True}
    assert not page.locator('section[data-run="1"]').is_visible()
    page.get_by_role("button", name="Show all").press("Enter")
    assert all(trace["visible"] for trace in drawn(page, "loss"))
    assert page.locator('section[data-run="1"]').is_visible()


def test_steps_and_axis_are_chosen_with_keys(browser: Browser, several: str) -> None:
    page = browser.open(several)
    page.get_by_label("from", exact=True).fill("100")
    page.get_by_label("to", exact=True).fill("250")
    page.keyboard.press("Enter")
    ranges = "name => document.getElementById(`plot-${name}`).layout.xaxis.range"
    assert [page.evaluate(ranges, name) for name in ("loss", "acceptance", "slots-1")] == [[100, 250]] * 3
    page.get_by_role("button", name="Show all").press("Enter")
    low, high = page.evaluate(ranges, "loss")
    assert low <= 1
    assert high >= 9000
    page.get_by_label("from", exact=True).fill("1500")
    page.keyboard.press("Enter")
    assert page.evaluate(ranges, "loss") == [1500, 9000]
    kind = "document.getElementById('plot-loss').layout.yaxis.type"
    before = page.evaluate(kind)
    page.get_by_label("logarithmic").press("Space")
    assert {before, page.evaluate(kind)} == {"linear", "log"}


@pytest.mark.parametrize("name", ["one", "several"])
def test_a_phone_in_the_dark(browser: Browser, request: pytest.FixtureRequest, name: str) -> None:
    page = browser.open(request.getfixturevalue(name), width=390, height=844, dark=True)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    widths = page.locator(".plot").evaluate_all("plots => plots.map(plot => plot.getBoundingClientRect().width)")
    assert all(300 < width <= 390 for width in widths)
    browser.screenshot(page, f"report-{name}-narrow-dark")


def test_the_figures_follow_the_scheme(browser: Browser, one: str) -> None:
    page = browser.open(one, dark=True)
    look = """() => { const plot = document.getElementById("plot-loss");
        const ground = getComputedStyle(document.body).backgroundColor;
        return [ground, plot.layout.paper_bgcolor, plot.layout.font.color]; }"""
    assert page.evaluate(look) == ["rgb(20, 23, 27)", "#14171b", "#e6e9ed"]
    browser.screenshot(page, "report-dark")
    dark = {trace["colour"] for trace in drawn(page, "loss")}
    page.emulate_media(color_scheme="light")
    until = time.monotonic() + TIMEOUT_MS / 1000
    while page.evaluate(look)[1] != "#ffffff":  # what waits in the page would need an `eval`, which the page forbids
        assert time.monotonic() < until
        page.wait_for_timeout(50)
    assert page.evaluate(look) == ["rgb(255, 255, 255)", "#ffffff", "#1b1f24"]
    assert dark.isdisjoint(trace["colour"] for trace in drawn(page, "loss"))


FOCUSABLE = "a[href], button, input, summary, [tabindex='0']"
NUMBERED = """selector => {
    const all = [...document.querySelectorAll(selector)];
    all.forEach((one, place) => { one.dataset.place = place; });
    return all.filter(one => one.checkVisibility()).map(one => one.dataset.place);
}"""


def test_every_control_is_reached_with_the_tab_key_and_shows_it(browser: Browser, several: str) -> None:
    page = browser.open(several)
    wanted = page.evaluate(NUMBERED, FOCUSABLE)
    assert len(wanted) > 30
    reached: list[str] = []
    for _ in range(len(wanted)):
        page.keyboard.press("Tab")
        place, outline = page.evaluate(
            "[document.activeElement.dataset.place, getComputedStyle(document.activeElement).outlineStyle]"
        )
        assert outline == "solid", place
        reached.append(place)
    assert reached == wanted
    # The first is a link past the navigation, and a table opens without a mouse.
    page.locator(".skip").press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    details = page.locator("details").first
    details.locator("summary").press("Enter")
    assert details.locator("table").is_visible()


def test_headings_tables_and_figures_are_named(browser: Browser, several: str) -> None:
    page = browser.open(several)
    levels = page.locator("h1, h2, h3").evaluate_all("all => all.map(one => Number(one.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(later - level <= 1 for level, later in pairwise(levels))
    assert page.locator("table:not(:has(caption))").count() == 0
    assert page.locator("th:not([scope])").count() == 0
    assert page.locator("figure:not(:has(figcaption p))").count() == 0
    assert page.locator(".plot:not([aria-label])").count() == 0


def test_without_scripts_the_numbers_are_still_there(browser: Browser, one: str) -> None:
    page = browser.open(one, java_script_enabled=False)
    assert page.locator("noscript").inner_text().startswith("The figures are drawn by a script")
    assert "long: training loss 10" in page.locator("figcaption").first.inner_text()
    assert not page.locator("#view").is_visible()


def test_no_script_but_the_pages_own_runs(browser: Browser, one: str) -> None:
    page = browser.open(one)
    with browser.allowing("Content Security Policy"):
        page.evaluate("""() => {
            const script = document.createElement("script");
            script.textContent = "window.strange = 1";
            document.body.append(script);
        }""")
        assert page.evaluate("window.strange") is None


def test_what_a_folder_holds_is_shown_and_never_run(browser: Browser, tmp_path: Path) -> None:
    run = write_events(tmp_path / HOSTILE.replace("/", "⁄"), [poisoned(event) for event in eventful(60)])
    page = browser.open(page_of([run], "hostile"))
    page.locator("summary").evaluate_all("all => all.forEach(one => { one.parentElement.open = true; })")
    assert page.locator("img").count() == 0
    assert f"target replica 0{HOSTILE}"[:40] in page.locator("main").inner_text()
    labels = page.locator("#plot-states-0 .ytick text").evaluate_all("all => all.map(one => one.textContent)")
    assert any(label.startswith("target replica 0</script><img src=x") for label in labels)
    assert page.evaluate("document.documentElement.dataset.figures") == "8"
