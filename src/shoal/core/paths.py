"""Files and folders that the user names, tried before anything runs."""

from __future__ import annotations

import tempfile
from pathlib import Path


def check_file(option: str, path: Path) -> None:
    """Raise ValueError unless a file can be written there. Creates missing folders."""
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder; name a file in it")
    check_folder(option, path.parent)


def check_folder(option: str, folder: Path) -> None:
    """Raise ValueError unless files can be written in that folder. Creates it if it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"{option}: {folder} is not a folder") from None
    except OSError as error:
        raise ValueError(f"{option}: cannot write in {folder} ({error.strerror})") from None
