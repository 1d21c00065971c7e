"""The fold of a run's events, held against sums made from all events at once; and the sentence on who waits."""

import random
from typing import Any

import pytest
from told_run import PEAK, Event, begin, sample_event, step_event, told

from paceline.observe.bottleneck import bottleneck
from paceline.observe.state import RATE_S, RunState


def after(events: list[Event]) -> RunState:
    state = RunState()
    for event in events:
        state.apply(event)
    return state


def test_a_run_that_works() -> None:
    state = after([*begin(), step_event(9, 1010.0), step_event(19, 1015.0, loss=2.0)])
    assert (state.outcome, state.run, state.step, state.total_steps) == ("running", "/runs/one", 20, 100)
    assert (state.loss, state.acceptance, state.lr, state.grad_norm) == (2.0, 1.5, 1e-3, 0.5)
    assert (state.tokens_per_s, state.blocks_per_s) == (200.0, 10.0)
    assert state.mfu == pytest.approx(2e14 / PEAK)
    assert state.eta_s == pytest.approx(80 * 0.5)
    assert state.stages == [{"name": "dataset opened", "s": 0.25}]
    assert {name: role["state"] for name, role in state.roles.items()} == dict.fromkeys(
        ("target replica 0", "drafter rank 0"), "running"
    )


def rate(events: list[Event], name: str) -> float:
    """The same rate, from the newest steps backwards."""
    total = seconds = 0.0
    for event in reversed(events):
        if event["event"] in ("started", "resumed") or seconds >= RATE_S:
            break
        if event["event"] == "step":
            total += event["since"][name]
            seconds += event["since"]["s"]
    return total / seconds


@pytest.mark.parametrize("seed", range(5))
def test_rates_are_of_the_newest_steps_of_this_part_of_the_run(seed: int) -> None:
    draw, events, state, step = random.Random(seed), begin(), RunState(), 0
    for event in events:
        state.apply(event)
    for _ in range(200):
        if draw.random() < 0.02:
            step = draw.randrange(step + 1)
            new = told("resumed", 2000.0, steps=step, settings=events[0]["settings"], checkpoint="c")
        else:
            step += 1
            sums = {name: draw.randrange(1, 10**6) for name in ("steps", "tokens", "padded_tokens", "blocks", "flops")}
            new = step_event(step - 1, 2000.0, since={**sums, "s": draw.uniform(0.01, 20)}, total_steps=500)
        events.append(new)
        state.apply(new)
        assert state.step == step
        if new["event"] == "resumed":
            assert state.tokens_per_s is None
            assert state.outcome == "starting"
            continue
        assert state.tokens_per_s == pytest.approx(rate(events, "tokens"))
        assert state.mfu == pytest.approx(rate(events, "flops") / PEAK)
        assert state.eta_s == pytest.approx((500 - step) / rate(events, "steps"))


@pytest.mark.parametrize("drafters", [["cpu"], ["cuda:1", "cpu"], ["cuda:2"]])
def test_without_every_drafters_peak_there_is_no_share_of_it(drafters: list[str]) -> None:
    state = after([*begin(pipeline={"targets": ["cpu"], "drafters": drafters}), step_event(9, 1010.0)])
    assert state.tokens_per_s == 200.0
    assert state.mfu is None


def test_ranks_on_one_device_share_its_peak() -> None:
    events = [*begin(pipeline={"targets": ["cuda:1"], "drafters": ["cuda", "cuda:0"]}), step_event(9, 1010.0)]
    assert after(events).mfu == pytest.approx(2e14 / PEAK)


def test_an_older_run_has_no_rates() -> None:
    event = step_event(9, 1010.0)
    del event["since"]
    state = after([*begin(), event])
    assert (state.step, state.tokens_per_s, state.mfu, state.eta_s, state.bottleneck) == (10, None, None, None, None)


@pytest.mark.parametrize(
    ("event", "values", "outcome"),
    [
        ("trained", {"train_steps": 100}, "finished"),
        ("failed", {"message": "It broke."}, "failed"),
        ("interrupted", {"message": "after step 10."}, "interrupted"),
    ],
)
def test_a_run_that_ended(event: str, values: dict[str, Any], outcome: str) -> None:
    state = after([*begin(), step_event(9, 1010.0), told(event, 1020.0, **values)])
    assert (state.outcome, state.message, state.eta_s) == (outcome, values.get("message"), None)


def test_faults_are_kept_newest_last_and_a_new_run_forgets_them() -> None:
    bad = [told("quarantined", 1010.0 + i, row=i, dataset="d", detail="is bad") for i in range(150)]
    state = after([*begin(), *bad])
    assert [fault["message"] for fault in state.faults[-2:]] == [
        "row 148 of d is set aside: it is bad",
        "row 149 of d is set aside: it is bad",
    ]
    assert len(state.faults) == 100
    state.apply(begin()[0])
    assert state.faults == []


def test_a_sample_tells_of_roles_and_devices() -> None:
    state = after([*begin(), sample_event(1010.0, {"data": 0.25}, {})])
    replica, rank = state.roles["target replica 0"], state.roles["drafter rank 0"]
    assert (replica["busy_share"], replica["waits_for"], rank["busy_share"]) == (0.75, "data", 1.0)
    assert (state.queue_bytes, state.queue_limit_bytes, len(state.gpus)) == (2**20, 2**31, 2)
    state.apply(told("role", 1011.0, role="target replica 0", device="cuda:0", state="failed", s=9.0))
    assert state.roles["target replica 0"]["busy_share"] is None


def test_plain_data_has_all_that_a_reader_needs() -> None:
    told_ = after([*begin(), step_event(9, 1010.0)]).as_dict()
    assert {"outcome", "step", "total_steps", "tokens_per_s", "mfu", "eta_s", "roles", "faults", "bottleneck"} <= set(
        told_
    )
    assert not [name for name in told_ if name.startswith("_")]


@pytest.mark.parametrize(
    ("target", "drafter", "says"),
    [
        ({}, {}, None),
        ({"data": 0.09}, {"features": 0.09}, None),
        ({}, {"features": 0.31}, "Drafters wait 31 % for features: add a target replica, or colocate"),
        (
            {"data": 0.2},
            {"features": 0.31},
            "Target replicas wait 20 % for data, and drafters 31 % for features: raise data.p",
        ),
        ({"data": 0.9}, {}, None),  # nobody misses what they would have made
        (
            {"room in the channel": 0.6},
            {},
            "Target replicas wait 60 % for room in the channel: the drafter is what limits",
        ),
        ({}, {"the other ranks": 0.25}, "Drafter ranks wait 25 % for one another: raise train.batches_per_step"),
        ({"room in the channel": 0.2}, {"the other ranks": 0.4}, "Drafter ranks wait 40 %"),
    ],
)
def test_who_waits_for_whom(target: dict[str, float], drafter: dict[str, float], says: str | None) -> None:
    sentence = after([*begin(), sample_event(1010.0, target, drafter)]).bottleneck
    assert sentence is None if says is None else (sentence or "").startswith(says)


def test_shares_of_several_samples_count_by_their_length() -> None:
    samples = [sample_event(0.0, {}, {"features": 0.5}, s=1.0), sample_event(0.0, {}, {"features": 0.1}, s=3.0)]
    assert (bottleneck(samples) or "").startswith("Drafters wait 20 % for features")


def test_a_device_that_both_use_is_named() -> None:
    sample = sample_event(0.0, {}, {"features": 0.5})
    for role in sample["roles"]:
        role["device"] = "cpu"
    assert "they share cpu with the target" in (bottleneck([sample]) or "")
