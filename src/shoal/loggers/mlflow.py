"""MLflow: a run of an experiment in a tracking store, such as sqlite:///mlflow.db or http://localhost:5000."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from shoal.loggers.logger import Logger, config_text

STATES = {"done": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
LONGEST = 6000  # characters that MLflow takes for a parameter


class MLflow(Logger):
    """Creates a run in the store at `uri`, by default the one that MLFLOW_TRACKING_URI names.

    The experiment is `MLFLOW_EXPERIMENT_NAME`, or "shoal". A store on this machine is opened at once; one
    behind a URL when the first run starts, since it may take long to answer.
    """

    def __init__(self, uri: str = "") -> None:
        from mlflow import MlflowClient

        self._experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "shoal"
        self._run = ""
        self._began = 0.0
        try:
            self._client: Any = MlflowClient(tracking_uri=uri or None)
            if not self._client.tracking_uri.startswith(("http:", "https:", "databricks")):
                self._experiment_id()
        except Exception as error:
            raise ValueError(f"log mlflow:{uri}: {' '.join(str(error).split())}") from error

    def start(self, name: str, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        self._began = time.time()
        self._run = self._client.create_run(self._experiment_id(), run_name=name).info.run_id
        settings = [Param(key, config_text(value)[:LONGEST]) for key, value in config.items()]
        for first in range(0, len(settings), 100):  # as many as MLflow takes at once
            self._client.log_batch(self._run, params=settings[first : first + 100])

    def log(self, figures: Mapping[str, float], *, step: int, samples: int, seconds: float) -> None:
        from mlflow.entities import Metric

        moment = round(1000 * (self._began + seconds))
        metrics = [Metric(name, value, moment, step) for name, value in figures.items()]
        for first in range(0, len(metrics), 1000):
            self._client.log_batch(self._run, metrics=metrics[first : first + 1000])

    def finish(self, state: str) -> None:
        self._client.set_terminated(self._run, STATES[state])

    def _experiment_id(self) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        made = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        return str(made)
