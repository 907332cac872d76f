"""`shoal join`: its options, checked before torch is imported. join_progress.py shows what follows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.grpc_options import PANEL, Authority, Certificate, Insecure, Key, read_access

Token = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="The token of the run, in a file that only you can read. Or set SHOAL_TOKEN.",
        rich_help_panel=PANEL,
    ),
]


def refuse_token(value: str | None) -> None:
    """Raise ValueError: whoever lists the processes of a machine sees their arguments."""
    if value is not None:
        raise ValueError(
            "--token would show the token to everybody who lists this machine's processes; put it into a "
            "file of mode 600 for --token-file, or into SHOAL_TOKEN"
        )


def join(
    address: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="Where the run listens; it says so when it begins.")
    ] = "",
    token_file: Token = None,
    authority: Authority = None,
    certificate: Certificate = None,
    key: Key = None,
    insecure: Insecure = False,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Torch threads of this worker.", show_default="this machine's cores"),
    ] = None,
    token: Annotated[str | None, typer.Option(hidden=True, callback=refuse_token)] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print errors only.")] = False,
) -> None:
    """Take part in a run that is under way on another machine.

    The run was started with --transport grpc and --max-workers, and tells
    what to type here. Ctrl-C leaves it; the others go on.
    """
    if not address:
        raise ValueError("name the run to join, as in: shoal join 10.0.0.1:7000 --token-file token")
    access = read_access(
        "grpc",
        certificate=certificate,
        key=key,
        authority=authority,
        token_file=token_file,
        insecure=insecure,
    )

    from shoal.cli.join_progress import take_part  # imports torch

    take_part(address, access, threads, quiet)
