"""Pages in the system's headless Chromium, driven by Playwright, for tests marked `system`.

A page may neither write an error to its console nor ask anybody but its own server, or for a page from a file anything
but that file. `Browser.check`, which the fixture `browser` calls behind every test, fails for it.
"""

from __future__ import annotations  # Playwright is loaded once a browser starts: collecting tests is quick

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from playwright.sync_api import Browser as Chromium
    from playwright.sync_api import ConsoleMessage, Page, Request, Route

TIMEOUT_MS = 30_000  # of whatever Playwright waits for; two loaded cores take their time


class Browser:
    """Opens pages and remembers what they did that they may not."""

    def __init__(self, chromium: Chromium, screenshots: Path) -> None:
        self.screenshots = screenshots
        self.problems: list[str] = []
        self._chromium = chromium

    def open(self, url: str, *, width: int = 1280, height: int = 800, dark: bool = False, **context: Any) -> Page:
        """Open a page in a fresh profile and return it when it is loaded.

        `context` is what else Playwright's new_context takes, such as `java_script_enabled` or `reduced_motion`.
        """
        profile = self._chromium.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", **context
        )
        profile.set_default_timeout(TIMEOUT_MS)
        return self.tab(profile.new_page(), url)

    def tab(self, page: Page, url: str) -> Page:
        """Open a page in a tab that is there, as `context.new_page()` of another page returns one."""

        def hear(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning"):
                self.problems.append(f"{url}: the console says: {message.text}")

        def ask(route: Route, request: Request) -> None:
            if _is_own(request.url, url):
                route.fallback()
            else:
                self.problems.append(f"{url}: asks for {request.url}")
                route.abort()

        page.on("console", hear)
        page.on("pageerror", lambda error: self.problems.append(f"{url}: throws {error}"))
        page.on("websocket", lambda socket: self.problems.append(f"{url}: opens {socket.url}"))
        page.route("**/*", ask)
        page.goto(url)
        return page

    def screenshot(self, page: Page, name: str) -> Path:
        """Save the whole page as NAME.png and return the file."""
        path = self.screenshots / f"{name}.png"
        page.screenshot(path=path, full_page=True)
        return path

    @contextmanager
    def allowing(self, pattern: str) -> Iterator[None]:
        """Let pages do in the block, and only there, what matches."""
        before = len(self.problems)
        yield
        new = [problem for problem in self.problems[before:] if not re.search(pattern, problem)]
        self.problems[before:] = new

    def check(self) -> None:
        """Fail if a page did what it may not, and close all pages."""
        for context in list(self._chromium.contexts):
            context.close()
        problems, self.problems = self.problems, []
        assert not problems, "\n".join(problems)


@contextmanager
def started(screenshots: Path) -> Iterator[Browser]:
    """Start Chromium and end it with the block."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium")
    assert path, "there is no chromium: make test-system installs it."
    with sync_playwright() as playwright:
        # As root, as in a container, Chromium's sandbox cannot be had; the pages are the tests' own.
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield Browser(chromium, screenshots)
        chromium.close()


def _is_own(url: str, page: str) -> bool:
    asked, own = urlsplit(url), urlsplit(page)
    if asked.scheme in ("data", "blob"):
        return True
    if own.scheme == "file":
        return asked.scheme == "file" and asked.path == own.path
    return (asked.scheme, asked.netloc) == (own.scheme, own.netloc)
