"""The evaluator's part in a run: a whole target and a drafter of its own, which decode held-out prompts meanwhile."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.drafter import find_drafter
from paceline.config import RunSettings
from paceline.decode.engine import Engine
from paceline.decode.evaluate import Evaluation, acceptance
from paceline.decode.prompts import reach_for
from paceline.decode.requests import Request, taking
from paceline.decode.sampling import GREEDY
from paceline.decode.steps import Drafts
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import Drafter
from paceline.pipeline.channel import Closed
from paceline.pipeline.handover import Handover, Job
from paceline.pipeline.supervisor import Care, Role
from paceline.pipeline.watch import write_stacks
from paceline.records import Completion, Hung, RunError, StepReport
from paceline.runtime import pulse
from paceline.runtime.gate import Gate
from paceline.runtime.streams import Mark, follow, mark
from paceline.target.load import TargetFacts, fingerprint
from paceline.target.model import DecodingTarget
from paceline.train.loop import Dealt

_REHEARSED = 2  # new tokens: one comes from the prompt pass, one from a cycle


@dataclass(frozen=True, slots=True, eq=False)
class InTraining:
    """What a run evaluates while it trains, and who learns of it."""

    prompts: Sequence[Sequence[int]]
    handover: Handover
    by_held_out: bool  # training's own estimate is of held-out rows
    on_result: Callable[[Job, Evaluation, float], None]  # how long it took, in seconds
    tell: Callable[..., None]  # an event's name and values: `evaluator_failed`
    let_go: Callable[[int], None]  # of a state that will not be evaluated any more

    def noting(self, on_report: Callable[[StepReport], None], *, held_out: bool) -> Callable[[StepReport], None]:
        """Return `on_report` with a note of the counts, if they are those that the estimate is made of."""

        def both(report: StepReport) -> None:
            self.handover.note(report)
            on_report(report)

        return both if held_out == self.by_held_out else on_report

    def followed(self, stream: Iterable[Dealt]) -> Iterator[Dealt]:
        """Yield what a rank is dealt, and say behind it that no state will be handed over any more."""
        yield from stream
        self.handover.finish()


class Evaluator:
    """Decodes the prompts greedily with the drafter that is handed over; see TargetReplica for what a role is.

    All that it needs is made before it is ready: shapes, caches and graphs are fixed, and weights are copied into
    tensors that stay.
    """

    def __init__(
        self, settings: RunSettings, facts: TargetFacts, plan: InTraining, *, gate: Gate, stopping: Callable[[], bool]
    ) -> None:
        assert settings.evaluate.device is not None
        self.name, self.device, self.doing = "evaluator", settings.evaluate.device, ""
        self._settings, self._facts, self._plan = settings, facts, plan
        self._gate, self._stopping = gate, stopping
        # Where its stream has read the weights for the last time, and where another's has written them.
        self._idle: Mark | None = None
        self._taken: Mark | None = None
        self._new = settings.evaluate.max_new_tokens
        # Those of similar length enter together.
        self._order = sorted(range(len(plan.prompts)), key=lambda at: -len(plan.prompts[at]))

    def load(self) -> None:
        """Load the whole target and make room for the drafter."""
        self._revision = fingerprint(self._facts.folder)
        shape, numbers = self._settings.drafter, getattr(torch, self._settings.target.dtype)
        target = DecodingTarget(self._facts, shape.taps, dtype=numbers, device=self.device)
        does = self._facts.conventions
        tables = (target.model.get_input_embeddings().weight, target.model.get_output_embeddings().weight)
        ends = FrozenEnds(*tables, does.embed_scale, does.logit_cap)
        self._drafter = Drafter(shape, self._facts.hidden_size).to(self.device, numbers).eval().requires_grad_(False)
        for weight in self._drafter.parameters():
            weight.zero_()
        longest = max(map(len, self._plan.prompts))
        self._engine = Engine(
            target,
            GREEDY,
            rows=min(self._settings.evaluate.rows, len(self._plan.prompts)),
            slots=reach_for(longest + self._new),
            drafts=Drafts(self._drafter, ends),
            captured=target.device.type == "cuda",
            gate=self._gate,
        )

    def warm(self) -> dict[str, object]:
        """Rehearse the longest prompts, capture every cycle, and return what all roles must agree on."""
        self.doing = "rehearsing the longest prompts"
        rows = self._order[: self._settings.evaluate.rows]
        self._decode(rows, min(self._new, _REHEARSED))
        self.doing = "capturing cycles"
        self._engine.prepare()
        self.doing = ""
        return {
            "target revision": self._revision,
            "taps": self._settings.drafter.taps,
            "feature width": self._drafter.fc.in_features,
            "rope theta": self._facts.rope_theta,
        }

    def run(self) -> None:
        """Evaluate what is handed over until no more comes.

        Raises:
            Closed: the run stops; what is under way is left.
        """
        try:
            for job in self._plan.handover.jobs():
                pulse.goes_on()
                self._evaluate(job)
        finally:
            self._plan.handover.leave()

    def claim(self, steps: int) -> bool:
        """Return whether the state after `steps` steps is to be evaluated, in rank 0's thread; see Handover."""
        return self._plan.handover.claim(steps)

    def give(self, weights: Sequence[Tensor]) -> None:
        """Take a drafter's weights, in rank 0's thread, and begin."""
        self._plan.handover.give(lambda: self.take(weights))

    def stop(self) -> None:
        """Let it leave where it is."""
        self._plan.handover.stop()

    def lose(self, error: RunError, **more: Any) -> None:
        """Expect nothing of it any more, and tell why."""
        job = self._plan.handover.fail()
        if job is not None:
            self._plan.let_go(job.steps)
        told = {"role": self.name, "device": self.device, "doing": self.doing, "message": str(error)}
        self._plan.tell("evaluator_failed", **told, **more)

    def take(self, weights: Sequence[Tensor]) -> None:
        """Copy a drafter's weights; the copy is queued behind what their device does, and nobody waits for it."""
        # A copy runs on the sender's stream, or where that is a CPU on the receiver's, of the thread that is here.
        on = weights[0].device if weights[0].is_cuda else torch.device(self.device)
        with self._gate.work(), torch.no_grad():
            follow(self._idle, on)
            for own, given in zip(self._drafter.parameters(), weights, strict=True):
                own.copy_(given, non_blocking=own.is_cuda and given.is_cuda)
            self._taken = mark(on)

    def _evaluate(self, job: Job) -> None:
        self.doing = f"evaluating the drafter after step {job.steps}"
        if job.saved:
            found = find_drafter(Path(self._settings.run_dir), str(job.steps)).weights()
            self.take([found[name] for name, _ in self._drafter.named_parameters()])
        began, here = time.monotonic(), torch.device(self.device)
        follow(self._taken, here)
        done = self._decode(self._order, self._new)
        self._idle = mark(here)
        seconds = time.monotonic() - began
        self._plan.on_result(job, acceptance(done, self._settings.drafter.block_size), seconds)
        self.doing = ""

    def _decode(self, order: Sequence[int], new: int) -> list[Completion]:
        prompts = self._plan.prompts
        requests = taking(Request(at, prompts[at], new) for at in order)
        found = {int(request.key): done for request, done in self._engine.serve(requests, self._between)}
        return [found[at] for at in sorted(found)]

    def _between(self) -> None:
        pulse.goes_on()
        self._plan.handover.look()
        if self._stopping():
            raise Closed


class EvaluatorCare:
    """Lets a run go on without its evaluator (see supervisor.Care); what becomes of other roles `others` decide."""

    def __init__(self, evaluator: Evaluator, others: Care, stacks: Path) -> None:
        """`stacks` is the file that gets all threads' when it hangs."""
        self._evaluator, self._others, self._stacks = evaluator, others, stacks

    def failed(self, role: Role, error: RunError) -> Role | None:
        """Tell that the evaluator is lost, which nobody replaces."""
        if role is not self._evaluator:
            return self._others.failed(role, error)
        self._evaluator.lose(error)
        return None

    def hung(self, role: Role, error: Hung) -> None:
        """Tell that the evaluator is lost; its thread is left alone."""
        if role is not self._evaluator:
            self._others.hung(role, error)
            return
        write_stacks(self._stacks)
        self._evaluator.lose(error, stacks=str(self._stacks))

    def stalled(self, error: Hung) -> None:
        """All roles wait."""
        self._others.stalled(error)
