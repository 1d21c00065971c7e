"""A drafter rank's part in a run: build the drafter, rehearse the one shape, train."""

from collections.abc import Callable, Iterable

import torch

from paceline.config import DrafterSettings, TrainSettings
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import Drafter
from paceline.records import StepReport
from paceline.runtime.compiling import Policy
from paceline.runtime.gate import Gate
from paceline.train.loop import Dealt, train_loop
from paceline.train.ranks import Meeting
from paceline.train.step import DrafterStep


class DrafterRank:
    """The drafter that is trained on one device. `doing` says what it works on, for a message if it fails."""

    def __init__(
        self,
        rank: int,
        device: str,
        *,
        drafter: DrafterSettings,
        train: TrainSettings,
        hidden_size: int,
        target_revision: str,
        load_ends: Callable[[], FrozenEnds],
        source: Iterable[Dealt],
        meeting: Meeting,
        total_steps: int,
        on_step: Callable[[StepReport], None],
        policy: Policy,
        gate: Gate,
        alarm: Callable[[str], None],
    ) -> None:
        self.name, self.device, self.doing = f"drafter rank {rank}", device, ""
        self._rank, self._meeting = rank, meeting
        self._drafter, self._train, self._hidden_size = drafter, train, hidden_size
        self._target_revision, self._load_ends = target_revision, load_ends
        self._source, self._total_steps, self._on_step = source, total_steps, on_step
        self._policy, self._gate, self._alarm = policy, gate, alarm

    def load(self) -> None:
        """Draw the initial weights and load the target's embedding and head."""
        self.drafter = Drafter(self._drafter, self._hidden_size).initialise(self._train.seed).to(self.device)
        self._step = DrafterStep(self.drafter, self._load_ends(), self._train, policy=self._policy, alarm=self._alarm)

    def warm(self) -> dict[str, object]:
        """Compile, rehearse and capture the step at the one shape and return what the targets must agree with."""
        self.doing = f"rehearsing {self._train.context_slots} context slots and {self._train.anchor_slots} anchors"
        self._step.warm()
        self.doing = ""
        features_CD = self._step.buffers.features_CD
        return {
            "target revision": self._target_revision,
            "taps": self._drafter.taps,
            "feature width": features_CD.shape[1],
            "feature dtype": str(features_CD.dtype),
            "rope theta": self._drafter.rope_theta,
        }

    def run(self) -> None:
        """Train until the stream ends."""
        train_loop(
            self._step,
            self._watched(),
            total_steps=self._total_steps,
            on_step=self._on_step if self._rank == 0 else lambda report: None,
            meet=lambda step: self._meeting.reduce(self._rank, step.shared()),
            work=self._gate.work,
        )
        if torch.device(self.device).type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def recompiles(self) -> int:
        """Calls of the step that torch would have compiled again after warm-up."""
        return self._step.recompiles

    def _watched(self) -> Iterable[Dealt]:
        for batch, closing in self._source:
            if batch is not None:
                self.doing = f"step {batch.tokens.step}, micro-batch {batch.tokens.seq}"
            yield batch, closing
