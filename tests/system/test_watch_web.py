"""The live page of a run in a browser: it follows the events, says what it lost, and takes every text for text."""

import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from browser import Browser
from told_run import begin, sample_event, step_event, told
from watched_page import Run, Server

pytestmark = pytest.mark.system

NOW = float(int(time.time()) - 3000)  # when the runs began
LOST = r"ERR_(CONNECTION_REFUSED|INCOMPLETE_CHUNKED_ENCODING|CONNECTION_RESET|EMPTY_RESPONSE)|status of 403"
HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run under way."""
    run = Run(tmp_path / "run")
    run.tell(*begin(NOW, run_dir="runs/first"))
    run.tell(step_event(9, NOW + 10), step_event(19, NOW + 15), sample_event(NOW + 15, {}, {"features": 0.31}))
    yield run
    run.close()


# In a test's arguments the server is before the browser: it outlives the pages, which miss it otherwise.
@pytest.fixture
def server(run: Run) -> Iterator[Server]:
    server = Server(run.folder)
    yield server
    server.process.kill()
    server.process.communicate()


def facts(page: Any) -> dict[str, str]:
    """Return what the page says, by name."""
    found: dict[str, str] = page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('dl div')]"
        ".map(group => [group.children[0].textContent, group.children[1].children[0].textContent]))"
    )
    return found


def rows(page: Any, section: str) -> list[list[str]]:
    found: list[list[str]] = page.evaluate(
        f"[...document.querySelectorAll('#{section} tbody tr')].map(row => [...row.children].map(cell => "
        "[...cell.children].map(part => part.textContent).filter(Boolean).join(' | ')))"
    )
    return found


def expect(page: Any, selector: str, text: str) -> None:
    """Wait until there is such an element with that text in it."""
    page.locator(selector, has_text=text).wait_for()


def number(text: str) -> float:
    return float(re.sub(r"[^\d.e+-]", "", text))


def test_the_page_follows_the_run(server: Server, browser: Browser, run: Run) -> None:
    page = browser.open(server.url)
    expect(page, "#steps", "step 20 of 100 (20 %)")
    expect(page, "#outcome", "running")
    expect(page, "#connection", "Live")
    expect(page, "h1", "runs/first")
    expect(page, "#eta", "0:00:40 left")
    assert rows(page, "roles") == [
        ["target replica 0 | cuda:0", "running", "100 %", "0 %"],
        ["drafter rank 0 | cuda:1", "running", "69 %", "31 % | for features"],
    ]
    assert rows(page, "gpus")[1] == ["cuda:1 | H", "1.0 GiB of 8.0 GiB", "50 %"]
    assert rows(page, "stages") == [["dataset opened", "0.3 s"]]
    assert page.locator("#bottleneck").inner_text() == run.state["bottleneck"]
    assert run.state["bottleneck"].startswith("Drafters wait 31 % for features")
    run.tell(
        step_event(29, NOW + 20, loss=1.23456, acceptance=2.714, lr=3e-4, grad_norm=0.123456, epoch=2),
        told("evaluated", NOW + 21, steps=30, tau=3.456),
        told("held_out", NOW + 21, steps=30, loss=1.5),
        told("memory_growth", NOW + 22, where="host", mib=2000.0, mib_per_min=20.5),
    )
    expect(page, "#faults tbody", "memory of host grows by 20.5 MiB a minute")
    said, state = facts(page), run.state
    assert said == {
        "Loss": "1.2346", "τ estimate": "2.71", "True τ": "3.46", "Held-out loss": "1.5000", "Learning rate": "3.0e-04",
        "Gradient norm": "0.123", "Epoch": "2", "Tokens/s": "200", "Blocks/s": "10.0", "MFU": "20.0 %",
        "Queue": "1.0 MiB", "Host memory": "1.0 GiB",
    }  # fmt: skip
    names = {"Loss": "loss", "τ estimate": "acceptance", "True τ": "true_tau", "Tokens/s": "tokens_per_s"}
    for name, key in names.items():
        assert number(said[name]) == pytest.approx(state[key], abs=0.005)
    assert number(said["MFU"]) == pytest.approx(100 * state["mfu"], abs=0.05)
    assert page.title() == "30 % running · runs/first · paceline"
    label = page.locator("#losses svg").get_attribute("aria-label")
    assert label.startswith("Loss: 2.50 at step 10, 1.23 at step 30, lowest 1.23, highest 2.50. Held-out loss: 1.50")
    assert page.locator("#losses polyline").get_attribute("points").count(",") == 3
    assert page.locator("#taus circle").count() == 1


def test_the_start_up_is_open_while_it_lasts(browser: Browser, tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.tell(*begin(NOW)[:4])
    server = Server(run.folder)
    page = browser.open(server.url)
    expect(page, "#outcome", "starting")
    assert page.get_by_role("table", name="Stages of the start-up").is_visible()
    run.tell(*begin(NOW)[4:])
    expect(page, "#outcome", "running")
    assert not page.get_by_role("table", name="Stages of the start-up").is_visible()
    browser.check()
    assert server.end().splitlines() == [f"{run.folder}: running"]
    run.close()


def test_a_curve_that_begins_far_above(server: Server, browser: Browser, run: Run) -> None:
    """The rest is no flat line: it has most of the height."""
    run.tell(*begin(NOW), step_event(0, NOW, loss=70.0))
    run.tell(*(step_event(n, NOW + n, loss=2.0 + n % 2) for n in range(10, 99)))
    page = browser.open(server.url)
    expect(page, "#steps", "step 99")
    points = page.locator("#losses polyline").get_attribute("points").split()
    heights = [float(point.split(",")[1]) for point in points]
    height = page.locator("#losses svg").bounding_box()["height"]
    assert max(heights[1:]) - min(heights[1:]) > height / 2
    assert "highest 70.00" in page.locator("#losses svg").get_attribute("aria-label")


def test_numbers_that_are_not_finite(server: Server, browser: Browser, run: Run) -> None:
    run.tell(step_event(29, NOW + 20, loss=float("nan"), grad_norm=float("inf")))
    page = browser.open(server.url)
    expect(page, "#steps", "step 30")
    assert (facts(page)["Loss"], facts(page)["Gradient norm"]) == ("nan", "inf")


@pytest.mark.parametrize(
    ("last", "outcome", "message", "status"),
    [
        (told("trained", NOW + 99, train_steps=100), "finished", "", 0),
        (told("failed", NOW + 99, message="drafter rank 0 failed"), "failed", "drafter rank 0 failed", 1),
        (told("interrupted", NOW + 99, message="stopped at 20"), "interrupted", "stopped at 20", 75),
    ],
)
def test_the_run_ends(
    server: Server, browser: Browser, run: Run, last: dict[str, Any], outcome: str, message: str, status: int
) -> None:
    """The page stays, and can be opened again."""
    page = browser.open(server.url)
    expect(page, "#outcome", "running")
    run.tell(last)
    expect(page, "#outcome", outcome)
    assert page.locator("#message").inner_text() == message
    assert page.locator("#elapsed").inner_text() == "after 0:01:39"
    assert not page.locator("#eta").is_visible()
    page.reload()
    expect(page, "#outcome", outcome)
    assert server.end().splitlines() == [f"{run.folder}: {outcome}"]
    expect(page, "#connection", "`paceline watch --web` has ended")
    assert server.process.returncode == status


def test_every_text_stays_text(browser: Browser, run: Run, tmp_path: Path) -> None:
    """Of events, of the settings in them, and of what the run is called by who looks."""
    folder = tmp_path / "<img src=x onerror=document.title='taken'>"
    hostile = Run(folder)
    events = begin(NOW, run_dir=HOSTILE)
    for event in events:
        if event["event"] == "role":
            event.update(role=HOSTILE, device=HOSTILE)
        if event["event"] == "stage":
            event["name"] = HOSTILE
    sample = sample_event(NOW + 10, {}, {HOSTILE: 0.5})
    sample["roles"][1].update(role=HOSTILE, state=HOSTILE)
    sample["gpus"][0].update(device=HOSTILE, name=HOSTILE)
    hostile.tell(
        *events, step_event(9, NOW + 9), sample,
        told("checkpoint_failed", NOW + 11, steps=5, message=HOSTILE), told("failed", NOW + 12, message=HOSTILE),
    )  # fmt: skip
    hostile.close()
    server = Server(folder)
    try:
        page = browser.open(server.url)
        expect(page, "#outcome", "failed")
        assert page.locator("h1").inner_text() == HOSTILE
        assert page.locator("#from").inner_text() == f"seen as {folder}"
        assert page.locator("#message").inner_text() == HOSTILE
        assert [HOSTILE in row[1] for row in rows(page, "faults")] == [True, True]
        assert any(HOSTILE in row[0] for row in rows(page, "roles"))
        assert rows(page, "gpus")[0][0] == f"{HOSTILE} | {HOSTILE}"
        assert rows(page, "stages")[0][0] == HOSTILE
        assert page.locator("img").count() == 0
        assert page.locator("script").count() == 1
        assert page.title().startswith("10 % failed")
    finally:
        browser.check()
        server.end()


def test_a_lost_server_and_another_in_its_place(server: Server, browser: Browser, run: Run) -> None:
    page = browser.open(server.url)
    expect(page, "#steps", "step 20")
    with browser.allowing(LOST):
        server.end(signal.SIGKILL)
        expect(page, "#connection.lost", "The connection is lost")
        assert facts(page)["Loss"] == "2.5000", "the last numbers stay"
        other = Server(run.folder, server.port)
        try:
            expect(page, "#connection.lost", "not valid any more")
        finally:
            other.end()


def test_a_server_that_is_silent(server: Server, browser: Browser, run: Run) -> None:
    page = browser.open(server.url).context.new_page()
    page.clock.install()
    browser.tab(page, server.url)
    expect(page, "#steps", "step 20")
    server.process.send_signal(signal.SIGSTOP)
    page.clock.fast_forward(20_000)
    expect(page, "#connection.lost", "The connection is lost")
    server.process.send_signal(signal.SIGCONT)
    run.tell(step_event(29, NOW + 20))
    expect(page, "#steps", "step 30")
    expect(page, "#connection:not(.lost)", "Live")


def stalled(server: Server) -> socket.socket:
    """Return a connection to the stream of events that nobody reads from."""
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    reader.connect(("127.0.0.1", server.port))
    path = urlsplit(server.url)
    reader.sendall(f"GET /events?{path.query} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
    return reader


def test_many_tabs_and_readers_that_do_not_read(server: Server, browser: Browser, run: Run) -> None:
    """All tabs follow; a tab that nobody sees leaves its connection to others; Ctrl-C ends all of it at once."""
    readers = [stalled(server) for _ in range(3)]
    tabs = [browser.open(server.url)]
    tabs += [browser.tab(tabs[0].context.new_page(), server.url) for _ in range(3)]
    for tab in tabs:
        expect(tab, "#steps", "step 20")
    hide = "hidden => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });" + (
        "document.dispatchEvent(new Event('visibilitychange')) }"
    )
    tabs[0].evaluate(hide, True)
    for step in range(20, 100):  # far more than sockets hold
        run.tell(step_event(step, NOW + step), *(told("batch_split", NOW + step, message=HOSTILE) for _ in range(100)))
    for tab in tabs[1:]:
        expect(tab, "#steps", "step 100 of 100")
    assert tabs[0].locator("#steps").inner_text() == "step 20 of 100 (20 %)"
    tabs[0].evaluate(hide, False)
    expect(tabs[0], "#steps", "step 100 of 100")
    assert server.end().splitlines() == [f"{run.folder}: running"]
    assert server.process.returncode == 3
    for tab in tabs:
        expect(tab, "#connection.lost", "`paceline watch --web` has ended: what is below is the last that it saw.")
    for reader in readers:
        reader.close()


def test_a_run_that_is_killed_and_goes_on(server: Server, browser: Browser, run: Run) -> None:
    page = browser.open(server.url)
    expect(page, "#outcome", "running")
    run.close()
    expect(page, "#outcome", "failed")
    expect(page, "#message", "the run was killed, or its machine went down")
    run.open()
    run.tell(told("resumed", NOW + 50, steps=10, checkpoint="c", best=None, settings={"run_dir": "runs/first"}))
    run.tell(step_event(10, NOW + 51))
    expect(page, "#steps", "step 11 of 100")
    expect(page, "#outcome", "running")
    assert not page.locator("#message").is_visible()


def test_events_that_cannot_be_read_end_the_page(server: Server, browser: Browser, run: Run) -> None:
    page = browser.open(server.url)
    expect(page, "#steps", "step 20")
    with (run.folder / "events.jsonl").open("a") as file:
        file.write('{"schema": 99, "t": 1, "event": "step"}\n')
    expect(page, "#connection.lost", "`paceline watch --web` has ended")
    assert server.process.wait(30) == 2
    assert server.process.stdout is not None
    assert "has events of schema 99, but this version of paceline reads 1" in server.process.stdout.read()


def test_a_run_elsewhere_whose_connection_breaks(browser: Browser, run: Run, tmp_path: Path) -> None:
    """What the page says of the run's machine is not what it says of its own server."""
    broken, gate = tmp_path / "broken", tmp_path / "gate"
    gate.write_text(f'#!/bin/sh\ntest ! -e {broken} && exec "$@"\n')
    gate.chmod(0o700)
    server = Server(run.folder, 0, "--via", gate)
    try:
        page = browser.open(server.url)
        expect(page, "#steps", "step 20")
        assert not page.locator("#note").is_visible()
        broken.touch()
        (connection,) = psutil.Process(server.process.pid).children()
        connection.kill()
        expect(page, "#note", "Trying again in")
        expect(page, "#connection:not(.lost)", "Live")
        run.tell(step_event(29, NOW + 20))
        broken.unlink()
        expect(page, "#steps", "step 30")
        assert not page.locator("#note").is_visible()
        assert server.end().splitlines()[-1] == f"{run.folder}: running"
    finally:
        server.process.kill()
        with browser.allowing(LOST):
            browser.check()


def long_run(run: Run) -> None:
    for step in range(20, 3000, 10):
        acceptance = 4 - 3 / (1 + step / 300) + 0.1 * (step % 7) / 7
        run.tell(step_event(step, NOW + step, total_steps=4000, loss=1 + 3 / (1 + step / 200), acceptance=acceptance))
        if step % 500 == 0:
            run.tell(
                told("held_out", NOW + step, steps=step, loss=1.2 + 3 / (1 + step / 200)),
                told("evaluated", NOW + step, steps=step, tau=acceptance - 0.2),
                told("checkpoint", NOW + step, steps=step),
            )
    run.tell(
        told("replica_failed", NOW + 2000, role="target replica 0", device="cuda:0", restarted=True, restarts_left=2,
             message="target replica 0 on cuda:0 failed while computing micro-batch 812: device-side assert triggered"),
        told("rejected", NOW + 2500, step=2500, loss=41.0, rule="loss", limit=12.5),
        sample_event(NOW + 3000, {}, {"features": 0.31}),
    )  # fmt: skip


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False), (390, True)])
def test_how_it_looks(server: Server, browser: Browser, run: Run, width: int, dark: bool) -> None:
    """Nothing is wider than the window; what is read aloud and what has the focus is what it should be."""
    long_run(run)
    page = browser.open(server.url, width=width, height=844, dark=dark)
    expect(page, "#steps", "step 2,991 of 4,000")
    browser.screenshot(page, f"watch-{width}-{'dark' if dark else 'light'}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    live = page.evaluate(
        "[...document.querySelectorAll('[aria-live], [role=status], [role=alert], [role=log]')].map(n => n.id)"
    )
    assert live == ["outcome", "connection", "note", "message"], "no number is read aloud as it changes"
    for name in ("Roles", "GPUs", "Faults and guards, newest first"):
        assert page.get_by_role("table", name=name).is_visible()
    assert page.get_by_role("rowheader", name="drafter rank 0").is_visible()
    assert page.get_by_role("progressbar", name="Steps done").get_attribute("value") == "2991"
    assert not page.get_by_role("table", name="Stages of the start-up").is_visible()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
    page.keyboard.press("Enter")
    page.get_by_role("table", name="Stages of the start-up").wait_for()


def test_the_token_leaves_the_browser_for_nobody(server: Server, browser: Browser) -> None:
    page = browser.open(server.url)
    asked: list[dict[str, str]] = []
    page.on("request", lambda request: asked.append(request.all_headers()))
    page.reload()
    expect(page, "#steps", "step 20")
    assert len(asked) >= 2
    assert not any("referer" in headers for headers in asked)
    token = urlsplit(server.url).query.removeprefix("token=")
    assert token not in Path(f"/proc/{server.process.pid}/cmdline").read_text()
