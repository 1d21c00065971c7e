"""A drafter rank's part in a run: build the drafter, rehearse the one shape, train."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from paceline.config import DrafterSettings, TrainSettings
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import Drafter
from paceline.records import RunError, StepReport
from paceline.runtime.compiling import Policy
from paceline.runtime.gate import Gate
from paceline.train.loop import Dealt, train_loop
from paceline.train.memory import advice, step_memory
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
        """Draw the initial weights and load the target's embedding and head.

        Raises:
            RunError: the device has too little memory for them.
        """
        ends = self._load_ends()
        self._vocab_size, self._tied = len(ends.head_VH), ends.head_VH is ends.embed_VH
        with self._explaining_memory(held=0):
            self.drafter = Drafter(self._drafter, self._hidden_size).initialise(self._train.seed).to(self.device)
            self._step = DrafterStep(self.drafter, ends, self._train, policy=self._policy, alarm=self._alarm)

    def warm(self) -> dict[str, object]:
        """Compile, rehearse and capture the step at the one shape and return what the targets must agree with.

        Raises:
            RunError: the device has too little memory for the largest micro-batch; what to lower is said.
        """
        self.doing = f"rehearsing {self._train.context_slots} context slots and {self._train.anchor_slots} anchors"
        there = step_memory(
            self._drafter, self._train, hidden_size=self._hidden_size, vocab_size=self._vocab_size, tied=self._tied
        )
        held = there.weights + there.gradients + there.working_copy + there.ends + there.buffers
        with self._explaining_memory(held=held):
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

    @contextmanager
    def _explaining_memory(self, *, held: int) -> Iterator[None]:
        """Say what to lower if the block runs out of memory on a device where this rank holds `held` bytes already."""
        # Asked before: afterwards, what the failed step still holds could not be told from what others hold.
        room, total = _room(self.device)
        try:
            yield
        except RuntimeError as error:
            if not _ran_out(error):
                raise
            cause = advice(
                self._drafter,
                self._train,
                hidden_size=self._hidden_size,
                vocab_size=self._vocab_size,
                tied=self._tied,
                policy=self._policy,
                room=room + held,
                total=total,
            )
            raise RunError(f"out of memory. {cause}") from error

    def _watched(self) -> Iterable[Dealt]:
        for batch, closing in self._source:
            if batch is not None:
                self.doing = f"step {batch.tokens.step}, micro-batch {batch.tokens.seq}"
            yield batch, closing


def _ran_out(error: BaseException | None) -> bool:
    """Return whether an error is one of memory or came while one was handled, as when a capture is broken off."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error is not None


def _room(device: str) -> tuple[int, int]:
    """Return the bytes of a device that can still be allocated, and all it has; zeros where it is no GPU."""
    if torch.device(device).type != "cuda":
        return 0, 0
    free, total = torch.cuda.mem_get_info(device)
    # What this process has reserved and does not use is given out again.
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), total
