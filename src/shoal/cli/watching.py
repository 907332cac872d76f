"""shoal watch: the page of a run that is kept, or that runs on another host."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.core.errors import ShoalError

if TYPE_CHECKING:
    from shoal.watch.tunnel import PageElsewhere

LOOK_SECONDS = 0.5


def watch(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN|HOST:PORT/TOKEN", help="A run that is kept, or a page elsewhere."),
    ] = "last",
    runs: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Where runs are kept.", show_default="$SHOAL_RUNS or shoal-runs"),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the page on this host.", show_default="a free one")
    ] = 0,
) -> None:
    """Show a run on a page in your browser.

    RUN is the folder of a run, ended or under way, its name or the beginning
    of it, or last: all runs of the last command. HOST:PORT/TOKEN is what a
    run with --watch prints on another host; the page comes through ssh.
    Ctrl-C ends the page, not the run.
    """
    from shoal.watch.tunnel import PageElsewhere

    elsewhere = None if Path(run).exists() else PageElsewhere.parse(run)
    try:
        if elsewhere is not None:
            show_elsewhere(elsewhere, port)
        else:
            show_runs(run, runs, port)
    except KeyboardInterrupt:
        return


def show_elsewhere(page: PageElsewhere, port: int) -> None:
    """Bring a page of another host here, until Ctrl-C or until ssh ends."""
    from shoal.watch.tunnel import Tunnel

    tunnel = Tunnel(page, port)
    try:
        typer.echo(f"watch: {tunnel.address}\n       through ssh to {page.host}; Ctrl-C closes it")
        code = tunnel.wait()
    finally:
        tunnel.close()
    raise ShoalError(f"ssh to {page.host} ended with exit code {code}")


def show_runs(word: str, runs: str | None, port: int) -> None:
    """Serve a page of the runs that a word means, until Ctrl-C. A comparison under way may add some."""
    from shoal.records.stored_runs import find_runs
    from shoal.watch.feed import Feed
    from shoal.watch.page_server import PageServer
    from shoal.watch.replay import Replay

    found = find_runs(word, runs)
    command = found[0].about.get("first")
    feed = Feed()
    server = PageServer(feed, port)
    replays: dict[str, Replay] = {}
    records: list[Any] = []

    def load_new() -> None:
        for stored in found:
            if stored.name not in replays and stored.about.get("first") == command:
                replays[stored.name] = Replay(stored, feed, records)
                replays[stored.name].load()

    try:
        feed.run()
        load_new()
        typer.echo(f"watch: {server.address}\n       Ctrl-C closes it")
        while True:
            [*replays.values()][-1].follow()
            time.sleep(LOOK_SECONDS)
            if word == "last":
                found = find_runs(word, runs)
                load_new()
    finally:
        feed.close(grace_seconds=0.5)
        server.close()
