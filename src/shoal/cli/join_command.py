"""`shoal join`: its options, checked before torch is imported. join_progress.py shows what follows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.command import ADDRESS
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
    """The address of the run. Raises ValueError if there is none."""
    if not words:
        raise ValueError("name the run to join, as in: shoal join 10.0.0.1:7000 --token-file token")
    return words[0]


def check_script(words: Sequence[str], threads: int | None) -> None:
    """Raise ValueError for a script that is not there, or for what a script decides itself."""
    if words and not Path(words[0]).is_file():
        raise ValueError(f"there is no script {words[0]!r}")
    if words and threads is not None:
        raise ValueError(
            f"--threads {threads} is for the runs of tasks: a script may call torch.set_num_threads itself"
        )


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

    The run was started with --max-workers, over gRPC, and tells what to type
    here. The run of a script is joined with the same script. Ctrl-C leaves
    it; the others go on.
    """
    address = read_address(ctx.meta[ADDRESS])
    check_script(ctx.args, threads)
    access = read_access(
        "grpc",
        certificate=certificate,
        key=key,
        authority=authority,
        token_file=token_file,
        insecure=insecure,
    )

    from shoal.cli.join_progress import take_part  # imports torch

    take_part(address, access, ctx.args, threads, quiet)
