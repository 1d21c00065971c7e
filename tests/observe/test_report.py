"""A report's figures and tables say what the events say, which plain loops here read once more."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from made_runs import eventful, last_told, poisoned, write_events

from paceline.observe.report.learning import acceptance_figure, loss_figure, slots_figure
from paceline.observe.report.page import open_runs, report_page
from paceline.observe.report.parts import Figure, Missing, Run, Table, duration, figures
from paceline.observe.report.tables import (
    evaluations_table,
    exports_table,
    facts_table,
    faults_tables,
    runs_table,
    settings_tables,
)
from paceline.observe.report.workings import figures_of
from paceline.records import UserError

LAST_TRACES = {"training loss": "loss", "estimate": "acceptance"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write_events(tmp_path_factory.mktemp("runs") / "eventful", eventful())
    (run / "evaluation.json").write_text(json.dumps(EVALUATION | {"per_prompt": {"key": ["a"] * 1000}}))
    (run / "evaluation-server.json").write_text('{"engine": "vLLM", "tau": 9.0}')
    (run / "provenance.json").write_text(json.dumps({"argv": ["paceline", "train"], "packages": {"numpy": "2.4.6"}}))
    (run / "export").mkdir()
    (run / "export" / "config.json").write_text('{"architectures": ["DFlashDraftModel"], "dtype": "bfloat16"}')
    (run / "export" / "model.safetensors").write_bytes(bytes(3 * 2**20))
    return run


EVALUATION = {
    "train_steps": 900,
    "tau_trained": 4.321,
    "tau_pooled": 4.0,
    "per_slot_acceptance": [1.0, 0.9, 0.8],
    "prompts": 32,
    "prompt_set": "gsm8k",
    "dtype": "float32",
    "device": "cpu",
    "temperature": 0.0,
    "lossless": True,
    "speedup_vs_autoregressive": 2.5,
}


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return open_runs([folder])[0]


def all_figures(run: Run) -> dict[str, Figure | Missing]:
    parts = [loss_figure([run]), acceptance_figure([run]), slots_figure(run), *figures_of(run)]
    return {part.title: part for part in parts}


def drawn(part: Figure | Missing | Table) -> Figure:
    assert isinstance(part, Figure), part
    return part


def trace(part: Figure | Missing, ending: str) -> Any:
    (found,) = [one for one in drawn(part).traces if one["name"].endswith(ending)]
    return found


def rows(part: Table | Missing) -> dict[str, list[str]]:
    assert isinstance(part, Table), part
    return {row[0]: list(row[1:]) for row in part.rows}


def finite(value: float | str) -> float | None:
    return None if isinstance(value, str) or not math.isfinite(value) else value


def test_every_figure_is_as_plotly_wants_it_and_says_its_numbers(run: Run) -> None:
    for part in all_figures(run).values():
        figure = drawn(part)
        go.Figure(data=figure.traces, layout=figure.layout)  # which refuses a property that is none
        assert figure.said
        assert all(sentence.endswith(".") for sentence in figure.said)
        json.dumps(figure.traces, allow_nan=False)


@pytest.mark.parametrize(("title", "name"), [("Loss", "training loss"), ("Acceptance length τ", "estimate")])
def test_curves_are_those_of_the_steps_that_count(run: Run, folder: Path, title: str, name: str) -> None:
    steps = last_told(folder)["step"]
    found = trace(all_figures(run)[title], f": {name}")
    assert found["x"] == list(steps) == list(range(1, 901))
    assert found["y"] == [finite(one[LAST_TRACES[name]]) for one in steps.values()]
    assert 77.0 not in found["y"]  # told again behind the checkpoint


def test_what_was_told_behind_the_checkpoint_is_dropped_at_once(tmp_path: Path) -> None:
    events = eventful()
    resumed = next(place for place, event in enumerate(events) if event["event"] == "resumed")
    folder = write_events(tmp_path / "run", events[: resumed + 4])
    found = trace(loss_figure(open_runs([folder])), ": training loss")
    assert found["x"] == list(last_told(folder)["step"])
    assert len(found["x"]) in (452, 453, 454)


def test_means_are_quotients_of_sums_over_steps_that_were_applied(run: Run, folder: Path) -> None:
    steps = {n: one for n, one in last_told(folder)["step"].items() if one["applied"]}
    parts: dict[int, list[dict[str, Any]]] = {}
    for done, one in steps.items():
        parts.setdefault(min((done - 1) * 90 // 899, 89), []).append(one)
    found = trace(all_figures(run)["Loss"], "training loss, mean")
    expected = [
        sum(one["loss_sum"] for one in part) / sum(one["weight_sum"] for one in part) for part in parts.values()
    ]
    assert found["y"] == pytest.approx(expected)


def test_held_out_and_true_acceptance_are_those_told(run: Run, folder: Path) -> None:
    told = last_told(folder)
    held, true = (
        trace(all_figures(run)["Loss"], "held-out loss"),
        trace(all_figures(run)["Acceptance length τ"], "true τ while training"),
    )
    assert dict(zip(held["x"], held["y"], strict=True)) == {n: one["loss"] for n, one in told["held_out"].items()}
    assert dict(zip(true["x"], true["y"], strict=True)) == {n: one["tau"] for n, one in told["evaluated"].items()}
    star = trace(all_figures(run)["Acceptance length τ"], "paceline evaluate")
    assert (star["x"], star["y"]) == ([900], [4.321])


def test_the_heat_map_has_the_shares_of_each_slot(run: Run, folder: Path) -> None:
    parts: dict[int, list[dict[str, Any]]] = {}
    for done, one in last_told(folder)["step"].items():
        parts.setdefault(min((done - 1) * 150 // 899, 149), []).append(one)
    (found,) = drawn(slots_figure(run)).traces
    for slot in (0, 7, 14):
        expected = [
            sum(one["accepted_K"][slot] for one in part) / sum(one["available_K"][slot] for one in part)
            for part in parts.values()
        ]
        assert found["z"][slot] == pytest.approx(expected)
    assert found["y"] == list(range(1, 16))


def test_padding_and_buckets_are_the_plans(run: Run, folder: Path) -> None:
    plan = next(event for event in eventful() if event["event"] == "plan")
    figure = drawn(all_figures(run)["Batches and padding"])
    samples, padding = figure.traces
    assert samples["y"] == [one["samples"] for one in plan["buckets"]]
    assert padding["y"] == [one["padding_share"] for one in plan["buckets"]]
    assert samples["x"][:2] == ["0–769", "770–1215"]
    assert "5.0 % planned, 4.8 % in logged steps" in figure.said[0]  # 1 - 30,000 / 31,500


def test_roles_are_told_without_the_hour_in_which_nothing_ran(run: Run, folder: Path) -> None:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    up_s = events[-1]["t"] - events[0]["t"] - 3600
    assert run.history.seconds == pytest.approx(up_s)
    figure = drawn(all_figures(run)["States of the roles"])
    compiling = next(one for one in figure.traces if one["name"] == "compiling")
    assert compiling["y"][0] == "target replica 0"
    assert (compiling["base"][0] * 60, compiling["x"][0] * 60) == (pytest.approx(40), pytest.approx(90))


def test_work_is_the_mean_of_the_samples(run: Run, folder: Path) -> None:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    samples = [event for event in events if event["event"] == "sample"]
    figure = drawn(all_figures(run)["Who worked, who waited"])
    assert figure.table is not None
    found = rows(figure.table)
    columns = len(figure.traces[0]["x"])
    width_s = run.history.seconds / columns
    began, away_s = events[0]["t"], 0.0
    bins: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        away_s += 3600 if event["event"] == "resumed" else 0
        if event["event"] == "sample":
            bins.setdefault(int((event["t"] - began - away_s - 2.5) / width_s), []).append(event)
    for place, name in enumerate(figure.traces[0]["y"]):
        busy = [event["roles"][place]["busy_share"] for event in samples]
        assert found[name][1] == f"{100 * sum(busy) / len(busy):.1f} %"
        shares = dict.fromkeys(range(columns))
        shares |= {n: sum(e["roles"][place]["busy_share"] for e in part) / len(part) for n, part in bins.items()}
        assert figure.traces[0]["z"][place] == [None if one is None else pytest.approx(one) for one in shares.values()]
    assert found["drafter rank 0"][3] == "features"


def test_memory_and_use_of_gpus_are_the_samples(run: Run, folder: Path) -> None:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    gpus = [event["gpus"][3] for event in events if event["event"] == "sample"]
    memory = next(one for one in drawn(all_figures(run)["Memory"]).traces if one["name"] == "cuda:3")
    assert memory["y"] == [gpu["memory_used_bytes"] / 2**30 for gpu in gpus]
    used = drawn(all_figures(run)["Utilisation of GPUs"])
    assert used.table is not None
    mean = sum(gpu["utilisation"] for gpu in gpus) / len(gpus)
    assert rows(used.table)["cuda:3"] == ["NVIDIA H200", f"{100 * mean:.1f} %"]


def test_faults_are_counted_and_told_with_their_times(run: Run, folder: Path) -> None:
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    counted, listed = faults_tables(run)
    kinds = ("rejected", "rolled_back", "replica_failed", "disk_full", "checkpoint_skipped", "interrupted", "resumed")
    expected = {kind: sum(event["event"] == kind for event in events) for kind in kinds}
    assert {kind: int(row[0]) for kind, row in rows(counted).items()} == expected
    assert isinstance(listed, Table)
    assert len(listed.rows) == sum(expected.values())
    back = next(row for row in listed.rows if row[1] == "rolled_back")
    assert back[0].startswith("2027-01-15 08:")
    assert "after step 304 the drafter is that of step 290 again" in back[2]


def test_of_many_faults_the_first_and_last_are_listed(tmp_path: Path) -> None:
    began, *_ = eventful()
    many = [{**began, "event": "quarantined", "row": row, "t": began["t"] + row} for row in range(1000)]
    (run,) = open_runs([write_events(tmp_path / "run", [began, *many])])
    counted, listed = faults_tables(run)
    assert rows(counted) == {"quarantined": ["1,000"]}
    assert isinstance(listed, Table)
    assert len(listed.rows) == 200
    assert "(800 between" in listed.caption
    assert "row 999 " in listed.rows[-1][2]


def test_a_command_at_the_end_is_a_fault_only_if_it_failed(tmp_path: Path) -> None:
    began, *_ = eventful()
    for message, kinds in ((None, []), ("`notify` ended with status 1.", ["on_end"])):
        ended = {**began, "event": "on_end", "command": ["notify"], "status": 1, "message": message}
        skipped = {**began, "event": "evaluation_skipped", "steps": 3}
        (run,) = open_runs([write_events(tmp_path / "run", [began, skipped, ended])])
        counted, listed = faults_tables(run)
        assert list(rows(counted)) == ["evaluation_skipped", *kinds]
        assert rows(runs_table([run]))["run"][-1] == str(len(kinds))
        assert isinstance(listed, Table)
        assert message is None or listed.rows[-1][2] == message


def test_tables_of_results_data_and_settings(run: Run, folder: Path) -> None:
    assert rows(runs_table([run]))["eventful"][:2] == ["finished", "900 of 900"]
    assert rows(runs_table([run]))["eventful"][7] == "4.32"
    assert rows(evaluations_table([run]))["eventful"] == [
        *("evaluation.json", "900", "4.32", "4.00", "0.90 0.80", "32 of gsm8k", "float32, cpu, greedy", "2.5×", "yes"),
    ]
    table = evaluations_table([run])
    assert isinstance(table, Table)
    assert list(table.rows[0][1:8]) == ["evaluation-server.json", "–", "9.00", "–", "–", "–", "vLLM"]
    assert rows(exports_table([run]))["eventful"][:5] == ["export", "z-lab", "bfloat16", "1", "3.0 MiB"]
    facts = rows(facts_table(run))
    assert facts["dataset dataset"] == [f"fingerprint {'ab' * 32}"]
    assert facts["tokens"] == ["2,300,000,000"]
    assert facts["GPU cuda:7"] == ["NVIDIA H200, 140.40 GiB, 989 TFLOP/s dense bfloat16"]
    assert facts["numpy"] == ["2.4.6"]
    (settings,) = settings_tables([run])
    assert rows(settings)["drafter.block_size"] == ["16"]


def test_several_runs_lie_over_one_another(folder: Path, tmp_path: Path) -> None:
    events = eventful(300, seed=7)
    tree = events[0]["settings"]
    events[0]["settings"] = {**tree, "train": {**tree["train"], "lr": 0.5}}
    same = write_events(tmp_path / "eventful", events[: len(events) // 3])
    runs = open_runs([folder, same])
    assert [one.name for one in runs] == [str(folder), str(same)]
    assert [one.state for one in runs] == ["finished", "under way"]
    colours = [one["meta"]["colour"] for one in drawn(loss_figure(runs)).traces]
    assert set(colours) == {0, 1}
    apart, whole = settings_tables(runs)
    assert rows(apart) == {"train.lr": [str(tree["train"]["lr"]), "0.5"]}
    assert len(rows(whole)) > 50
    with pytest.raises(UserError, match="named twice"):
        open_runs([folder, folder / ".." / "eventful"])
    with pytest.raises(UserError, match="at most 8 runs, got 9"):
        open_runs([tmp_path / str(place) for place in range(9)])


def without(*kinds: str, keys: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    kept = [event for event in eventful(60) if event["event"] not in kinds]
    return [{key: value for key, value in event.items() if key not in keys} for event in kept]


OLD = ("sample", "machine", "data", "evaluated", "held_out", "trained")


@pytest.mark.parametrize(
    ("events", "missing"),
    [
        (without(*OLD), {"Who worked, who waited", "Memory", "Utilisation of GPUs"}),
        (without(*OLD, "plan", keys=("accepted_K", "available_K", "applied")), {"Acceptance by slot"}),
        (
            without(*OLD, "step", "role", "plan"),
            {"Loss", "Acceptance length τ", "Acceptance by slot", "States of the roles"},
        ),
        ([], {"Loss", "Acceptance length τ", "Batches and padding"}),
    ],
)
def test_what_is_not_there_is_said(tmp_path: Path, events: list[dict[str, Any]], missing: set[str]) -> None:
    run = write_events(tmp_path / "run", events)
    (opened,) = open_runs([run])
    parts = all_figures(opened)
    gone = {title: part.why for title, part in parts.items() if isinstance(part, Missing)}
    assert missing <= gone.keys()
    assert all(why.endswith(".") for why in gone.values())
    page = report_page([opened], now=0.0)
    assert all(why.replace("'", "&#39;") in page for why in gone.values())
    assert page.count('<div class="plot"') == len(parts) - len(gone)


def test_a_run_under_way_is_said_to_be(tmp_path: Path) -> None:
    events = eventful(60)[:-20]
    (run,) = open_runs([write_events(tmp_path / "run", events)])
    assert "Its last event is 1 min 30 s old." in report_page([run], now=events[-1]["t"] + 90)
    # Its last `trained` counts no more once it goes on.
    (run,) = open_runs(
        [write_events(tmp_path / "run", [*eventful(60), {**events[-1], "event": "resumed", "steps": 60}])]
    )
    assert "Over the whole run" not in report_page([run])


def test_without_gpus_the_hosts_memory_stays(tmp_path: Path) -> None:
    events = [event | ({"gpus": []} if "gpus" in event else {}) for event in eventful(60)]
    (run,) = open_runs([write_events(tmp_path / "run", events)])
    figure = drawn(all_figures(run)["Memory"])
    assert [one["name"] for one in figure.traces] == ["host"]
    assert "No GPU was sampled." in figure.said
    assert isinstance(all_figures(run)["Utilisation of GPUs"], Missing)


def test_losses_of_a_wide_range_are_drawn_on_a_logarithmic_axis(tmp_path: Path) -> None:
    events = [event for event in eventful(60) if event["event"] in ("started", "step")]
    for scale, kind in ((1.0, "linear"), (100.0, "log"), (0.0, "linear")):
        changed = [event | ({"loss": scale} if event.get("step") == 5 else {}) for event in events]
        changed = [event | ({"loss": 1.0} if "step" in event and event["step"] != 5 else {}) for event in changed]
        (run,) = open_runs([write_events(tmp_path / "run", changed)])
        assert drawn(loss_figure([run])).layout["yaxis"]["type"] == kind


def test_whatever_is_written_in_a_folder_is_text(tmp_path: Path) -> None:
    events = [poisoned(event) for event in eventful(60)]
    run = write_events(tmp_path / "<i>run", events)
    (run / "evaluation.json").write_text(json.dumps(poisoned(EVALUATION)))
    (run / "provenance.json").write_text(json.dumps(poisoned({"argv": ["x"], "packages": {"numpy": "2"}})))
    page = report_page(open_runs([run]))
    assert "<img" not in page.partition("</style>")[2].replace(_library(page), "")
    assert "<i>" not in page.replace(_library(page), "")
    assert "7 * 7" in page
    data = [part.split("</script>")[0] for part in page.split("data-figure=")[1:]]
    assert len(data) == 8
    for one in data:
        tree = json.loads(one.partition(">")[2])
        names = [trace.get("name", "") for trace in tree["traces"]]
        assert not any("<" in name for name in names)  # Plotly would take it for a tag


def _library(page: str) -> str:
    return page.split("<script>")[1].split("</script>")[0]


def test_damaged_files_and_links_are_told(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder, run)
    (run / "evaluation-server.json").unlink()
    (run / "evaluation.json").write_text("{")
    (run / "evaluation-step-00000010.json").write_text("[]")
    (run / "evaluation-step-00000020.json").symlink_to("/etc/hostname")
    (run / "export" / "config.json").write_text('{"architectures": ["Other"]}')
    (run / "export-x").symlink_to(folder / "export")
    (opened,) = open_runs([run])
    said = opened.folder.unread
    assert [one.split(" is left out: ")[0] for one in said] == [
        *("evaluation-step-00000010.json", "evaluation-step-00000020.json", "evaluation.json", "export", "export-x"),
    ]
    assert "must hold a JSON object, found list" in said[0]
    assert "it is a link" in said[1]
    assert isinstance(evaluations_table([opened]), Missing)
    assert isinstance(exports_table([opened]), Missing)
    page = report_page([opened])
    assert all(sentence in page for sentence in said)


@pytest.mark.parametrize(
    ("say", "value", "text"),
    [
        (figures, 1234.0, "1,234"),
        (figures, 0.00012345, "0.0001234"),
        (figures, 123456.7, "123,457"),
        (figures, math.inf, "inf"),
        (figures, None, "–"),
        (duration, 59.95, "60.0 s"),
        (duration, 3599.6, "1 h 0 min"),
        (duration, 200_000.0, "2 d 7 h"),
    ],
)
def test_numbers_in_words(say: Callable[[Any], str], value: Any, text: str) -> None:
    assert say(value) == text


def _run_of(folder: Path, *told: dict[str, Any]) -> Path:
    """Return a run that told no more than this."""
    events = ({"schema": 1, "t": 1.0, **event} for event in ({"event": "started", "settings": {}}, *told))
    return write_events(folder / "run", events)


@pytest.mark.parametrize(
    ("event", "what"),
    [
        ({"event": "sample", "s": None, "roles": []}, "sample"),
        ({"event": "step", "step": "ten"}, "step"),
        ({"event": "plan", "steps": 3, "buckets": [{"low": "a", "high": 8}]}, "figures and tables"),
        ({"event": "quarantined", "row": "x", "dataset": "d", "detail": "y"}, "quarantined"),
    ],
)
def test_events_with_values_of_other_kinds_are_refused_in_a_sentence(
    tmp_path: Path, event: dict[str, Any], what: str
) -> None:
    run = _run_of(tmp_path, event)
    with pytest.raises(UserError, match=rf"Events of {run} are not as docs/events.md has them \({what}: "):
        report_page(open_runs([run]))


def test_a_measurement_that_is_no_number_leaves_a_gap(tmp_path: Path) -> None:
    run = _run_of(tmp_path)
    (run / "evaluation.json").write_text('{"tau": 1e999, "train_steps": 3}')
    assert "evaluation.json" in report_page(open_runs([run]))
