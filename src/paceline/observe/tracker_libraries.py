"""The four trackers behind one small protocol. A library is imported when its tracker is opened.

What a library's own environment variables say holds: where it writes, to whom, whether it is offline. Without them all
of them write into RUN/trackers and nothing leaves the machine, except that Weights & Biases is online by itself.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from paceline.observe.tracker_numbers import Point
from paceline.records import INTERRUPTED_STATUS

_PROJECT = "paceline"
_STATUS = {"finished": 0, "failed": 1, "interrupted": INTERRUPTED_STATUS}


@dataclass(frozen=True, slots=True)
class Begin:
    """What a tracker is opened with."""

    run: Path
    settings: dict[str, Any]  # flat
    identity: str | None  # the run's there, where a part of it was told before
    resumed: bool

    @property
    def folder(self) -> Path:
        """Where a tracker may write."""
        return self.run / "trackers"


class Tracker(Protocol):
    """A library that is told of a run."""

    identity: str  # what it takes to go on with the run there

    def tell(self, point: Point) -> None:
        """Numbers of a step, or of an evaluation."""

    def end(self, outcome: str, message: str) -> None:
        """The run, or this part of it, is over: finished, failed or interrupted."""


class TensorBoard:
    """Event files in RUN/trackers/tensorboard."""

    def __init__(self, begin: Begin) -> None:
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.identity = begin.run.name
        self._writer = EventFileWriter(str(begin.folder / "tensorboard"), flush_secs=10)
        if begin.identity is None:  # it shows the first ones
            self._add(hparams_pb(begin.settings, trial_id=begin.run.name))

    def tell(self, point: Point) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=number) for name, number in point.numbers.items()]
        self._add(Summary(value=values), point.steps, point.t)

    def end(self, outcome: str, message: str) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2
        from tensorboard.plugins.text import metadata as text
        from tensorboard.util import tensor_util

        now = time.time()
        words = tensor_util.make_tensor_proto(f"{outcome}: {message}" if message else outcome)
        said = Summary.Value(tag="outcome", metadata=text.create_summary_metadata("outcome", ""), tensor=words)
        status = api_pb2.STATUS_SUCCESS if outcome == "finished" else api_pb2.STATUS_FAILURE
        info = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=now)
        session = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(session_end_info=info))
        tag = metadata.SESSION_END_INFO_TAG
        self._add(Summary(value=[said, Summary.Value(tag=tag, metadata=session, tensor=metadata.NULL_TENSOR)]))
        self._writer.close()

    def _add(self, summary: Any, steps: int = 0, t: float | None = None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(summary=summary, step=steps, wall_time=t or time.time()))


class WandB:
    """A run of Weights & Biases, by its own id."""

    def __init__(self, begin: Begin) -> None:
        import wandb

        quiet = wandb.Settings(console="off", disable_git=True, disable_code=True, x_disable_stats=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=os.environ.get("WANDB_NAME", begin.run.name),
            dir=os.environ.get("WANDB_DIR", str(begin.folder)),
            id=begin.identity or os.environ.get("WANDB_RUN_ID"),
            resume="allow" if begin.identity else None,
            settings=quiet,
        )
        self.identity = self._run.id
        self._run.config.update(begin.settings, allow_val_change=True)
        self._run.define_metric("*", step_metric="steps")  # its own count only ever rises, and not by steps

    def tell(self, point: Point) -> None:
        self._run.log({**point.numbers, "steps": point.steps})

    def end(self, outcome: str, message: str) -> None:
        self._run.summary.update({"outcome": outcome, "message": message})
        self._run.finish(exit_code=_STATUS[outcome])


class MLflow:
    """A run of an MLflow store, by its id; RUN/trackers/mlflow.db unless MLFLOW_TRACKING_URI names another."""

    def __init__(self, begin: Begin) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param, RunTag

        own = None if os.environ.get("MLFLOW_TRACKING_URI") else f"sqlite:///{begin.folder / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=own)
        if begin.identity:
            self._client.update_run(begin.identity, status="RUNNING")
            self.identity = begin.identity
        else:
            experiment = self._experiment((begin.folder / "mlflow").as_uri() if own else None)
            self.identity = self._client.create_run(experiment, run_name=begin.run.name).info.run_id
        there = self._client.get_run(self.identity).data.params
        # What was once said of a run is not changed there, so what a later part changed is a tag.
        params = [Param(key, str(value)) for key, value in begin.settings.items() if key not in there]
        changed = [
            RunTag(f"resumed.{key}", str(value))
            for key, value in begin.settings.items()
            if key in there and there[key] != str(value)
        ]
        for first in range(0, len(params), 100):  # no more at once
            self._client.log_batch(self.identity, params=params[first : first + 100])
        self._client.log_batch(self.identity, tags=changed)

    def _experiment(self, place: str | None) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        there = self._client.get_experiment_by_name(name)
        return there.experiment_id if there else self._client.create_experiment(name, artifact_location=place)

    def tell(self, point: Point) -> None:
        from mlflow.entities import Metric

        t = round(point.t * 1000)
        metrics = [Metric(name, number, t, point.steps) for name, number in point.numbers.items()]
        self._client.log_batch(self.identity, metrics=metrics)

    def end(self, outcome: str, message: str) -> None:
        self._client.set_tag(self.identity, "outcome", outcome)
        self._client.set_tag(self.identity, "message", message)
        status = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}[outcome]
        self._client.set_terminated(self.identity, status=status)


class Trackio:
    """A run of Trackio, by its name; in RUN/trackers/trackio unless Trackio's own variables name another place."""

    def __init__(self, begin: Begin) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(begin.folder / "trackio"))  # read at the import
        import trackio

        self.identity = begin.identity or f"{begin.run.name}-{os.urandom(3).hex()}"
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", _PROJECT),
            name=self.identity,
            config=begin.settings,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def tell(self, point: Point) -> None:
        self._run.log(point.numbers, step=point.steps)

    def end(self, outcome: str, message: str) -> None:
        from trackio import AlertLevel  # it has no other place for an outcome

        level = {"finished": AlertLevel.INFO, "failed": AlertLevel.ERROR, "interrupted": AlertLevel.WARN}[outcome]
        self._run.alert(outcome, message, level)
        self._run.finish()


OPEN: dict[str, Callable[[Begin], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
}
