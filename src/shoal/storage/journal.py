"""Journal: a server's log on disk. A snapshot of its state, and the messages since.

    DIR/snapshot-00000003.safetensors   tensors of the state
        snapshot-00000003.json          everything else, and the SHA-256 of itself and the tensors; the last
        journal-00000003.log            the messages after that snapshot, one record each

A record is magic, CRC-32, length, then the message as it travels. What is not whole at the very end is cut
off: nobody was told of it. Anywhere else it is damage, and an error. The two newest snapshots are kept with
what follows them, so a damaged one costs nothing. Nothing is ever unpickled.

Nothing is synced: the folder is temporary, and only a successor on the same host reads it, for which the page
cache is enough. A host that crashes takes the run with it, and its checkpoints are what is left.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from shoal.core.errors import CheckpointError, WireError
from shoal.core.state_tree import harvest, plant
from shoal.core.transport import HEADER_BYTES, Message
from shoal.storage.whole_files import cannot_write, digest, read_file, seal, unseal, write_whole
from shoal.transports import frames

SNAPSHOT_SHARE = 0.05
"""Of a server's time that goes into snapshots, where they are all that is kept."""

LEAST_SECONDS = 1.0
"""Between two snapshots."""

SNAPSHOT_MODELS = 8
"""How many times the model's own size a journal may have before a snapshot replaces it."""

LEAST_JOURNAL = 64 * 2**20

_RECORD = struct.Struct("<4sIQ")  # magic, CRC-32 of what follows, its length
_MAGIC = b"SHJ1"

_LOSES = (
    ": updates that were acknowledged would be lost. Have a look at the disk under TMPDIR, and start the run "
    "again from its last checkpoint."
)


class Journal:
    """The log of one server in a folder of its own. `limit_bytes` bounds a message that is read back."""

    def __init__(self, folder: str | Path, durability: str, limit_bytes: int) -> None:
        self.keeps_every_update = durability == "journal"
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._limit_bytes = limit_bytes
        self._number = 0
        self._file: int | None = None
        self._bytes = 0
        self._most_bytes = LEAST_JOURNAL
        self._changed = False
        self._next_snapshot = 0.0

    def append(self, m: Message) -> None:
        """Write a message down. From then on it survives this process."""
        self._changed = True
        if not self.keeps_every_update:
            return
        parts = frames.flatten(m.parts)
        pieces = [memoryview(frames.encode(m, parts, m.src)), *map(frames.bytes_of, parts)]
        check, length = 0, 0
        for piece in pieces:
            check, length = zlib.crc32(piece, check), length + len(piece)
        for piece in (memoryview(_RECORD.pack(_MAGIC, check, length)), *pieces):
            self._write(piece)
        self._bytes += _RECORD.size + length

    def sync(self) -> None:
        """Do nothing: what is appended survives already."""

    def snapshot_is_due(self) -> bool:
        """Whether the journal is long, or enough has happened since the last snapshot."""
        if self.keeps_every_update:
            return self._bytes > self._most_bytes
        return self._changed and time.monotonic() > self._next_snapshot

    def snapshot(self, state: dict[str, Any]) -> None:
        """Keep this state, and begin a new journal after it."""
        began = time.monotonic()
        tensors: dict[str, Tensor] = {}
        tree = plant(state, tensors, "state")
        content = save_tensors(tensors)
        number = self._number + 1
        write_whole(self._path("snapshot", number, "safetensors"), content, synced=False)
        record = {"number": number, "sha256": digest(content), "state": tree}
        write_whole(self._path("snapshot", number, "json"), seal(record), synced=False)
        self._most_bytes = max(LEAST_JOURNAL, SNAPSHOT_MODELS * len(content))
        self._begin(number)
        self._prune()
        took = time.monotonic() - began
        self._next_snapshot = began + max(LEAST_SECONDS, took / SNAPSHOT_SHARE)

    def recover(self) -> tuple[dict[str, Any] | None, Iterable[Message]]:
        """The newest whole snapshot and the messages after it; further ones are appended to them."""
        for number in sorted(self._numbers("snapshot", "json"), reverse=True):
            state = self._load(number)
            if state is not None:
                newest = max([number, *self._numbers("journal", "log")])
                self._begin(newest)
                return state, (m for n in range(number, newest + 1) for m in self._read(n, n == newest))
        if self._numbers("snapshot", "json"):
            raise CheckpointError(
                f"no snapshot in {self._folder} is whole; the server cannot go on from them"
            )
        return None, ()

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    # -- inside --------------------------------------------------------------------------------

    def _path(self, kind: str, number: int, suffix: str) -> Path:
        return self._folder / f"{kind}-{number:08d}.{suffix}"

    def _numbers(self, kind: str, suffix: str) -> list[int]:
        return [int(path.stem.rpartition("-")[2]) for path in self._folder.glob(f"{kind}-*.{suffix}")]

    def _begin(self, number: int) -> None:
        """Append to the journal of that number from now on."""
        self.close()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
        self._file = os.open(self._path("journal", number, "log"), flags, 0o600)
        self._number = number
        self._bytes = os.fstat(self._file).st_size
        self._changed = False

    def _write(self, piece: memoryview) -> None:
        assert self._file is not None, "a journal begins with a snapshot"
        written = 0
        try:
            while written < len(piece):
                written += os.write(self._file, piece[written:])
        except OSError as error:
            raise cannot_write(self._path("journal", self._number, "log"), error) from error

    def _load(self, number: int) -> dict[str, Any] | None:
        """The state in a snapshot, or None unless it is whole."""
        try:
            record = unseal(read_file(self._path("snapshot", number, "json")))
            content = read_file(self._path("snapshot", number, "safetensors"))
        except OSError:
            return None
        if record is None or digest(content) != record["sha256"]:
            return None
        state: dict[str, Any] = harvest(record["state"], load_tensors(content))
        return state

    def _read(self, number: int, is_newest: bool) -> Iterator[Message]:
        """The messages of a journal. A torn end is cut off: it was never acknowledged."""
        path = self._path("journal", number, "log")
        if not path.exists():
            raise CheckpointError(f"{path} is missing{_LOSES}")
        with path.open("rb") as file:
            place = count = 0
            while (message := self._record(file)) is not None:
                yield message
                place, count = file.tell(), count + 1
            if place == path.stat().st_size:
                return
            if not is_newest or self._has_record_after(file, place):
                raise CheckpointError(f"record {count + 1} of {path} is damaged{_LOSES}")
        os.truncate(path, place)

    def _has_record_after(self, file: BinaryIO, place: int) -> bool:
        """Whether a whole record begins anywhere after that place."""
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            while (place := content.find(_MAGIC, place + 1)) >= 0:
                file.seek(place)
                if self._record(file) is not None:
                    return True
        return False

    def _record(self, file: BinaryIO) -> Message | None:
        """The next message; None if there is no whole one."""
        head = file.read(_RECORD.size)
        if len(head) < _RECORD.size:
            return None
        magic, check, length = _RECORD.unpack(head)
        if magic != _MAGIC or not HEADER_BYTES <= length <= HEADER_BYTES + self._limit_bytes:
            return None
        body = bytearray(file.read(length))
        if len(body) < length or zlib.crc32(body) != check:
            return None
        try:
            message, shapes = frames.decode(body[:HEADER_BYTES], self._limit_bytes)
        except WireError:
            return None
        parts, place = [], HEADER_BYTES
        for dtype, elements in shapes:
            nbytes = dtype.itemsize * elements
            piece = body[place : place + nbytes]
            parts.append(torch.frombuffer(piece, dtype=dtype) if nbytes else torch.empty(0, dtype=dtype))
            place += nbytes
        message.parts = tuple(parts)
        return message if place == length else None

    def _prune(self) -> None:
        """Remove what is older than the two newest snapshots."""
        for number in sorted(self._numbers("snapshot", "json"))[:-2]:
            for path in (
                self._path("snapshot", number, "json"),
                self._path("snapshot", number, "safetensors"),
                self._path("journal", number, "log"),
            ):
                path.unlink(missing_ok=True)
