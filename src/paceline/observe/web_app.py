"""The live page as an ASGI application: one page, one stream of events, and who may have them.

Whoever asks needs the token, and asks for this machine by its own name (a page elsewhere whose name leads here has
another one). The page loads nothing from anywhere and runs no script but its own; what it shows of a run reaches it as
JSON, never as HTML.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from importlib import resources

from jinja2 import Environment
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders, QueryParams
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

BEAT_S = 5.0  # a stream is silent for no longer; the page gives a connection up after three
HOSTS = ("127.0.0.1", "localhost")
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",  # the token is in the page's URL
    "X-Content-Type-Options": "nosniff",
}
_POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
_REFUSAL = "Open this page by the URL that `paceline watch --web` printed: it has the token.\n"


class Feed:
    """The newest message, for any number of readers of one event loop.

    Each reader goes on at its own pace and is given what is the newest by then, so one that is slow misses messages
    and holds nobody.
    """

    def __init__(self) -> None:
        self.closed = False
        self._newest: tuple[str, float] | None = None  # and when it came
        self._changed = asyncio.Event()

    def publish(self, message: str) -> None:
        """Replace the newest message, a JSON text."""
        self._newest = message, time.monotonic()
        self._wake()

    def close(self) -> None:
        """End all streams."""
        self.closed = True
        self._wake()

    async def stream(self) -> AsyncIterator[str]:
        """Yield server-sent events: `state` with the newest message and its age, `beat`, and at last `end`."""
        yield "retry: 2000\n\n"
        sent = None
        while not self.closed:
            changed, newest = self._changed, self._newest
            if newest is not None and newest is not sent:
                sent, (message, came) = newest, newest
                yield f'event: state\ndata: {{"age": {time.monotonic() - came:.1f}, "run": {message}}}\n\n'
                continue
            try:
                await asyncio.wait_for(changed.wait(), BEAT_S)
            except TimeoutError:
                yield "event: beat\ndata:\n\n"
        yield "event: end\ndata:\n\n"

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def application(feed: Feed, token: str) -> ASGIApp:
    """Return the application that shows what is published to `feed` to whoever has the token."""

    async def page(_: Request) -> Response:
        nonce = secrets.token_urlsafe(16)
        return HTMLResponse(_page(nonce), headers={"Content-Security-Policy": _POLICY.format(nonce=nonce)})

    async def events(_: Request) -> Response:
        return StreamingResponse(feed.stream(), media_type="text/event-stream")

    guards = [
        Middleware(_Headers),
        Middleware(TrustedHostMiddleware, allowed_hosts=list(HOSTS), www_redirect=False),
        Middleware(_Token, token=token),
    ]
    return Starlette(routes=[Route("/", page), Route("/events", events)], middleware=guards)


def _page(nonce: str) -> str:
    folder = resources.files("paceline.observe")
    parts = {kind: (folder / f"web_page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js")}
    # The style and the script are ours and go in as they are; nothing of a run is in the page.
    template = Environment(autoescape=True).from_string(parts["html"])
    return template.render(nonce=nonce, style=parts["css"], script=parts["js"])


class _Headers:
    """Gives every answer the headers that it lacks."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, with_headers)


class _Token:
    """Refuses whoever does not have the token, whatever is asked for."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = QueryParams(scope.get("query_string", b"")).get("token", "")
        if secrets.compare_digest(given.encode(), self._token):
            await self._app(scope, receive, send)
        else:
            await PlainTextResponse(_REFUSAL, status_code=403)(scope, receive, send)
