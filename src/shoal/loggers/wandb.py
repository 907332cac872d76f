"""Weights & Biases: a run of a project. WANDB_MODE, WANDB_DIR and the like work as in any script."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from shoal.core.errors import Unavailable
from shoal.loggers.logger import Logger

EXIT_CODES = {"done": 0, "failed": 1, "interrupted": 130}


class WandB(Logger):
    """Creates a run in `project`, by default the one that WANDB_PROJECT names, or "shoal".

    The figures are drawn over `step`; `samples` and `seconds` are there to be chosen instead.
    """

    def __init__(self, project: str = "") -> None:
        import wandb

        self._wandb: Any = wandb
        self._project = project or os.environ.get("WANDB_PROJECT") or "shoal"
        self._run: Any = None
        online = wandb.setup().settings.mode == "online"
        if online and not wandb.login(
            prompt=False, verify=False
        ):  # or init would ask in the midst of the run
            raise Unavailable("logger 'wandb' has no API key. Run `wandb login`, or set WANDB_MODE=offline")

    def start(self, name: str, config: Mapping[str, Any]) -> None:
        self._run = self._wandb.init(
            project=self._project,
            name=name,
            config=dict(config),
            reinit="create_new",  # the user's own run, if there is one, stays as it is
            settings=self._wandb.Settings(console="off", quiet=True),  # the terminal is ours
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, figures: Mapping[str, float], *, step: int, samples: int, seconds: float) -> None:
        self._run.log({"step": step, **figures})

    def finish(self, state: str) -> None:
        self._run.finish(exit_code=EXIT_CODES[state])
