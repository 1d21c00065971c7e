"""What `paceline train` tells while it works: events, console lines, and the sums of its summary."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.best import Best
from paceline.checkpoint.store import Saved, resume_command
from paceline.config import RunSettings
from paceline.data.set_aside import BadRow
from paceline.observe.console import Console, Tick
from paceline.observe.events import EventLog
from paceline.observe.quarantine import Quarantine
from paceline.pipeline.supervisor import RoleState
from paceline.records import StepReport

_SAVING = {
    "checkpoint": "saved after step {steps:,} ({mib:,.1f} MiB in {write_s:.1f} s; the step waited {copy_s:.2f} s)",
    "checkpoint_failed": "saving after step {steps:,} failed, the last checkpoint is as it was: {message}",
    "checkpoint_skipped": "not saved after step {steps:,}: the save before it is still under way",
    "disk_full": "{message} The run waits until there is.",
}
_REPLICA = {
    "restarted": "{message}; it is restarted, restarts left: {restarts_left}",
    "left_out": "{message}; it stays out",
    "replica_hung": "{message}; it is left alone, and all stacks are in {stacks}",
    "batch_split": "{role} on {device} ran out of memory at micro-batch {seq} ({tokens:,} tokens), which it computes "
    "again in {parts} part(s)",
}
_BAD_ROWS_SHOWN = 20  # on the console


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


class Teller:
    """Passes on what happens in a run. `totals` are those of the parts before this one, if it goes on."""

    def __init__(
        self,
        settings: RunSettings,
        total_steps: int,
        totals: Totals,
        *,
        events: EventLog,
        quarantine: Quarantine,
        console: Console,
        tick: Tick,
        best: Best,
    ) -> None:
        self.totals, self._best = totals, best
        self._saved = totals.steps or None  # steps of the last checkpoint
        self._settings, self._total_steps = settings, total_steps
        self._events, self._quarantine, self._console, self._tick = events, quarantine, console, tick
        self._bad_rows = 0  # in this part
        self._began = time.monotonic()
        if totals.steps:
            tick(totals.steps)

    def on_state(self, report: RoleState) -> None:
        """A role's state changed."""
        role, state, s = report.role, report.state, report.seconds
        self._events.write("role", role=role.name, device=role.device, state=state, s=s)
        if state in ("loading", "compiling", "ready"):
            self._console.line(f"  {role.name} on {role.device}: {state} ({s:.1f} s)")

    def on_step(self, report: StepReport) -> None:
        """An optimizer step is done."""
        self.totals.add(report)
        self._tick(report.step + 1, note=f"loss {report.loss:.3f} accept {report.acceptance:.2f} lr {report.lr:.1e}")
        last = report.step + 1 == self._total_steps
        if report.step % self._settings.train.log_every == 0 or last:
            values = {name: getattr(report, name) for name in report.__slots__}
            more = {"loss": report.loss, "acceptance": report.acceptance, "total_steps": self._total_steps}
            self._events.write("step", **values, **more)

    def on_held_out(self, report: StepReport) -> None:
        """A held-out loss is known."""
        steps, loss, accept = report.step + 1, report.loss, report.acceptance
        self.totals.held_out_loss, self.totals.held_out_steps = loss, steps
        best = self._best.offer(steps, loss)
        counts = {name: getattr(report, name) for name in ("loss_sum", "weight_sum", "accepted_K", "available_K")}
        more = {"blocks": report.blocks, "tokens": report.tokens, "best": best}
        self._events.write("held_out", steps=steps, loss=loss, acceptance=accept, **counts, **more)
        best_text = ", the best so far" if best else ""
        self._console.line(f"  held out after step {steps:,}: loss {loss:.4f} accept {accept:.2f}{best_text}")

    def on_bad_row(self, bad: BadRow) -> None:
        """A row of a dataset was set aside."""
        place = {"dataset": str(bad.dataset), "fingerprint": bad.fingerprint, "row": bad.row}
        for file in (self._quarantine, self._events):
            file.write("quarantined", reason=bad.reason, **place, detail=bad.detail)
        self._bad_rows += 1
        if self._bad_rows <= _BAD_ROWS_SHOWN:
            self._console.line(f"  row {bad.row:,} of {bad.dataset} is set aside: it {bad.detail}")
        elif self._bad_rows == _BAD_ROWS_SHOWN + 1:
            self._console.line(f"  more rows are set aside; quarantine.jsonl in {self._settings.run_dir} lists them")

    def on_whole(self, shards: int) -> None:
        """Every shard of the data was compared with its checksum."""
        self._events.write("checksums", shards=shards)

    def on_recompile(self, guard: str) -> None:
        """A step did not fit what was compiled."""
        self._events.write("recompile", guard=guard)
        self._console.line(f"  a step did not fit what was compiled and ran without: {guard[:200]}")

    def on_save(self, event: str, **values: Any) -> None:
        """A checkpoint was written, or not."""
        if event == "checkpoint":
            self._saved = values["steps"]
        self._events.write(event, **values)
        self._console.line(f"  {_SAVING[event].format(mib=values.get('bytes', 0) / 2**20, **values)}")

    def on_rolled_back(self, steps: int, to: Saved) -> None:
        """Too many steps were rejected, and the run went back to a checkpoint."""
        self._saved = to.steps
        self._events.write("rolled_back", steps=steps, to=to.steps, checkpoint=str(to.folder))
        self._console.line(
            f"  too many steps were rejected: after step {steps:,} the drafter is that of step {to.steps:,} again; the "
            f"data goes on from where it is"
        )

    def on_replica(self, event: str, **values: Any) -> None:
        """A replica failed or hangs, or split a micro-batch."""
        self._events.write(event, **values)
        then = "restarted" if values.get("restarted") else "left_out"
        said = {**values, "message": values.get("message", "").rstrip(".")}
        self._console.line(f"  {_REPLICA.get(event) or _REPLICA[then]}".format(**said))

    def on_asked(self, why: str) -> None:
        """The run was asked to stop."""
        self._events.write("stopping", message=why)
        self._console.line(f"  {why}: stopping, this step is finished and saved; SIGTERM or Ctrl-C again stops at once")

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
