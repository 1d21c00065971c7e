"""The live page's server: who may have the page, what it is sent, and where it listens."""

import asyncio
import itertools
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from starlette.testclient import TestClient
from told_run import append, begin, step_event, told

from paceline import cli
from paceline.observe import web, web_app
from paceline.observe.watched import Look, Watched
from paceline.observe.web import Page
from paceline.observe.web_app import Feed, application
from paceline.records import UserError

TOKEN = "the-token"


def client(feed: Feed | None = None, host: str = "127.0.0.1:8000") -> TestClient:
    return TestClient(application(feed or Feed(), TOKEN), base_url=f"http://{host}", follow_redirects=False)


def closed(message: str) -> Feed:
    """A feed whose streams end behind a message."""

    class Closed(Feed):
        async def stream(self) -> Any:
            async for text in super().stream():
                yield text
                if "state" in text:
                    self.close()

    feed = Closed()
    feed.publish(message)
    return feed


@pytest.mark.parametrize("path", ["/", "/events", "/favicon.ico", "/../../etc/passwd"])
@pytest.mark.parametrize(
    "query", ["", "?token=", "?token=the-toke", "?token=the-tokenn", "?token=%C3%A9", "?tok=the-token"]
)
def test_nobody_without_the_token(path: str, query: str) -> None:
    answer = client().get(path + query)
    assert answer.status_code == 403
    assert answer.text == "Open this page by the URL that `paceline watch --web` printed: it has the token.\n"


def test_the_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(web_app.secrets, "compare_digest", lambda *pair: compared.append(pair))
    assert client().get("/?token=other").status_code == 403
    assert compared == [(b"other", b"the-token")]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200), ("localhost:9", 200), ("evil.example", 400), ("127.0.0.1.evil.example:8000", 400),
        ("localhost.evil.example", 400), ("192.168.0.7:8000", 400), ("", 400), ("www.localhost", 400),
        ("[::1]:80", 400),
    ],
)  # fmt: skip
def test_hosts_of_other_names_are_refused(host: str, status: int) -> None:
    """A page whose own name was made to lead to this machine asks with that name."""
    answer = client().get(f"/?token={TOKEN}", headers={"host": host})
    assert answer.status_code == status
    assert "location" not in answer.headers


def test_other_methods_and_paths() -> None:
    assert client().post(f"/?token={TOKEN}").status_code == 405
    assert client().get(f"/nothing?token={TOKEN}").status_code == 404


@pytest.mark.parametrize(
    "path", [f"/?token={TOKEN}", "/", f"/events?token={TOKEN}", f"/nothing?token={TOKEN}", "/host"]
)
def test_headers(path: str) -> None:
    headers = {"host": "evil.example"} if path == "/host" else {}
    answer = client(closed("{}")).get(path, headers=headers)
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-security-policy"].startswith("default-src 'none';")
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
    assert "access-control-allow-origin" not in answer.headers


def test_the_page_names_nobody_else_and_runs_its_own_script_alone() -> None:
    nonces = set()
    for _ in range(2):
        answer = client().get(f"/?token={TOKEN}")
        policy = answer.headers["content-security-policy"]
        assert "unsafe" not in policy
        nonce, style = re.search(r"script-src 'nonce-([\w-]{22})'; style-src 'nonce-([\w-]{22})';", policy).groups()  # type: ignore[union-attr]
        assert nonce == style
        assert re.findall(r"<(?:script|style)[^>]*>", answer.text) == [
            f'<{tag} nonce="{nonce}">' for tag in ("style", "script")
        ]
        nonces.add(nonce)
    assert len(nonces) == 2
    assert set(re.findall(r"https?://[^\s'\"]+", answer.text)) == {"http://www.w3.org/2000/svg"}  # SVG's name
    assert TOKEN not in answer.text
    assert "innerHTML" not in answer.text


def test_events_are_sent_as_they_are() -> None:
    answer = client(closed('{"a": "<b>\\n"}')).get(f"/events?token={TOKEN}")
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    sent = 'event: state\ndata: {"age": 0.0, "run": {"a": "<b>\\n"}}'
    assert ageless(answer.text) == f"retry: 2000\n\n{sent}\n\nevent: end\ndata:\n\n"


def ageless(text: str) -> str:
    return re.sub(r'"age": \d+\.\d', '"age": 0.0', text)


def state(n: int, age: float = 0.0) -> str:
    return f'event: state\ndata: {{"age": {age}, "run": {n}}}\n\n'


def test_a_message_has_its_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes later is told how old the newest is."""

    async def read() -> str:
        feed = Feed()
        monkeypatch.setattr(web_app.time, "monotonic", lambda: 100.0)
        feed.publish("1")
        monkeypatch.setattr(web_app.time, "monotonic", lambda: 142.04)
        stream = feed.stream()
        return [await anext(stream) for _ in range(2)][1]

    assert asyncio.run(read()) == state(1, 42.0)


def test_slow_readers_get_the_newest_and_hold_nobody() -> None:
    async def read() -> list[str]:
        feed = Feed()
        slow, quick = feed.stream(), feed.stream()
        seen = [await anext(slow), await anext(quick)]
        for n in range(100):
            feed.publish(str(n))
            assert ageless(await anext(quick)) == state(n)
        seen.append(ageless(await anext(slow)))
        late = asyncio.ensure_future(anext(slow))
        await asyncio.sleep(0)
        assert not late.done(), "it has the newest"
        feed.close()
        return [*seen, await late, await anext(quick)]

    end = "event: end\ndata:\n\n"
    assert asyncio.run(read()) == ["retry: 2000\n\n"] * 2 + [state(99), end, end]


def test_a_stream_is_never_silent_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_app, "BEAT_S", 0.01)

    async def read() -> list[str]:
        stream = Feed().stream()
        return [await asyncio.wait_for(anext(stream), 10) for _ in range(3)]

    assert asyncio.run(read())[1:] == ["event: beat\ndata:\n\n"] * 2


# Page


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    append(tmp_path / "run", *begin(), step_event(4, 1010.0))
    return Watched(tmp_path / "run", "RUN")


def test_looks_become_messages(watched: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(web._Server, "publish", lambda _, message: sent.append(json.loads(message)))
    page = Page(told.append, title="RUN")
    assert told == [], "nothing is there to be seen"
    lost = "The connection is lost."
    for trouble, events in [
        (None, []), (None, []), (lost, []), (lost, []), (None, [step_event(5, 1011.0, loss="nan")]),
    ]:  # fmt: skip
        append(tmp_path / "run", *events)
        look = Look(True, time.time() + 500, trouble=trouble)
        page.look(watched, look, watched.see(look))
    page.close()
    assert told[0] == "The run's live page, until Ctrl-C:"
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}", told[1])
    assert told[2:] == [lost, lost]
    seen = [(message["note"], message["state"]["step"]) for message in sent]
    assert seen == [(None, 5), (lost, 5), (None, 6)], "only what is new"
    assert sent[0]["curves"]["loss"] == [[5, 2.5]]
    assert sent[2]["state"]["loss"] == "nan"
    assert sent[0]["title"] == "RUN"
    assert "settings" not in sent[0]["state"]
    for message in sent:
        assert message["now"] - time.time() == pytest.approx(500, abs=60), "by the clock of the run's machine"


def test_values_of_other_kinds_do_not_reach_the_page(watched: Watched, tmp_path: Path) -> None:
    page, look = Page(lambda text: None, title="RUN"), Look(True, time.time())
    append(tmp_path / "run", told("sample", 1012.0, s=1.0, roles=[], gpus=[None]))
    try:
        with pytest.raises(UserError, match=r"^Events of .* are not as docs/events.md has them \(state: "):
            page.look(watched, look, watched.see(look))
    finally:
        page.close()


def test_a_page_is_served_until_it_is_closed(watched: Watched) -> None:
    told: list[str] = []
    page = Page(told.append, title="RUN")
    look = Look(True, 1011.0)
    page.look(watched, look, watched.see(look))
    threads = threading.active_count()
    with httpx2.stream("GET", told[1].replace("/?", "/events?"), timeout=30) as answer:
        lines = answer.iter_lines()
        assert "event: state" in itertools.islice(lines, 3)
        assert json.loads(next(lines).removeprefix("data: "))["run"]["state"]["step"] == 5
        page.close()
        assert [line for line in lines if line] == ["event: end", "data:"]
    assert threading.active_count() == threads - 1
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(told[1])
    page.end(watched)
    assert told[2:] == ["RUN: running"]


def test_a_reader_that_does_not_read_holds_neither_others_nor_the_end() -> None:
    server = web._Server(web._listen(0))
    url = urlsplit(server.url)
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.settimeout(30)
        reader.connect((url.hostname, url.port))
        reader.sendall(f"GET /events?{url.query} HTTP/1.1\r\nHost: {url.netloc}\r\n\r\n".encode())
        server.publish(json.dumps("x" * 2**25))  # more than any socket holds
        while b"event: state" not in reader.recv(4096):
            pass
        server.publish('"second"')
        with httpx2.stream("GET", server.url.replace("/?", "/events?"), timeout=30) as answer:
            assert any("second" in line for line in answer.iter_lines())
        server.end()
        assert not server._thread.is_alive()


def test_only_this_machine_can_connect() -> None:
    listener = web._listen(0)
    try:
        assert listener.getsockname()[0] == "127.0.0.1"
        port = listener.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        with pytest.raises(ConnectionRefusedError):  # another address of this machine: who listens on all has it too
            socket.create_connection(("127.0.0.2", port), timeout=5)
    finally:
        listener.close()


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return what the command line says when it refuses these arguments of `watch`."""

    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["paceline", "watch", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr()
        assert (end.value.code, said.out) == (2, "")
        return said.err

    return run


def test_a_port_that_is_in_use(watched: Watched, tmp_path: Path, refused: Callable[..., str]) -> None:
    with web._listen(0) as listener:
        port = listener.getsockname()[1]
        assert refused(tmp_path / "run", "--web", "--port", port) == (
            f"error: --port must be one that is free on 127.0.0.1, but {port} cannot be had: Address already in use. "
            "Name another one, or 0 for any.\n"
        )


@pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
def test_without_the_extra(
    missing: str, watched: Watched, tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    assert refused(tmp_path / "run", "--web") == (
        f"error: `paceline watch --web` needs the extra `web`, but {missing} is not installed: pip install "
        "'paceline[web]'.\n"
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--web", "--once"], "--web serves a page for as long as somebody looks, got --once too"),
        (["--web", "--json"], "--web serves a page for as long as somebody looks, got --json too"),
        (["--port", "8000"], "--port is that of the page which --web serves, got --port 8000 without it"),
    ],
)
def test_options_that_have_nothing_to_do(
    options: list[str], sentence: str, tmp_path: Path, refused: Callable[..., str]
) -> None:
    assert sentence in refused(tmp_path, *options)


def test_a_folder_that_is_none(tmp_path: Path, refused: Callable[..., str]) -> None:
    """Is said before any page is."""
    assert "is not a run's folder" in refused(tmp_path, "--web")
