"""A drafter rank's part in a run: build the drafter, rehearse the one shape, train."""

import gc
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from paceline.config import DrafterSettings, TrainSettings
from paceline.drafter.ends import FrozenEnds
from paceline.drafter.model import Drafter
from paceline.records import Rejection, RunError, StepReport, causes
from paceline.runtime.compiling import Policy
from paceline.runtime.gate import Gate
from paceline.train.guard import Guard
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
        guard: Guard,
        on_rejected: Callable[[Rejection], None],
        roll_back: Callable[[int, DrafterStep, Guard, int], None],
        policy: Policy,
        gate: Gate,
        alarm: Callable[[str], None],
        fill: Callable[[Drafter], Drafter] | None = None,
        on_warm: Callable[[DrafterStep], None] = lambda step: None,
        stopping: Callable[[], bool] = lambda: False,
        between_steps: Callable[[DrafterStep, int, bool], None] = lambda step, steps, last: None,
        looks: Callable[[int], bool] = lambda steps: False,
        on_held_out: Callable[[StepReport], None] = lambda report: None,
        steps_done: int = 0,
    ) -> None:
        """`guard` decides which updates are applied; when too many were not, `roll_back` puts an older state in place.

        `fill` gives the drafter its first weights; without it they are drawn. `on_warm` may put a saved state in
        place, that after `steps_done` steps. Rank 0 asks `stopping` for all ranks, and between two of its steps calls
        `between_steps` with how many are done and whether all ranks stop here. `looks`, `on_held_out`: see train_loop.
        """
        self.name, self.device, self.doing = f"drafter rank {rank}", device, ""
        self._rank, self._meeting = rank, meeting
        self._drafter, self._train, self._hidden_size = drafter, train, hidden_size
        self._target_revision, self._load_ends = target_revision, load_ends
        self._source, self._total_steps, self._on_step = source, total_steps, on_step
        self._guard, self._on_rejected, self._roll_back = guard, on_rejected, roll_back
        self._policy, self._gate, self._alarm = policy, gate, alarm
        self._on_warm, self._stopping, self._between_steps = on_warm, stopping, between_steps
        self._looks, self._on_held_out = looks, on_held_out
        # How many steps are done in weights, moments and guard; None while an update or a roll-back may be under way.
        self.whole_steps: int | None = steps_done
        self._fill = fill or (lambda drafter: drafter.initialise(train.seed))

    def load(self) -> None:
        """Draw the initial weights, or take them over, and load the target's embedding and head.

        Raises:
            RunError: the device has too little memory for them.
        """
        ends = self._load_ends()
        self._vocab_size, self._tied = len(ends.head_VH), ends.head_VH is ends.embed_VH
        with self._explaining_memory(self._room_without_it):
            self.drafter = self._fill(Drafter(self._drafter, self._hidden_size)).to(self.device)
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
        self._held = there.stays
        # Asked before, while nobody else works: afterwards, what the failed rehearsal still holds, broken captures too,
        # could not be told from what others hold.
        room, total = _room(self.device)
        with self._explaining_memory(lambda error: (room + self._held, total)):
            self._step.warm()
        self.doing = ""
        self._on_warm(self._step)  # captured graphs hold the tensors, so a state goes into them, and only now
        features_CD = self._step.buffers.features_CD
        return {
            "target revision": self._target_revision,
            "taps": self._drafter.taps,
            "feature width": features_CD.shape[1],
            "feature dtype": str(features_CD.dtype),
            "rope theta": self._drafter.rope_theta,
        }

    def run(self) -> None:
        """Train until the stream ends or all ranks stop.

        Raises:
            RunError: the device has too little memory, as when others on it have grown; what to lower is said.
        """
        with self._explaining_memory(self._room_with_it):
            self._run()

    def _run(self) -> None:
        first = self._rank == 0
        train_loop(
            self._step,
            self._watched(),
            total_steps=self._total_steps,
            on_step=self._on_step if first else lambda report: None,
            guard=self._guard,
            rank=self._rank,
            on_rejected=self._on_rejected,
            roll_back=self._told_back,
            meet=self._meet,
            between_steps=self._told_between if first else lambda steps, last: None,
            on_whole=self._told_whole,
            work=self._gate.work,
            looks=self._looks,
            on_held_out=self._on_held_out if first else lambda report: None,
        )
        if torch.device(self.device).type == "cuda":
            torch.cuda.synchronize(self.device)

    def _meet(self, steps: int) -> bool:
        last = self._stopping() and steps < self._total_steps  # the run's own end is no stop
        last = self._meeting.reduce(self._rank, self._step.shared(), last=last)
        if steps != self.whole_steps:  # else it was about held-out rows, which nothing is learnt from
            self.doing, self.whole_steps = f"the update of step {steps - 1}", None
        return last

    def _told_whole(self, steps: int) -> None:
        self.whole_steps = steps

    def _told_back(self, steps: int) -> None:
        self.doing = f"going back to a checkpoint after step {steps}"
        self._roll_back(self._rank, self._step, self._guard, steps)
        self.doing = ""

    def _told_between(self, steps: int, last: bool) -> None:
        self.doing = f"saving after step {steps}"
        self._between_steps(self._step, steps, last)
        self.doing = ""

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return what outlives a step; whole only while `whole_steps` is a number."""
        return self._step.state()

    @property
    def recompiles(self) -> int:
        """Calls of the step that torch would have compiled again after warm-up."""
        return self._step.recompiles

    @contextmanager
    def _explaining_memory(self, room_of: Callable[[BaseException], tuple[int, int]]) -> Iterator[None]:
        """Say what to lower if the block runs out of memory.

        `room_of` then returns what this rank may take of its device and what the device has, in bytes.
        """
        try:
            yield
        except RuntimeError as error:
            if not _ran_out(error):
                raise
            room, total = room_of(error)
            cause = advice(
                self._drafter,
                self._train,
                hidden_size=self._hidden_size,
                vocab_size=self._vocab_size,
                tied=self._tied,
                policy=self._policy,
                room=room,
                total=total,
            )
            raise RunError(f"out of memory. {cause}") from error

    def _room_without_it(self, error: BaseException) -> tuple[int, int]:
        """Return the room and the whole of the device once what this rank has put there is gone.

        Asked after loading has failed, because others load meanwhile: a target beside this rank, another rank.
        """
        vars(self).pop("drafter", None)
        _let_go(error)
        return _room(self.device)

    def _room_with_it(self, error: BaseException) -> tuple[int, int]:
        """Return the room that this rank has with what stays of it between two steps, and the whole of the device."""
        _let_go(error)
        room, total = _room(self.device)
        return room + self._held, total

    def _watched(self) -> Iterable[Dealt]:
        for batch, closing in self._source:
            if batch is not None:
                what = "held-out loss after step" if batch.tokens.held_out else "step"
                self.doing = f"{what} {batch.tokens.step}, micro-batch {batch.tokens.seq}"
            yield batch, closing


# What CUDA, its driver and those who call them say where torch's allocator was not asked: a graph is made ready, a
# kernel is loaded, or cuBLAS starts.
_NO_MEMORY = re.compile(
    r"CUDA error: out of memory|CUDA driver error: out of memory|Triton Error \[CUDA\]: out of memory"
    r"|CUBLAS_STATUS_ALLOC_FAILED"
)


def _ran_out(error: BaseException) -> bool:
    """Return whether an error is one of memory or came while one was handled, as when a capture is broken off."""
    return any(
        isinstance(part, torch.OutOfMemoryError) or (isinstance(part, RuntimeError) and _NO_MEMORY.search(str(part)))
        for part in causes(error)
    )


def _let_go(error: BaseException) -> None:
    """Free what was being built when an error came: its frames hold it."""
    for part in causes(error):
        traceback.clear_frames(part.__traceback__)
    gc.collect()


def _room(device: str) -> tuple[int, int]:
    """Return the bytes of a device that can still be allocated, and all it has; zeros where it is no GPU."""
    where = torch.device(device)
    if where.type != "cuda":
        return 0, 0
    free, total = torch.cuda.mem_get_info(where)
    # What this process has reserved and does not use is given out again, except what CUDA graphs, of another rank, keep
    # in their own pool. Where torch does not say whose a segment is, it counts as taken.
    unused = sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == where.index and segment.get("segment_pool_id") == (0, 0)
    )
    return free + unused, total
