"""Options of a run on several hosts: which, and how Shoal is started there over ssh."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.core.catalogue import check_word
from shoal.core.words import TRANSPORTS, refuse_mpi
from shoal.launch.hosts import HostList, parse_hosts

PANEL = "Several hosts by ssh"

Hosts = Annotated[
    str | None,
    typer.Option(
        "--hosts",
        metavar="NAME:WORKERS,…",
        help="Start so many workers on each of these hosts, over ssh. NAME=ADDRESS:WORKERS also names the "
        "address for the other hosts.",
        rich_help_panel=PANEL,
    ),
]
ServersOn = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="The host that holds the servers, or the keeper of a run without.",
        show_default="the first",
        rich_help_panel=PANEL,
    ),
]
Port = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=65535,
        help="Port of the first that listens: a server, else the keeper, else worker 0. The others that "
        "listen take the next ones in order.",
        show_default="any free one",
        rich_help_panel=PANEL,
    ),
]
Relay = Annotated[
    bool,
    typer.Option(
        "--relay",
        help="For hosts that cannot all call each other: the host of the keeper passes messages between "
        "workers on, over grpc.",
        rich_help_panel=PANEL,
    ),
]
RemotePython = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="The Python that has Shoal on the hosts.",
        show_default="the same as here",
        rich_help_panel=PANEL,
    ),
]
RemoteFolder = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="The folder on the hosts in which the script runs.",
        show_default="the same as here",
        rich_help_panel=PANEL,
    ),
]
Ssh = Annotated[
    str | None,
    typer.Option(
        metavar="COMMAND", help="Call ssh so, as in 'ssh -F file'.", show_default="ssh", rich_help_panel=PANEL
    ),
]
Env = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME[=VALUE]",
        help="Set an environment variable on the hosts, by default to its value here. Can be repeated; "
        "SHOAL_DATA needs no mention.",
        rich_help_panel=PANEL,
    ),
]

ALWAYS = ("SHOAL_DATA", "SHOAL_SHARED_MEMORY")
"""Variables that travel to the hosts if they are set."""


BELONGING = ("servers_on", "port", "relay", "remote_python", "remote_folder", "ssh", "env")


def read_hosts(given: Mapping[str, Any], transport: str | None, access: Sequence[str]) -> HostList | None:
    """The hosts that were named, if any, of the options given. `access` are the names of options for grpc.

    Raises ValueError for options that do not fit together.
    """
    text, workers = given["hosts"], given["workers"]
    if text is None:
        if word := next((name for name in BELONGING if given[name]), None):
            raise ValueError(f"--{word.replace('_', '-')} belongs to --hosts")
        return None
    hosts = parse_hosts(text)
    ssh = shlex.split(given["ssh"]) if given["ssh"] else ["ssh"]
    found = HostList(
        hosts,
        servers_on=given["servers_on"] or "",
        ssh=tuple(ssh) or ("ssh",),
        python=given["remote_python"],
        folder=given["remote_folder"],
        port=given["port"],
        relayed=bool(given["relay"]),
        variables=read_variables(given["env"] or ()),
    )
    if workers is not None and workers != found.workers:
        raise ValueError(f"-n {workers} does not fit --hosts {text}, which has {found.workers}; omit -n")
    check_transport(transport, found.port)
    if found.relayed and transport != "grpc":
        raise ValueError(f"--relay belongs to transport 'grpc': over {transport!r} all nodes call each other")
    if access:
        option = access[0].replace("_", "-")
        raise ValueError(
            f"--{option} does not go with --hosts, which makes the certificates and the token of each run"
        )
    return found


def check_transport(transport: str | None, port: int | None) -> None:
    """Raise ValueError for a transport that does not reach other hosts, or does not take a port."""
    if transport is None:
        return
    check_word("transport", transport, [word for word in TRANSPORTS if word != "sim"])
    refuse_mpi(transport)
    if transport == "processes":
        raise ValueError(
            "transport 'processes' is one host; with --hosts take 'grpc', the default, or 'gloo'"
        )
    if port is not None and transport != "grpc":
        raise ValueError(f"--port belongs to transport 'grpc': with {transport!r} every node listens")


def read_variables(words: Sequence[str]) -> dict[str, str]:
    """The environment variables of the nodes. Raises ValueError for one that has no value here."""
    found = {name: os.environ[name] for name in ALWAYS if name in os.environ}
    for word in words:
        name, equals, value = word.partition("=")
        if not name.isidentifier():
            raise ValueError(f"--env {word}: write it as NAME or NAME=VALUE")
        if not equals and name not in os.environ:
            raise ValueError(f"--env {name}: it is not set here; write --env {name}=VALUE")
        found[name] = value if equals else os.environ[name]
    if "SHOAL_DATA" in found:
        found["SHOAL_DATA"] = str(Path(found["SHOAL_DATA"]).absolute())
    return found
