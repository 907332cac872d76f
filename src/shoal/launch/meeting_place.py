"""How processes that another program started on several hosts meet: a store, and a network interface."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import struct
from datetime import timedelta
from pathlib import Path

from torch import distributed as dist

from shoal.core.errors import PeerLost, Unavailable
from shoal.transports.rendezvous import Store, await_keys, missing

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"

SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def meet(host: str, port: int, rank: int, timeout: float) -> Store:
    """A store at `host`, which the process of rank 0 keeps and all others call. Waits for that process."""
    listening = _listen(host, port) if rank == 0 else None
    try:
        store: Store = dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            is_master=rank == 0,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=None if listening is None else listening.detach(),
        )
    except RuntimeError as error:
        raise PeerLost(
            f"node 0 could not be reached at {host}:{port} within {timeout:g} s (I am node {rank}): {error}"
        ) from None
    return store


def _listen(host: str, port: int) -> socket.socket:
    """Listen at the address of `host`, or at all if its name is only that of the loopback address here.

    A store that opens its own socket would listen at all addresses.
    """
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    known = ipaddress.ip_address(address[0]).is_loopback and not _is_address(host)
    try:
        return socket.create_server(("" if known else address[0], port), family=family, backlog=1024)
    except OSError as problem:
        why = os.strerror(problem.errno or 0)
        raise Unavailable(
            f"the processes cannot meet at {host}:{port}: {why}. Set MASTER_PORT to a free port"
        ) from None


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def choose_interface(store: Store, host: str, port: int, rank: int, nodes: int, timeout: float) -> None:
    """Tell gloo, by its environment variable, which network interface leads to the other hosts.

    That is the one from which `host`, where the store is, is reached. The processes on that very host would
    find the loopback interface: they take the one that leads to the first process elsewhere.
    """
    if GLOO_INTERFACE in os.environ:
        return
    mine = _address_towards(host, port)
    store.set(f"shoal/from/{rank}", mine)
    keys = {other: f"shoal/from/{other}" for other in range(nodes)}
    if absent := await_keys(store, keys, timeout):
        raise missing(rank, absent, timeout, "come to the meeting point")
    addresses = [store.get(key).decode() for key in keys.values()]
    elsewhere = [address for address in addresses if address != addresses[0]]
    if mine == addresses[0] and elsewhere:
        mine = _address_towards(elsewhere[0], port)
    interface = _interface_of(mine)
    if interface is None:
        raise ValueError(
            f"no network interface has the address {mine} from which {host} is reached: set {GLOO_INTERFACE} "
            "to the interface that connects the hosts, such as eth0"
        )
    os.environ[GLOO_INTERFACE] = interface


def _address_towards(host: str, port: int) -> str:
    """The address of this host from which packets to `host` would leave. Sends none."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _interface_of(address: str) -> str | None:
    """The network interface with this address, on Linux; else None."""
    wanted = ipaddress.ip_address(address)
    if wanted.version == 6:
        with contextlib.suppress(OSError):
            for line in Path("/proc/net/if_inet6").read_text().splitlines():
                number, *_, name = line.split()
                if ipaddress.ip_address(bytes.fromhex(number)) == wanted:
                    return name
        return None
    with contextlib.suppress(ImportError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        import fcntl

        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                said = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if ipaddress.ip_address(said[20:24]) == wanted:
                    return name
    return None
