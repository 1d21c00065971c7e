"""What is read of a server's own counts, against counts by hand of what the fakes did."""

from functools import partial
from statistics import fmean
from typing import Any

import pytest
from fake_drafting import SLOTS, Vllm, cycles_for, sglang
from fake_server import MODEL, listed, serving

from paceline.decode.remote import KEY_VARIABLE
from paceline.decode.sampling import Sampling
from paceline.decode.served import Asked, Served, measure, served_model
from paceline.decode.served_counters import read_counters
from paceline.records import RunError, UserError

PROMPTS = [[4 + at, 5, 6 + 3 * at] for at in range(12)]
NEW = 20


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


def asked(url: str, **more: Any) -> Asked:
    return Asked(**{
        "url": url, "prompts": PROMPTS, "max_new_tokens": NEW, "stop_ids": (2,), "sampling": Sampling(),
        "concurrency": 3, "timeout_s": 30.0, **more,
    })  # fmt: skip


def run(url: str, **more: Any) -> Served:
    done: list[int] = []
    served = measure(asked(url, **more), MODEL, done.append)
    assert done == list(range(1, len(more.get("prompts", PROMPTS)) + 1))
    return served


def shares(cycles: list[int]) -> list[float]:
    return [fmean(count >= slot for count in cycles) for slot in range(SLOTS + 1)]


def test_vllm() -> None:
    vllm = Vllm()
    with serving(vllm.respond, pages={"/metrics": vllm.metrics}, delay_s=0.01) as fake:
        served = run(fake.url + "/v1/")
        assert fake.most == 3
        assert len(fake.asked) == len(PROMPTS) + 3, "as many to warm up as there are at once"
    cycles = [count for prompt in PROMPTS for count in cycles_for(prompt, NEW)]
    assert (served.engine, served.model, served.tokens) == ("vLLM", MODEL, NEW * len(PROMPTS))
    assert served.tau is None
    assert served.tau_pooled == pytest.approx(1 + sum(cycles) / len(cycles)), "what warmed up is not in it"
    assert served.cycles == len(cycles)
    assert served.per_slot_acceptance == pytest.approx(shares(cycles))
    assert served.other_tokens == 0
    assert served.tokens_per_s == pytest.approx(served.tokens / served.seconds)
    body = fake.asked[-1]
    assert body["prompt"] in PROMPTS
    assert {key: body[key] for key in ("model", "max_tokens", "temperature", "stop_token_ids", "stream")} == {
        "model": MODEL, "max_tokens": NEW, "temperature": 0.0, "stop_token_ids": [2], "stream": False,
    }  # fmt: skip


def test_vllm_that_answers_somebody_else_meanwhile() -> None:
    vllm = Vllm()

    def respond(body: dict[str, Any]) -> Any:
        vllm.count([1, 2], 5)
        return vllm.respond(body)

    with serving(respond, pages={"/metrics": vllm.metrics}) as fake:
        assert run(fake.url).other_tokens == 5 * len(PROMPTS)


def test_vllm_that_counts_after_it_has_answered() -> None:
    vllm, looks = Vllm(), []

    def metrics() -> str:
        looks.append(1)
        late = Vllm()
        return vllm.metrics() if len(looks) != 3 else late.metrics()  # the first look behind the last answer

    with serving(vllm.respond, pages={"/metrics": metrics}) as fake:
        served = run(fake.url)
    assert len(looks) == 4
    assert served.cycles == sum(len(cycles_for(prompt, NEW)) for prompt in PROMPTS)


@pytest.mark.parametrize("usual", [0, 1000])
def test_vllm_that_is_started_anew_meanwhile(usual: int) -> None:
    """Its counters begin again; without more than before nothing could be said of the answers."""
    vllm, looks = Vllm(), []
    vllm.generated = vllm.drafts = usual

    def metrics() -> str:
        looks.append(1)
        return vllm.metrics() if len(looks) < 3 else Vllm().metrics()

    with (
        serving(vllm.respond, pages={"/metrics": metrics}) as fake,
        pytest.raises(
            RunError, match=r"counts -?\d[\d,]* generated tokens more than before, and its answers had 240: "
        ),
    ):
        run(fake.url)


@pytest.mark.parametrize("line", ["vllm:foo abc", "vllm:spec_decode_num_drafts_total NaN", "vllm:foo +Inf"])
def test_values_that_are_no_number_are_passed_over(line: str) -> None:
    vllm = Vllm()
    vllm.count([1, 2], 5)
    assert read_counters(f"{line}\n{vllm.metrics()}{line}\n") == read_counters(vllm.metrics())


@pytest.mark.parametrize("value", [-5, True, "x", None, 1.5])
def test_counts_of_tokens_that_are_none(value: Any) -> None:
    vllm = Vllm()

    def respond(body: dict[str, Any]) -> Any:
        return {**vllm.respond(body), "usage": {"completion_tokens": value}}

    with (
        serving(respond, pages={"/metrics": vllm.metrics}) as fake,
        pytest.raises(UserError, match="an answer without usage.completion_tokens"),
    ):
        run(fake.url)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("spec_verify_ct", "x"),
        ("spec_verify_ct", -3),
        ("spec_verify_ct", 1.5),
        ("spec_accept_length", "x"),
        ("spec_accept_length", float("nan")),
        ("spec_accept_length", -1),
        ("spec_accept_histogram", {"a": 1}),
        ("spec_accept_histogram", [1, None]),
        ("spec_accept_histogram", [-5, 2]),
    ],
)
def test_what_sglang_says_has_to_be_numbers(key: str, value: Any) -> None:
    def respond(body: dict[str, Any]) -> Any:
        told = sglang(body)
        told["meta_info"][key] = value
        return told

    with serving(native=respond) as fake, pytest.raises(UserError, match=f"an answer whose meta_info.{key} is "):
        run(fake.url)


def test_names_and_ports_that_are_none() -> None:
    for models in ({"data": 3}, {"data": [{"id": None}, 4]}):
        with serving(models=models) as fake, pytest.raises(UserError, match="lists no model"):
            served_model(fake.url, None, 5.0)
    with pytest.raises(UserError, match="must look like"):
        served_model("http://localhost:99999", None, 5.0)


def test_sglang() -> None:
    with serving(native=sglang, delay_s=0.01) as fake:
        served = run(fake.url)
        assert fake.most == 3
        assert len(fake.asked) == len(PROMPTS) + 3
    each = [cycles_for(prompt, NEW) for prompt in PROMPTS]
    cycles = [count for one in each for count in one]
    assert (served.engine, served.tokens) == ("SGLang", NEW * len(PROMPTS))
    assert served.tau == pytest.approx(fmean(NEW / len(one) for one in each))
    assert served.tau_pooled == pytest.approx(NEW * len(PROMPTS) / len(cycles))
    assert served.cycles == len(cycles)
    assert served.per_slot_acceptance == pytest.approx(shares(cycles))
    assert fake.asked[0]["sampling_params"]["stop_token_ids"] == [2]
    assert fake.asked[0]["sampling_params"]["temperature"] == 0.0


def test_sglang_of_other_versions() -> None:
    for name, told in (("spec_correct_drafts_histogram", True), (None, False)):
        with serving(native=partial(sglang, histogram=name)) as fake:
            assert (run(fake.url).per_slot_acceptance is not None) is told


def test_answers_of_one_token_have_no_cycle() -> None:
    with serving(native=sglang) as fake, pytest.raises(RunError, match="drafted nothing for 12 answers"):
        run(fake.url, max_new_tokens=1)
    vllm = Vllm()
    with (
        serving(vllm.respond, pages={"/metrics": vllm.metrics}) as fake,
        pytest.raises(RunError, match="drafted nothing for 12 answers"),
    ):
        run(fake.url, max_new_tokens=1)


def test_servers_that_do_not_draft() -> None:
    vllm = Vllm(speculative=False)
    with serving(vllm.respond, pages={"/metrics": vllm.metrics}) as fake:
        with pytest.raises(UserError) as refused:
            run(fake.url)
        assert str(refused.value) == (
            f"{fake.url} (vLLM) counts no drafts: its /metrics has no vllm:spec_decode_num_drafts. Start it with "
            "--speculative-config, and without --disable-log-stats."
        )
    with serving(native=partial(sglang, speculative=False)) as fake:
        with pytest.raises(UserError) as refused:
            run(fake.url)
        assert str(refused.value) == (
            f"{fake.url} (SGLang) counts no drafts: meta_info of /generate has no spec_verify_ct. Start it with "
            "--speculative-algorithm DFLASH."
        )


def test_a_server_of_another_kind() -> None:
    with serving() as fake, pytest.raises(UserError, match=r"is neither vLLM \(.*\) nor SGLang \(/generate: 404"):
        run(fake.url)


def test_a_request_that_fails_ends_the_measurement() -> None:
    def respond(body: dict[str, Any]) -> Any:
        return (500, {}, "out of memory") if body["input_ids"] == PROMPTS[7] else sglang(body)

    with serving(native=respond) as fake:
        with pytest.raises(RunError) as failed:
            run(fake.url)
        assert (
            str(failed.value) == f"{fake.url} did not answer prompt 8 of 12: 500 Internal Server Error: out of memory."
        )


def test_which_model_is_measured() -> None:
    with serving(models=listed("org/tiny", "lora")) as fake:
        assert served_model(fake.url, None, 5.0) == "org/tiny"
        assert served_model(fake.url + "/v1", "lora", 5.0) == "lora"
        with pytest.raises(UserError, match=r"serves org/tiny, lora, not other \(--served-name\)"):
            served_model(fake.url, "other", 5.0)
    with pytest.raises(UserError, match=r"does not answer: no connection \(Connection refused\)"):
        served_model(fake.url, None, 5.0)
    with serving(models=listed()) as fake, pytest.raises(UserError, match="lists no model"):
        served_model(fake.url, None, 5.0)
    with pytest.raises(UserError, match="must look like"):
        served_model("localhost:8000", None, 5.0)


def test_a_server_that_wants_a_key() -> None:
    with (
        serving(models=(401, {}, {"error": "no"})) as fake,
        pytest.raises(UserError, match=f"wants a key .* {KEY_VARIABLE} is not set"),
    ):
        served_model(fake.url, None, 5.0)


def test_counters_of_several_engines_and_what_else_is_on_the_page() -> None:
    text = (
        'vllm:spec_decode_num_drafts_total{engine="0",model_name="a b"} 10.0\n'
        'vllm:spec_decode_num_drafts_total{engine="1",model_name="a b"} 3e1 1700000000000\n'
        "vllm:spec_decode_num_accepted_tokens 60.0\n"
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="10"} 4.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="2"} 8.0\n'
        "other:spec_decode_num_drafts_total 7.0\nnonsense\n\n"
    )
    found = read_counters(text)
    assert (found.drafts, found.tau) == (40, 2.5)
    assert found.per_slot == (1.0, 0.2, 0.1), "in the order of positions, not of text"
    assert not found.has("vllm:generation_tokens")
