"""The target replicas of a run: what each has in hand, and what becomes of those that fail or hang.

A replica that fails gives its micro-batch back and is built anew, as often as the budget allows; one that hangs is left
alone, and its device too. The others go on. What comes of a micro-batch does not depend on who makes it, so a run with
faults trains what a run without does.
"""

import gc
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from paceline.pipeline.channel import OrderedChannel
from paceline.pipeline.dispenser import Dispenser
from paceline.pipeline.outlets import Outlets
from paceline.pipeline.supervisor import Role
from paceline.pipeline.watch import write_stacks
from paceline.records import Hung, RunError, TokenBatch, causes
from paceline.target.replica import TargetReplica

Build = Callable[[int, Sequence[str], Outlets], TargetReplica]


class Replicas:
    """Builds replicas and takes care of them (see supervisor.Care); a drafter rank that fails or hangs ends the run.

    `tell` gets an event's name and values: `replica_failed`, `replica_hung`.
    """

    def __init__(
        self,
        devices: Sequence[Sequence[str]],
        build: Build,
        *,
        dispenser: Dispenser,
        channel: OrderedChannel,
        restarts: int,
        stacks: Path,
        tell: Callable[..., None],
    ) -> None:
        """`devices` has those of each replica, `restarts` may be made in all, and `stacks` is the file that gets all
        threads' when something hangs.
        """
        self._build, self._dispenser, self._channel = build, dispenser, channel
        self._left, self._stacks, self._tell = restarts, stacks, tell
        self._working: dict[Role, tuple[int, Sequence[str], Outlets]] = {}
        self._causes: dict[str, RunError] = {}  # the last one of every replica
        self._suspected: dict[int, RunError] = {}  # micro-batches that a replica failed at, and how
        self.first = [self._new(index, own) for index, own in enumerate(devices)]

    def failed(self, role: Role, error: RunError) -> Role | None:
        """Return a new replica for one that failed, or None if it stays out.

        Raises:
            RunError: a drafter rank or the loader failed, another replica has failed at the same micro-batch before, or
                no replica is left.
        """
        if role not in self._working:
            raise error
        index, devices, outlet = self._working.pop(role)
        if error.__cause__ is not None and error.__cause__ is self._dispenser.error:
            raise error
        batch = _at_fault(role, devices, outlet.revoke())
        self._causes[role.name] = error
        self._channel.look_again()  # what the role has still under way is refused, and leaves
        _free(role, devices, error)
        if isinstance(role, TargetReplica):
            role.give_up()  # whoever has not left by now hangs
        outlet.left()
        again = self._left > 0 and not self._dispenser.over and not self._is_suspect(batch)
        self._left -= 1 if again else 0
        told = {"role": role.name, "device": role.device, "doing": role.doing, "message": str(error)}
        self._tell("replica_failed", **told, restarted=again, restarts_left=self._left)
        self._suspect(batch, error)
        if again:
            return self._new(index, devices)
        self._check_left(RunError)
        return None

    def hung(self, role: Role, error: Hung) -> None:
        """Give a hung replica's micro-batch to the others; its device is suspect, so it is not restarted.

        Raises:
            Hung: a drafter rank hangs, another replica failed at the same micro-batch before, or no replica is left.
        """
        target = role in self._working
        write_stacks(self._stacks, also_stderr=not target)
        if not target:
            raise Hung(f"{error} The stacks of all threads are in {self._stacks}.")
        _, devices, outlet = self._working.pop(role)
        batch = _at_fault(role, devices, outlet.revoke(hung=True))
        if isinstance(role, TargetReplica):
            role.give_up()
        self._causes[role.name] = error
        told = {"role": role.name, "device": role.device, "doing": role.doing, "message": str(error)}
        self._tell("replica_hung", **told, stacks=str(self._stacks))
        self._suspect(batch, error)
        self._channel.look_again()
        self._check_left(Hung)

    def stalled(self, error: Hung) -> None:
        """Raise the error, with all stacks written."""
        write_stacks(self._stacks, also_stderr=True)
        raise Hung(f"{error} The stacks of all threads are in {self._stacks}.")

    def join(self) -> None:
        """Wait a while, once the run is over, for threads that replicas have of their own."""
        for role in self._working:
            if isinstance(role, TargetReplica):
                role.join()

    def _new(self, index: int, devices: Sequence[str]) -> TargetReplica:
        outlet = Outlets(self._dispenser)
        replica = self._build(index, devices, outlet)
        self._working[replica] = index, devices, outlet
        return replica

    def _is_suspect(self, batch: TokenBatch | None) -> bool:
        return batch is not None and batch.seq in self._suspected

    def _suspect(self, batch: TokenBatch | None, error: RunError) -> None:
        """Raise if a replica has failed at this micro-batch before: then it is not the replica's fault."""
        if batch is None:
            return
        before = self._suspected.setdefault(batch.seq, error)
        if before is not error:
            rows = ", ".join(map(str, batch.samples[:8])) + ", ..." * (len(batch.samples) > 8)
            data = "evaluate.held_out (numbered behind all training rows)" if batch.held_out else "the data"
            raise type(error)(
                f"Two replicas have failed at micro-batch {batch.seq}, which holds rows {rows} of {data}, so the "
                f"fault is probably in those: {_sentence(before)} {_sentence(error)} Look at the rows. If features are "
                "not finite, try target.dtype: float32; or leave the rows out of the dataset; both start anew, in "
                "another run_dir."
            )

    def _check_left(self, kind: type[RunError]) -> None:
        if not self._working and not self._dispenser.over:
            causes = " ".join(map(_sentence, self._causes.values()))
            raise kind(f"No target replica is left, and none may be restarted (pipeline.restarts). {causes}")


def _sentence(error: RunError) -> str:
    text = str(error)
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _at_fault(role: Role, devices: Sequence[str], batches: Sequence[TokenBatch]) -> TokenBatch | None:
    """Return which of its micro-batches a replica failed or hangs at; on several devices it knows that itself."""
    if len(devices) > 1 and isinstance(role, TargetReplica):
        batches = [batch for batch in batches if batch.seq == role.stuck_at]
    return batches[0] if batches else None


def _free(role: Role, devices: Sequence[str], error: BaseException) -> None:
    """Let go of all that a replica which failed has on its device, before it is built anew."""
    if isinstance(role, TargetReplica):
        role.unload()
    for part in causes(error):
        traceback.clear_frames(part.__traceback__)
    gc.collect()
    if any(torch.device(device).type == "cuda" for device in devices):
        with suppress(RuntimeError):  # of a device that is beyond help; who is built anew on it says so
            torch.cuda.empty_cache()  # of all devices
