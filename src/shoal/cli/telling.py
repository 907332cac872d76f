"""Telling the user what a command does that takes its time and has no bar to show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def telling(quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """What is being done, on stderr: the latest beside a spinner on a terminal, else a line for each."""
    from rich.console import Console

    console = Console(stderr=True, quiet=quiet, highlight=False)
    if not console.is_terminal:
        yield lambda what: console.print(what, markup=False, soft_wrap=True)
        return
    with console.status("") as status:
        yield status.update
