"""The demo on the terminal: what an act is about, its table, and the last screen."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import indent

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shoal.demo.sentences import SCRIPT
from shoal.demo.tables import TextTable


def show_heading(console: Console, heading: str, about: str) -> None:
    """Print what comes now."""
    console.print(Text(f"\n{heading}", "bold"))
    console.print(Text(about))


def show_table(console: Console, table: TextTable, *sentences: str) -> None:
    """Print an act's table, and sentences about it."""
    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1), pad_edge=False)
    for number, header in enumerate(table.headers):
        grid.add_column(header, justify="right" if number else "left", no_wrap=True)
    for row in table.rows:
        grid.add_row(*row)
    console.print(Padding(grid, (1, 0, 1, 0)))
    for sentence in sentences:
        console.print(Text(sentence))


def show_last_screen(console: Console, lines: Sequence[str], command: str, page: str) -> None:
    """Print the five lines, and the command to type next."""
    console.print(Text("\nWhat this run has shown", "bold"))
    grid = Table.grid(padding=(0, 1))
    for number, line in enumerate(lines, 1):
        grid.add_row(Text(f"{number}.", "bold"), Text(line))
    console.print(grid)
    console.print(Text("\nNext, your own script: three lines in it, then one command", "bold"))
    console.print(Text(indent(SCRIPT, "    ")))
    console.print(Text(f"    {command}", "bold green"), soft_wrap=True)
    console.print(Text(f"\nreport: {page}"), soft_wrap=True)
