"""Files that are there whole or not at all, and records that prove that nobody changed a bit of them.

A record is JSON that holds the SHA-256 of itself:

    {"sha256": "9f86d081…", "record": {…}}
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.core.errors import CheckpointError

PART = ".part"
"""What the name of a file ends with until it is whole."""

_BEGIN, _MIDDLE, _END = b'{"sha256": "', b'", "record": ', b"}"
_DIGITS = 64


def seal(record: Mapping[str, Any]) -> bytes:
    """The record as JSON with its checksum."""
    body = json.dumps(record).encode()
    return b"".join((_BEGIN, digest(body).encode(), _MIDDLE, body, _END))


def unseal(content: bytes) -> dict[str, Any] | None:
    """The record that was sealed; None if a byte of it is not as it was."""
    head = len(_BEGIN) + _DIGITS + len(_MIDDLE)
    body = content[head:-1]
    if content != b"".join((_BEGIN, digest(body).encode(), _MIDDLE, body, _END)):
        return None
    record: dict[str, Any] = json.loads(body)
    return record


def digest(content: bytes) -> str:
    """The SHA-256 of these bytes, in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def read_file(path: Path) -> bytes:
    """The content of a file. Raises OSError for a link, a device or a pipe, which might have no end."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(f"{path} is not a file")
    return path.read_bytes()


def write_whole(path: Path, content: bytes, *, synced: bool = True) -> None:
    """Write all of it or nothing: temporary file, sync, rename, sync of the folder.

    Unless `synced`, it outlives this process, and maybe not the host. Raises CheckpointError with the path if
    there is no room for it.
    """
    temporary = path.with_name(path.name + PART)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0)
    try:
        with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            if synced:
                os.fsync(file.fileno())
        temporary.replace(path)
        if synced:
            sync_folder(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise cannot_write(path, error) from error
        raise


def cannot_write(path: Path, error: OSError) -> CheckpointError:
    """The error of a file for which there is no room, or that may not be written."""
    return CheckpointError(f"cannot write {path}: {error.strerror or error}")


def sync_folder(folder: Path) -> None:
    """Have the disk remember which files a folder holds."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
