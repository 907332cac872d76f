"""Options of transport grpc: the address a server listens on, TLS files, and the token of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

PANEL = "gRPC between hosts"

Listen = Annotated[
    str | None,
    typer.Option(
        metavar="HOST[:PORT]",
        help="Address that a server listens on.",
        show_default="this host only",
        rich_help_panel=PANEL,
    ),
]
Advertise = Annotated[
    str | None,
    typer.Option(metavar="HOST", help="Name by which other hosts reach this one.", rich_help_panel=PANEL),
]
Certificate = Annotated[
    Path | None, typer.Option(metavar="FILE", help="This host's certificate (PEM).", rich_help_panel=PANEL)
]
Key = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The certificate's private key (PEM).", rich_help_panel=PANEL),
]
Authority = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Certificate authority that signed the certificates (PEM).",
        rich_help_panel=PANEL,
    ),
]
Mutual = Annotated[
    bool, typer.Option("--mutual", help="Require a certificate from workers, too.", rich_help_panel=PANEL)
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Secret that admits a node to the run. Or set SHOAL_TOKEN.",
        rich_help_panel=PANEL,
    ),
]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="Accept other hosts without TLS and token.", rich_help_panel=PANEL),
]


ACCESS = (*("listen", "advertise", "certificate", "key", "authority", "mutual", "token_file", "insecure"),)
"""The names of these options."""


def check_opening(max_workers: int | None, transport: str | None, access: Mapping[str, Any]) -> None:
    """Raise ValueError for options of a run that others join, where none can, or of one that is alone."""
    if max_workers is not None and transport != "grpc":
        raise ValueError(f"--max-workers {max_workers}: others join over gRPC; add --transport grpc")
    if access and max_workers is None:
        option = next(iter(access)).replace("_", "-")
        raise ValueError(f"--{option} is for workers that join from other hosts; add --max-workers")


def read_access(transport: str | None, **given: Any) -> dict[str, Any]:
    """The options that were given, as plain values. Raises ValueError if the transport is not grpc."""
    access = {
        name: str(v) if isinstance(v, Path) else v for name, v in given.items() if v not in (None, False)
    }
    if access and transport != "grpc":
        option = next(iter(access)).replace("_", "-")
        raise ValueError(f"--{option} belongs to --transport grpc")
    return access
