"""Logs the same run to one logger and prints what its own reader finds: `python logged_figures.py WORD DIR`.

A program of its own, because the libraries leave threads and services behind, and warn when imported.
"""

from __future__ import annotations

import csv
import json
import os
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONFIG = {"strategy": "downpour", "lr": 0.3, "strategy.period": None}
CURVE = [
    {
        "samples": 0,
        "seconds": 0.0,
        "test_loss": 2.5,
        "test_accuracy": 10.0,
        "metrics": {"frame errors": 90.0},
    },
    {
        "samples": 600,
        "seconds": 3.0,
        "test_loss": 0.5,
        "test_accuracy": 80.0,
        "metrics": {"frame errors": 9.5},
    },
]
History = dict[str, list[tuple[int, float]]]


def node(rank: int, step: int, **more: Any) -> dict[str, Any]:
    """A progress event of a worker; rank 2 is a server."""
    worker = {
        "samples": 100 * step,
        "samples_per_second": 100.0 + rank,
        "loss": 1 / step,
        "wait_fraction": 0.25,
    }
    server = {"samples": 0, "samples_per_second": 0.0, "loss": float("nan"), "staleness": 0.5 + step}
    own = {"role": "server", **server} if rank == 2 else {"role": "worker", "staleness": None, **worker}
    return {"rank": rank, "step": step, "seconds": float(step), "bytes_sent": 1000 * step, **own, **more}


def log_a_run(*loggers: Any, state: str = "done") -> None:
    """Three moments of two workers and a server, the last of them after worker 1 was lost, and two tests."""
    from shoal.loggers import figures, sending

    figures.ROW_SECONDS = 0.0  # a row for every event
    figures.ROWS = 10**9
    run = sending.LoggedRun(loggers, "downpour-1117-0742", CONFIG, workers=2, servers=1)
    for step in (1, 2):
        for rank in (0, 1, 2):
            run.event(node(rank, step))
    run.event(node(1, 2, lost=True))
    run.event(node(0, 4))
    run.end(state, {"curve": CURVE} if state == "done" else None, "")


def read_csv(folder: Path) -> History:
    (path,) = folder.glob("*.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return _by_name((int(r.pop("step")), {k: float(v) for k, v in r.items() if v}) for r in rows)


def read_tensorboard(folder: Path) -> History:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (run,) = folder.iterdir()
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    assert "config/text_summary" in events.Tags()["tensors"]
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def read_mlflow(folder: Path) -> History:
    from mlflow import MlflowClient

    client = MlflowClient(store(folder))
    (experiment,) = (e for e in client.search_experiments() if e.name == "shoal")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("downpour-1117-0742", "FINISHED")
    assert run.data.params == {"strategy": "downpour", "lr": "0.3", "strategy.period": "none"}
    history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return {name: [(m.step, m.value) for m in metrics] for name, metrics in history.items()}


def store(folder: Path) -> str:
    """A database, if there is a driver for one."""
    try:
        import sqlalchemy  # noqa: F401
    except ImportError:
        os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
        return str(folder / "mlruns")
    return f"sqlite:///{folder}/mlflow.db"


def read_wandb(folder: Path) -> History:
    import wandb

    wandb.teardown()  # its service writes the file, on a busy machine some time after the run has finished
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    told = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in wandb_records(path.read_bytes())
        if record.WhichOneof("record_type") == "history"
    ]
    rows = ((r.pop("step"), {k: v for k, v in r.items() if not k.startswith("_")}) for r in told)
    return _by_name(rows)


def wandb_records(data: bytes) -> Iterator[Any]:
    """The records of an offline run, in the framing of LevelDB's log: blocks of 32 kB."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, whole = 7, b""
    while at + 7 <= len(data):
        if (room := 32768 - at % 32768) < 7:
            at += room
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a record in one piece, or the last piece of one
            yield Record.FromString(whole)
            whole = b""


def _by_name(rows: Any) -> History:
    found: History = defaultdict(list)
    for step, figures in rows:
        for name, value in figures.items():
            found[name].append((step, value))
    return found


if __name__ == "__main__":
    word, folder = sys.argv[1], Path(sys.argv[2])
    os.chdir(folder)
    os.environ["WANDB_MODE"] = "offline"
    place = {
        "csv": folder / "figures",
        "tensorboard": folder / "tb",
        "wandb": "shoal",
        "mlflow": store(folder),
    }
    from shoal.loggers.log_option import read_logger

    log_a_run(read_logger(f"{word}:{place[word]}"))
    readers = {"csv": read_csv, "tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow}
    print(json.dumps(readers[word](folder if word in ("wandb", "mlflow") else Path(place[word]))))
