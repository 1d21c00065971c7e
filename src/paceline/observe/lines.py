"""What a person reads of an event: one plain line, the same in a run's own console and in what looks on from outside.

A line of numbers is made of words and values in turn, always in the same order and without thousands separators, so
that grep and awk find them.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from paceline.records import many

Event = Mapping[str, Any]

_SENTENCES = {
    "checkpoint": "saved after step {steps:,} ({mib:,.1f} MiB in {write_s:.1f} s; the step waited {copy_s:.2f} s)",
    "checkpoint_failed": "saving after step {steps:,} failed, the last checkpoint is as it was: {message}",
    "checkpoint_skipped": "not saved after step {steps:,}: the save before it is still under way",
    "disk_full": "{message} The run waits until there is.",
    "replica_hung": "{said}; it is left alone, and all stacks are in {stacks}",
    "batch_split": "{role} on {device} ran out of memory at micro-batch {seq} ({tokens:,} tokens), which it computes "
    "again in {parts} part(s)",
    "rolled_back": "too many steps were rejected: after step {steps:,} the drafter is that of step {to:,} again; the "
    "data goes on from where it is",
    "quarantined": "row {row:,} of {dataset} is set aside: it {detail}",
    "memory_growth": "memory of {where} grows by {mib_per_min:,.1f} MiB a minute and is {mib:,.0f} MiB now",
    "resumed": "going on after step {steps:,} from {checkpoint}",
    "warm_start": "the drafter starts from {folder} ({layout})",
    "data": "data samples {samples} tokens {tokens} target {target} revision {target_revision}",
    "machine": "machine {host} cores {cores:g} python {python} torch {torch}",
    "stage": "{name} ({s:.1f} s)",
    "loading": "{role} on {device}: {share:.0%} of the weights are loaded",
    "console_lost": "{message} The run goes on and shows nothing.",
    "disagreement": "WARNING: {message}",
    "no_fp8": "WARNING: {role} on {device} computes in bfloat16 and not in fp8 (target.fp8: auto): {reason}",
    "evaluator_failed": "{said}; {then}",
    "best_not_kept": "the state after step {steps:,} is the best, but cannot be kept: {message}",
    "stopping": "{message}: stopping, this step is finished and saved; SIGTERM or Ctrl-C again stops at once",
    "tracker_failed": "{message}",
    "unreadable": "{message}",
    "failed": "failed: {message}",
    "interrupted": "stopped: {message}",
}


def line_of(event: Event) -> str | None:
    """Return the line of an event, None for one that has none. A key that is missing, as in an older run, is a `?`."""
    name = event.get("event", "")
    if name in _MADE:
        return _MADE[name](event)
    sentence = _SENTENCES.get(name)
    if sentence is None:
        return None
    more = {"mib": event.get("bytes", 0) / 2**20} if name == "checkpoint" else {}
    return _filled(sentence, {**more, **event, "said": str(event.get("message", "")).rstrip(".")})


class Lines:
    """The lines of a stream of events, no more of them than a person reads.

    Of `step`, and of one role's `loading`, at most one every `step_s` seconds, and of `sample` every `sample_s`, by the
    events' own times; the first, and a run's last step, always. Of rows that are set aside the first twenty.
    """

    def __init__(self, *, step_s: float = 5.0, sample_s: float = 60.0) -> None:
        self._every = {"step": step_s, "sample": sample_s, "loading": step_s}
        self._last: dict[str, float] = {}
        self._rows = 0

    def of(self, event: Event) -> str | None:
        """Return the line of the next event, None if it has none or one too many."""
        name = event.get("event", "")
        if name in self._every:
            what = f"{name} {event.get('role', '')}"
            last, t = self._last.get(what), float(event.get("t", 0))
            final = name == "step" and event.get("step", -1) + 1 == event.get("total_steps")
            if last is not None and t - last < self._every[name] and not final:
                return None
            self._last[what] = t
        if name == "quarantined":
            self._rows += 1
            if self._rows > _ROWS:
                more = "more rows are set aside; quarantine.jsonl in the run's folder lists them"
                return more if self._rows == _ROWS + 1 else None
        return line_of(event)


_ROWS = 20


def _step(event: Event) -> str:
    done, total = event.get("step", -1) + 1, event.get("total_steps", "?")
    pairs = [f"step {done}/{total}", f"epoch {event.get('epoch', '?')}", f"loss {number(event.get('loss')):.4f}"]
    pairs += [f"accept {number(event.get('acceptance')):.2f}", *_slots(event)]
    pairs += [f"lr {number(event.get('lr')):.1e}", f"norm {number(event.get('grad_norm')):.3g}"]
    since = event.get("since") or {}
    seconds, steps = since.get("s", 0), since.get("steps", 0)
    if seconds > 0:
        pairs += [f"tokens/s {since['tokens'] / seconds:.0f}", f"blocks/s {since['blocks'] / seconds:.1f}"]
        if steps and isinstance(total, int):
            pairs.append(f"eta {clock((total - done) * seconds / steps)}")
    if event.get("applied") is False:
        pairs.append("not applied")
    return " ".join(pairs)


def _slots(event: Event) -> list[str]:
    shares = slot_shares(event)
    return [f"slot-{slot} {shares[slot - 1]:.0%}" for slot in shown_slots(len(shares))]


def _sample(event: Event) -> str:
    pairs = []
    for role in event.get("roles", ()):
        busy = role.get("busy_share")
        pairs.append(f"{role['role'].replace(' ', '-')} busy {'?' if busy is None else f'{busy:.0%}'}")
        if role.get("waits_for") and role.get("wait_share"):
            pairs.append(f"waits {role['wait_share']:.0%} for {role['waits_for'].replace(' ', '-')}")
    pairs.append(f"queue {_word(event.get('queue_bytes'))}")
    if event.get("host_bytes") is not None:
        pairs.append(f"host {_word(event['host_bytes'])}")
    for gpu in event.get("gpus", ()):
        used = gpu.get("utilisation")
        pairs.append(f"{gpu['device']} {_word(gpu.get('memory_used_bytes'))}")
        pairs.append(f"util {'?' if used is None else f'{used:.0%}'}")
    return " ".join(pairs)


def _word(count: int | float | None) -> str:
    return "?" if count is None else size(count).replace(" ", "")


def _role(event: Event) -> str | None:
    if event.get("state") not in ("loading", "compiling", "ready"):
        return None
    return _filled("{role} on {device}: {state} ({s:.1f} s)", event)


def _held_out(event: Event) -> str:
    best = ", the best so far" if event.get("best") is True else ""
    text = "held out after step {steps:,}: loss {loss:.4f} accept {acceptance:.2f}"
    return " ".join([_filled(text, event), *_slots(event)]) + best


def _evaluated(event: Event) -> str:
    best = ", the best so far" if event.get("best") is True else ""
    estimate = "" if event.get("estimate") is None else "; training sees {estimate:.2f}"
    text = "true acceptance after step {steps:,}: {tau:.2f}, {tau_pooled:.2f} pooled" + estimate
    return _filled(text + f" ({_many(event, 'prompts', 'prompt')}, {{s:.1f}} s)", event) + best


def _evaluation_skipped(event: Event) -> str:
    why = "that after step {busy_with:,} is under way"
    if event.get("busy_with") is None:
        why = "its checkpoint is gone"
    elif event["busy_with"] == event.get("steps"):
        why = "the run was asked to stop while it was decoded"
    return _filled("no true acceptance after step {steps:,}: " + why, event)


def _rejected(event: Event) -> str:
    what = {"loss": "loss", "grad_norm": "gradient norm"}.get(event.get("rule", ""), "loss or gradient norm")
    value, limit = number(event.get(event.get("rule", ""))), number(event.get("limit"))
    why = f"{value:.4g} is over {limit:.4g} (see guard.spike)" if math.isfinite(value) else f"{value} is not finite"
    return f"step {event.get('step', '?')} was not applied: {what} {why}; its rows are in quarantine.jsonl"


def _replica_failed(event: Event) -> str:
    then = "; it is restarted, restarts left: {restarts_left}" if event.get("restarted") else "; it stays out"
    return _filled("{said}" + then, {**event, "said": str(event.get("message", "")).rstrip(".")})


def _on_end(event: Event) -> str | None:
    return event.get("message")


def _target_path(event: Event) -> str:
    who, how = _filled("{role} on {device}", event), [word for word in ("compiled", "fp8") if event.get(word)]
    how.append(f"attention: {event.get('attention', '?')}")
    if event.get("path") == "plain":
        return f"WARNING: {who} runs transformers' own forward and not the fast path: {event.get('reason', '?')}"
    return f"{who} runs on the fast path ({', '.join(how)})"


def _recompile(event: Event) -> str:
    return f"a step did not fit what was compiled and ran without: {str(event.get('guard', ''))[:200]}"


def _plan(event: Event) -> str:
    text = (
        "plan samples {samples} tokens {tokens} batches {batches} ({layout}) padding {padding_share:.1%} steps {steps}"
    )
    return _filled(text, event)


def _started(event: Event) -> str:
    return f"run {(event.get('settings') or {}).get('run_dir', '?')} started"


def _trained(event: Event) -> str:
    trained = f"trained {_many(event, 'train_steps', 'step')} in "
    return _filled(trained + "{train_s:.1f} s; the drafter is in {drafter}", event)


_MADE: dict[str, Callable[[Event], str | None]] = {
    "started": _started,
    "plan": _plan,
    "role": _role,
    "step": _step,
    "sample": _sample,
    "rejected": _rejected,
    "held_out": _held_out,
    "evaluated": _evaluated,
    "evaluation_skipped": _evaluation_skipped,
    "replica_failed": _replica_failed,
    "target_path": _target_path,
    "recompile": _recompile,
    "on_end": _on_end,
    "trained": _trained,
}


class _Missing:
    """Stands in for a key that an event lacks, or a value of another kind than its format."""

    def __format__(self, how: str) -> str:
        return "?"


class _Given(dict[str, Any]):
    def __missing__(self, key: str) -> _Missing:
        return _Missing()


def _filled(sentence: str, values: Mapping[str, Any]) -> str:
    given = {key: _Missing() if value is None else value for key, value in values.items()}
    # Numbers that are not finite may still be strings, which take no number's format.
    given |= {key: float(value) for key, value in values.items() if value in ("nan", "inf", "-inf")}
    return sentence.format_map(_Given(given))


def _many(event: Event, key: str, what: str) -> str:
    count = event.get(key)
    return many(count, what) if isinstance(count, int) else f"? {what}s"


def number(value: Any) -> float:
    """Return a number of an event as a float: nan where it is missing."""
    return math.nan if value is None else float(value)


def slot_shares(event: Event) -> list[float]:
    """Return the share of blocks whose slots 1..k were all right, for every k; of those that have labels there."""
    counts = zip(event.get("accepted_K") or (), event.get("available_K") or (), strict=False)
    return [right / max(of, 1) for right, of in counts]


def shown_slots(count: int) -> list[int]:
    """Return those of so many slots that a person is shown: the first, the middle and the last."""
    return sorted({1, (count + 1) // 2, count}) if count else []


def size(count: int | float) -> str:
    """Return bytes in the unit that makes a short number."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def clock(seconds: int | float) -> str:
    """Return a length of time as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
