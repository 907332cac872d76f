"""Invitation: the token of a run whose places are open, and the words with which somebody joins it."""

from __future__ import annotations

import os
import secrets
import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shoal.launch.join import Access
from shoal.launch.keeper_process import KeeperPlace


@dataclass(frozen=True)
class Invitation:
    """What a worker that joins is `told`, and the end of the command with which it does."""

    told: dict[str, Any]
    hint: str

    def added_to(self, place: KeeperPlace) -> KeeperPlace:
        """The place of a keeper that invites others."""
        return replace(place, invitation=self.told, hint=self.hint)


def with_token(access: Access, folder: str | Path) -> Access:
    """The same access with a file that holds the run's token: the user's own, or a new one in that folder.

    Raises ValueError if the run may not listen there without TLS.
    """
    from shoal.transports.grpc import Security
    from shoal.transports.grpc.security import split_address, with_port

    settings = asdict(access)
    listen, _ = settings.pop("listen"), settings.pop("advertise")
    tokens = Security(**settings).secrets() or (secrets.token_hex(32),)
    if access.token_file is None:
        file = Path(folder) / "token"
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as written:
            written.write("\n".join(tokens))
        access = replace(access, token_file=str(file))
    Security(**{**settings, "token_file": access.token_file}).check_listening(
        split_address(with_port(listen))[0]
    )
    return access


def join_hint(asked: Access, given: Access) -> str:
    """The options of `shoal join` for a run that was `asked` for so, and was given a token file."""
    from shoal.transports.grpc.security import TOKEN_VARIABLE

    if asked.token_file is None and os.environ.get(TOKEN_VARIABLE):
        words = []
        after = f" (with the same {TOKEN_VARIABLE})"
    else:
        words = ["--token-file", str(given.token_file)]
        after = ""
    words += ["--authority", given.authority] if given.authority else []
    words += ["--certificate", "FILE", "--key", "FILE"] if given.mutual else []
    words += ["--insecure"] if given.insecure else []
    return shlex.join(words) + after
