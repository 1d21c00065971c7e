"""What `paceline train` does with true acceptance: who evaluates, what is told of it, and which state is the best."""

from functools import partial
from pathlib import Path
from typing import Any

from paceline.checkpoint.best import Best
from paceline.checkpoint.saver import Saver
from paceline.checkpoint.store import Saved, resume_command, saved_steps
from paceline.config import RunSettings
from paceline.decode.evaluate import Evaluation
from paceline.observe.events import EventLog
from paceline.pipeline.evaluator import InTraining
from paceline.pipeline.handover import Forced, Handover, Job
from paceline.recipes.train_inputs import Inputs


class TrueAcceptance:
    """The evaluations of a run, where it has any (evaluate.device)."""

    def __init__(
        self,
        settings: RunSettings,
        inputs: Inputs,
        start: Saved | None,
        best: Best,
        *,
        events: EventLog,
    ) -> None:
        self._settings, self._inputs, self._best = settings, inputs, best
        self._events = events
        before = (start.state.get("evaluation") if start else None) or {}
        self._last: dict[str, Any] | None = before.get("last")
        self._failure: str | None = None
        self._handover: Handover | None = None
        if inputs.prompts is not None:
            self._handover = Handover(
                inputs.total_steps,
                due=partial(settings.evaluate.tau_due, total_steps=inputs.total_steps),
                held_out=inputs.held_out is not None,
                skipped=self._on_skipped,
                steps_done=start.steps if start else 0,
                state=self._still_there(start, before["handover"]) if before else None,
            )

    def plan(self, saver: Saver) -> InTraining | None:
        """Return what the roles need for it, or None where there is no evaluator."""
        if self._handover is None or self._inputs.prompts is None:
            return None
        if pending := self._handover.state()["pending"]:
            saver.adopt(pending["steps"])
        return InTraining(
            self._inputs.prompts.ids,
            self._handover,
            by_held_out=self._inputs.held_out is not None,
            on_result=partial(self._on_result, saver),
            tell=self._on_failed,
            let_go=saver.let_go,
        )

    def state(self) -> dict[str, Any] | None:
        """Return what a checkpoint says of it."""
        if self._handover is None:
            return None
        handed = self._handover.state()
        return {"last": self._last, "pending": handed["pending"], "handover": handed}

    def summary(self) -> dict[str, Any]:
        """Return the last true acceptance, what decided which state is the best, and why there was no more of it."""
        if self._handover is not None and (left := self._handover.state()["pending"]):
            self._on_skipped(left["steps"], left["steps"])  # a stop came while the last one was decoded
        last = self._last or {"steps": None, "tau": None}
        by = self._settings.evaluate.best_by
        return {"tau": last["tau"], "tau_steps": last["steps"], "best_by": by, "evaluator_failed": self._failure}

    def _still_there(self, start: Saved | None, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state without what was to be evaluated if its checkpoint is gone, and say so."""
        pending = state["pending"]
        if pending and start and pending["steps"] not in saved_steps(start.folder.parents[1]):
            self._on_skipped(pending["steps"], None)
            return {**state, "pending": None}
        return state

    def _on_skipped(self, steps: int, busy_with: int | None) -> None:
        self._events.write("evaluation_skipped", steps=steps, busy_with=busy_with)

    def _on_failed(self, event: str, **values: Any) -> None:
        self._failure = values["message"]
        best = self._best.state()
        stays = f"the best stays that after step {best['steps']:,}" if best else "no state is the best"
        then = (
            f"training goes on without true acceptance, and {stays}. A run that is resumed has an evaluator again "
            f"({resume_command(Path(self._settings.run_dir))})"
        )
        self._events.write(event, **values, then=then)

    def _on_result(self, saver: Saver, job: Job, found: Evaluation, seconds: float) -> None:
        best = self._chosen(saver, job.steps, found.tau)
        self._last = {"steps": job.steps, "tau": found.tau}
        self._events.write(
            "evaluated",
            steps=job.steps,
            tau=found.tau,
            tau_pooled=found.tau_pooled,
            slot_acceptance_K=found.per_slot_acceptance[1:],
            prompts=found.prompts,
            tokens=found.tokens,
            s=round(seconds, 3),
            best=best,
            estimate=job.forced.acceptance if job.forced else None,
            estimate_slot_acceptance_K=job.forced.slot_acceptance_K if job.forced else None,
        )
        if job.forced is not None:
            self._compare(job, found.tau, job.forced)

    def _chosen(self, saver: Saver, steps: int, tau: float) -> bool:
        """Let a state be the best if it is and is saved; return whether."""
        if not saver.has(steps) or not self._best.offer(steps, tau):
            saver.let_go(steps)
            return False
        try:
            saver.choose(steps)
        except OSError as error:
            self._best.failed(steps)
            saver.let_go(steps)
            self._events.write("best_not_kept", steps=steps, message=error.strerror)
            return False
        return True

    def _compare(self, job: Job, tau: float, forced: Forced) -> None:
        """Tell if true acceptance falls too far short of training's: then their conventions may differ."""
        share = self._settings.evaluate.disagreement
        limit = (1 - share) * forced.acceptance
        if tau >= limit:
            return
        seen = (
            "on held-out rows"
            if self._inputs.held_out is not None
            else "on the rows of the latest steps, which it may know by heart (evaluate.held_out compares better)"
        )
        message = (
            f"The drafter after step {job.steps:,} is accepted for {tau:.2f} tokens a cycle where training sees "
            f"{forced.acceptance:.2f} {seen}: {1 - tau / forced.acceptance:.0%} less, and evaluate.disagreement allows "
            f"{share:.0%}. Decoding may not follow training's conventions (taps, rotary base, mask token, template), "
            f"or the prompts are unlike the data: look with `paceline evaluate {self._settings.run_dir} PROMPTS "
            "--checkpoint latest --probe`."
        )
        self._events.write(
            "disagreement", steps=job.steps, tau=tau, estimate=forced.acceptance, limit=limit, message=message
        )
