"""What a run learnt: losses and acceptance lengths over steps, and acceptance by slot over time.

Shapes: N logged steps, K drafted slots of a block.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.observe.report.history import Steps, number
from paceline.observe.report.parts import Figure, Missing, Run, Table, figures, label, length, share
from paceline.observe.report.reduce import BINS, plain, pooled, reduced

_MANY = 200  # points; of more a mean of neighbours is drawn too
_NEIGHBOURS = 10  # that such a mean is of, at least


def loss_figure(runs: Sequence[Run]) -> Figure | Missing:
    """Return the training and held-out losses of all runs."""
    if not any(len(run.steps.done_N) or run.history.held_out for run in runs):
        return Missing("Loss", "No step has been logged yet.")
    traces: list[dict[str, Any]] = []
    said = []
    for run in runs:
        steps, applied_N = run.steps, run.steps.applied_N & np.isfinite(run.steps.loss_sum_N)
        sums = (steps.loss_sum_N[applied_N], steps.weight_sum_N[applied_N])
        means = pooled(steps.done_N[applied_N], *sums, _bins(steps))
        traces += _curve(run, "training loss", steps.done_N, steps.loss_N, means)
        traces += _points(run, "held-out loss", run.history.held_out, "loss", dash="dash")
        traces += _rejected(run)
        said += _loss_said(run)
    layout: dict[str, Any] = {
        "yaxis": {"title": {"text": "loss (nats)"}, "type": _axis_type(traces)},
        "xaxis": _steps_axis(),
    }
    layout["shapes"] = [shape for run in runs for shape in _turns(run)]
    return Figure("loss", "Loss", traces, layout, said, over_steps=True)


def acceptance_figure(runs: Sequence[Run]) -> Figure | Missing:
    """Return estimated and true acceptance lengths of all runs."""
    if not any(len(run.steps.done_N) or run.history.evaluated or run.evaluations for run in runs):
        return Missing("Acceptance length τ", "No step has been logged yet, and nothing was evaluated.")
    traces: list[dict[str, Any]] = []
    said = []
    for run in runs:
        steps = run.steps
        x, shares = pooled(steps.done_N, steps.accepted_NK, np.maximum(steps.available_NK, 1e-9), _bins(steps))
        means = (x, 1 + shares.sum(axis=-1)) if len(x) else (x, np.empty(0))
        traces += _curve(run, "estimate", steps.done_N, steps.acceptance_N, means)
        traces += _points(run, "held-out estimate", run.history.held_out, "acceptance", dash="dash")
        traces += _points(run, "true τ while training", run.history.evaluated, "tau", dash="dot", symbol="diamond")
        traces += _evaluations(run)
        said += _acceptance_said(run)
    layout = {"yaxis": {"title": {"text": "tokens a cycle"}}, "xaxis": _steps_axis()}
    table = _evaluated_table(runs)
    return Figure("acceptance", "Acceptance length τ", traces, layout, said, table, over_steps=True)


def slots_figure(run: Run) -> Figure | Missing:
    """Return how many blocks were accepted up to each slot, over the steps."""
    title = "Acceptance by slot"
    steps = run.steps
    slots = steps.accepted_NK.shape[1]
    if not slots:
        return Missing(title, "No step that tells acceptance by slot has been logged.")
    x, shares_BK = pooled(steps.done_N, steps.accepted_NK, steps.available_NK)
    trace = {
        "type": "heatmap",
        "x": x,
        "y": list(range(1, slots + 1)),
        "z": plain(shares_BK.T),
        "zmin": 0,
        "zmax": 1,
        "colorscale": "Cividis",
        "colorbar": {"title": {"text": "share"}, "thickness": 12, "tickformat": ".0%"},
        "hovertemplate": "about step %{x:,.0f}<br>up to slot %{y}: %{z:.1%}<extra></extra>",
    }
    layout = {
        "xaxis": _steps_axis(),
        "yaxis": {"title": {"text": "slot"}, "dtick": 1 if slots <= 16 else 4, "autorange": "reversed"},
    }
    first, last = (_slot_shares(steps, part) for part in (slice(0, _tenth(steps)), slice(-_tenth(steps), None)))
    true = list(run.history.evaluated.values())[-1:]
    truth = [number(value) for value in (true[0].get("slot_acceptance_K") or [])] if true else []
    rows = [
        [str(k + 1), share(first[k]), share(last[k]), share(truth[k]) if k < len(truth) else "–"] for k in range(slots)
    ]
    said = [
        f"Share of blocks whose slots up to this one were all right, by the training data: slot 1 went from "
        f"{share(first[0])} to {share(last[0])}, slot {slots} from {share(first[-1])} to {share(last[-1])} "
        "(first and last tenth of the logged steps)."
    ]
    columns = ("up to slot", "first tenth", "last tenth", "last true evaluation")
    table = Table("Acceptance up to each slot", columns, rows)
    return Figure(f"slots-{run.index}", title, [trace], layout, said, table, over_steps=True)


def _bins(steps: Steps) -> int:
    return max(1, min(BINS, len(steps.done_N) // _NEIGHBOURS))


def _curve(run: Run, what: str, x_N: Any, y_N: Any, means: tuple[list[float], Any]) -> list[dict[str, Any]]:
    """Return the traces of a curve; of a long one the mean of neighbours in front and the curve itself faint behind."""
    x, y = reduced(x_N, y_N)
    if not x:
        return []
    name = label(f"{run.name}: {what}")
    raw: dict[str, Any] = _trace(run, name, x, y, mode="lines" if len(x) > 1 else "markers", line={"width": 1.5})
    if len(x_N) <= _MANY:
        return [raw]
    raw["meta"]["faint"] = True
    front = _trace(run, f"{name}, mean", means[0], plain(means[1]), mode="lines", line={"width": 2})
    return [raw | {"showlegend": False, "hoverinfo": "skip"}, front]


def _points(
    run: Run, what: str, told: dict[int, dict[str, Any]], key: str, *, dash: str, symbol: str = "circle"
) -> list[dict[str, Any]]:
    if not told:
        return []
    x = sorted(told)
    y = plain([number(told[steps].get(key)) for steps in x])
    return [
        _trace(
            run,
            label(f"{run.name}: {what}"),
            x,
            y,
            mode="lines+markers",
            line={"width": 1.5, "dash": dash},
            marker={"size": 6 if symbol == "circle" else 9, "symbol": symbol},
        )
    ]


def _trace(run: Run, name: str, x: Any, y: Any, **more: Any) -> dict[str, Any]:
    return {"type": "scatter", "name": name, "x": x, "y": y, "meta": {"run": run.index, "colour": run.index}, **more}


def _rejected(run: Run) -> list[dict[str, Any]]:
    steps = run.steps
    wrong_N = ~steps.applied_N & np.isfinite(steps.loss_N)
    if not wrong_N.any():
        return []
    x, y = reduced(steps.done_N[wrong_N], steps.loss_N[wrong_N])
    return [
        _trace(run, label(f"{run.name}: not applied"), x, y, mode="markers", marker={"symbol": "x", "size": 8}),
    ]


def _evaluations(run: Run) -> list[dict[str, Any]]:
    known = [(one.steps or _last_step(run), one) for one in run.evaluations if one.tau == one.tau]
    known = [(steps, one) for steps, one in known if steps is not None and one.server is None]
    if not known:
        return []
    trace = _trace(
        run,
        label(f"{run.name}: paceline evaluate"),
        [steps for steps, _ in known],
        plain([one.tau for _, one in known]),
        mode="markers",
        marker={"symbol": "star", "size": 13},
    )
    return [trace | {"text": [label(one.file) for _, one in known]}]


def _last_step(run: Run) -> int | None:
    return int(run.steps.done_N[-1]) if len(run.steps.done_N) else None


def _turns(run: Run) -> list[dict[str, Any]]:
    """Return lines where a run went on or back."""
    places = [*run.history.resumed, *(steps for steps, _ in run.history.rolled_back)]
    line = {"width": 1, "dash": "dot"}
    return [
        {
            "type": "line",
            "x0": at,
            "x1": at,
            "y0": 0,
            "y1": 1,
            "yref": "paper",
            "line": line,
            "name": f"run-{run.index}",
        }
        for at in places[:50]
    ]


def _axis_type(traces: Sequence[dict[str, Any]]) -> str:
    """Return log where losses span more than a factor of 20, as at the beginning of a run."""
    values = [y for trace in traces for y in trace["y"] if y is not None]
    return "log" if values and min(values) > 0 and max(values) > 20 * min(values) else "linear"


def _steps_axis() -> dict[str, Any]:
    return {"title": {"text": "steps done"}, "tickformat": ",.0f"}


def _loss_said(run: Run) -> list[str]:
    steps, told = run.steps, run.history.held_out
    parts = []
    if len(steps.done_N):
        finite_N = np.isfinite(steps.loss_N)
        first, last = steps.loss_N[0], steps.loss_N[-1]
        parts.append(f"training loss {figures(first)} at step {steps.done_N[0]:,.0f}, {figures(last)} at the last one")
        if finite_N.any():
            low = int(np.nanargmin(np.where(finite_N, steps.loss_N, np.inf)))
            parts[-1] += f", lowest {figures(steps.loss_N[low])} at step {steps.done_N[low]:,.0f}"
        if odd := int((~finite_N).sum()):
            parts.append(f"logged losses that are not finite and leave gaps: {odd:,}")
        if rejected := int((~steps.applied_N).sum()):
            parts.append(f"logged steps that were not applied: {rejected:,}")
    finite = {done: number(one.get("loss")) for done, one in told.items() if np.isfinite(number(one.get("loss")))}
    if finite:
        best = min(finite, key=finite.__getitem__)
        parts.append(
            f"held-out loss {figures(finite[max(finite)])} after step {max(finite):,}, lowest {figures(finite[best])} "
            f"after step {best:,}"
        )
    elif not told:
        parts.append("no held-out loss was told (evaluate.held_out)")
    turns = [f"it went on after step {steps:,}" for steps in run.history.resumed[:10]]
    turns += [f"after step {after:,} it went back to step {to:,}" for after, to in run.history.rolled_back[:10]]
    return [f"{run.name}: {'; '.join(parts + turns)}."]


def _acceptance_said(run: Run) -> list[str]:
    steps, told = run.steps, run.history.evaluated
    parts = []
    if len(steps.done_N):
        parts.append(
            f"estimate by training data {length(float(steps.acceptance_N[-1]))} at step {steps.done_N[-1]:,.0f}"
        )
    if told:
        last = max(told)
        tau = number(told[last].get("tau"))
        best = max(told, key=lambda done: number(told[done].get("tau")))
        parts.append(f"true τ {length(tau)} after step {last:,}, highest after step {best:,}")
    else:
        parts.append("true τ was not measured while it trained")
    own = [one for one in run.evaluations if one.server is None and one.tau == one.tau]
    parts += [f"{one.file} has τ {length(one.tau)}" for one in own[:5]]
    if not own:
        parts.append("paceline evaluate has left no result")
    return [f"{run.name}: {'; '.join(parts)}."]


def _evaluated_table(runs: Sequence[Run]) -> Table | None:
    rows = []
    for run in runs:
        for steps, told in sorted(run.history.evaluated.items()):
            values = (number(told.get(key)) for key in ("tau", "tau_pooled", "estimate"))
            best = "yes" if told.get("best") is True else ""
            rows.append([run.name, f"{steps:,}", *map(length, values), best])
    if not rows:
        return None
    columns = ("run", "after step", "true τ", "pooled", "estimate", "best so far")
    return Table("True acceptance length while training", columns, rows)


def _tenth(steps: Steps) -> int:
    return max(1, len(steps.done_N) // 10)


def _slot_shares(steps: Steps, part: slice) -> list[float]:
    above_K, below_K = steps.accepted_NK[part].sum(axis=0), steps.available_NK[part].sum(axis=0)
    return [above / below if below else float("nan") for above, below in zip(above_K, below_K, strict=True)]
