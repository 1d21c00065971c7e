"""Who is told of what while `paceline train` works."""

from typing import Any

from paceline.config import RunSettings
from paceline.observe.console import Console
from paceline.pipeline.listeners import Listeners
from paceline.recipes.train_guard import GuardTeller
from paceline.recipes.train_stop import StopRequest
from paceline.recipes.train_tell import Teller


def listeners(
    settings: RunSettings,
    teller: Teller,
    guard: GuardTeller,
    stop: StopRequest,
    console: Console,
    *,
    fp8: dict[str, str],
) -> Listeners:
    """Return them: the run's events go to `teller` and `guard`, and `stop` learns when there is a step to finish.

    `fp8` is what checkpoints and the end of the run say of it, and learns when a target goes on without.
    """

    def on_replica(event: str, **values: Any) -> None:
        if event == "no_fp8":
            fp8["target"] = "off"
        teller.on_replica(event, **values)

    def on_ready() -> None:
        stop.begin()
        teller.on_ready()

    return Listeners(
        on_state=teller.on_state,
        on_ready=on_ready,
        on_step=guard.watched(teller.on_step, settings.devices),
        on_held_out=teller.on_held_out,
        on_rejected=guard.on_rejected,
        on_rolled_back=teller.on_rolled_back,
        on_recompile=teller.on_recompile,
        on_replica=on_replica,
        on_sample=teller.on_sample,
        warn=console.line,
    )
