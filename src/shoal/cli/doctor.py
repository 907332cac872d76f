"""`shoal doctor`: print what machine.py finds out about this machine, one line each."""

from __future__ import annotations

import typer

MARKS = {True: ("✓", "green"), False: ("✗", "bold red"), None: ("–", "dim")}


def doctor() -> None:
    """Test what Shoal needs on this machine, and say how to fix what is broken.

    ✓ works, ✗ is broken, – is missing and optional.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from shoal.cli.machine import examine  # imports torch

    console = Console(highlight=False)
    broken = 0
    for finding in examine():
        mark, sentence = Text(*MARKS[finding.works]), Text(finding.sentence)
        if console.is_terminal:  # folds long lines beside the mark; elsewhere one finding is one line
            line = Table.grid(padding=(0, 1))
            line.add_row(mark, sentence)
            console.print(line)
        else:
            console.print(mark, sentence, soft_wrap=True)
        broken += finding.works is False
    if broken:
        raise typer.Exit(1)
