"""Where runs are kept, and the files of each; quickly imported."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE, DEFAULT, NONE = "SHOAL_RUNS", "shoal-runs", "none"

ABOUT, EVENTS, LOG, RESULT = "run.json", "events.jsonl", "log.txt", "result.json"


def chosen_folder(given: str | None) -> Path | None:
    """The folder of runs: `given`, $SHOAL_RUNS, or ./shoal-runs. None for the word none."""
    text = given or os.environ.get(VARIABLE) or DEFAULT
    return None if text == NONE else Path(text)


def existing_folder(given: str | None) -> Path:
    """The folder of runs to read. Raises ValueError for `none`, and for a folder named but not there."""
    folder = chosen_folder(given)
    if folder is None:
        raise ValueError("--runs none, or SHOAL_RUNS=none, keeps no runs; name a folder with --runs DIR")
    if given and not folder.is_dir():
        raise ValueError(f"--runs: there is no folder {folder}")
    return folder
