"""TensorBoard: an event file for each run, read with `tensorboard --logdir FOLDER`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.core.paths import check_folder
from shoal.loggers.logger import Logger, config_text, free_path


class TensorBoard(Logger):
    """Writes scalars to `FOLDER/NAME`. TensorBoard's axis RELATIVE shows the seconds of training."""

    def __init__(self, folder: str = "") -> None:
        self._folder = Path(folder or "runs")
        check_folder("log tensorboard", self._folder)
        self._writer: Any = None
        self._began = 0.0

    def start(self, name: str, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._began = time.time()
        self._writer = SummaryWriter(str(free_path(self._folder / name)), flush_secs=5)
        lines = [f"| {key} | {config_text(value)} |" for key, value in config.items()]
        self._writer.add_text("config", "\n".join(["| setting | value |", "|---|---|", *lines]))

    def log(self, figures: Mapping[str, float], *, step: int, samples: int, seconds: float) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step, self._began + seconds)

    def finish(self, state: str) -> None:
        self._writer.close()
