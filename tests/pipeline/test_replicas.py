"""Replicas that fail: the run goes on as if nothing had been, or ends with the cause and all that was reached."""

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config import RunSettings
from paceline.observe.console import Console
from paceline.observe.reading import read_events
from paceline.pipeline.channel import OrderedChannel
from paceline.recipes.train import train
from paceline.records import RunError, TokenBatch
from paceline.target.load import fingerprint
from paceline.target.replica import TargetReplica

Fault = Callable[[TargetReplica, TokenBatch], None]


def events(settings: RunSettings) -> list[dict[str, Any]]:
    return list(read_events(Path(settings.run_dir)))


def told(settings: RunSettings, *kinds: str) -> list[dict[str, Any]]:
    return [event for event in events(settings) if event["event"] in kinds]


def losses(settings: RunSettings, *, resume: bool = False) -> dict[int, float]:
    """Train and return the exact loss of every step."""
    train(settings, console=Console(json=True), resume=resume)
    return {event["step"]: event["loss_sum"] for event in told(settings, "step")}


@pytest.fixture
def break_features(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fault], None]:
    """Return what lets a function be called before features are computed, outside rehearsals; it may raise."""

    def install(fault: Fault) -> None:
        whole = TargetReplica._features

        def features(self: TargetReplica, tokens: TokenBatch) -> torch.Tensor:
            fault(self, tokens)
            return whole(self, tokens)

        monkeypatch.setattr(TargetReplica, "_features", features)

    return install


def raise_once_each(*seqs: int) -> Fault:
    left, lock = set(seqs), threading.Lock()

    def fault(replica: TargetReplica, tokens: TokenBatch) -> None:
        with lock:
            if tokens.seq not in left:
                return
            left.remove(tokens.seq)
        raise RuntimeError(f"device lost at {tokens.seq}")

    return fault


def test_replicas_that_fail_are_restarted_up_to_the_budget_and_losses_stay_the_same(
    settings: Any, break_features: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = losses(settings("whole"))
    break_features(raise_once_each(0, 4, 9, 14))
    broken = settings("broken", pipeline={"targets": ["cpu", "cpu"]})
    assert losses(broken) == expected
    failures = told(broken, "replica_failed")
    assert [(event["restarted"], event["restarts_left"]) for event in failures] == [
        (True, 2),
        (True, 1),
        (True, 0),
        (False, 0),
    ]
    assert all(re.match(r"micro-batch \d+ \(rows ", event["doing"]) for event in failures)
    causes = {event["message"].split("): ")[-1] for event in failures}
    assert causes == {f"RuntimeError: device lost at {seq}" for seq in (0, 4, 9, 14)}
    out = capsys.readouterr().err
    assert "device lost at 0; it is restarted, restarts left: 2" in out
    assert "; it stays out" in out


@pytest.mark.timeout(60)
def test_an_error_that_is_its_own_cause_is_survived(settings: Any, break_features: Any) -> None:
    expected, left = losses(settings("whole")), [3]

    def fault(replica: TargetReplica, tokens: TokenBatch) -> None:
        if tokens.seq in left:
            left.remove(tokens.seq)
            error = RuntimeError("device lost")
            raise error from error

    break_features(fault)
    broken = settings("broken")
    assert losses(broken) == expected
    assert len(told(broken, "replica_failed")) == 1


def test_the_weights_of_who_failed_are_gone_before_it_is_built_anew(
    settings: Any, break_features: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, made, there = TargetReplica.load, [], []

    def load(self: TargetReplica) -> None:
        there.append(sum(hasattr(replica, "_target") for replica in made))
        made.append(self)
        whole(self)

    monkeypatch.setattr(TargetReplica, "load", load)
    break_features(raise_once_each(3))
    losses(settings("broken"))
    assert there == [0, 0]


def test_without_a_replica_the_state_is_saved_and_the_run_goes_on_from_it(settings: Any, break_features: Any) -> None:
    expected = losses(settings("whole"))
    steps_made = threading.Event()

    def fault(replica: TargetReplica, tokens: TokenBatch) -> None:
        if tokens.seq == 6:
            assert steps_made.wait(30)
            raise RuntimeError("device lost")

    tree = settings("broken", pipeline={"restarts": 0})
    with pytest.MonkeyPatch.context() as patch:
        whole = TargetReplica._features

        def features(self: TargetReplica, tokens: TokenBatch) -> torch.Tensor:
            fault(self, tokens)
            return whole(self, tokens)

        patch.setattr(TargetReplica, "_features", features)
        patch.setattr(
            "paceline.recipes.train_tell.Teller.on_step", _and_then(steps_made.set, "paceline.recipes.train_tell")
        )
        with pytest.raises(RunError) as error:
            losses(tree)
    text = str(error.value)
    assert text.startswith(
        "No target replica is left, and none may be restarted (pipeline.restarts). "
        "target replica 0 on cpu failed while running (micro-batch 6 (rows "
    )
    saved = re.search(r"RuntimeError: device lost\. The state after step (\d+) is saved: go on with `(.*)`\.$", text)
    assert saved, text
    assert saved[2] == f"paceline train {tree.run_dir} --resume"
    assert [event["steps"] for event in told(tree, "checkpoint")] == [int(saved[1])]
    assert losses(tree, resume=True) == expected


def _and_then(more: Callable[[], None], module: str) -> Callable[..., None]:
    from paceline.recipes.train_tell import Teller

    whole = Teller.on_step

    def on_step(self: Teller, report: Any) -> None:
        whole(self, report)
        more()

    return on_step


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_features_that_are_not_finite_never_reach_the_drafter(
    settings: Any, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    expected = losses(settings("whole"))
    whole, hit = TargetReplica._features, []

    def features(self: TargetReplica, tokens: TokenBatch) -> torch.Tensor:
        found = whole(self, tokens)
        if tokens.seq == 5 and not hit:
            hit.append(self.name)
            found = found.clone()
            found[1, 2] = float(value)
        return found

    monkeypatch.setattr(TargetReplica, "_features", features)
    tree = settings("broken", pipeline={"targets": ["cpu", "cpu"], "feature_cache": "memory"})
    assert losses(tree) == expected
    (event,) = told(tree, "replica_failed")
    assert event["role"] == hit[0]
    assert re.search(
        r"\(micro-batch 5 \(rows .*\)\): Features must be finite, but 1 of [\d,]+ values are", event["message"]
    )


def test_a_micro_batch_at_which_two_replicas_fail_ends_the_run_with_its_rows(
    settings: Any, break_features: Any
) -> None:
    rows: list[tuple[int, ...]] = []

    def fault(replica: TargetReplica, tokens: TokenBatch) -> None:
        if tokens.seq == 4:
            rows.append(tokens.samples)
            raise RuntimeError(f"time {len(rows)}")

    break_features(fault)
    tree = settings("broken", pipeline={"targets": ["cpu"] * 3, "restarts": 100})
    with pytest.raises(RunError) as error:
        losses(tree)
    listed = ", ".join(map(str, rows[0]))
    assert str(error.value).startswith(
        f"Two replicas have failed at micro-batch 4, which holds rows {listed} of the data"
    )
    assert "RuntimeError: time 1." in str(error.value)
    assert "RuntimeError: time 2." in str(error.value)
    assert [event["restarted"] for event in told(tree, "replica_failed")] == [True, False]


def test_a_restarted_replica_must_agree_with_the_run(
    settings: Any, break_features: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody has put another model where the target lies."""
    loads = []

    def changed(folder: Path) -> str:
        loads.append(folder)
        return fingerprint(folder) if len(loads) == 1 else "another"

    monkeypatch.setattr("paceline.target.replica.fingerprint", changed)
    break_features(raise_once_each(3))
    tree = settings("broken", pipeline={"restarts": 2})
    with pytest.raises(
        RunError, match=r"No target replica is left.*disagree on the target revision: \w+ against another"
    ):
        losses(tree)
    assert len(loads) == 3


def test_a_micro_batch_that_was_split_is_told(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = losses(settings("whole"))
    whole, parts = TargetReplica._whole, []

    def out_of_memory(self: TargetReplica, tokens: TokenBatch, *rest: Any) -> torch.Tensor:
        if self.doing.startswith("micro-batch 3 "):
            parts.append(tokens)
            if len(parts) == 1:
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return whole(self, tokens, *rest)

    monkeypatch.setattr(TargetReplica, "_whole", out_of_memory)
    tree = settings("tight")
    found = losses(tree)
    assert list(found) == list(expected)
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-4)
    (event,) = told(tree, "batch_split")
    assert (event["seq"], event["parts"], event["tokens"]) == (3, 2, parts[0].num_tokens)
    assert parts[1].lengths + parts[2].lengths == parts[0].lengths
    assert not told(tree, "replica_failed")


def test_a_replica_that_hung_and_comes_back_delivers_nothing_twice(
    settings: Any, break_features: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = losses(settings("whole"))
    stuck, go, dropped, last = threading.Event(), threading.Event(), [], threading.Event()
    put = OrderedChannel.put

    def noted(self: OrderedChannel, batch: Any, admit: Callable[[], bool] = lambda: True) -> bool:
        wanted = put(self, batch, admit)
        if not wanted:
            dropped.append((threading.current_thread().name, batch.tokens.seq))
            last.set()
        return wanted

    def fault(replica: TargetReplica, tokens: TokenBatch) -> None:
        if tokens.seq == 3 and not stuck.is_set():
            stuck.set()
            assert go.wait(60)
        elif tokens.seq == 8:  # made by who is left: the other comes back while the run is under way
            go.set()
            assert last.wait(60)

    monkeypatch.setattr(OrderedChannel, "put", noted)
    break_features(fault)
    tree = settings("broken", pipeline={"targets": ["cpu"] * 2, "work_timeout_s": 4, "credit_gib": 1e-6})
    assert losses(tree) == expected
    (event,) = told(tree, "replica_hung")
    assert event["doing"].startswith("micro-batch 3 (rows ")
    assert dropped == [(event["role"], 3)]
    stacks = Path(event["stacks"]).read_text()
    assert event["role"] in stacks
    assert "in fault" in stacks
