"""Who is told of what happens in a run."""

from collections.abc import Callable
from dataclasses import dataclass

from paceline.checkpoint.store import Saved
from paceline.pipeline.supervisor import RoleState
from paceline.records import Rejection, StepReport


@dataclass(frozen=True, slots=True)
class Listeners:
    """Called from the thread in which something happens; what they raise ends the run."""

    on_state: Callable[[RoleState], None]  # of a role
    on_ready: Callable[[], None]  # all roles are
    on_step: Callable[[StepReport], None]
    on_held_out: Callable[[StepReport], None]
    on_rejected: Callable[[Rejection], None]  # a step was not applied, says every rank
    on_rolled_back: Callable[[int, Saved], None]  # how many steps are done, and what the run went back to
    on_recompile: Callable[[str], None]  # a step did not fit what was compiled; the guard that failed
    on_replica: Callable[..., None]  # an event's name and values: those of Replicas, batch_split, loading
    on_sample: Callable[..., None]  # a sample's values
    warn: Callable[[str], None]  # a sentence on a checkpoint that could not be taken
