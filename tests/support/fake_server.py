"""Servers on the loopback that answer, lie, stall, close, vanish and come back as a test decides."""

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from paceline.decode.remote import Remote
from paceline.decode.requests import Request
from paceline.records import Completion, PacelineError

EOS = 2
MODEL = "org/tiny"

CLOSE = "close in the middle of the body"
# Status, headers and body; a body alone is a success.
Reply = dict[str, Any] | tuple[int, dict[str, str], Any] | str
Respond = Callable[[dict[str, Any]], Reply]
Page = Callable[[], Reply]  # what a GET returns


def ids_for(prompt: Sequence[int], limit: int) -> tuple[list[int], str]:
    """Return the answer to a prompt and why it ends: up to 9 words that follow from the prompt."""
    ids = [10 + (sum(prompt) * 7 + place) % 100 for place in range(sum(prompt) % 10)] + [EOS]
    return (ids, "stop") if len(ids) <= limit else (ids[:limit], "length")


def words(ids: Sequence[int]) -> str:
    return " ".join(f"w{token}" for token in ids if token != EOS)


def choice(body: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Answer as /v1/completions does, without ids."""
    prompt = body["prompt"]
    if isinstance(prompt, str):
        prompt = [int(word[1:]) if word.startswith("w") else 0 for word in prompt.split()]
    ids, finish = ids_for(prompt, body["max_tokens"])
    told = {"index": 0, "text": words(ids), "finish_reason": finish, "logprobs": None, **more}
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
    return {"model": body["model"], "choices": [told], "usage": usage}


def vllm(body: dict[str, Any]) -> Reply:
    """Answer as vLLM and SGLang do."""
    assert body["return_token_ids"]
    return choice(body, token_ids=ids_for(body["prompt"], body["max_tokens"])[0])


class Fake:
    """One running server: what it was asked and how many requests it had at once."""

    def __init__(
        self, respond: Respond, *, native: Respond | None, models: Any, delay_s: float, pages: dict[str, Page]
    ) -> None:
        self.respond, self.native, self.models, self.delay_s, self.pages = respond, native, models, delay_s, pages
        self.asked: list[dict[str, Any]] = []  # bodies of completions, probes left out
        self.keys: set[str | None] = set()
        self.now = self.most = self.probes = 0
        self.url = ""
        self._lock = threading.Lock()

    def reply(self, path: str, body: dict[str, Any] | None) -> Reply:
        if body is None:
            if path in self.pages:
                return self.pages[path]()
            return self.models if path == "/v1/models" else (404, {}, "no such page")
        respond = {"/v1/completions": self.respond, "/completion": self.native, "/generate": self.native}.get(path)
        if respond is None:
            return 404, {}, {"detail": "Not Found"}
        probe = body.get("max_tokens", body.get("n_predict")) == 1
        with self._lock:
            self.probes += probe
            if not probe:
                self.asked.append(body)
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            time.sleep(0 if probe else self.delay_s)
            return respond(body)
        finally:
            with self._lock:
                self.now -= 1


def listed(*names: str) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": name, "object": "model"} for name in names]}


@contextmanager
def serving(
    respond: Respond = vllm,
    *,
    native: Respond | None = None,
    models: Any = None,
    delay_s: float = 0.0,
    port: int = 0,
    pages: dict[str, Page] | None = None,
) -> Iterator[Fake]:
    """Run a server until the block ends; then its port refuses connections."""
    models = listed(MODEL) if models is None else models
    fake = Fake(respond, native=native, models=models, delay_s=delay_s, pages=pages or {})

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._send(fake.reply(self.path, None))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            fake.keys.add(self.headers["authorization"])
            self._send(fake.reply(self.path, body))

        def _send(self, reply: Reply) -> None:
            status, headers, body = reply if isinstance(reply, tuple) else (200, {}, reply)
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(data) + (99 if reply is CLOSE else 0)))
            self.close_connection = reply is CLOSE or not running.is_set()
            self.end_headers()
            self.wfile.write(data)

    class Quiet(ThreadingHTTPServer):
        daemon_threads, block_on_close = True, False

        def handle_error(self, *_: Any) -> None:  # a client that leaves early is what some tests are about
            pass

    running = threading.Event()
    running.set()
    server = Quiet(("127.0.0.1", port), Handler)
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        running.clear()
        server.shutdown()
        server.server_close()
        thread.join()


Outcomes = dict[tuple[int | str, int], Completion | PacelineError]


def requests(count: int = 12, new: int = 50) -> list[Request]:
    return [Request(f"p{i}", [4 + i % 100, 5, 6 + 3 * i % 110], new) for i in range(count)]


def outcomes(remote: Remote, asked: Iterable[Request]) -> Outcomes:
    return {(request.key, request.copy): outcome for request, outcome in remote.complete(asked)}


def expected(asked: Iterable[Request], retokenized: bool = False) -> Outcomes:
    done: Outcomes = {}
    for request in asked:
        prompt = tuple(request.prompt_ids)
        ids, finish = ids_for(prompt, request.max_new_tokens)
        done[request.key, request.copy] = Completion(prompt, tuple(ids), finish, retokenized=retokenized)
    return done


def asks_for(body: dict[str, Any], request: Request) -> bool:
    """Whether a body is a request's, not a probe's."""
    return body["prompt"] == list(request.prompt_ids) and body["max_tokens"] != 1
