"""RunStore: the folder in which runs are kept, and the names of new ones."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

from shoal.core.paths import check_folder
from shoal.records.places import VARIABLE, chosen_folder
from shoal.records.run_folder import RunFolder


@dataclass(frozen=True)
class RunDescription:
    """What a run is, before it starts. `config` holds all settings as plain values."""

    task: str
    strategy: str
    workers: int
    servers: int
    config: dict[str, Any]

    def name(self) -> str:
        """The strategy, or a script that names its own, and the date: bmuf-1117-0742."""
        is_word = re.fullmatch(r"\w+", self.strategy)
        word = self.strategy if is_word else re.sub(r"\W+", "-", Path(self.task).stem).strip("-")
        return f"{word}-{datetime.now():%m%d-%H%M}"


@dataclass
class RunStore:
    """A folder of runs. All runs of one command share a store, and remember the first of them."""

    path: Path
    command: str = ""
    kept: list[Path] = field(default_factory=list)

    def open(self, run: RunDescription) -> RunFolder:
        """Create the folder of a new run. Raises OSError where none can be created."""
        path = self._create(run.name())
        self.kept.append(path)
        about = {
            "task": run.task,
            "strategy": run.strategy,
            "workers": run.workers,
            "servers": run.servers,
            "first": self.kept[0].name,
            "command": self.command,
            "folder": str(Path.cwd()),
            "config": run.config,
            "versions": {"shoal": version("shoal"), "torch": version("torch"), "python": python_version()},
        }
        return RunFolder(path, about, run.workers + run.servers)

    def _create(self, name: str) -> Path:
        """The first of name, name-2, name-3, … that nobody else creates."""
        self.path.mkdir(parents=True, exist_ok=True)
        number = 1
        while True:
            path = self.path / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir()
            except FileExistsError:
                number += 1
            else:
                return path


def open_store(runs: str | Path | RunStore | None) -> RunStore | None:
    """The store of `shoal.run(runs=...)`. Raises ValueError if the folder cannot be written."""
    if runs is None or isinstance(runs, RunStore):
        return runs
    check_folder("runs", Path(runs))
    return RunStore(Path(runs))


def make_store(given: str | None, command: str) -> RunStore | None:
    """The store for the runs of a command. Raises ValueError if a folder that was named cannot be written."""
    folder = chosen_folder(given)
    if folder is not None and (given or os.environ.get(VARIABLE)):
        check_folder("--runs" if given else VARIABLE, folder)
    return None if folder is None else RunStore(folder, command)
