"""Hosts of a run: what `--hosts a:4,b=10.0.0.2:4` names, and at which address each is reached."""

from __future__ import annotations

import ipaddress
import socket
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

FORM = "write --hosts as NAME:WORKERS,NAME:WORKERS, or NAME=ADDRESS:WORKERS"
LOOK_UP_SECONDS = 10.0
"""How long `ssh -G`, which only reads ssh's configuration, may take."""

SSH = ("ssh",)


@dataclass(frozen=True)
class Host:
    """One host: its name for ssh, its number of workers, and its address for the other hosts."""

    name: str
    workers: int
    address: str = ""


@dataclass(frozen=True)
class HostList:
    """The hosts of a run, and how Shoal is started on them. Workers are counted through in this order.

    `python` and `folder` are the interpreter and the current folder there; None takes the launcher's own.
    `port` is that of the first server or of the keeper, and others take those after it; None takes any free
    one. Where the hosts are `relayed`, not all can call each other.
    `homes` places each node, by the number of its host; without it, `workers` and `servers_on` do.
    """

    hosts: tuple[Host, ...]
    homes: tuple[int, ...] = ()
    servers_on: str = ""  # name of the host that holds the servers; the first one by default
    ssh: tuple[str, ...] = SSH
    python: str | None = None
    folder: str | None = None
    port: int | None = None
    relayed: bool = False
    variables: dict[str, str] = field(default_factory=dict)  # environment variables for the nodes
    start: Callable[[Host, Sequence[str]], Any] | None = None  # runs the agent instead of ssh

    def __post_init__(self) -> None:
        names = [host.name for host in self.hosts]
        if self.servers_on and self.servers_on not in names:
            raise ValueError(
                f"--servers-on {self.servers_on}: --hosts names no such host, but {', '.join(names)}"
            )

    @property
    def workers(self) -> int:
        """The workers of all hosts."""
        return sum(host.workers for host in self.hosts)

    def place_nodes(self, nodes: int) -> list[int]:
        """For each of `nodes` ranks, the number of its host. The last ranks are servers, or a keeper."""
        by_workers = (number for number, host in enumerate(self.hosts) for _ in range(host.workers))
        placed = list(self.homes or by_workers)
        names = [host.name for host in self.hosts]
        home = names.index(self.servers_on) if self.servers_on else 0
        return placed + [home] * (nodes - len(placed))

    def resolve(self) -> HostList:
        """The same hosts with the address of each. Raises ValueError for one that others cannot reach."""
        if self.start is not None:  # whoever starts the agents knows the addresses
            return self
        hosts = tuple(
            replace(host, address=resolve(host.address or real_name(self.ssh, host.name), host.name))
            for host in self.hosts
        )
        if len(hosts) > 1:
            for host in hosts:
                _check_reachable(host)
        seen: dict[str, str] = {}
        for host in hosts:
            if host.address in seen:
                raise ValueError(
                    f"--hosts names {host.address} twice, as {seen[host.address]!r} and {host.name!r}; "
                    "name each host once"
                )
            seen[host.address] = host.name
        return replace(self, hosts=hosts)

    def __str__(self) -> str:
        return ",".join(f"{host.name}:{host.workers}" for host in self.hosts)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Read `a:4,me@b:4,c=10.0.0.3:2,[fd00::1]:4`. Raises ValueError with the word that is wrong."""
    hosts = tuple(_parse_host(word.strip()) for word in text.split(","))
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"--hosts names {name!r} twice; name each host once, with all its workers")
    return hosts


def _parse_host(word: str) -> Host:
    target, colon, workers = word.rpartition(":")
    if not colon or not workers.isdecimal() or not workers.isascii():
        raise ValueError(f"--hosts: {word!r} has no number of workers; {FORM}")
    if int(workers) < 1:
        raise ValueError(f"--hosts {word}: a host needs at least 1 worker; leave out a host without any")
    name, equals, address = target.partition("=")
    name, address = _without_brackets(name), _without_brackets(address)
    if not name or name.startswith("-") or any(c.isspace() or c in "[]/" for c in name + address):
        raise ValueError(f"--hosts: {word!r} is not a host; {FORM}")
    if equals and not address:
        raise ValueError(f"--hosts: {word!r} has no address after '='; {FORM}")
    if ":" in name + address and not _is_address(name) and not _is_address(address):
        raise ValueError(f"--hosts: {word!r} has too many colons; {FORM}. ssh's port belongs in its config")
    return Host(name, int(workers), address)


def _without_brackets(name: str) -> str:
    """`fd00::1` of `[fd00::1]`."""
    bare = name.removeprefix("[").removesuffix("]")
    return bare if name == f"[{bare}]" else name


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.rpartition("@")[2])
    except ValueError:
        return False
    return True


def real_name(ssh: Sequence[str], name: str) -> str:
    """What ssh's configuration says is the HostName of `name`; the name itself if ssh does not answer."""
    bare = name.rpartition("@")[2]
    try:
        told = subprocess.run(
            [*ssh, "-G", name],
            capture_output=True,
            text=True,
            timeout=LOOK_UP_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):  # whatever it is, connecting will tell
        return bare
    words = (line.split(" ", 1) for line in told.stdout.splitlines())
    return next((word[1] for word in words if word[0] == "hostname" and len(word) == 2), bare)


def resolve(name: str, host: str) -> str:
    """The IP address of `name`, IPv4 first. Raises ValueError if it has none."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"--hosts: {name!r} has no address ({getattr(error, 'strerror', None) or error}); "
            f"write {host}=ADDRESS:WORKERS"
        ) from None
    found.sort(key=lambda each: each[0] != socket.AF_INET)
    return str(found[0][4][0])


def _check_reachable(host: Host) -> None:
    address = ipaddress.ip_address(host.address)
    if address.is_loopback or address.is_unspecified:
        raise ValueError(
            f"--hosts: {host.name!r} has the address {host.address}, at which other hosts cannot reach it; "
            f"write {host.name}=ADDRESS:{host.workers}"
        )
