"""How a run worked: batches and padding, roles over time, memory and use of GPUs.

Shapes: N samples of an interval.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.observe.report.history import History, Role, number
from paceline.observe.report.parts import Figure, Missing, Run, Table, clock_unit, duration, figures, gib, label, share
from paceline.observe.report.reduce import BINS, plain, reduced
from paceline.records import many

_ROW_PX = 28  # height of a role or GPU
Lane = tuple[Any, Any, Any]  # of each sample when it ended, how long it was, the share


def buckets_figure(run: Run) -> Figure | Missing:
    """Return the samples of each length bucket and what their padding costs."""
    title, plan = "Batches and padding", run.history.state.plan
    if not plan:
        return Missing(title, "The events have no plan of the batches.")
    padding = f"padding {share(number(plan.get('padding_share')))} planned, {share(_real_padding(run))} in logged steps"
    whole = f"{figures(number(plan.get('samples')))} samples in {figures(number(plan.get('batches')))} batches an epoch"
    buckets = plan.get("buckets") or []
    if not buckets:
        return Missing(title, f"Batches are {plan.get('layout')}, without buckets: {whole}; {padding}.")
    names = [f"{int(number(one.get('low')))}–{int(number(one.get('high'))) - 1}" for one in buckets]
    samples = [number(one.get("samples")) for one in buckets]
    padded = [number(one.get("padding_share")) for one in buckets]
    bars: dict[str, Any] = {"type": "bar", "x": names, "meta": {"colour": run.index}}
    traces = [
        bars | {"y": plain(samples), "name": "samples", "hovertemplate": "%{x} tokens: %{y:,} samples<extra></extra>"},
        bars
        | {
            "y": plain(padded),
            "name": "padding",
            "yaxis": "y2",
            "hovertemplate": "%{x}: %{y:.1%} padded<extra></extra>",
        },
    ]
    layout = {
        "xaxis": {"title": {"text": "tokens of a sample"}, "type": "category", "anchor": "y2"},
        "yaxis": {"title": {"text": "samples"}, "domain": [0.4, 1]},
        "yaxis2": {"title": {"text": "padding"}, "domain": [0, 0.3], "tickformat": ".0%", "rangemode": "tozero"},
        "showlegend": False,
    }
    rows = [
        [name, figures(count), figures(number(one.get("batches"))), share(part)]
        for name, count, one, part in zip(names, samples, buckets, padded, strict=True)
    ]
    table = Table("Length buckets", ("tokens", "samples", "batches", "padding"), rows)
    return Figure(f"buckets-{run.index}", title, traces, layout, [f"{whole}; {padding}."], table)


def _real_padding(run: Run) -> float:
    padded = float(np.nansum(run.steps.padded_N))
    return 1 - float(np.nansum(run.steps.tokens_N)) / padded if padded else float("nan")


def states_figure(run: Run) -> Figure | Missing:
    """Return which state each role was in, over the time that the run was up."""
    title, roles = "States of the roles", run.history.roles
    spans = [(name, *span) for name, role in roles.items() for span in _spans(role, run.history.seconds)]
    if not spans:
        return Missing(title, "No role has told its state yet.")
    unit, scale = clock_unit(run.history.seconds)
    traces = []
    for state in dict.fromkeys(state for _, _, _, state in spans):
        mine = [(name, start, end) for name, start, end, of in spans if of == state]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": label(state),
                "y": [label(name) for name, _, _ in mine],
                "base": [start / scale for _, start, _ in mine],
                "x": [(end - start) / scale for _, start, end in mine],
                "meta": {"state": state},
                "hovertemplate": f"%{{y}}: {label(state)} from %{{base:.2f}} for %{{x:.2f}} {unit}<extra></extra>",
            }
        )
    layout = {"barmode": "overlay", **_lane_layout(unit, len(roles))}
    rows = [
        [name, role.device, _ready(role), role.states[-1][1] if role.states else "–"] for name, role in roles.items()
    ]
    said = [f"{many(len(roles), 'role')} in {duration(run.history.seconds)}; " + _counted(run.history) + "."]
    table = Table("Roles", ("role", "device", "ready after", "last state"), rows)
    return Figure(f"states-{run.index}", title, traces, layout, said, table)


def _spans(role: Role, end: float) -> list[tuple[float, float, str]]:
    """Return the times (start, end, state) a role was in a state that takes time."""
    ends = [*(start for start, _ in role.states[1:]), end]
    spans = zip(role.states, ends, strict=True)
    return [(start, stop, state) for (start, state), stop in spans if state not in _ENDED and stop > start]


_ENDED = ("done", "stopped", "failed")


def _ready(role: Role) -> str:
    starts = [s for s, state in role.states if state == "loading"]
    ready = [s for s, state in role.states if state == "ready"]
    return duration(ready[0] - starts[0]) if starts and ready else "–"


def _counted(run: History) -> str:
    last = [role.states[-1][1] for role in run.roles.values() if role.states]
    return ", ".join(f"{last.count(state)} {state}" for state in dict.fromkeys(last)) + " at the end"


def work_figure(run: Run) -> Figure | Missing:
    """Return which share of the time each role worked, over the time that the run was up."""
    title = "Who worked, who waited"
    roles = {name: role for name, role in run.history.roles.items() if role.samples}
    if not roles:
        return Missing(
            title, "The events have no samples of the roles' work: the run is older, or has not told one yet."
        )
    lanes = {name: np.array(role.samples, dtype=np.float64).T for name, role in roles.items()}
    trace, layout, unit = _lanes(run, {name: (end, s, busy) for name, (end, s, busy, _) in lanes.items()}, "worked")
    _, waits = _binned(run, {name: (end, s, wait) for name, (end, s, _, wait) in lanes.items()})
    trace["customdata"] = plain(waits)
    trace["hovertemplate"] = (
        f"%{{y}} at %{{x:.2f}} {unit}: worked %{{z:.0%}}, waited %{{customdata:.0%}}<extra></extra>"
    )
    means = {name: (_mean(s, busy), _mean(s, wait)) for name, (_, s, busy, wait) in lanes.items()}
    rows = [
        [name, role.device, *map(share, means[name]), max(role.waits_for, key=role.waits_for.__getitem__, default="–")]
        for name, role in roles.items()
    ]
    least, most = min(means, key=lambda name: means[name][0]), max(means, key=lambda name: means[name][1])
    said = [
        f"Of {len(roles)} roles {least} worked least, {share(means[least][0])} of the time, and {most} waited most, "
        f"{share(means[most][1])}."
    ]
    table = Table("Shares of the time", ("role", "device", "worked", "waited", "mostly for"), rows)
    return Figure(f"work-{run.index}", title, [trace], layout, said, table)


def utilisation_figure(run: Run) -> Figure | Missing:
    """Return the utilisation of GPUs, over the time that the run was up."""
    title, gpus = "Utilisation of GPUs", run.history.gpus
    if not gpus:
        return Missing(title, "No GPU was sampled: the run had none, or is older.")
    lanes = {}
    for device, samples in gpus.items():
        end_N, length_N, _, _, busy_N = np.array(samples, dtype=np.float64).T
        lanes[device] = (end_N, length_N, busy_N)
    trace, layout, unit = _lanes(run, lanes, "used")
    trace["hovertemplate"] = f"%{{y}} at %{{x:.2f}} {unit}: %{{z:.0%}}<extra></extra>"
    means = {device: _mean(s, busy) for device, (_, s, busy) in lanes.items()}
    rows = [[device, run.history.gpu_names.get(device, "–"), share(mean)] for device, mean in means.items()]
    least, most = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
    said = [f"On average {least} was used {share(means[least])} of the time"]
    said[0] += "." if len(means) == 1 else f", the least, and {most} {share(means[most])}, the most."
    table = Table("Utilisation of GPUs", ("device", "GPU", "mean"), rows)
    return Figure(f"utilisation-{run.index}", title, [trace], layout, said, table)


def _lanes(run: Run, lanes: Mapping[str, Lane], what: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return a heat map of shares over time, a row a name, its layout, and the unit of time."""
    unit, scale = clock_unit(run.history.seconds)
    edges, shares = _binned(run, lanes)
    trace = {
        "type": "heatmap",
        "x": ((edges[1:] + edges[:-1]) / 2 / scale).tolist(),
        "y": [label(name) for name in lanes],
        "z": plain(shares),
        "zmin": 0,
        "zmax": 1,
        "colorscale": "Cividis",
        "ygap": 2,
        "colorbar": {"title": {"text": what}, "thickness": 12, "tickformat": ".0%"},
    }
    return trace, _lane_layout(unit, len(lanes)), unit


def _lane_layout(unit: str, rows: int) -> dict[str, Any]:
    return {
        "xaxis": {"title": {"text": f"time the run was up ({unit})"}},
        "yaxis": {"autorange": "reversed", "type": "category"},
        "height": 150 + _ROW_PX * rows,
    }


def _binned(run: Run, lanes: Mapping[str, Lane]) -> tuple[Any, list[Any]]:
    """Return the edges of equal parts of the time, and of each lane the mean share in each part: samples count with
    their length, where their middle lies. A part without samples has nan.
    """
    columns = min(BINS, max(len(end_N) for end_N, _, _ in lanes.values()))
    edges = np.linspace(0, max(run.history.seconds, 1e-9), columns + 1)
    found = []
    for end_N, length_N, share_N in lanes.values():
        known_N = np.isfinite(share_N) & np.isfinite(length_N)
        bin_N = np.clip(np.searchsorted(edges, end_N - length_N / 2, side="right") - 1, 0, columns - 1)[known_N]
        parts = (share_N * length_N, length_N)
        above, below = (np.bincount(bin_N, part_N[known_N], minlength=columns) for part_N in parts)
        with np.errstate(divide="ignore", invalid="ignore"):
            found.append(above / below)
    return edges, found


def _mean(length_N: Any, share_N: Any) -> float:
    """Return a share over all samples; nan where none tells it."""
    known_N = np.isfinite(share_N) & np.isfinite(length_N)
    below = float(length_N[known_N].sum())
    return float((share_N * length_N)[known_N].sum()) / below if below else float("nan")


def memory_figure(run: Run) -> Figure | Missing:
    """Return the memory of GPUs and of the host, over the time that the run was up."""
    title, seen = "Memory", run.history
    if not seen.gpus and not seen.host:
        return Missing(title, "The events have no samples of memory: the run is older, or has not told one yet.")
    unit, scale = clock_unit(seen.seconds)
    lines = {device: [(s, used) for s, _, used, _, _ in samples] for device, samples in seen.gpus.items()}
    if seen.host:
        lines["host"] = seen.host
    traces, rows, most = [], [], {}
    for place, (name, points) in enumerate(lines.items()):
        s_N, bytes_N = np.array(points, dtype=np.float64).T
        traces.append(_line(name, place, s_N / scale, bytes_N / 2**30))
        total = seen.gpus[name][-1][3] if name in seen.gpus else None
        most[name] = float(np.nanmax(bytes_N)) if np.isfinite(bytes_N).any() else float("nan")
        what = seen.gpu_names.get(name, "anonymous memory of this process" if name == "host" else "–")
        rows.append([name, what, gib(most[name]), gib(float(bytes_N[-1])), gib(total)])
    said = [f"The fullest GPU, {full}, held {gib(most[full])} at most." for full in _fullest(seen, most)]
    said += [f"The process held {gib(most['host'])} of anonymous host memory at most."] if seen.host else []
    said += [] if seen.gpus else ["No GPU was sampled."]
    layout = {
        "xaxis": {"title": {"text": f"time the run was up ({unit})"}},
        "yaxis": {"title": {"text": "GiB"}, "rangemode": "tozero"},
    }
    table = Table("Memory", ("where", "what", "most", "last", "of"), rows)
    return Figure(f"memory-{run.index}", title, traces, layout, said, table)


def _fullest(seen: History, most: Mapping[str, float]) -> list[str]:
    known = [device for device in seen.gpus if np.isfinite(most[device])]
    return [max(known, key=most.__getitem__)] if known else []


def _line(name: str, place: int, x_N: Any, y_N: Any) -> dict[str, Any]:
    x, y = reduced(x_N, y_N)
    mode, dash = "lines" if len(x) > 1 else "markers", "solid" if place < 8 else "dot"  # there are eight colours
    line = {"width": 1.5, "dash": dash}
    return {
        "type": "scatter",
        "mode": mode,
        "name": label(name),
        "x": x,
        "y": y,
        "line": line,
        "meta": {"colour": place},
    }


def figures_of(run: Run) -> Sequence[Figure | Missing]:
    """Return the figures on how one run worked, in the page's order."""
    parts = (buckets_figure, states_figure, work_figure, memory_figure, utilisation_figure)
    return [part(run) for part in parts]
