"""run_token: a token for the nodes of one host that find each other in a store which anybody may read."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.core.errors import ShoalError
from shoal.launch.stop_signals import temporary_folder
from shoal.transports.rendezvous import Store, await_keys, missing

TOKEN_KEY = "shoal/token"
"""The key under which the store holds the path of the file, and never the token."""


@contextmanager
def run_token(store: Store, rank: int, timeout: float) -> Iterator[str]:
    """The path of a file with a token that only this user can read. Worker 0 writes it, and removes it.

    Raises ShoalError if the file is another user's, who would know the token.
    """
    if rank:
        if await_keys(store, {0: TOKEN_KEY}, timeout):
            raise missing(rank, (0,), timeout, "write a token")
        path = store.get(TOKEN_KEY).decode()
        _check_owner(Path(path))
        yield path
        return
    with temporary_folder("shoal-token-") as folder:
        file = Path(folder) / "token"
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as written:
            written.write(secrets.token_hex(32))
        store.set(TOKEN_KEY, str(file))
        yield str(file)


def _check_owner(path: Path) -> None:
    try:
        found = path.lstat()
    except OSError as error:
        raise ShoalError(
            f"this process cannot read the token of its run: {error.strerror}: {path}. Without --listen all "
            "nodes share a host and its files; else give them a token with --token-file, or in SHOAL_TOKEN"
        ) from None
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise ShoalError(
            f"the token of this run, {path}, is not a file of this user: somebody else has written to the "
            "rendezvous store. Give the nodes a token with --token-file, or in SHOAL_TOKEN"
        )
