"""What each library says that it was told of a run, read with its own reader: `python readers.py NAME FOLDER`.

Prints JSON: `numbers`, a list of (step, value) by name, in the library's order; `settings`; `outcome`; `runs`, how many
there are. A process of its own, because some libraries look at their folder only once.
"""

import json
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def tensorboard(folder: Path) -> dict[str, Any]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    read = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    read.Reload()
    data = read.summary_metadata
    start = HParamsPluginData.FromString(data["_hparams_/session_start_info"].plugin_data.content).session_start_info
    settings = {key: getattr(value, value.WhichOneof("kind")) for key, value in start.hparams.items()}
    numbers = {tag: [(one.step, one.value) for one in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
    outcome = read.Tensors("outcome")[-1].tensor_proto.string_val[0].decode()
    return {"numbers": numbers, "settings": settings, "outcome": outcome.split(":")[0], "runs": 1}


def _records(path: Path) -> Iterator[bytes]:
    """Yield a W&B file's records. The package reads them in its binary only; the form is LevelDB's log: blocks of
    32 KiB of pieces, each with 4 bytes of checksum, 2 of length and 1 that says whole, first, middle or last.
    """
    data, at, record = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if 2**15 - at % 2**15 < 7:
            at += 2**15 - at % 2**15
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        piece = data[at + 7 : at + 7 + length]
        assert int.from_bytes(data[at : at + 4], "little") == zlib.crc32(data[at + 6 : at + 7 + length])
        at, record = at + 7 + length, record + piece
        if kind in (1, 4):
            yield record
            record = b""


def wandb(folder: Path) -> dict[str, Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    numbers: dict[str, list[Any]] = {}
    settings: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    ids = set()
    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        for data in _records(path):
            record = Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                ids.add(record.run.run_id)
                updates = record.run.config.update
            else:
                updates = record.config.update if kind == "config" else []
            settings |= {item.key or item.nested_key[0]: json.loads(item.value_json) for item in updates}
            if kind == "history":
                row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                for key, value in row.items():
                    if "/" in key:
                        numbers.setdefault(key, []).append((row["steps"], float(value)))
            if kind == "summary":
                summary |= {i.key or i.nested_key[0]: json.loads(i.value_json) for i in record.summary.update}
    return {"numbers": numbers, "settings": settings, "outcome": summary.get("outcome"), "runs": len(ids)}


def mlflow(folder: Path) -> dict[str, Any]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}"))
    experiment = client.get_experiment_by_name("paceline")
    runs = client.search_runs([experiment.experiment_id])
    run = runs[0]
    numbers = {
        key: [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, key)]
        for key in run.data.metrics
    }
    assert {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}[run.data.tags["outcome"]] == (
        run.info.status
    )
    return {
        "numbers": numbers,
        "settings": run.data.params,
        "outcome": run.data.tags["outcome"],
        "runs": len(runs),
        "tags": dict(run.data.tags),
    }


def trackio(folder: Path) -> dict[str, Any]:
    os.environ["TRACKIO_DIR"] = str(folder / "trackio")
    from trackio.sqlite_storage import SQLiteStorage

    runs = SQLiteStorage.get_runs("paceline")
    numbers: dict[str, list[Any]] = {}
    for row in SQLiteStorage.get_logs("paceline", runs[0]):
        for key, value in row.items():
            if "/" in key:
                numbers.setdefault(key, []).append((row["step"], float(value)))
    return {
        "numbers": numbers,
        "settings": SQLiteStorage.get_run_config("paceline", runs[0]),
        "outcome": max(SQLiteStorage.get_alerts("paceline"), key=lambda alert: alert["timestamp"])["title"],
        "runs": len(runs),
    }


READ: dict[str, Callable[[Path], dict[str, Any]]] = {
    "tensorboard": tensorboard,
    "wandb": wandb,
    "mlflow": mlflow,
    "trackio": trackio,
}

if __name__ == "__main__":
    print(json.dumps(READ[sys.argv[1]](Path(sys.argv[2]))))
