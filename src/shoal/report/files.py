"""Runs as JSON files, written atomically and readable by any JSON parser."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.report.goal import goal_of
from shoal.report.reading import Record


def write_json(records: Sequence[Record], path: str | os.PathLike[str], target: float | None = None) -> Path:
    """Write `{"goal": {...}, "runs": [...]}` to `path` and return the path. Creates missing folders.

    `target` is the test accuracy (or loss) to which the runs are timed. NaN and infinity become null. The
    write is atomic: a reader sees the old file or the new one. Raises OSError with the path if the file
    cannot be written.
    """
    goal = goal_of(records, target)
    runs = [
        {**record, "seconds_to_goal": None if goal is None else goal.seconds(record)} for record in records
    ]
    text = json.dumps({"goal": goal and asdict(goal), "runs": plain(runs)}, indent=1, allow_nan=False)
    return write_whole(path, text + "\n")


def plain(value: Any) -> Any:
    """`value` in types that JSON has. NaN and infinity become None, other objects their text."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value)


def write_whole(path: str | os.PathLike[str], text: str) -> Path:
    """Write `text` to a temporary file, then rename it to `path`, so that no reader sees half a file."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        why = (
            f"cannot write the report '{target}': {error.strerror}. Name a file in a folder you may write to."
        )
        raise OSError(error.errno, why) from error
    return target
