"""`shoal search`: its options, checked before torch is imported. searching.py runs the search."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.command import Device, Patience, Servers, Timeout
from shoal.cli.outcome import JsonFile, ReportFile
from shoal.cli.record_options import KeptRuns
from shoal.codecs import CODECS
from shoal.core.catalogue import check_word
from shoal.core.limits import PATIENCE_SECONDS
from shoal.core.paths import check_file
from shoal.core.words import DEVICES
from shoal.programs.tasks import TASKS
from shoal.search import METHODS
from shoal.search.search_folder import check_search_folder
from shoal.search.searcher import METRICS, TRIAL_TRANSPORTS
from shoal.search.space import Space, read_space_file, read_space_options
from shoal.strategies import STRATEGIES

FOLDER = Path("shoal-search")


def search(
    task: Annotated[
        str, typer.Option(metavar="WORD", help="Model and data to train; see: shoal list tasks.")
    ] = "digits",
    method: Annotated[
        str,
        typer.Option(
            metavar="WORD", help="How to search, such as pbt:population=16; see: shoal list methods."
        ),
    ] = "pbt",
    space: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The hyper-parameters and their ranges, TOML or JSON.")
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=RANGE", help='One range, as in "lr=log 1e-4..1"; several are allowed.'),
    ] = None,
    epochs: Annotated[int, typer.Option(help="Budget of all trials together.")] = 100,
    at_once: Annotated[
        int | None,
        typer.Option("--at-once", help="Trials at a time.", show_default="as many as there are cores for"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the search, the weights and the data.")] = 0,
    held_out: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of the training set that trials are scored on.")
    ] = 0.2,
    metric: Annotated[str, typer.Option(metavar="WORD", help="accuracy or loss.")] = "accuracy",
    strategy: Annotated[
        str, typer.Option(metavar="WORD", help="Strategy of every trial, such as bmuf:period=8.")
    ] = "single",
    workers: Annotated[int, typer.Option("-n", "--workers", help="Workers of every trial.")] = 1,
    servers: Servers = 1,
    codec: Annotated[
        str | None, typer.Option(metavar="WORD", help="How messages inside a trial are compressed.")
    ] = None,
    transport: Annotated[
        str, typer.Option(metavar="WORD", help="processes, gloo or grpc, inside a trial.")
    ] = "processes",
    device: Device = "cpu",
    threads: Annotated[
        int | None, typer.Option(help="Torch threads of each process.", show_default="its share of the cores")
    ] = None,
    timeout: Timeout = 300.0,
    patience: Patience = PATIENCE_SECONDS,
    folder: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Journal, checkpoints and the best model.", rich_help_panel="Files"),
    ] = FOLDER,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the search in the folder.", rich_help_panel="Files")
    ] = False,
    json: JsonFile = None,
    report: ReportFile = None,
    runs: KeptRuns = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the closing table only.")] = False,
) -> None:
    """Search for the hyper-parameters or the architecture with which a task trains best.

    Trials train side by side, survive kills, and are scored on examples held
    out of the training set. Ctrl-C stops in order; the same command with
    --resume goes on.
    """
    check_words(task, method, strategy, codec, transport, metric)
    check_word("device", device, DEVICES)
    check_numbers(epochs, at_once, held_out, workers, threads)
    ranges = read_ranges(space, vary or [])
    way = METHODS.read(method)
    way.check(ranges)
    way.check_budget(epochs)
    files = {"--json": json, "--report": report}
    for option, path in files.items():
        if path is not None:
            check_file(option, path)
    check_search_folder(folder, resume)
    settings = {
        "epochs": epochs,
        "at_once": at_once,
        "strategy": strategy,
        "workers": workers,
        "servers": servers,
        "codec": codec,
        "transport": transport,
        "device": device,
        "held_out": held_out,
        "metric": metric,
        "seed": seed,
        "folder": folder,
        "resume": resume,
        "threads": threads,
        "timeout": timeout,
        "patience": patience,
    }
    from shoal.cli.searching import run_search

    run_search(task, ranges, method, settings, runs, quiet, files)


def check_words(
    task: str, method: str, strategy: str, codec: str | None, transport: str, metric: str
) -> None:
    """Raise ValueError with the nearest name for a word that is not known."""
    TASKS.check_text(task)
    METHODS.check_text(method)
    STRATEGIES.check_text(strategy)
    CODECS.check_text(codec or "none")
    check_word("transport", transport, TRIAL_TRANSPORTS)
    check_word("metric", metric, METRICS)


def check_numbers(
    epochs: int, at_once: int | None, held_out: float, workers: int, threads: int | None
) -> None:
    """Raise ValueError for a number that is too small or too large."""
    for option, number in (
        ("--epochs", epochs),
        ("--at-once", at_once),
        ("--workers", workers),
        ("--threads", threads),
    ):
        if number is not None and number < 1:
            raise ValueError(f"{option} {number} must be at least 1")
    if not 0 < held_out < 1:
        raise ValueError(f"--held-out {held_out:g} is a share of the training set, above 0 and below 1")


def read_ranges(file: Path | None, options: list[str]) -> Space:
    """The space of a file and of options; an option replaces what the file says of the same name."""
    ranges: dict[str, Any] = {} if file is None else dict(read_space_file(file))
    ranges |= read_space_options(options)
    if not ranges:
        raise ValueError(
            'what is searched? Name it: --vary "lr=log 1e-4..1" --vary batch=16,32,64, or --space FILE'
        )
    return Space(ranges)
