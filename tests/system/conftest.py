"""A headless browser for the tests of pages."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, started

_FOLDER = pytest.StashKey[Path]()


@pytest.fixture(scope="session")
def screenshots(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of this session's screenshots, whose name is printed at its end."""
    return request.config.stash.setdefault(_FOLDER, tmp_path_factory.mktemp("screenshots"))


@pytest.fixture(scope="module")
def _chromium(screenshots: Path) -> Iterator[Browser]:
    with started(screenshots) as browser:
        yield browser


@pytest.fixture
def browser(_chromium: Browser) -> Iterator[Browser]:
    """Chromium; whatever a page does that it may not fails the test that opened it."""
    yield _chromium
    _chromium.check()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    folder = config.stash.get(_FOLDER, None)
    if folder is not None:
        terminalreporter.write_line(f"screenshots: {folder}")
