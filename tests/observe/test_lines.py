"""One plain line an event: words and values in turn, no more lines than a person reads."""

from typing import Any

import pytest
from told_run import begin, sample_event, step_event, told

from paceline.observe.lines import Lines, line_of


def test_a_step_is_words_and_values_in_turn() -> None:
    line = line_of(step_event(1999, 0.0, total_steps=4000)) or ""
    words = line.split()
    assert dict(zip(words[::2], words[1::2], strict=True)) == {
        "step": "2000/4000",
        "epoch": "0",
        "loss": "2.5000",
        "accept": "1.50",
        "slot-1": "40%",
        "slot-3": "8%",
        "slot-5": "0%",
        "lr": "1.0e-03",
        "norm": "0.5",
        "tokens/s": "200",
        "blocks/s": "10.0",
        "eta": "0:16:40",
    }


@pytest.mark.parametrize("loss", [float("nan"), "nan", None])
def test_a_loss_that_is_no_number(loss: Any) -> None:
    assert "loss nan" in (line_of(step_event(0, 0.0, loss=loss, applied=False)) or "")


def test_a_sample_names_every_role() -> None:
    line = line_of(sample_event(0.0, {"room in the channel": 0.25}, {})) or ""
    assert line == (
        "target-replica-0 busy 75% waits 25% for room-in-the-channel drafter-rank-0 busy 100% queue 1.0MiB host 1.0GiB "
        "cuda:0 1.0GiB util 50% cuda:1 1.0GiB util 50%"
    )


@pytest.mark.parametrize(
    ("event", "says"),
    [
        (told("rejected", 0, step=3, rule="loss", loss=9.0, limit=2.5), "step 3 was not applied: loss 9 is over 2.5"),
        (
            told("rejected", 0, step=3, rule="grad_norm", grad_norm="inf", limit="inf"),
            "step 3 was not applied: gradient norm inf is not finite",
        ),
        (
            told("replica_failed", 0, message="It failed.", restarted=True, restarts_left=2),
            "It failed; it is restarted, restarts left: 2",
        ),
        (
            told("replica_failed", 0, message="It {failed}.", restarted=False, restarts_left=0),
            "It {failed}; it stays out",
        ),
        (
            told("evaluation_skipped", 0, steps=9, busy_with=9),
            "no true acceptance after step 9: the run was asked to stop while it was decoded",
        ),
        (told("checkpoint", 0, steps=1200, bytes=2**20, write_s=1.0, copy_s=0.5), "saved after step 1,200 (1.0 MiB in"),
        (
            told("held_out", 0, steps=5, loss="nan", acceptance=1.0, best=False),
            "held out after step 5: loss nan accept",
        ),
        (
            told("evaluated", 0, steps=1, tau=2.5, tau_pooled=2.25, prompts=1, s=0.5),
            "true acceptance after step 1: 2.50, 2.25 pooled (1 prompt, 0.5 s)",
        ),
        (told("trained", 0, train_steps=1, train_s=2.0, drafter="d"), "trained 1 step in 2.0 s; the drafter is in d"),
        (told("trained", 0, train_s=2.0, drafter="d"), "trained ? steps in 2.0 s"),
        (told("checkpoint", 0), "saved after step ? (0.0 MiB in ? s"),
        (told("role", 0, role="r", device="cpu", state="ready", s=1.25), "r on cpu: ready (1.2 s)"),
    ],
)
def test_sentences(event: dict[str, Any], says: str) -> None:
    assert (line_of(event) or "").startswith(says)


def test_which_path_a_target_takes() -> None:
    role = {"event": "target_path", "role": "target replica 1", "device": "cuda:1"}
    fast = role | {"path": "fast", "compiled": True, "fp8": True, "attention": "FlashAttention 3", "reason": ""}
    says = "target replica 1 on cuda:1 runs on the fast path (compiled, fp8, attention: FlashAttention 3)"
    assert line_of(fast) == says
    plain = role | {"path": "plain", "compiled": False, "fp8": False, "attention": None, "reason": "it is odd"}
    says = "WARNING: target replica 1 on cuda:1 runs transformers' own forward and not the fast path: it is odd"
    assert line_of(plain) == says


def test_what_has_no_line() -> None:
    assert line_of(told("checksums", 0, shards=3)) is None
    assert line_of(told("of the future", 0)) is None
    assert line_of(told("role", 0, role="r", device="cpu", state="running", s=1.0)) is None


def test_a_line_an_interval() -> None:
    lines = Lines(step_s=5.0, sample_s=60.0)
    steps = [step_event(i, 100.0 + i, total_steps=14) for i in range(14)]
    assert [i for i, event in enumerate(steps) if lines.of(event)] == [0, 5, 10, 13]
    samples = [sample_event(100.0 + 5 * i, {}, {}) for i in range(30)]
    assert [i for i, event in enumerate(samples) if lines.of(event)] == [0, 12, 24]
    assert len([event for event in begin() if lines.of(event)]) == 10


def test_only_the_first_rows_that_are_set_aside() -> None:
    lines = Lines()
    told_ = [lines.of(told("quarantined", 0, row=i, dataset="d", detail="is bad")) for i in range(50)]
    assert [line for line in told_ if line][-2:] == [
        "row 19 of d is set aside: it is bad",
        "more rows are set aside; quarantine.jsonl in the run's folder lists them",
    ]
