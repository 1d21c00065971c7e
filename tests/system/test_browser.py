"""The browser that pages are tested in notices what they may not do."""

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser

pytestmark = pytest.mark.system

PAGE = "<!doctype html><html lang=en><title>t</title><link rel=icon href=data:,><style>%s</style><p id=p>text</p>%s"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "page.html").write_text(PAGE % ("", "<img src=data:image/gif;base64,R0lGODlhAQABAAAAACw= alt=''>"))
    return tmp_path


@pytest.fixture
def origin(folder: Path) -> Iterator[str]:
    """A server of that folder."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(folder))  # type: ignore[arg-type]

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("place", ["file", "server"])
def test_a_page_that_does_nothing_forbidden(browser: Browser, folder: Path, origin: str, place: str) -> None:
    url = (folder / "page.html").as_uri() if place == "file" else f"{origin}/page.html"
    page = browser.open(url, width=390, dark=True)
    assert page.locator("#p").inner_text() == "text"
    assert page.evaluate("[innerWidth, matchMedia('(prefers-color-scheme: dark)').matches]") == [390, True]
    assert browser.screenshot(page, f"scaffolding-{place}").read_bytes().startswith(b"\x89PNG")
    assert browser.problems == []


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("<script>console.error('ouch')</script>", "the console says: ouch"),
        ("<script>throw new Error('ouch')</script>", "throws ouch"),
        ("<img src=http://other.invalid/x.png>", "asks for http://other.invalid/x.png"),
        ("<script>fetch('http://127.0.0.1:9/').catch(() => 0)</script>", "asks for http://127.0.0.1:9/"),
        ("<script>new WebSocket('ws://127.0.0.1:9/')</script>", "opens ws://127.0.0.1:9/"),
    ],
)
@pytest.mark.parametrize("place", ["file", "server"])
def test_what_a_page_may_not_do(
    browser: Browser, folder: Path, origin: str, place: str, body: str, problem: str
) -> None:
    (folder / "bad.html").write_text(PAGE % ("", body))
    page = browser.open((folder / "bad.html").as_uri() if place == "file" else f"{origin}/bad.html")
    page.wait_for_load_state("networkidle")
    with pytest.raises(AssertionError, match=problem):
        browser.check()


def test_a_page_from_a_file_loads_no_other_file(browser: Browser, folder: Path) -> None:
    (folder / "bad.html").write_text(PAGE % ("", "<img src=other.png>"))
    browser.open((folder / "bad.html").as_uri())
    with pytest.raises(AssertionError, match="asks for file://.*other.png"):
        browser.check()
