"""The remote engine: what it asks of servers, what it makes of their answers, and whom it trusts.

Servers are made up here; real ones are in tests/interop/test_servers.py.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_server import (
    EOS,
    MODEL,
    Reply,
    Respond,
    choice,
    expected,
    ids_for,
    listed,
    outcomes,
    requests,
    serving,
    vllm,
    words,
)

from paceline.decode.remote import KEY_VARIABLE, Remote
from paceline.decode.requests import Request, copies
from paceline.decode.sampling import Sampling
from paceline.pipeline.conversing import Completer
from paceline.records import RunError, UserError
from paceline.target.load import TargetFacts

# What servers understand


def llama_cpp(body: dict[str, Any]) -> Reply:
    """Answer as llama.cpp's /completion does."""
    ids, finish = ids_for(body["prompt"], body["n_predict"])
    assert body["return_tokens"]
    return {
        "content": words(ids),
        "tokens": ids,
        "stop_type": {"stop": "eos", "length": "limit"}[finish],
        "tokens_evaluated": len(body["prompt"]),
        "truncated": False,
        "model": body["model"],
    }


def openai(body: dict[str, Any]) -> Reply:
    """Answer as a server that knows OpenAI's fields alone."""
    if more := body.keys() - {"model", "prompt", "max_tokens", "temperature", "top_p", "seed", "n", "stream"}:
        return 400, {}, {"error": {"message": f"Unknown fields: {sorted(more)}"}}
    return choice(body)


def transformers_serve(body: dict[str, Any]) -> Reply:
    known = {"model", "prompt", "max_tokens", "seed", "generation_config", "n", "top_p", "temperature"}
    if more := body.keys() - known:
        return 422, {}, {"detail": f"Unexpected fields in the request: {sorted(more)}"}
    if not isinstance(body["prompt"], str):
        return 400, {}, {"detail": "prompt must be a string."}
    return choice(body)


@pytest.mark.parametrize(
    ("respond", "native", "retokenized", "how"),
    [
        (vllm, None, False, "returns token ids (vLLM's and SGLang's return_token_ids)."),
        (choice, llama_cpp, False, "returns token ids (llama.cpp's /completion). It cannot be told stop tokens."),
        (choice, None, True, "returns only text, which is tokenized again (vLLM's and SGLang's return_token_ids)."),
        (choice, lambda body: "<html>", True, "returns only text, which is tokenized again (vLLM's and"),
        (openai, None, True, "(OpenAI's fields). It cannot be told top_k and stop tokens."),
        (transformers_serve, None, True, "returns only text, which is tokenized again (transformers serve)."),
    ],
    ids=["vllm", "llama.cpp", "text", "text and a page", "openai", "transformers"],
)
def test_what_a_server_understands_is_found_out(
    make: Callable[..., Remote], respond: Respond, native: Respond | None, retokenized: bool, how: str
) -> None:
    asked = requests(9) + requests(5, new=4)[3:]
    asked = [Request(i, request.prompt_ids, request.max_new_tokens) for i, request in enumerate(asked)]
    with serving(respond, native=native) as fake:
        remote = make(fake.url + "/v1/", sampling=Sampling(0.7, top_k=5, top_p=0.9, seed=3))
        assert isinstance(remote, Completer)
        assert len(remote.told) == 1
        assert how in remote.told[0]
        assert fake.probes == {transformers_serve: 3, openai: 2}.get(respond, 1 + bool(native))
        assert outcomes(remote, asked) == expected(asked, retokenized)
        assert remote.retokenized == (len(asked) if retokenized else 0)
        assert f"{len(asked)} retokenized" in remote.note(0) or not retokenized
        body = fake.asked[0]
        said = body | json.loads(body.get("generation_config", "{}"))
        assert (said["temperature"], said["top_p"], said.get("top_k", 5)) == (0.7, 0.9, 5)
        assert {done.finish for done in expected(asked).values()} == {"stop", "length"}


def test_prompts_go_as_ids_and_seeds_follow_from_key_and_copy(make: Callable[..., Remote]) -> None:
    asked = list(copies(requests(3), 2))
    seeds = []
    with serving() as fake:
        for seed in (1, 1, 2):
            fake.asked.clear()
            outcomes(make(fake, sampling=Sampling(1.0, seed=seed), concurrency=1), asked)
            assert [body["prompt"] for body in fake.asked] == [request.prompt_ids for request in asked]
            assert all((b["n"], b["stop_token_ids"], b["top_k"]) == (1, [EOS], -1) for b in fake.asked)
            seeds.append([body["seed"] for body in fake.asked])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0] + seeds[2])) == 12
    assert all(0 <= seed < 2**31 for seed in seeds[0] + seeds[2])


# How much is asked at once


def test_requests_under_way_are_bounded_and_taken_as_they_are_sent(make: Callable[..., Remote]) -> None:
    taken = 0

    def endless() -> Iterator[Request]:
        nonlocal taken
        while True:
            taken += 1
            yield Request(taken, (5, 6, taken % 90), 9)

    with serving(delay_s=0.02) as one, serving(delay_s=0.02) as two:
        remote = make(one, two, concurrency=6)
        results = iter(remote.complete(endless()))
        for yielded in range(1, 41):
            next(results)
            assert taken <= yielded + 6
        results.close()
        assert one.most + two.most in (5, 6)
        assert len(one.asked) > 5 < len(two.asked)
        assert not [t for t in threading.enumerate() if t.name == "remote"]
        before = taken
        asked = requests(5)
        assert outcomes(remote, asked) == expected(asked), "a later round knows nothing of the one that was left"
        assert taken == before
        assert "busy" in remote.note(5)
        assert sum(stats.finished for stats in remote.stats) >= 45


# Which model


def test_another_model_than_asked_is_refused(make: Callable[..., Remote]) -> None:
    with serving(models=listed("org/other", "more")) as fake:
        with pytest.raises(UserError, match=f"^{fake.url} serves org/other, more, not org/tiny. Start it with"):
            make(fake)
        with pytest.raises(UserError, match="serves org/other, more, not third"):
            make(fake, served_name="third")
        remote = make(fake, served_name="more")
        outcomes(remote, requests(1))
        assert fake.asked[0]["model"] == "more"
    folder = {"data": [{"id": "anything", "root": "/models/Tiny"}]}
    for models, name in ((listed("/data/tiny/"), "/data/tiny/"), (folder, "anything"), ((404, {}, "none"), MODEL)):
        with serving(models=models) as fake:
            outcomes(make(fake), requests(1))
            assert fake.asked[0]["model"] == name
    unlisted = serving(lambda body: vllm(body) | {"model": "other@main"}, models=listed())
    with unlisted as fake, pytest.raises(UserError, match="serves other, not org/tiny"):
        make(fake)


def test_a_server_that_comes_back_with_another_model_gets_nothing(make: Callable[..., Remote]) -> None:
    with serving() as fake:
        port = int(fake.url.rpartition(":")[2])
        remote = make(fake)
    with serving(port=port, models=listed("other")) as fake:
        # The first request meets the new server unseen on a fresh connection unless the old one was seen to go.
        remote._servers[0].down_since = time.monotonic()
        with pytest.raises(RunError, match="serves other, not org/tiny"):
            outcomes(remote, requests(3))
        assert not fake.asked
        assert remote.told[-1].endswith("It gets no more requests.")


def test_a_generator_that_nobody_closes_does_not_hold_the_interpreter_up(tiny: TargetFacts) -> None:
    with serving(delay_s=0.02) as fake:
        code = f"""
import builtins
from paceline.decode import remote
from paceline.decode.requests import Request
from paceline.decode.sampling import Sampling
from paceline.target.load import load_tokenizer
remote._GRACE_S = 0.5
made = remote.Remote([{fake.url!r}], model={MODEL!r}, tokenizer=load_tokenizer({str(tiny.folder)!r}), stop_ids=(2,),
                     vocab_size=128, sampling=Sampling())
builtins.left = made.complete(Request(i, (4, 5), 9) for i in range(10**6))  # what goes last
print(next(builtins.left)[0].key)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout in {f"{key}\n" for key in range(64)}, done.stderr


# Keys and bad settings


def test_the_key_is_sent_and_shown_nowhere(make: Callable[..., Remote], monkeypatch: pytest.MonkeyPatch) -> None:
    def respond(body: dict[str, Any]) -> Reply:
        return vllm(body) if good else (401, {}, {"error": {"message": "Incorrect API key: sekret-1."}})

    with serving(respond) as fake:
        good = False
        with pytest.raises(UserError, match=f"wants a key .*variable {KEY_VARIABLE} is not set.$"):
            make(fake)
        monkeypatch.setenv(KEY_VARIABLE, "sekret-1")
        with pytest.raises(UserError, match=r"Incorrect API key: \*\*\*.*does not fit.$") as refused:
            make(fake)
        good = True
        remote = make(fake)
        assert fake.keys == {None, "Bearer sekret-1"}
        good = False
        with pytest.raises(RunError, match="wants a key") as stopped:
            outcomes(remote, requests(9))
    assert "sekret" not in f"{refused.value}{stopped.value}{remote.told}{vars(remote)}{vars(remote._servers[0])}"


def test_bad_settings(make: Callable[..., Remote]) -> None:
    for url in ("", "localhost:8000", "ftp://x", "http://"):
        with pytest.raises(UserError, match="A server's URL must look like http://localhost:8000, got"):
            make(url)
    with pytest.raises(UserError, match=f"holds a user or a key. Put a key into {KEY_VARIABLE}") as refused:
        make("http://me:sekret@localhost")
    assert "sekret" not in str(refused.value)
    with pytest.raises(UserError, match="Setting concurrency of remote engines must be above 0, got 0."):
        make("http://localhost", concurrency=0)
