"""Options that say how nodes reach each other over gRPC, and who may."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

PANEL = "gRPC between hosts"

Listen = Annotated[
    str | None,
    typer.Option(
        metavar="HOST[:PORT]",
        help="Where a server listens.",
        show_default="this host alone",
        rich_help_panel=PANEL,
    ),
]
Advertise = Annotated[
    str | None, typer.Option(metavar="HOST", help="What others call this host.", rich_help_panel=PANEL)
]
Certificate = Annotated[
    Path | None, typer.Option(metavar="FILE", help="This host's certificate (PEM).", rich_help_panel=PANEL)
]
Key = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The certificate's private key.", rich_help_panel=PANEL)
]
Authority = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Who signed the certificates.", rich_help_panel=PANEL)
]
Mutual = Annotated[
    bool, typer.Option("--mutual", help="Workers show a certificate, too.", rich_help_panel=PANEL)
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The word that lets a node in; or in SHOAL_TOKEN.",
        rich_help_panel=PANEL,
    ),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Let other hosts in without any of this.", rich_help_panel=PANEL)
]


def read_access(transport: str, **given: Any) -> dict[str, Any]:
    """Those that were given, as plain values. Raises ValueError where there is no use for them."""
    access = {
        name: str(v) if isinstance(v, Path) else v for name, v in given.items() if v not in (None, False)
    }
    if access and transport != "grpc":
        option = next(iter(access)).replace("_", "-")
        raise ValueError(f"--{option} belongs to --transport grpc")
    return access
