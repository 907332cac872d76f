"""Loopback: which addresses lead nowhere but to this host."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether that is this host alone. A name other than localhost may be anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_loopback(host: str) -> None:
    """Raise ValueError unless that is an IPv4 address of this host alone."""
    if ":" in host or host == "localhost" or not is_loopback(host):
        raise ValueError(
            f"host {host} is not an IPv4 loopback address; frames travel in the clear, so sockets stay on "
            "127.0.0.1. Between hosts use the grpc transport."
        )
