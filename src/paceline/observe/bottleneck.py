"""Who waits for whom in a run, and what to change: one sentence out of its `sample` events."""

from collections.abc import Mapping, Sequence
from typing import Any

NOTABLE = 0.1  # of the time; who waits less is kept busy

FEATURES, ROOM, DATA, RANKS = "features", "room in the channel", "data", "the other ranks"  # what roles wait for
_DRAFTER, _TARGET = "drafter rank ", "target replica "  # what roles are called

Sample = Mapping[str, Any]


def bottleneck(samples: Sequence[Sample]) -> str | None:
    """Return the sentence on these samples, the longest counting most; None where nobody waits notably."""
    starved, full = _wait(samples, _DRAFTER, FEATURES), _wait(samples, _TARGET, ROOM)
    unread, apart = _wait(samples, _TARGET, DATA), _wait(samples, _DRAFTER, RANKS)
    if min(unread, starved) >= NOTABLE and unread >= full:
        return (
            f"Target replicas wait {_percent(unread)} for data, and drafters {_percent(starved)} for features: raise "
            "data.prefetch, or put the dataset on a faster disk."
        )
    if starved >= NOTABLE and starved >= max(full, apart):
        return f"Drafters wait {_percent(starved)} for features: {_more_targets(samples)}."
    if full >= NOTABLE and full >= apart:
        return (
            f"Target replicas wait {_percent(full)} for room in the channel: the drafter is what limits; add a drafter "
            "rank, or take a target replica's device for one."
        )
    if apart >= NOTABLE:
        return (
            f"Drafter ranks wait {_percent(apart)} for one another: raise train.batches_per_step, so that each has as "
            "many micro-batches of a step, or give them devices of equal speed."
        )
    return None


def _more_targets(samples: Sequence[Sample]) -> str:
    """Return what helps drafters that wait for features."""
    targets, drafters = _devices(samples, _TARGET), _devices(samples, _DRAFTER)
    both = sorted(targets & drafters)
    if both:
        return f"they share {', '.join(both)} with the target; give target replicas a device of their own"
    return "add a target replica, or colocate one on a drafter's device"


def _devices(samples: Sequence[Sample], kind: str) -> set[str]:
    return {str(role.get("device")) for role in samples[-1].get("roles", ()) if role["role"].startswith(kind)}


def _wait(samples: Sequence[Sample], kind: str, what: str) -> float:
    """Return the share of their time that the roles of a kind waited for something."""
    waited = passed = 0.0
    for sample in samples:
        for role in sample.get("roles", ()):
            if role["role"].startswith(kind) and role.get("wait_share") is not None:
                waits = role.get("waits") or {role.get("waits_for"): role["wait_share"]}
                waited += sample["s"] * waits.get(what, 0.0)
                passed += sample["s"]
    return waited / passed if passed else 0.0


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
