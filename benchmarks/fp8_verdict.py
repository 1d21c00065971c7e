"""Whether drafters that were trained in fp8 draft as well as those in bfloat16, from their evaluations.

A question's tau is the tokens that a draft cycle gave it on average. The paired bootstrap over questions holds for
these drafters alone: other seeds would give others. So the verdict adds how far an arm's drafters lie apart (pooled
over both arms, Student's t), and is an equivalence test: tau is "the same" if the 90 % interval of both together, which
is two one-sided tests at 5 %, lies within 3 % of bfloat16's tau. Decoding is at most as much faster as tau is larger,
and drafters that differed in nothing but their seed were 4 % apart (log.md). "lower" or "higher" is an interval without
0 that is not the same; otherwise it is "undecided", and about how many seeds would decide is said.

Shapes: A arms, S seeds, P questions, R resamples.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.decode.compare import RESAMPLES, SEED, paired_bootstrap, resampled_means

ARMS = ("bf16", "fp8")
MARGIN, LEVEL = 0.03, 0.90  # of bfloat16's tau, within which tau is the same; of the interval that must lie there


def compare(reports: Sequence[Sequence[dict[str, Any]]], seeds: Sequence[int]) -> dict[str, Any]:
    """Return each drafter's acceptance, and the paired difference of the arms: `reports` are by arm and seed.

    Of a question the tokens a draft cycle gave it on average count, averaged over an arm's seeds. One whose answer had
    no cycle with some drafter is left out.
    """
    asked = {report["prompt_ids_sha256"] for arm in reports for report in arm}
    assert len(asked) == 1, "all drafters answer the same questions"
    tau_ASP = np.array([[_taus(report) for report in arm] for arm in reports])
    used_P = np.isfinite(tau_ASP).all((0, 1))
    tau_ASP = tau_ASP[..., used_P]
    bf16_P, fp8_P = tau_ASP.mean(1)
    drafters = {
        f"{arm}-{seed}": {"tau": report["tau_trained"], "lossless": report["lossless"]}
        for arm, runs in zip(ARMS, reports, strict=True)
        for seed, report in zip(seeds, runs, strict=True)
    }
    return {
        "drafters": drafters,
        "difference_by_seed": [round(float(value), 4) for value in (tau_ASP[1] - tau_ASP[0]).mean(-1)],
        "left_out": int((~used_P).sum()),
        "fp8_against_bf16": paired_bootstrap(fp8_P, bf16_P, resamples=RESAMPLES),
        **judged(tau_ASP),
    }


def judged(tau_ASP: np.ndarray) -> dict[str, Any]:
    """Return the verdict on arms x seeds x questions, and what it comes from.

    The difference's error is that of drawing questions and that of drawing seeds, 2/S of the variance in an arm. That
    two drafters have a seed in common is not used: it makes their difference smaller, if anything.
    """
    S = tau_ASP.shape[1]
    difference_P, bf16 = (tau_ASP[1] - tau_ASP[0]).mean(0), float(tau_ASP[0].mean())
    found = float(difference_P.mean())
    told = {"margin": MARGIN * bf16, "level": LEVEL, "difference": found, "seeds": S, "low": None, "high": None}
    if S == 1:
        return {"verdict": "undecided", "judged": {**told, "seeds_needed": 2}}
    spread = float(tau_ASP.mean(-1).var(1, ddof=1).mean())  # of an arm's drafters, squared
    drawn_R = resampled_means(difference_P[None], RESAMPLES, SEED)[0]
    drawn_R += (2 * spread / S) ** 0.5 * np.random.default_rng(SEED).standard_t(2 * (S - 1), RESAMPLES)
    low, high = (float(edge) for edge in np.quantile(drawn_R, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
    told |= {"low": low, "high": high, "spread_of_seeds": spread**0.5, "seeds_needed": None}
    if max(-low, high) < MARGIN * bf16:
        return {"verdict": "the same", "judged": told}
    if low > 0 or high < 0:
        return {"verdict": "higher" if low > 0 else "lower", "judged": told}
    room = (MARGIN * bf16 - abs(found)) / 1.8  # a normal distribution's 1.64 and a little for Student's tails
    left = room**2 - float(difference_P.var(ddof=1)) / len(difference_P) if room > 0 else 0.0
    told["seeds_needed"] = max(S + 1, math.ceil(2 * spread / left)) if left > 0 else None
    return {"verdict": "undecided", "judged": told}


def table(result: dict[str, Any]) -> str:
    """Return the result as a person reads it."""
    told, by = result["fp8_against_bf16"], result["judged"]
    lines = ["| arm | seed | tau |", "| --- | --- | --- |"]
    for name, drafter in result["drafters"].items():
        arm, seed = name.split("-")
        lines.append(f"| {arm} | {seed} | {drafter['tau']:.3f} |")
    own, other, difference = (told[what] for what in ("own", "other", "difference"))
    lines += [
        "",
        f"fp8 {own['mean']:.3f}, bf16 {other['mean']:.3f}; difference {difference['mean']:+.4f} "
        f"({100 * told['confidence']:.0f} % over questions: {difference['low']:+.4f} to {difference['high']:+.4f}), "
        f"{told['prompts']} questions, "
        f"{len(result['difference_by_seed'])} seeds, {result['steps']:,} steps each",
    ]
    interval = "no interval from one seed"
    if by["low"] is not None:
        interval = f"{100 * by['level']:.0f} % over questions and seeds: {by['low']:+.4f} to {by['high']:+.4f}"
    lines.append(f"verdict: {result['verdict']} ({interval}; the same is within {by['margin']:.4f}, {MARGIN:.0%})")
    if result["verdict"] == "undecided":
        needed = by["seeds_needed"]
        lines.append(
            f"about {needed} seeds would decide" if needed else "more seeds would not decide: too near the margin"
        )
    return "\n".join(lines)


def _taus(report: dict[str, Any]) -> list[float]:
    """Return the acceptance length of every question; nan without a cycle."""
    columns = report["per_prompt"]
    pairs = zip(columns["cycle_tokens"], columns["cycles"], strict=True)
    return [tokens / cycles if cycles else math.nan for tokens, cycles in pairs]
