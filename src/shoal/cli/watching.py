"""shoal watch: the page of a run that was recorded, or that runs on another host."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from shoal.core.errors import ShoalError

LOOK_SECONDS = 0.5


def watch(
    run: Annotated[
        str, typer.Argument(metavar="DIR|HOST:PORT/TOKEN", help="The folder of a run, or its page elsewhere.")
    ] = "",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the page on this host.", show_default="a free one")
    ] = 0,
) -> None:
    """Show a run on a page in your browser.

    DIR is the folder of a run, finished or under way. HOST:PORT/TOKEN is what
    a run with --watch prints on another host; the page comes through ssh.
    Ctrl-C ends the page, not the run.
    """
    from shoal.watch.tunnel import PageElsewhere

    if not run:
        raise ValueError("name the folder of a run, as in: shoal watch shoal-runs/bmuf-1117-0742")
    elsewhere = None if Path(run).exists() else PageElsewhere.parse(run)
    try:
        if elsewhere is not None:
            show_elsewhere(elsewhere, port)
        else:
            show_folder(Path(run), port)
    except KeyboardInterrupt:
        return


def show_elsewhere(page: object, port: int) -> None:
    """Bring a page of another host here, until Ctrl-C or until ssh ends."""
    from shoal.watch.tunnel import PageElsewhere, Tunnel

    assert isinstance(page, PageElsewhere)
    tunnel = Tunnel(page, port)
    try:
        typer.echo(f"watch: {tunnel.address}\n       through ssh to {page.host}; Ctrl-C closes it")
        code = tunnel.wait()
    finally:
        tunnel.close()
    raise ShoalError(f"ssh to {page.host} ended with exit code {code}")


def show_folder(folder: Path, port: int) -> None:
    """Serve the page of a run's folder until Ctrl-C."""
    from shoal.watch.feed import Feed
    from shoal.watch.page_server import PageServer
    from shoal.watch.replay import Replay, check_run

    check_run(folder)
    feed = Feed()
    replay = Replay(folder, feed)
    server = PageServer(feed, port)
    try:
        replay.load()
        feed.run()
        typer.echo(f"watch: {server.address}\n       Ctrl-C closes it")
        while replay.follow():
            time.sleep(LOOK_SECONDS)
        while True:
            time.sleep(3600)
    finally:
        feed.close(grace_seconds=0.5)
        server.close()
