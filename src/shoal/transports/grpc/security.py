"""Security: which nodes may connect to a hub, and how connections are protected."""

from __future__ import annotations

import hmac
import ipaddress
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from shoal.transports.grpc.hub_protocol import Options
from shoal.transports.rendezvous import is_loopback

TOKEN_VARIABLE = "SHOAL_TOKEN"
"""Environment variable with the token, if no other is given."""

SHORTEST_TOKEN = 32
MOST_TOKENS = 2

Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Security:
    """Certificates and tokens of one node. The default has neither, and is for a single host.

    A hub with a `certificate` and its `key` uses TLS; a node that dials it needs the `authority` that
    signed that certificate. With `mutual` TLS every node has a certificate. Files are PEM.
    The token comes from `tokens`, from `token_file` (one per line, mode 0600) or from SHOAL_TOKEN. Of two
    tokens a node sends the first and accepts both, so that you can change them one node at a time.
    `insecure` admits other hosts without any of this.
    """

    certificate: Path | str | None = None
    key: Path | str | None = field(default=None, repr=False)
    authority: Path | str | None = None
    mutual: bool = False
    token_file: Path | str | None = None
    tokens: tuple[str, ...] = field(default=(), repr=False)
    insecure: bool = False

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key belong together: give both or neither")
        if self.mutual and (self.certificate is None or self.authority is None):
            raise ValueError("mutual TLS needs certificate, key and authority on every node")
        if self.tokens and self.token_file is not None:
            raise ValueError("give tokens or token_file, not both")
        _check_tokens(self.tokens, "tokens")

    def secrets(self) -> tuple[str, ...]:
        """The tokens, read again from their source; empty if there are none."""
        if self.tokens:
            return self.tokens
        if self.token_file is not None:
            return _check_tokens(_read_private(Path(self.token_file)), f"token file {self.token_file}")
        return _check_tokens(tuple(os.environ.get(TOKEN_VARIABLE, "").split()), TOKEN_VARIABLE)

    def passwords(self, run_id: str) -> tuple[str, ...]:
        """What a hub accepts: the tokens, or the run id if there are none. Nodes send the first.

        So a hub always refuses a stranger before it reads the request.
        """
        return self.secrets() or (run_id,)

    def check_listening(self, host: str) -> None:
        """Raise ValueError unless a hub may listen there."""
        if is_loopback(host) or self.insecure:
            return
        lacking = [] if self.certificate is not None else ["tls=…"]
        if not self.mutual and not self.secrets():
            lacking.append("token_file=…")
        if lacking:
            raise ValueError(f"refusing to listen on {host} without {', '.join(lacking)} (or insecure=True)")

    def check_dialling(self, host: str) -> None:
        """Raise ValueError unless a node may send its credentials to that host."""
        if self.authority is None and not (is_loopback(host) or self.insecure):
            raise ValueError(f"refusing to call {host} without tls=… (or insecure=True)")

    def server_credentials(self) -> Any:
        """The TLS credentials of a hub's port; None without TLS."""
        if self.certificate is None or self.key is None:
            return None
        pair = (Path(self.key).read_bytes(), Path(self.certificate).read_bytes())
        authority = Path(self.authority).read_bytes() if self.mutual and self.authority is not None else None
        return grpc.ssl_server_credentials([pair], authority, require_client_auth=self.mutual)

    def channel(self, address: str, options: Options) -> Any:
        """A channel to a hub; connects on first use."""
        if self.authority is None:
            return grpc.insecure_channel(address, options=options)
        own = (
            (Path(self.key).read_bytes(), Path(self.certificate).read_bytes())
            if self.key is not None and self.certificate is not None
            else (None, None)
        )
        credentials = grpc.ssl_channel_credentials(Path(self.authority).read_bytes(), *own)
        return grpc.secure_channel(address, credentials, options=options)


def bearer(passwords: tuple[str, ...]) -> Metadata:
    """The metadata that carries a node's password."""
    return (("authorization", f"Bearer {passwords[0]}"),)


def is_admitted(shown: str, passwords: tuple[str, ...]) -> bool:
    """Whether the caller's metadata holds one of the passwords. Constant time."""
    given = shown.encode()
    return True in [hmac.compare_digest(given, f"Bearer {password}".encode()) for password in passwords]


def split_address(address: str) -> tuple[str, int]:
    """Host and port. Raises ValueError if there is no port."""
    host, colon, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    is_host = bool(host) and (":" not in host or host == f"[{bare}]")
    if not (colon and is_host and port.isdecimal() and int(port) < 1 << 16):
        raise ValueError(f"address {address!r} is not host:port, as in 127.0.0.1:0 or [::1]:50051")
    return bare, int(port)


def join_address(host: str, port: int) -> str:
    """The address that `split_address` splits."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def with_port(address: str) -> str:
    """The address, with port 0 (any free port) appended if it has none, as in `::1`."""
    bare = address.removeprefix("[").removesuffix("]")
    try:
        ipaddress.ip_address(bare)
    except ValueError:
        return address if ":" in address else join_address(address, 0)
    return join_address(bare, 0)


def _read_private(path: Path) -> tuple[str, ...]:
    with path.open(encoding="ascii") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:
            raise ValueError(f"token file {path} is open to others (mode {mode:04o}): chmod 600 {path}")
        tokens = tuple(file.read(4096).split())
    if not tokens:
        raise ValueError(f"token file {path} is empty")
    return tokens


def _check_tokens(tokens: tuple[str, ...], where: str) -> tuple[str, ...]:
    if len(tokens) > MOST_TOKENS:
        raise ValueError(f"{where}: {len(tokens)} tokens, at most {MOST_TOKENS}: the new one and the old one")
    for token in tokens:
        if len(token) < SHORTEST_TOKEN or not (token.isascii() and token.isprintable()):
            raise ValueError(
                f"{where}: a token has at least {SHORTEST_TOKEN} printable ascii characters. "
                "Make one with: python -c 'import secrets; print(secrets.token_hex(32))'"
            )
    return tokens
