"""The command line: `shoal demo`, `shoal run` and so on.

Each command's module reads and checks its arguments without importing torch, then calls the module beside it.

demo        what Shoal is good for             shoal.demo   its acts
compare     one task, several strategies       comparison   the runs of a comparison
plan_command  which strategy, before any run   shoal.planning   formulas, short runs, the order
search      many models of one task            searching    the search; shoal.search has the methods
run         a script on several workers        launching    starts its processes, or joins a launcher's
join_command  a run that is under way          join_progress  takes part in it as a worker
runs        runs that are kept                 remove_runs  shoal runs rm
report      table and page of several of them
watching    runs on a live page                shoal.watch  the page, live or replayed
manifest    the file that starts a run on a cluster: Slurm, Kubernetes
split       a model cut into stages            shoal.pipelines   measures, cuts, simulates
reproduce   a published table, made again      listing      every word and its options: shoal list
doctor      what works on this machine         machine      the tests behind it
calibrate   what costs time on this machine    shoal.profiling   measures it; probe.py tries the transports
command     how arguments are read, errors reported
outcome     the closing table and files
checkpoint_options, grpc_options, record_options, watch_options   options that commands share
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from shoal.cli import (
    calibrate,
    compare,
    demo,
    doctor,
    join_command,
    listing,
    manifest,
    plan_command,
    report,
    reproduce,
    run,
    runs,
    search,
    split,
    watching,
)
from shoal.cli.command import (
    Command,
    CommandGroup,
    Commands,
    JoinCommand,
    ScriptCommand,
    StrategyCommand,
)
from shoal.launch.quick_exit import end_quickly
from shoal.launch.stop_signals import signals_raise

EXIT_CODES = "Exit codes: 2 for usage errors, 1 for runtime failures, 130 for Ctrl-C,\n143 for SIGTERM."

app = typer.Typer(cls=Commands, add_completion=False, pretty_exceptions_enable=False, epilog=EXIT_CODES)
app.command("demo", cls=Command, epilog=EXIT_CODES)(demo.demo)
app.command("compare", cls=StrategyCommand, epilog=EXIT_CODES)(compare.compare)
app.command(
    "plan",
    cls=ScriptCommand,
    context_settings={"allow_extra_args": True},
    options_metavar="[OPTIONS] [SCRIPT] [-- ARGUMENTS]",
    epilog=EXIT_CODES,
)(plan_command.plan)
app.command("search", cls=Command, epilog=EXIT_CODES)(search.search)
app.command("run", cls=ScriptCommand, context_settings={"allow_interspersed_args": False}, epilog=EXIT_CODES)(
    run.run
)
app.command(
    "join",
    cls=JoinCommand,
    context_settings={"allow_extra_args": True, "allow_interspersed_args": False},
    options_metavar="HOST:PORT [OPTIONS] [SCRIPT [ARGUMENTS]]",
    epilog=EXIT_CODES,
)(join_command.join)
app.command(
    "runs",
    cls=Command,
    context_settings={"allow_extra_args": True},
    options_metavar="[OPTIONS] [WORD]...",
    epilog=EXIT_CODES,
)(runs.show)
app.command(
    "report",
    cls=Command,
    context_settings={"allow_extra_args": True},
    options_metavar="[OPTIONS] RUN...",
    epilog=EXIT_CODES,
)(report.report_runs)
app.command("watch", cls=Command, epilog=EXIT_CODES)(watching.watch)
manifests = typer.Typer(cls=CommandGroup, help="Print the file that starts a run on Slurm or Kubernetes.")
for kind, (show, told) in manifest.COMMANDS.items():
    manifests.command(
        kind,
        cls=ScriptCommand,
        context_settings={"allow_interspersed_args": False},
        help=told,
        epilog=EXIT_CODES,
    )(show)
app.add_typer(manifests, name="manifest")
app.command("split", cls=Command, epilog=EXIT_CODES)(split.split)
app.command("reproduce", cls=Command, epilog=EXIT_CODES)(reproduce.reproduce)
app.command(
    "list",
    cls=Command,
    context_settings={"allow_extra_args": True},  # kinds; typer would import pydantic for an argument
    options_metavar="[OPTIONS] [KIND]...",
)(listing.show)
app.command("calibrate", cls=Command, epilog=EXIT_CODES)(calibrate.calibrate)
app.command("doctor", cls=Command, epilog="Exit codes: 0 if everything works, 1 if something is broken.")(
    doctor.doctor
)


@app.callback(invoke_without_command=True)
def shoal(
    ctx: typer.Context,
    want_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Train one PyTorch model on many workers; how they are kept together is one word."""
    if want_version:
        from importlib.metadata import version

        print(f"shoal {version('shoal')}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


def main() -> None:
    """Run the `shoal` command."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal without ✓ gets a ?
    end_quickly()
    with signals_raise():
        app(prog_name="shoal")
