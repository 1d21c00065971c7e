"""Shows a run as a live page in a browser of this machine: `paceline watch RUN --web`.

Looks are taken in the main thread, as for all that `watch` shows. A second thread serves what the last look made of the
run, so no reader holds a look, however slow.
"""

import asyncio
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from paceline.observe.events import plain
from paceline.observe.watched import Look, Watched, readable
from paceline.observe.web_curves import Curves
from paceline.records import UserError

_LOOPBACK = "127.0.0.1"
_ABORT_S = 0.3  # after which a reader that does not read is not waited for
_END_S = 5.0  # for the thread that serves
_UNSHOWN = {"settings", "plan", "data", "machine"}  # of the state: large, and not on the page


class Page:
    """The page of a run. It is served from the first look on, until it is closed."""

    def __init__(self, tell: Callable[[str], None], *, title: str, port: int = 0) -> None:
        """`tell` gets lines for a person, the one with the URL first. `title` is what the run was called by who looks.

        Raises:
            UserError: the extra `web` is not installed.
        """
        _check_extra()
        self._tell, self._title, self._port = tell, title, port
        self._curves = Curves()
        self._ahead_s = 0.0  # what the clock of the run's machine is ahead of this one's
        self._note: object = self  # of the last message; equals none before the first
        self._server: _Server | None = None

    def look(self, watched: Watched, look: Look, fresh: list[dict[str, Any]]) -> None:
        """Show what a look has found, or why there is nothing new.

        Raises:
            UserError: it is the first look, and the port cannot be had.
        """
        if self._server is None:
            self._server = _Server(_listen(self._port))
            self._tell("The run's live page, until Ctrl-C:")
            self._tell(self._server.url)
        if look.trouble:
            self._tell(readable(look.trouble))
        else:
            self._ahead_s = look.now - time.time()
        for event in fresh:
            self._curves.apply(event)
        if fresh or look.trouble != self._note:
            self._note = look.trouble
            self._server.publish(self._message(watched, look.trouble))

    def close(self) -> None:
        """End the page at once, whoever reads it."""
        if self._server is not None:
            self._server.end()

    def end(self, watched: Watched) -> None:
        """Say what became of the run."""
        self._tell(f"{readable(self._title)}: {watched.state.outcome}")

    def _message(self, watched: Watched, note: str | None) -> str:
        watched.panel(width=80)  # values of other kinds than events have are an error here, not in the browser
        state = {key: value for key, value in watched.as_dict().items() if key not in _UNSHOWN}
        shown = {"title": self._title, "note": note, "state": state, "curves": self._curves.as_dict()}
        return json.dumps(plain({**shown, "now": time.time() + self._ahead_s}))


class _Server:
    """A thread that serves the newest message."""

    def __init__(self, listener: socket.socket) -> None:
        import uvicorn

        from paceline.observe.web_app import Feed, application

        token = secrets.token_urlsafe(24)
        self.url = f"http://{_LOOPBACK}:{listener.getsockname()[1]}/?token={token}"
        self._feed, self._loop = Feed(), asyncio.new_event_loop()
        config = uvicorn.Config(
            application(self._feed, token),
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,  # URLs have the token
            proxy_headers=False,
            server_header=False,
        )
        self._server, self._listener = uvicorn.Server(config), listener
        self._thread = threading.Thread(target=self._serve, name="live page", daemon=True)
        self._thread.start()

    def publish(self, message: str) -> None:
        """Let this be the newest message, a JSON text."""
        self._loop.call_soon_threadsafe(self._feed.publish, message)

    def end(self) -> None:
        """End all streams and the thread."""
        self._server.should_exit = True
        self._thread.join(_END_S)
        self._listener.close()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._both())

    async def _both(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._end_streams())
            tasks.create_task(self._server.serve(sockets=[self._listener]))

    async def _end_streams(self) -> None:
        """Once the server is to exit, end what would keep it: streams, and readers that do not read."""
        while not self._server.should_exit:
            await asyncio.sleep(0.05)
        self._feed.close()
        await asyncio.sleep(_ABORT_S)
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()


def _check_extra() -> None:
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(
            f"`paceline watch --web` needs the extra `web`, but {error.name} is not installed: pip install "
            "'paceline[web]'."
        ) from None


def _listen(port: int) -> socket.socket:
    """Return a socket that already takes connections, of this machine alone.

    Raises:
        UserError: the port is in use, or may not be used.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what an ended server's connections leave behind
    try:
        listener.bind((_LOOPBACK, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise UserError(
            f"--port must be one that is free on {_LOOPBACK}, but {port} cannot be had: {error.strerror}. Name another "
            "one, or 0 for any."
        ) from None
    return listener
