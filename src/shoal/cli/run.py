"""`shoal run`: a script of one's own in several processes, or in this one where a launcher started it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from shoal.api.script import Printer, run_here, run_script
from shoal.cli.access import (
    Advertise,
    Authority,
    Certificate,
    Insecure,
    Key,
    Listen,
    Mutual,
    TokenFile,
    read_access,
)
from shoal.cli.command import DOTTED, PASSED, Collective, Durability, Servers, Timeout
from shoal.cli.outcome import JsonFile, Outcome, ReportFile, last_words
from shoal.cli.saving import CheckpointFolder, Every, check_checkpoint, resumable
from shoal.codecs import CODECS
from shoal.launch.environment import Place
from shoal.launch.join import TRANSPORTS, check_collective, check_word, refuse_mpi
from shoal.launch.recovery import check_durability
from shoal.report import Progress
from shoal.storage.journal import DURABILITY
from shoal.strategies import STRATEGIES
from shoal.vocabulary.strategy import Strategy


def refuse_balance(balance: bool) -> None:
    """Raise ValueError where a script's samples are to be shared out."""
    if balance:
        raise ValueError(
            "--balance is for shoal.run() and shoal compare: a script's loop owns its loader, and nobody "
            "else can share out its samples"
        )


def refuse_growth(value: str | None) -> None:
    """Raise ValueError where a script's batch is to grow."""
    if value is not None:
        raise ValueError(
            "--grow-batch and --largest-batch are for shoal.run() and shoal compare: a script's loop owns "
            "its loader; let its batch_size grow there"
        )


def run(
    ctx: typer.Context,
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="A Python script with shoal.attach().")
    ] = "",
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="What the script itself is told.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("-n", "--workers", help="Workers to start.", show_default="1")
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(metavar="WORD", help="How the workers are kept together.", show_default="the script's"),
    ] = None,
    codec: Annotated[
        str | None,
        typer.Option(
            metavar="WORD",
            help="How messages are compressed, as top_k:density=0.001.",
            show_default="the script's",
        ),
    ] = None,
    transport: Annotated[
        str | None,
        typer.Option(help="processes, gloo or grpc; mpi under mpiexec.", show_default="processes"),
    ] = None,
    collective: Collective = "auto",
    servers: Servers = 1,
    durability: Durability = "memory",
    checkpoint: CheckpointFolder = None,
    every: Every = None,
    balance: Annotated[bool, typer.Option("--balance", hidden=True, callback=refuse_balance)] = False,
    grow_batch: Annotated[str | None, typer.Option(hidden=True, callback=refuse_growth)] = None,
    largest_batch: Annotated[str | None, typer.Option(hidden=True, callback=refuse_growth)] = None,
    timeout: Timeout = 300.0,
    listen: Listen = None,
    advertise: Advertise = None,
    certificate: Certificate = None,
    key: Key = None,
    authority: Authority = None,
    mutual: Mutual = False,
    token_file: TokenFile = None,
    insecure: Insecure = False,
    json: JsonFile = None,
    report: ReportFile = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, only what the workers print.")] = False,
) -> None:
    """Start a training script once for each worker.

    --strategy.NAME VALUE sets an option of the strategy. That, --strategy
    and --codec may also follow the script's name. All else there goes to the
    script, and so does everything after a bare --.
    """
    script, rest = find_script([script, *(arguments or [])] if script else [], ctx.meta[PASSED])
    chosen = choose_strategy(strategy, ctx.meta[DOTTED])
    check_collective(collective, CODECS.read(codec or "none"))
    found = Place.find()
    kind = transport or found.transport
    check_word("transport", kind, {name: TRANSPORTS[name] for name in ("processes", "gloo", "grpc", "mpi")})
    check_word("durability", durability, DURABILITY)
    check_durability(durability, kind)
    check_servers(servers, chosen)
    check_checkpoint(checkpoint, every)
    place = replace(
        found,
        transport=kind,
        access=read_access(
            kind,
            listen=listen,
            advertise=advertise,
            certificate=certificate,
            key=key,
            authority=authority,
            mutual=mutual,
            token_file=token_file,
            insecure=insecure,
        ),
        strategy=strategy,
        strategy_options=ctx.meta[DOTTED],
        codec=codec,
        collective=collective,
        servers=servers,
        durability=durability,
        checkpoint=None if checkpoint is None else str(checkpoint),
        every=every,
        timeout=timeout,
    )
    if place.is_joined:
        check_joining(place, chosen, workers, json or report)
        run_here(script, rest, place)
    else:
        refuse_mpi(kind)
        start(script, rest, 1 if workers is None else workers, chosen, place, Outcome(json, report), quiet)


def find_script(words: Sequence[str], passed: Sequence[str]) -> tuple[str, list[str]]:
    """The script and its arguments, before and after a bare `--`."""
    all_words = [*words, *passed]
    if not all_words:
        raise ValueError("name the script to run, as in: shoal run -n 4 train.py")
    if not Path(all_words[0]).is_file():
        raise ValueError(f"there is no script {all_words[0]!r}")
    return all_words[0], all_words[1:]


def choose_strategy(word: str | None, options: Mapping[str, str]) -> Strategy | None:
    """The strategy named on the command line; None leaves it to the script."""
    if word is not None:
        return STRATEGIES.make(word, **options)
    if options:
        raise ValueError(f"--strategy.{next(iter(options))} belongs to a strategy; name it with --strategy")
    return None


def check_servers(servers: int, strategy: Strategy | None) -> None:
    """Raise ValueError for servers that a strategy has no use for."""
    if servers > 1 and not (strategy and strategy.servers):
        raise ValueError(f"--servers {servers} belongs to a strategy with a server; name one with --strategy")


def check_joining(place: Place, strategy: Strategy | None, workers: int | None, file: Path | None) -> None:
    """Raise ValueError for what cannot be had where another launcher started the processes."""
    if place.transport not in {"torchrun": ("gloo", "grpc"), "mpi": ("mpi",)}[place.launched]:
        raise ValueError(f"transport {place.transport!r} cannot join what {place.launched} started")
    if place.durability == "journal":
        raise ValueError(
            f"{place.launched} started the processes, and does not start a server again; "
            "take durability 'memory', and --checkpoint"
        )
    servers = 0 if strategy is None else strategy.servers * place.servers
    if workers is not None and workers != place.nodes - servers:
        raise ValueError(
            f"-n {workers} does not fit: the launcher started {place.nodes} processes, {servers} of them for "
            f"servers. Leave -n out, or start {workers + servers}"
        )
    if file is not None:
        raise ValueError(f"{file} cannot be written: figures are collected only from processes Shoal started")


def start(
    script: str,
    arguments: Sequence[str],
    workers: int,
    strategy: Strategy | None,
    place: Place,
    outcome: Outcome,
    quiet: bool,
) -> None:
    """Run it in processes of our own, and show how they get on and what came of it."""
    console = Console(stderr=True)
    name = Path(script).name if place.strategy is None else f"{place.strategy} on {Path(script).name}"
    count = "1 worker" if workers == 1 else f"{workers} workers"
    with Progress(enabled=not quiet, console=console) as progress, resumable(place.checkpoint):
        progress.start(f"{name}, {count}", workers, strategy.servers * place.servers if strategy else 0)
        result = run_script(
            script,
            arguments,
            workers=workers,
            strategy=strategy,
            place=place,
            on_progress=progress.update,
            on_output=printer(console),
        )
        for event in last_words(result):
            progress.update(event)
    outcome.write([result.record()])
    outcome.show([result.record()])


def printer(display: Console) -> Printer:
    """Prints what workers say: above the live display where that is on the same terminal, else on stdout."""
    shared = display.is_terminal and sys.stdout.isatty()
    console = display if shared else Console()

    def show(name: str, line: str) -> None:
        text = Text.assemble((f"{name.removeprefix('the ')} | ", "dim"), Text.from_ansi(line))
        console.print(text, soft_wrap=True, highlight=False)

    return show
