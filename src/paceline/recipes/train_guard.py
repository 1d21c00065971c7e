"""What `paceline train` tells of steps that were not applied, and of memory that grows."""

from collections.abc import Callable

from paceline.data.mixture import Mixture
from paceline.observe.events import EventLog
from paceline.observe.growth import Growth, MemoryWatch
from paceline.observe.quarantine import Quarantine
from paceline.records import Rejection, StepReport


class GuardTeller:
    """Passes on what was rejected: rows to quarantine.jsonl, the rest to the events."""

    def __init__(self, mixture: Mixture, *, quarantine: Quarantine, events: EventLog) -> None:
        """Rows are those of `mixture`."""
        self._mixture, self._quarantine, self._events = mixture, quarantine, events

    def on_rejected(self, rejection: Rejection) -> None:
        """A step was not applied, says one of the ranks."""
        told = {name: getattr(rejection, name) for name in ("step", "loss", "grad_norm", "rule", "limit")}
        for place, suspect in enumerate(rejection.suspects):
            rows = [self._row(row) for row in suspect.samples]
            sums = {name: getattr(suspect, name) for name in ("features_sum", "loss_sum", "weight_sum")}
            self._quarantine.write("rejected", **told, rank=rejection.rank, micro_batch=place, **sums, rows=rows)
        if rejection.rank == 0:
            self._events.write("rejected", **told)

    def watched(self, on_step: Callable[[StepReport], None], devices: tuple[str, ...]) -> Callable[[StepReport], None]:
        """Return `on_step` with a look at the memory of this process and these devices now and then."""
        watch = MemoryWatch(devices, warn=self.on_growth)

        def both(report: StepReport) -> None:
            on_step(report)
            watch.look()

        return both

    def on_growth(self, growth: Growth) -> None:
        """Memory grows."""
        self._events.write("memory_growth", where=growth.where, mib=growth.mib, mib_per_min=growth.mib_per_min)

    def _row(self, row: int) -> dict[str, object]:
        dataset, place = self._mixture.find(row)
        return {"row": row, "dataset": str(dataset.folder), "dataset_row": place}
