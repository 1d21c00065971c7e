"""What a page says in tables: the runs, faults, evaluations, exports, data, machines, settings."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.observe.lines import line_of, size
from paceline.observe.report.files import Evaluation
from paceline.observe.report.history import number
from paceline.observe.report.parts import Missing, Run, Table, duration, figures, gib, length, moment, share

_NO_FAULTS = ("resumed", "checkpoint_skipped", "evaluation_skipped")  # listed among them, and not counted as such
_MOST = 200  # faults of a kind that are listed: the first half and the last half


def runs_table(runs: Sequence[Run]) -> Table:
    """Return where each run stands, a row a run."""
    columns = (
        *("run", "state", "steps", "training loss", "held-out loss", "best held-out", "estimate of τ", "true τ"),
        *("evaluated τ", "time up", "faults"),
    )
    return Table("Runs", columns, [_run_row(run) for run in runs])


def _run_row(run: Run) -> list[str]:
    seen, state = run.history, run.history.state
    held = {steps: number(one.get("loss")) for steps, one in seen.held_out.items()}
    best = min(held, key=held.__getitem__) if held else None
    own = [one for one in run.evaluations if one.server is None and one.tau == one.tau]
    last = max(own, key=lambda one: (one.file == "evaluation.json", one.steps or 0), default=None)
    true_tau = seen.evaluated[max(seen.evaluated)].get("tau") if seen.evaluated else None
    faults = sum(fault.get("event") not in _NO_FAULTS for fault in seen.faults)
    return [
        run.name,
        run.state,
        f"{state.step or 0:,} of {state.total_steps:,}" if state.total_steps else f"{state.step or 0:,}",
        figures(_known(state.loss)),
        figures(held[max(held)]) if held else "–",
        f"{figures(held[best])} after step {best:,}" if best is not None else "–",
        length(_known(state.acceptance)),
        length(_known(true_tau)),
        length(last.tau if last else None),
        duration(seen.seconds),
        f"{faults:,}",
    ]


def _known(value: Any) -> float | None:
    return None if value is None else number(value)


def faults_tables(run: Run) -> Sequence[Table | Missing]:
    """Return the faults and guards of a run: how many of each kind, and each with its time."""
    title, faults = "Faults and guards", run.history.faults
    if not faults:
        return [Missing(title, "None: no step was rejected, nothing failed, and nothing was set aside.")]
    counts = Counter(str(fault["event"]) for fault in faults)
    counted = Table(f"{title}: how often", ("event", "times"), [[kind, f"{n:,}"] for kind, n in counts.items()])
    seen: Counter[str] = Counter()
    rows, left_out = [], 0
    for fault in faults:
        kind = str(fault["event"])
        seen[kind] += 1
        if _MOST // 2 < seen[kind] <= counts[kind] - _MOST // 2:
            left_out += 1
            continue
        rows.append([moment(number(fault["t"])), kind, fault_text(fault)])
    more = f" ({left_out:,} between the first and last {_MOST // 2} of a kind are left out)" if left_out else ""
    return [counted, Table(f"{title} in the order of time{more}", ("time", "event", "what happened"), rows)]


def fault_text(event: Mapping[str, Any]) -> str:
    """Return what an event says, in words."""
    line = line_of(event)
    if line is None and (message := event.get("message")):
        line = str(message)
    if line is not None:
        return line
    return ", ".join(f"{key} {value}" for key, value in event.items() if key not in ("schema", "t", "event"))


def evaluations_table(runs: Sequence[Run]) -> Table | Missing:
    """Return what paceline evaluate left in the run folders."""
    rows = [_evaluation_row(run, one) for run in runs for one in run.evaluations]
    if not rows:
        return Missing("Evaluations", "No run folder holds a result of paceline evaluate.")
    columns = (
        *("run", "file", "after step", "τ, mean of requests", "τ, pooled", "accepted up to slot 1, 2, …", "prompts"),
        *("decoding", "speed against plain", "lossless"),
    )
    return Table("Evaluations", columns, rows)


def _evaluation_row(run: Run, one: Evaluation) -> list[str]:
    values = one.values
    slots = values.get("per_slot_acceptance")
    slots = [number(value) for value in slots[1:]] if isinstance(slots, list) else []
    temperature = number(values.get("temperature"))
    decoding = [] if temperature != temperature else ["greedy" if temperature == 0 else f"temperature {temperature:g}"]
    speed, lossless = values.get("speedup_vs_autoregressive"), values.get("lossless")
    prompts = figures(_known(values.get("prompts")))
    where = (one.server or values.get("dtype"), values.get("device"))
    return [
        run.name,
        one.file,
        "–" if one.steps is None else f"{one.steps:,}",
        length(one.tau),
        length(number(values.get("tau_pooled"))),
        " ".join(f"{value:.2f}" for value in slots) or "–",
        f"{prompts} of {values['prompt_set']}" if values.get("prompt_set") else prompts,
        ", ".join([*(str(part) for part in where if part), *decoding]),
        "–" if speed is None else f"{figures(number(speed), 3)}×",
        "yes" if lossless is True else "NO" if lossless is False else "not compared",
    ]


def exports_table(runs: Sequence[Run]) -> Table | Missing:
    """Return the exports that lie in the run folders."""
    rows = [
        [run.name, one.folder, one.layout, one.dtype, f"{one.files:,}", size(one.bytes), moment(one.written)]
        for run in runs
        for one in run.folder.exports
    ]
    if not rows:
        return Missing(
            "Exports", "No run folder holds an export; one that paceline export --out put elsewhere is not seen."
        )
    columns = ("run", "folder", "layout", "number format", "weight files", "size", "written")
    return Table("Exports", columns, rows)


def facts_table(run: Run) -> Table:
    """Return what a run was made with: data and its fingerprints, target, machine, versions."""
    rows = [*_data_rows(run), *_machine_rows(run)]
    return Table("Data and machine", ("what", "value"), rows or [["–", "Neither events nor provenance.json say it."]])


def _data_rows(run: Run) -> list[list[str]]:
    state, made = run.history.state, run.folder.provenance
    told: Mapping[str, Any] = state.data or {}
    datasets = made.get("dataset") or []
    datasets = [one for one in (datasets if isinstance(datasets, list) else [datasets]) if isinstance(one, dict)]
    pairs = list(zip(_texts(told.get("folders")), _texts(told.get("fingerprints")), strict=False)) or [
        (str(one.get("folder")), str(one.get("rows"))) for one in datasets
    ]
    rows = [[f"dataset {folder}", f"fingerprint {fingerprint}"] for folder, fingerprint in pairs]
    if held := _dict(made.get("held_out")):
        rows.append([f"held-out dataset {held.get('folder')}", f"fingerprint {held.get('rows')}"])
    counts = {key: told.get(key, (state.plan or {}).get(key)) for key in ("samples", "tokens")}
    rows += [[key, figures(number(value), 15)] for key, value in counts.items() if value is not None]
    target = _dict(made.get("target"))
    for name, value in (
        ("target", told.get("target") or target.get("name")),
        ("target revision", told.get("target_revision") or target.get("revision")),
    ):
        rows += [[name, str(value)]] if value else []
    if warm := run.history.warm_start:
        rows.append(["started from", f"{warm.get('folder')} ({warm.get('layout')})"])
    return rows


def _machine_rows(run: Run) -> list[list[str]]:
    told, made = run.history.state.machine or {}, run.folder.provenance
    packages = _dict(made.get("packages"))
    rows = [
        ["host", told.get("host")],
        ["platform", told.get("platform") or made.get("machine")],
        ["processor", told.get("cpu")],
        ["cores", figures(number(told["cores"]), 15) if told.get("cores") else None],
        ["memory", gib(number(told["memory_bytes"])) if told.get("memory_bytes") else None],
        ["Python", told.get("python") or made.get("python")],
        ["torch", told.get("torch")],
        *([name, version] for name, version in packages.items() if name != "torch" or not told.get("torch")),
        ["command", " ".join(_texts(made.get("argv"))) or None],
    ]
    for gpu in told.get("gpus") or []:
        peak = number(gpu.get("peak_flops"))
        speed = f", {peak / 1e12:,.0f} TFLOP/s dense bfloat16" if peak == peak else ""
        rows.append([f"GPU {gpu.get('device')}", f"{gpu.get('name')}, {gib(number(gpu.get('memory_bytes')))}{speed}"])
    return [[name, str(value)] for name, value in rows if value is not None]


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _texts(value: Any) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list | tuple) else []


def settings_tables(runs: Sequence[Run]) -> Sequence[Table | Missing]:
    """Return the settings: of several runs first those that differ, then all, a column a run."""
    trees = [_flat(run.history.state.settings or {}) for run in runs]
    keys = list(dict.fromkeys(key for tree in trees for key in tree))
    if not keys:
        return [Missing("Settings", "The events do not say the settings.")]
    rows = [[key, *(tree.get(key, "–") for tree in trees)] for key in keys]
    columns = ("setting", *(run.name for run in runs))
    whole = Table("All settings", columns, rows)
    if len(runs) == 1:
        return [whole]
    apart = [row for row in rows if len(set(row[1:])) > 1]
    if not apart:
        return [Missing("Settings that differ", "None."), whole]
    return [Table("Settings that differ", columns, apart), whole]


def _flat(tree: Any, key: str = "") -> dict[str, str]:
    if isinstance(tree, dict) and (tree or not key):
        return {name: text for part, value in tree.items() for name, text in _flat(value, f"{key}.{part}").items()}
    return {key.removeprefix("."): _said(tree)}


def _said(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_said, value)) or "none"
    if value is None or isinstance(value, bool):
        return "–" if value is None else "yes" if value else "no"
    return str(value)


def sums_said(run: Run) -> str:
    """Return the sums that a run told at its end, in words; nothing where it has none."""
    told = run.history.trained
    anchors, padding, recompiles = (
        number(told.get(key)) for key in ("real_anchor_share", "padding_share", "recompiles")
    )
    parts = [
        (f"{share(anchors)} of the anchor slots were used", anchors == anchors),
        (f"{share(padding)} of what the target read was padding", padding == padding),
        (f"the step ran {told.get('policy')}", "policy" in told),
        (
            f"{figures(recompiles)} step{'' if recompiles == 1 else 's'} did not fit what was compiled",
            recompiles == recompiles,
        ),
    ]
    known = [text for text, is_known in parts if is_known]
    return f"Over the whole run {', '.join(known)}." if known else ""
