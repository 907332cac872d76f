"""AttemptMark: tells what one start of a run has saved from what another saved in the same folder.

All nodes of a start have the same mark, and every record has that of the start which wrote it. A node that is
started again finds it in the file `attempt`.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from shoal.storage.folder_lock import MARK
from shoal.storage.whole_files import PART, cannot_write, read_file, write_whole


class AttemptMark:
    """The mark of the start that saves in a folder now; empty before the first has begun."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mark = ""

    def begin(self, mark: str) -> None:
        """What is saved from now on has this mark. Raises CheckpointError if the folder cannot be written."""
        self._mark = mark
        own = self._folder / f"{MARK}.{token_hex(8)}{PART}"  # other nodes write the same, at the same time
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_whole(own, mark.encode())
            own.replace(self._folder / MARK)
        except OSError as error:
            raise cannot_write(self._folder / MARK, error) from error

    def __str__(self) -> str:
        if not self._mark:
            with suppress(OSError):
                self._mark = read_file(self._folder / MARK).decode()
        return self._mark
