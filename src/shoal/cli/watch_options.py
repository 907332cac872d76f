"""The option --watch: a live page of what a command runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from shoal.watch.live import LivePage

Watch = Annotated[bool, typer.Option("--watch", help="Show the run on a live page; prints its address.")]


class NoPage:
    """Stands in for the page where none was asked for."""

    def start(self, name: str, workers: int, servers: int = 0, **about: Any) -> None:
        """A run begins."""

    def update(self, event: Mapping[str, Any]) -> None:
        """A node reports."""

    def print(self, name: str, line: str) -> None:
        """A worker prints."""

    def finish(self, record: Mapping[str, Any]) -> None:
        """The run has ended."""


@contextmanager
def live_page(wanted: bool) -> Iterator[LivePage | NoPage]:
    """The page, with its address on stderr; or what stands in for it."""
    if not wanted:
        yield NoPage()
        return
    from shoal.watch.live import LivePage

    with LivePage() as page:
        typer.echo(page.told(), err=True)
        yield page
