"""The command line: shoal compare | run | reproduce | list | doctor.

compare     one task under several strategies      run       a script of one's own on several workers
reproduce   a published table made again           catalogue what there is
doctor      what works on this machine; probe.py its test
command     how arguments are read, errors said    outcome   table and files; saving.py checks their folders
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from shoal.cli import catalogue, compare, doctor, reproduce, run
from shoal.cli.command import Commands, ScriptCommand, StrategyCommand

app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False)
app.command("compare", cls=StrategyCommand)(compare.compare)
app.command("run", cls=ScriptCommand, context_settings={"allow_interspersed_args": False})(run.run)
app.command("reproduce")(reproduce.reproduce)
app.command("list")(catalogue.show)
app.command("doctor")(doctor.doctor)


@app.callback(invoke_without_command=True)
def shoal(
    ctx: typer.Context,
    want_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Train one PyTorch model on many workers; how they are kept together is one word."""
    if want_version:
        print(f"shoal {version('shoal')}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


def main() -> None:
    """What the `shoal` command runs."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal without ✓ gets a ?
    app(prog_name="shoal")
