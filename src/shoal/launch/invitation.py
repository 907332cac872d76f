"""Invitation: what somebody needs to join a run whose places are open, and the command to type."""

from __future__ import annotations

import ipaddress
import os
import secrets
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shoal.launch.join import Access
from shoal.launch.keeper_process import KeeperPlace
from shoal.transports.rendezvous import is_loopback

COPIED = "  # copy these files there; they are secret"

RUN_ENDED = "the run was stopped where it was started, or failed there"
"""What one that was invited says when the run has gone."""


@dataclass(frozen=True)
class Invitation:
    """What a worker that joins is `told`, and the end of the command with which it does."""

    told: dict[str, Any]
    hint: str

    def added_to(self, place: KeeperPlace) -> KeeperPlace:
        """The place of a keeper that invites others."""
        return replace(place, invitation=self.told, hint=self.hint)


def with_credentials(access: Access, folder: str | Path) -> Access:
    """The same access with a token, and with certificates if others are to call from another host.

    What the user has not given is made for this run, in that folder. Raises ValueError if that cannot be.
    """
    from shoal.transports.grpc import Security
    from shoal.transports.grpc.security import split_address, with_port

    settings = asdict(access)
    listen, advertise = settings.pop("listen"), settings.pop("advertise")
    tokens = Security(**settings).secrets() or (secrets.token_hex(32),)
    if access.token_file is None:
        access = replace(access, token_file=_keep(folder, "token", "\n".join(tokens)))
    host = split_address(with_port(listen))[0]
    if is_loopback(host) or access.insecure or access.certificate is not None:
        return access
    return _certified(access, advertise or host, folder)


def _certified(access: Access, host: str, folder: str | Path) -> Access:
    """The same access with a certificate for that host, of an authority of this run's own."""
    from shoal.launch.certificates import CertificateAuthority

    try:
        wildcard = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        wildcard = True
    if wildcard:
        raise ValueError(
            f"Shoal makes certificates for addresses in digits, and not for {host!r}: give the address of "
            "this host with --listen or --advertise, or files with --certificate, --key and --authority"
        )
    authority = CertificateAuthority()
    certificate, key = authority.issue(host)
    return replace(
        access,
        certificate=_keep(folder, "certificate.pem", certificate),
        key=_keep(folder, "key.pem", key),
        authority=_keep(folder, "authority.pem", authority.certificate),
    )


def _keep(folder: str | Path, name: str, text: str) -> str:
    """Write a file that only this user can read; its path."""
    file = Path(folder) / name
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as written:
        written.write(text)
    return str(file)


def join_hint(asked: Access, given: Access, script: Sequence[str] = ()) -> str:
    """The options of `shoal join` for a run that was `asked` for so, and was given what it lacked.

    `script` has the name and the arguments of the script that the run is of.
    """
    from shoal.transports.grpc.security import TOKEN_VARIABLE, split_address, with_port

    in_variable = asked.token_file is None and bool(os.environ.get(TOKEN_VARIABLE))
    words = [] if in_variable else ["--token-file", str(given.token_file)]
    words += ["--authority", given.authority] if given.authority else []
    words += ["--certificate", "FILE", "--key", "FILE"] if given.mutual else []
    words += ["--insecure"] if given.insecure else []
    after = f"  # with the same {TOKEN_VARIABLE}" if in_variable else ""
    if words != ["--insecure"] and not is_loopback(split_address(with_port(given.listen))[0]):
        after = COPIED + after
    return shlex.join([*words, *script]) + after
