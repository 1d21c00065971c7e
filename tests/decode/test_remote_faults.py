"""The remote engine when servers fail: nothing is lost, nothing waits for ever, and the cause is told."""

import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
from fake_server import (
    CLOSE,
    MODEL,
    Reply,
    asks_for,
    choice,
    expected,
    outcomes,
    requests,
    serving,
    vllm,
)

from paceline.decode.remote import Remote
from paceline.records import RunError, UserError

# Faults


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        (CLOSE, "peer closed connection without sending complete message body"),
        ((500, {}, {"error": {"message": "CUDA out\nof memory."}}), "500 Internal Server Error: CUDA out of memory."),
        ("{nope", "an answer that is not JSON ({nope)"),
        ({"choices": []}, "an answer that is no completion"),
        (choice({"prompt": [4], "max_tokens": 9, "model": MODEL}, finish_reason="abort"), "that ended with 'abort'"),
    ],
    ids=["closes", "500", "no json", "no completion", "abort"],
)
def test_a_request_is_sent_again_and_one_that_always_fails_is_an_outcome(
    make: Callable[..., Remote], fault: Reply, cause: str
) -> None:
    asked = requests()
    bad, seen = asked[4], set()

    def respond(body: dict[str, Any]) -> Reply:
        first = str(body["prompt"]) not in seen and body["max_tokens"] != 1
        seen.add(str(body["prompt"]))
        return fault if asks_for(body, bad) or (first and sum(body["prompt"]) % 3 == 0) else vllm(body)

    with serving(respond) as fake:
        found = outcomes(make(fake, attempts=3), iter(asked))
        assert sum(asks_for(body, bad) for body in fake.asked) == 3
        error = found.pop((bad.key, 0))
        assert found == expected(r for r in asked if r is not bad)
        assert isinstance(error, RunError)
        assert str(error).startswith(f"{fake.url} gave no answer in 3 attempts, at last: ")
        assert cause in str(error)


def test_a_stalled_answer_is_given_up(make: Callable[..., Remote]) -> None:
    asked = requests(4)
    with serving(lambda body: time.sleep(1) or vllm(body) if asks_for(body, asked[1]) else vllm(body)) as fake:
        found = outcomes(make(fake, attempts=2, timeout_s=0.3), asked)
    assert str(found.pop((asked[1].key, 0))).endswith("gave no answer in 2 attempts, at last: no answer within 0 s.")
    assert found == expected(r for r in asked if r is not asked[1])


@pytest.mark.parametrize("code", [429, 503])
def test_a_server_without_room_is_asked_again_when_it_says(make: Callable[..., Remote], code: int) -> None:
    """It does not count against the requests, however few attempts they have."""
    refused: list[float] = []
    again: list[float] = []

    def respond(body: dict[str, Any]) -> Reply:
        if body["max_tokens"] != 1 and len(refused) < 3:
            refused.append(time.monotonic())
            return code, {"Retry-After": "0.4"}, "later"
        again.append(time.monotonic())
        return vllm(body)

    with serving(respond) as fake:
        remote = make(fake, attempts=1, concurrency=3)
        again.clear()
        assert outcomes(remote, requests(8)) == expected(requests(8))
    assert len(refused) == 3
    assert again[0] - refused[-1] > 0.35


def test_what_a_server_refuses_is_not_sent_again(make: Callable[..., Remote]) -> None:
    asked = requests(4)

    def respond(body: dict[str, Any]) -> Reply:
        return (400, {}, {"error": {"message": "too long"}}) if asks_for(body, asked[2]) else vllm(body)

    with serving(respond) as fake:
        found = outcomes(make(fake), asked)
        assert str(found["p2", 0]) == f"{fake.url} does not answer the prompt: 400 Bad Request: too long."
        assert len(fake.asked) == 4


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda data: data["usage"].update(prompt_tokens=4), "the server read 4 tokens of a prompt of 3"),
        (lambda data: data["choices"][0].update(token_ids=[5, 128]), "returned token id 128; the target has 0..127"),
        (lambda data: data["choices"][0].update(token_ids=[5], finish_reason="length"), "after 1 of 50 new tokens"),
    ],
)
def test_an_answer_that_is_not_the_targets_is_refused(
    make: Callable[..., Remote], change: Callable[[dict[str, Any]], None], cause: str
) -> None:
    def respond(body: dict[str, Any]) -> Reply:
        data = vllm(body)
        if body["max_tokens"] != 1:
            change(data)
        return data

    with serving(respond) as fake:
        assert cause in str(outcomes(make(fake), requests(1))["p0", 0])


def test_a_server_that_fails_at_everything_is_named_and_gets_little(make: Callable[..., Remote]) -> None:
    """It answers soonest, so it has always the fewest requests under way."""
    broken = False
    with (
        serving(lambda body: (500, {}, "broken") if broken else vllm(body)) as bad,
        serving(delay_s=0.02) as good,
    ):
        remote = make(bad, good, concurrency=8)
        broken = True
        assert outcomes(remote, requests(100)) == expected(requests(100))
        assert f"{bad.url} gives no answers (500 Internal Server Error: broken); it is tried again" in remote.told[-1]
        assert len(bad.asked) < 40


def test_requests_that_fail_together_count_once(make: Callable[..., Remote], monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that closes all connections once is not left alone as one that fails again and again."""
    closed: list[int] = []

    def respond(body: dict[str, Any]) -> Reply:
        if body["max_tokens"] != 1 and len(closed) < 16:
            closed.append(1)
            time.sleep(0.2)
            return CLOSE
        return vllm(body)

    with serving(respond) as fake:
        remote = make(fake, concurrency=16)
        monkeypatch.setattr("paceline.decode.remote_server.LONGEST_WAIT_S", 100.0)
        began = time.monotonic()
        assert outcomes(remote, requests(30)) == expected(requests(30))
        assert time.monotonic() - began < 2
        assert len(remote.told) == 1


def test_what_was_answered_before_the_run_ended_is_yielded(make: Callable[..., Remote]) -> None:
    asked = requests(9)
    waits = {"p0": 0.0, "p1": 0.1, "p2": 0.2, "p3": 0.2}  # p2 and p3 are answered after the refusal

    def respond(body: dict[str, Any]) -> Reply:
        key = next((request.key for request in asked if asks_for(body, request)), "")
        time.sleep(waits.get(str(key), 0.0))
        return (403, {}, "no more") if key == "p1" else vllm(body)

    with serving(respond) as fake:
        results = iter(make(fake).complete(asked))
        found = [next(results)]
        time.sleep(0.5)
        with pytest.raises(RunError, match="403 Forbidden: no more"):
            found.extend(results)
    assert found[0][0].key == "p0"
    assert {request.key for request, _ in found} == {"p0", "p2", "p3"}


# Servers that are away


def test_a_server_that_vanishes_is_named_and_the_others_go_on(make: Callable[..., Remote]) -> None:
    asked = requests(60)
    with serving(delay_s=0.01) as stays:
        with serving(delay_s=0.01) as goes:
            port = int(goes.url.rpartition(":")[2])
            remote = make(goes, stays)
            results = iter(remote.complete(asked))
            found = [next(results) for _ in range(10)]
            assert goes.asked
        found += islice(results, 30)
        assert f"{goes.url} gives no answers (no connection" in remote.told[-1]
        with serving(port=port) as back:
            time.sleep(0.3)
            found += results
            assert {(r.key, r.copy): outcome for r, outcome in found} == expected(asked)
            assert f"{goes.url} answers again." in remote.told
            assert back.asked


def test_a_server_that_is_away_at_the_start_is_told_and_tried_again(make: Callable[..., Remote]) -> None:
    with serving() as away:
        port = int(away.url.rpartition(":")[2])
    with serving(delay_s=0.02) as there:
        remote = make(away, there)
        assert remote.told[-1].startswith(f"{away.url}: no connection (Connection refused).")
        with serving(port=port) as back:
            assert outcomes(remote, requests(20)) == expected(requests(20))
            assert back.asked
    with pytest.raises(UserError, match=f"^No server answers. {away.url}: no connection .*{there.url}: no connection"):
        make(away, there)


def test_servers_may_take_their_time_to_start(make: Callable[..., Remote]) -> None:
    loading = iter([(503, {}, "loading"), (503, {}, "loading")])
    with serving(lambda body: next(loading, None) or vllm(body)) as fake:
        with pytest.raises(UserError, match="503 Service Unavailable: loading"):
            make(fake)
        remote = make(fake, ready_timeout_s=20.0)
        assert outcomes(remote, requests(3)) == expected(requests(3))


def test_when_no_server_is_left_the_run_ends_with_the_last_cause(make: Callable[..., Remote]) -> None:
    with serving(delay_s=0.01) as one, serving(delay_s=0.01) as two:
        remote = make(one, two, patience_s=0.4)
        results = iter(remote.complete(requests(200)))
        found = [next(results) for _ in range(9)]
    with pytest.raises(RunError, match=f"^No server has answered for 0 s. {one.url}: no connection .*{two.url}: no"):
        found.extend(results)
    assert len(found) >= 9
    assert {(r.key, r.copy): outcome for r, outcome in found}.items() <= expected(requests(200)).items()
