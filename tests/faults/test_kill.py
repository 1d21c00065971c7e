"""A run that is killed at any moment and resumed equals one never killed, bit for bit."""

from typing import Any

import pytest

pytestmark = pytest.mark.faults

KINDS: dict[str, Any] = {
    "trimmed": {},
    "packed": {"data": {"layout": "packed", "token_budget": 100}},
    "accumulated": {"train": {"batches_per_step": 2}, "data": {"layout": "bucketed"}},
    "two ranks": {"train": {"batches_per_step": 2}, "pipeline": {"drafters": ["cpu"] * 2, "targets": ["cpu"] * 2}},
    "muon, float32": {"train": {"optimizer": "muon", "dtype": "float32"}, "data": {"reshuffle": "batches"}},
    "features on disk": {"data": {"reshuffle": "batches"}, "pipeline": {"feature_cache": "disk"}},
}


@pytest.mark.parametrize(("kind", "seed"), [(kind, seed) for seed, kind in enumerate(KINDS)])
def test_a_killed_run_goes_on_as_if_nothing_had_been(lab: Any, kind: str, seed: int) -> None:
    whole = lab.finished(lab.settings("whole", KINDS[kind]))
    run = lab.settings("killed", KINDS[kind])
    lab.killed(run, seed, kills=2)
    lab.assert_equal(run, whole)


def test_two_commands_never_train_into_one_folder(lab: Any) -> None:
    run = lab.settings("one")
    first = lab.train(run, slow_s=0.05)
    first.wait_for(lambda: lab.told(run, "checkpoint"))
    for second in (lab.train(run), lab.train(run, "--resume-previous")):
        assert second.status() == 2
        assert f"error: Another process is training into {run} (run_dir): process {first.pid} on" in second.text()
    assert first.status() == 0, first.text()
    lab.assert_equal(run, lab.finished(lab.settings("whole")))


@pytest.mark.timeout(1800)
def test_thirty_kills(lab: Any, survival: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Seeds are kept: a red one is run again with its number."""
    lines, hits, lost = [], 0, []
    for number, kind in enumerate(KINDS):
        whole = lab.finished(lab.settings(f"whole-{number}", KINDS[kind]))
        for seed in range(100 + 5 * number, 105 + 5 * number):
            run = lab.settings(f"killed-{seed}", KINDS[kind])
            try:
                with survival.trial("SIGKILL at random moments, during saves too", seed):
                    moments, hit = lab.killed(run, seed, kills=1)
                    lab.assert_equal(run, whole)
            except AssertionError as error:
                lost.append(f"{seed}: {error}")
                continue
            hits += hit
            lines.append(f"{seed}  {kind:18s} {'killed' if hit else 'finished before':16s} {', '.join(moments)}")
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    assert not lost
    assert hits >= 25, "too few kills hit a run that was under way"
