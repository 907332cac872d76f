"""--on ray: where the processes of `shoal run` are started."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.core.catalogue import check_word

CLUSTERS = {"ray": "the Ray cluster at RAY_ADDRESS, or the one on this machine"}

On = Annotated[
    str | None,
    typer.Option(
        metavar="CLUSTER",
        help="Start the workers on a cluster: ray.",
        show_default="this host",
        rich_help_panel="A cluster",
    ),
]


def check_on(on: str | None, hosts: str | None, transport: str | None, has_access: bool) -> None:
    """Raise ValueError for a cluster that is not known, and for options that do not go with one."""
    if on is None:
        return
    check_word("cluster", on, CLUSTERS)
    if hosts is not None:
        raise ValueError("--on and --hosts both say where the workers are started; take one of them")
    if transport not in (None, "grpc", "gloo"):
        raise ValueError(
            f"transport {transport!r} is one host; with --on take 'grpc', the default, or 'gloo'"
        )
    if has_access:
        raise ValueError("--on makes the certificates and the token of each run; omit --listen and the like")
