"""The search of `shoal search`: runs it, writes its files, prints its closing table."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from shoal.core.errors import Interrupted
from shoal.launch.stop_signals import stopped_by
from shoal.records.run_store import make_store
from shoal.report.files import plain, write_whole
from shoal.search.search_display import SearchDisplay
from shoal.search.search_page import headline, write_search_page
from shoal.search.search_result import SearchResult, closing_search_table
from shoal.search.search_run import run
from shoal.search.space import Space


def run_search(
    task: str,
    space: Space,
    method: str,
    settings: dict[str, Any],
    runs: str | None,
    quiet: bool,
    files: dict[str, Path | None],
) -> None:
    """Search, write the files, and print the closing table. `settings` are those of shoal.search.run."""
    store = make_store(runs, shlex.join(["shoal", *sys.argv[1:]]))
    title = f"{method.partition(':')[0]} on {task}"
    with SearchDisplay(title, settings["epochs"], settings["metric"], enabled=not quiet) as display:
        try:
            found = run(task, space, method, **settings, watcher=display, runs=store)
        except Interrupted as stop:
            where = f"The search is in {settings['folder']}; the same command with --resume goes on"
            raise stopped_by(stop.signal, f". {where}.") from None
    kept = None if store is None or not store.kept else store.kept[0]
    _show(found, settings["folder"], files, kept)


def _show(found: SearchResult, folder: Path, files: dict[str, Path | None], kept: Path | None) -> None:
    """Write the files, and print the closing table and where everything is."""

    if (path := files["--json"]) is not None:
        write_whole(path, json.dumps(plain(found.record()), indent=1, allow_nan=False) + "\n")
    if (path := files["--report"]) is not None:
        write_search_page(found, path)
    console = Console(highlight=False)
    console.print()
    console.print(closing_search_table(found))
    console.print("\n" + headline(found), markup=False, soft_wrap=True)
    told = {"report": files["--report"], "json": files["--json"], "kept": kept}
    told["model"] = folder / "model.safetensors"
    lines = [f"{name}: {path}" for name, path in told.items() if path is not None]
    console.print("\n" + "\n".join(lines), markup=False, soft_wrap=True)
