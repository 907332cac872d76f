"""CSV: one file for each run, one line for each moment, one column for each figure."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from shoal.core.paths import check_folder
from shoal.loggers.logger import Logger, free_path


class CSV(Logger):
    """Writes `FOLDER/NAME.csv`. A cell is empty where a moment has no such figure."""

    def __init__(self, folder: str = "") -> None:
        self._folder = Path(folder or "figures")
        check_folder("log csv", self._folder)
        self._file: TextIO | None = None
        self._columns: list[str] = []

    def start(self, name: str, config: Mapping[str, Any]) -> None:
        path = free_path(self._folder / f"{name}.csv")
        self._columns = ["step"]
        self._file = path.open("x+", encoding="utf-8", newline="", buffering=1)

    def log(self, figures: Mapping[str, float], *, step: int, samples: int, seconds: float) -> None:
        if self._file is None:
            raise RuntimeError("log() before start()")
        if new := [name for name in figures if name not in self._columns]:
            self._widen(self._file, new)
        self._writer(self._file).writerow({"step": step, **figures})

    def finish(self, state: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _widen(self, file: TextIO, new: list[str]) -> None:
        """Write the file again with more columns. Happens once at the start and once for the test figures."""
        file.seek(0)
        rows = list(csv.DictReader(file))
        self._columns += new
        file.seek(0)
        writer = self._writer(file)
        writer.writeheader()
        writer.writerows(rows)

    def _writer(self, file: TextIO) -> csv.DictWriter[str]:
        return csv.DictWriter(file, self._columns, restval="", lineterminator="\n")
