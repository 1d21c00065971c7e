"""Where a run stands, as its events tell it: a pure fold, without clock, files or torch.

Whatever order of resumes and repeated steps the events have, the last one counts. What is not known is None, never a
guess: a rate before the second `step` event, the share of peak on a device whose peak is not known.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from paceline.observe.bottleneck import bottleneck
from paceline.observe.lines import line_of, number, slot_shares

RATE_S = 30.0  # seconds of steps that a rate is of, at least, where there are so many
SHARE_S = 30.0  # the same of samples, for the sentence on who waits for whom
_KEPT = 100  # faults, the newest
FAULTS = {
    "rejected",
    "rolled_back",
    "quarantined",
    "memory_growth",
    "recompile",
    "replica_failed",
    "replica_hung",
    "batch_split",
    "checkpoint_failed",
    "disk_full",
    "console_lost",
    "disagreement",
    "evaluator_failed",
    "best_not_kept",
    "tracker_failed",
    "failed",
}
_ROLE = {"busy_share": None, "wait_share": None, "waits_for": None}


class _Window:
    """The newest of what has a length in seconds, `s`: as few as reach `at_least_s` together."""

    def __init__(self, at_least_s: float) -> None:
        self._at_least_s = at_least_s
        self._parts: deque[Mapping[str, Any]] = deque()
        self._lengths = 0.0  # kept beside: summed anew for every event it would make reading a long run slow

    def add(self, part: Mapping[str, Any]) -> None:
        """Add the newest and let go of those that are not needed any more."""
        self._parts.append(part)
        self._lengths += part["s"]
        while self._lengths - self._parts[0]["s"] >= self._at_least_s:
            self._lengths -= self._parts.popleft()["s"]

    @property
    def items(self) -> list[Mapping[str, Any]]:
        """What is in the window, oldest first."""
        return list(self._parts)

    @property
    def seconds(self) -> float:
        """How long that is together."""
        return float(sum(part["s"] for part in self._parts))


class RunState:
    """The state of one run after the events that it was given."""

    def __init__(self) -> None:
        self.run: str | None = None
        self.settings: dict[str, Any] | None = None
        self.started_t: float | None = None  # of this part of the run, since 1970
        self.last_t: float | None = None  # of the last event
        self.outcome = "starting"  # running, finished, failed, interrupted
        self.message: str | None = None  # why it failed or was interrupted
        self.step: int | None = None  # how many are done
        self.total_steps: int | None = None
        self.epoch: int | None = None
        self.loss: float | None = None
        self.acceptance: float | None = None  # teacher-forced: an estimate of τ
        self.slot_acceptance_K: list[float] | None = None  # likewise, by slot
        self.true_tau: float | None = None  # decoded
        self.true_tau_steps: int | None = None
        self.held_out_loss: float | None = None
        self.held_out_steps: int | None = None
        self.saved_steps: int | None = None  # of the last checkpoint
        self.lr: float | None = None
        self.grad_norm: float | None = None
        self.roles: dict[str, dict[str, Any]] = {}
        self.queue_bytes: int | None = None
        self.queue_limit_bytes: int | None = None
        self.host_bytes: int | None = None
        self.gpus: list[dict[str, Any]] = []
        self.stages: list[dict[str, Any]] = []
        self.faults: list[dict[str, Any]] = []
        self.machine: dict[str, Any] | None = None
        self.data: dict[str, Any] | None = None
        self.plan: dict[str, Any] | None = None
        self._since = _Window(RATE_S)
        self._samples = _Window(SHARE_S)

    def apply(self, event: Mapping[str, Any]) -> None:
        """Take an event into account."""
        kind = event.get("event", "")
        self.last_t = number(event.get("t")) if "t" in event else self.last_t
        handle = _HANDLERS.get(kind)
        if handle is not None:
            handle(self, event)
        if kind in FAULTS:
            self.faults.append({"t": event.get("t"), "event": kind, "message": line_of(event)})
            del self.faults[:-_KEPT]

    @property
    def tokens_per_s(self) -> float | None:
        """Real tokens a second over the last steps."""
        return self._rate("tokens")

    @property
    def blocks_per_s(self) -> float | None:
        """Blocks a second over the last steps."""
        return self._rate("blocks")

    @property
    def mfu(self) -> float | None:
        """Useful operations a second as a share of the drafters' devices' dense bfloat16 peak, if all are known."""
        rate, drafters = self._rate("flops"), ((self.settings or {}).get("pipeline") or {}).get("drafters") or ()
        peaks = {gpu["device"]: gpu.get("peak_flops") for gpu in (self.machine or {}).get("gpus", ())}
        found = [peaks.get(device) for device in dict.fromkeys(map(_device, drafters))]
        known = [peak for peak in found if peak]
        return rate / sum(known) if rate is not None and known and len(known) == len(found) else None

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last step at the rate of the last steps; None unless the run is under way."""
        rate = self._rate("steps")
        if self.outcome != "running" or not rate or self.total_steps is None or self.step is None:
            return None
        return (self.total_steps - self.step) / rate

    @property
    def bottleneck(self) -> str | None:
        """A sentence that names who waits for whom and what to change; None where nobody waits notably."""
        return bottleneck(self._samples.items) if self.outcome == "running" else None

    def as_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""
        told = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        made = ("tokens_per_s", "blocks_per_s", "mfu", "eta_s", "bottleneck")
        return told | {name: getattr(self, name) for name in made}

    def _rate(self, name: str) -> float | None:
        parts = self._since.items
        if self._since.seconds <= 0 or any(part.get(name) is None for part in parts):
            return None
        return sum(part[name] for part in parts) / self._since.seconds

    def _begin(self, event: Mapping[str, Any]) -> None:
        """A part of the run begins: what was true of the one before is not any more."""
        self.settings = dict(event.get("settings") or {})
        self.run = self.settings.get("run_dir")
        self.started_t, self.outcome, self.message = self.last_t, "starting", None
        self.roles, self.gpus, self.stages = {}, [], []
        self.queue_bytes = self.queue_limit_bytes = self.host_bytes = None
        self._since, self._samples = _Window(RATE_S), _Window(SHARE_S)

    def _started(self, event: Mapping[str, Any]) -> None:
        fresh = RunState()
        fresh.last_t = self.last_t
        vars(self).update(vars(fresh))
        self._begin(event)

    def _resumed(self, event: Mapping[str, Any]) -> None:
        self._begin(event)
        self.step = self.saved_steps = event.get("steps")

    def _plan(self, event: Mapping[str, Any]) -> None:
        self.plan = _body(event)
        self.total_steps = event.get("steps")

    def _stage(self, event: Mapping[str, Any]) -> None:
        self.stages.append({"name": event.get("name"), "s": event.get("s")})

    def _role(self, event: Mapping[str, Any]) -> None:
        name, state = str(event.get("role")), event.get("state")
        before = self.roles.get(name, _ROLE)
        kept = before if state == "running" else _ROLE
        shares = {key: kept[key] for key in _ROLE}
        self.roles[name] = {"device": event.get("device"), "state": state, "since_t": self.last_t, **shares}
        if state == "running":
            self.outcome = "running"

    def _loading(self, event: Mapping[str, Any]) -> None:
        if (role := self.roles.get(str(event.get("role")))) is not None:
            role["loaded"] = event.get("share")

    def _step(self, event: Mapping[str, Any]) -> None:
        self.outcome = "running"
        self.step, self.total_steps = event["step"] + 1, event.get("total_steps", self.total_steps)
        self.epoch, self.lr = event.get("epoch"), event.get("lr")
        self.loss, self.acceptance = event.get("loss"), event.get("acceptance")
        self.slot_acceptance_K, self.grad_norm = slot_shares(event) or None, event.get("grad_norm")
        if since := event.get("since"):
            self._since.add(since)

    def _sample(self, event: Mapping[str, Any]) -> None:
        self._samples.add(_body(event))
        for role in event.get("roles", ()):
            told = {key: value for key, value in role.items() if key != "role"}
            self.roles[role["role"]] = {"since_t": None} | self.roles.get(role["role"], {}) | told
        self.queue_bytes, self.queue_limit_bytes = event.get("queue_bytes"), event.get("queue_limit_bytes")
        self.host_bytes, self.gpus = event.get("host_bytes"), list(event.get("gpus") or ())

    def _held_out(self, event: Mapping[str, Any]) -> None:
        self.held_out_loss, self.held_out_steps = event.get("loss"), event.get("steps")

    def _evaluated(self, event: Mapping[str, Any]) -> None:
        self.true_tau, self.true_tau_steps = event.get("tau"), event.get("steps")

    def _checkpoint(self, event: Mapping[str, Any]) -> None:
        self.saved_steps = event.get("steps")

    def _replica_hung(self, event: Mapping[str, Any]) -> None:
        if (role := self.roles.get(str(event.get("role")))) is not None:
            role |= {"state": "hung", "since_t": self.last_t, **_ROLE}

    def _machine(self, event: Mapping[str, Any]) -> None:
        self.machine = _body(event)

    def _data(self, event: Mapping[str, Any]) -> None:
        self.data = _body(event)

    def _trained(self, event: Mapping[str, Any]) -> None:
        self.outcome, self.step = "finished", event.get("train_steps", self.step)

    def _failed(self, event: Mapping[str, Any]) -> None:
        self.outcome, self.message = "failed", event.get("message")

    def _interrupted(self, event: Mapping[str, Any]) -> None:
        self.outcome, self.message = "interrupted", event.get("message")


_HANDLERS: dict[str, Callable[[RunState, Mapping[str, Any]], None]] = {
    "started": RunState._started,
    "resumed": RunState._resumed,
    "plan": RunState._plan,
    "machine": RunState._machine,
    "data": RunState._data,
    "stage": RunState._stage,
    "role": RunState._role,
    "loading": RunState._loading,
    "step": RunState._step,
    "sample": RunState._sample,
    "held_out": RunState._held_out,
    "evaluated": RunState._evaluated,
    "checkpoint": RunState._checkpoint,
    "replica_hung": RunState._replica_hung,
    "trained": RunState._trained,
    "failed": RunState._failed,
    "interrupted": RunState._interrupted,
}


def _body(event: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in event.items() if key not in ("schema", "t", "event")}


def _device(name: str) -> str:
    """Return a device as events name it: `cuda` is `cuda:0`."""
    return "cuda:0" if name == "cuda" else name
