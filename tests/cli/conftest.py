"""Running the command line in this process, and looking for processes that it left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from shoal.cli import app

Shoal = Callable[..., Result]


@pytest.fixture
def shoal(monkeypatch: pytest.MonkeyPatch) -> Shoal:
    """The command line, 80 columns wide and under no launcher: called with a line, then single arguments."""
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("SHOAL_PLACE", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return lambda line, *args: CliRunner().invoke(app, [*line.split(), *map(str, args)])


@pytest.fixture
def running() -> Callable[[Path], list[str]]:
    """The command lines of processes that mention a path."""

    def find(path: Path) -> list[str]:
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # it has just ended
                continue
            if str(path) in line:
                found.append(line)
        return found

    return find
