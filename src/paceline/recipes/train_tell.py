"""What `paceline train` tells while it works: events, of which the console is made, and the sums of its summary."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.best import Best
from paceline.checkpoint.store import Saved, resume_command
from paceline.config import RunSettings
from paceline.data.set_aside import BadRow
from paceline.observe.events import EventLog
from paceline.observe.quarantine import Quarantine
from paceline.pipeline.supervisor import RoleState
from paceline.recipes.train_stages import Stages
from paceline.records import StepReport


@dataclass(slots=True)
class Totals:
    """Sums over the whole run, kept from one part of it to the next."""

    steps: int = 0
    blocks: int = 0
    anchor_slots: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    rejected_steps: int = 0
    loss: float = float("nan")  # of the last step that was applied
    held_out_loss: float | None = None  # the last one
    held_out_steps: int | None = None  # after how many steps that was
    seconds: float = 0.0  # of the parts before this one

    def add(self, report: StepReport) -> None:
        """Add a step."""
        self.steps += 1
        self.blocks += report.blocks
        self.anchor_slots += report.anchor_slots
        self.tokens += report.tokens
        self.padded_tokens += report.padded_tokens
        if report.applied:
            self.loss = report.loss
        else:
            self.rejected_steps += 1


@dataclass(slots=True)
class Since:
    """Sums over the steps since the last `step` event."""

    steps: int = 0
    s: float = 0.0
    tokens: int = 0
    padded_tokens: int = 0
    blocks: int = 0
    flops: float = 0.0

    def add(self, report: StepReport, flops: float) -> None:
        """Add a step."""
        self.steps += 1
        self.tokens += report.tokens
        self.padded_tokens += report.padded_tokens
        self.blocks += report.blocks
        self.flops += flops


class Teller:
    """Passes on what happens in a run. `totals` are those of the parts before this one, if it goes on."""

    def __init__(
        self,
        settings: RunSettings,
        total_steps: int,
        totals: Totals,
        *,
        flops: Callable[[StepReport], float],
        events: EventLog,
        quarantine: Quarantine,
        stages: Stages,
        best: Best,
    ) -> None:
        """`flops` returns the operations of a step's useful work."""
        self.totals, self._best, self._flops = totals, best, flops
        self._saved = totals.steps or None  # steps of the last checkpoint
        self._settings, self._total_steps = settings, total_steps
        self._events, self._quarantine, self._stages = events, quarantine, stages
        self._began = self._last = time.monotonic()  # of this part; of its last `step` event
        self._since = Since()

    def on_state(self, report: RoleState) -> None:
        """A role's state changed."""
        role, state, s = report.role, report.state, report.seconds
        self._events.write("role", role=role.name, device=role.device, state=state, s=s)
        self._stages.on_state(role.name, state)

    def on_ready(self) -> None:
        """All roles are ready."""
        self._stages.ready()
        self._last = time.monotonic()

    def on_step(self, report: StepReport) -> None:
        """An optimizer step is done."""
        self.totals.add(report)
        self._since.add(report, self._flops(report))
        last = report.step + 1 == self._total_steps
        if report.step % self._settings.train.log_every == 0 or last:
            now = time.monotonic()
            since, self._since = self._since, Since()
            since.s, self._last = round(now - self._last, 6), now
            values = {name: getattr(report, name) for name in report.__slots__}
            more = {"loss": report.loss, "acceptance": report.acceptance, "total_steps": self._total_steps}
            self._events.write("step", **values, **more, since=asdict(since))

    def on_sample(self, **values: Any) -> None:
        """Some seconds have passed."""
        self._events.write("sample", **values)

    def on_held_out(self, report: StepReport) -> None:
        """A held-out loss is known."""
        steps, loss, accept = report.step + 1, report.loss, report.acceptance
        self.totals.held_out_loss, self.totals.held_out_steps = loss, steps
        best = self._best.by == "loss" and self._best.offer(steps, loss)
        counts = {name: getattr(report, name) for name in ("loss_sum", "weight_sum", "accepted_K", "available_K")}
        more = {"blocks": report.blocks, "tokens": report.tokens, "best": best}
        self._events.write("held_out", steps=steps, loss=loss, acceptance=accept, **counts, **more)

    def on_bad_row(self, bad: BadRow) -> None:
        """A row of a dataset was set aside."""
        place = {"dataset": str(bad.dataset), "fingerprint": bad.fingerprint, "row": bad.row}
        for file in (self._quarantine, self._events):
            file.write("quarantined", reason=bad.reason, **place, detail=bad.detail)

    def on_whole(self, shards: int) -> None:
        """Every shard of the data was compared with its checksum."""
        self._events.write("checksums", shards=shards)

    def on_recompile(self, guard: str) -> None:
        """A step did not fit what was compiled."""
        self._events.write("recompile", guard=guard)

    def on_save(self, event: str, **values: Any) -> None:
        """A checkpoint was written, or not."""
        if event == "checkpoint":
            self._saved = values["steps"]
        self._events.write(event, **values)

    def on_rolled_back(self, steps: int, to: Saved) -> None:
        """Too many steps were rejected, and the run went back to a checkpoint."""
        self._events.write("rolled_back", steps=steps, to=to.steps, checkpoint=str(to.folder))

    def on_replica(self, event: str, **values: Any) -> None:
        """A replica failed or hangs, or split a micro-batch."""
        self._events.write(event, **values)

    def on_asked(self, why: str) -> None:
        """The run was asked to stop."""
        self._events.write("stopping", message=why)

    def on_late(self, text: str) -> None:
        """Stopping took too long."""
        self._events.write("interrupted", message=text)

    def state(self) -> dict[str, Any]:
        """Return the sums so far as plain data, for a checkpoint."""
        return {**asdict(self.totals), "seconds": self.seconds()}

    def seconds(self) -> float:
        """Return how long the run took so far, in all its parts."""
        return round(self.totals.seconds + time.monotonic() - self._began, 1)

    def stopped(self) -> str:
        """Return the sentence for a run that was asked to stop: how far it is, and how to go on."""
        done, run = self.totals.steps, Path(self._settings.run_dir)
        if self._saved == done:
            state = ", saved"
        elif self._saved is not None:
            state = f", the last checkpoint is of step {self._saved:,}"
        else:
            state = ", without a checkpoint"
        return f"after step {done:,} of {self._total_steps:,}{state}. Go on with `{resume_command(run)}`."

    def summary(self) -> dict[str, Any]:
        """Return the run's sums in the summary's words."""
        totals = self.totals
        return {
            "train_steps": totals.steps,
            "rejected_steps": totals.rejected_steps,
            "loss": totals.loss,
            "real_anchor_share": totals.blocks / max(totals.anchor_slots, 1),
            "padding_share": 1 - totals.tokens / max(totals.padded_tokens, 1),
            "held_out_loss": totals.held_out_loss,
            "best": self._best.state(),
        }


def known_rows(quarantine: Quarantine) -> list[tuple[str, int]]:
    """Return which rows of which datasets earlier parts of a run have set aside."""
    told = [entry for entry in quarantine.entries() if entry.get("event") == "quarantined"]
    return [(entry["fingerprint"], entry["row"]) for entry in told if {"fingerprint", "row"} <= entry.keys()]
