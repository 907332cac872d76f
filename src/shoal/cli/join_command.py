"""`shoal join`: its options, checked before torch is imported. join_progress.py shows what follows."""

from __future__ import annotations

from collections.abc import Sequence
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


def read_address(words: Sequence[str]) -> str:
    """The only word. Raises ValueError for a script: its loop could not go on where the others are."""
    if not words:
        raise ValueError("name the run to join, as in: shoal join 10.0.0.1:7000 --token-file token")
    if len(words) > 1:
        raise ValueError(
            f"{words[1]!r} follows the address: nobody can join the run of a script from another machine; "
            "join those of shoal.run() and shoal compare, which tell the task themselves"
        )
    return words[0]


def join(
    ctx: typer.Context,
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
    """Take part in the run that listens at HOST:PORT, on another machine.

    The run was started with --transport grpc and --max-workers, and tells
    what to type here. Ctrl-C leaves it; the others go on.
    """
    address = read_address(ctx.args)
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
