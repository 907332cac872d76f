"""`shoal run`: its options, checked before torch is imported. launching.py starts the script."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.checkpoint_options import CheckpointFolder, Every, check_checkpoint
from shoal.cli.command import (
    DOTTED,
    PASSED,
    WORDS,
    Collective,
    Durability,
    MaxWorkers,
    MinWorkers,
    Patience,
    Servers,
    SpareProcesses,
    Timeout,
)
from shoal.cli.grpc_options import (
    ACCESS,
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
from shoal.cli.hosts_options import (
    Env,
    Hosts,
    Port,
    Relay,
    RemoteFolder,
    RemotePython,
    ServersOn,
    Ssh,
    read_hosts,
)
from shoal.cli.outcome import JsonFile, Outcome, PlanFile, ReportFile, read_plan
from shoal.cli.ray_options import On, check_on
from shoal.cli.record_options import KeptRuns, Loggers, read_records
from shoal.cli.watch_options import Watch
from shoal.codecs import CODECS
from shoal.core.catalogue import check_word, split_options
from shoal.core.limits import PATIENCE_SECONDS
from shoal.core.words import COLLECTIVES, DEVICES, DURABILITY, TRANSPORTS, check_durability
from shoal.strategies import STRATEGIES


def refuse_balance(balance: bool) -> None:
    """Raise ValueError: a script deals out its own samples."""
    if balance:
        raise ValueError(
            "--balance is for shoal.run() and shoal compare: a script's loop owns its loader, and Shoal "
            "cannot share out its samples"
        )


def refuse_growth(value: str | None) -> None:
    """Raise ValueError: a script sets its own batch size."""
    if value is not None:
        raise ValueError(
            "--grow-batch and --largest-batch are for shoal.run() and shoal compare: a script's loop owns "
            "its loader; let its batch_size grow there"
        )


def refuse_crew(value: str | None) -> None:
    """Raise ValueError: a script deals out its own samples to those who are there."""
    if value is not None:
        raise ValueError(
            "--crew is for shoal.run() and shoal compare: a script's loop owns its loader; start all workers "
            "with -n, or let others join with --max-workers"
        )


def refuse_scaling(value: str | None) -> None:
    """Raise ValueError: a script makes its own optimizer."""
    if value is not None:
        raise ValueError(
            "--scale-lr is for shoal.run() and shoal compare: a script makes its own optimizer, and the rate "
            "that it sets is the rate that is trained with; change it there"
        )


def run(
    ctx: typer.Context,
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="A Python script that calls shoal.attach().")
    ] = "",
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Arguments of the script.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("-n", "--workers", help="Workers to start.", show_default="1")
    ] = None,
    group: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="PROCESSES",
            help="Processes of each worker, which call attach(..., mesh=mesh).",
            show_default="1, without torch's RANK, LOCAL_RANK and so on",
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="WORD", help="How the workers are kept together.", show_default="the script's own"
        ),
    ] = None,
    codec: Annotated[
        str | None,
        typer.Option(
            metavar="WORD",
            help="How messages are compressed, such as top_k:density=0.001.",
            show_default="the script's own",
        ),
    ] = None,
    transport: Annotated[
        str | None,
        typer.Option(
            metavar="WORD",
            help="processes, gloo or grpc; mpi under mpiexec.",
            show_default="processes; grpc with --hosts, --on and --max-workers",
        ),
    ] = None,
    collective: Collective = "auto",
    servers: Servers = 1,
    durability: Durability = "memory",
    device: Annotated[
        str | None,
        typer.Option(
            metavar="WORD",
            help="The only one that a worker sees: cpu, cuda (of several GPUs each the next), or auto.",
            show_default="all there are",
        ),
    ] = None,
    checkpoint: CheckpointFolder = None,
    every: Every = None,
    balance: Annotated[bool, typer.Option("--balance", hidden=True, callback=refuse_balance)] = False,
    grow_batch: Annotated[str | None, typer.Option(hidden=True, callback=refuse_growth)] = None,
    largest_batch: Annotated[str | None, typer.Option(hidden=True, callback=refuse_growth)] = None,
    crew: Annotated[str | None, typer.Option(hidden=True, callback=refuse_crew)] = None,
    scale_lr: Annotated[str | None, typer.Option(hidden=True, callback=refuse_scaling)] = None,
    timeout: Timeout = 300.0,
    patience: Patience = PATIENCE_SECONDS,
    min_workers: MinWorkers = 1,
    spares: SpareProcesses = 0,
    max_workers: MaxWorkers = None,
    listen: Listen = None,
    advertise: Advertise = None,
    certificate: Certificate = None,
    key: Key = None,
    authority: Authority = None,
    mutual: Mutual = False,
    token_file: TokenFile = None,
    insecure: Insecure = False,
    hosts: Hosts = None,
    servers_on: ServersOn = None,
    port: Port = None,
    relay: Relay = False,
    remote_python: RemotePython = None,
    remote_folder: RemoteFolder = None,
    ssh: Ssh = None,
    env: Env = None,
    on: On = None,
    json: JsonFile = None,
    report: ReportFile = None,
    watch: Watch = False,
    runs: KeptRuns = None,
    log: Loggers = None,
    plan: PlanFile = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the workers' own output.")] = False,
) -> None:
    """Start a training script once for each worker.

    --strategy.NAME VALUE sets an option of the strategy. It, --strategy and
    --codec may also follow the script's name. All other words after that name
    are arguments of the script, and so is everything after a bare --.
    """
    passed = ctx.meta[PASSED]
    script, rest = find_script([script, *(arguments or [])] if script else [], passed)
    strategy, options = check_strategy(strategy, ctx.meta[DOTTED], servers)
    check_words(codec, transport, collective, durability)
    check_device(device, elsewhere=bool(hosts or on))
    check_workers(workers, group, elsewhere=bool(hosts or on), durability=durability)
    check_checkpoint(checkpoint, every, is_here=hosts is None and on is None)
    transport = transport or ("grpc" if hosts or on or max_workers else None)
    access = read_access(transport, **{name: ctx.params[name] for name in ACCESS})
    check_on(on, hosts, transport, bool(access))
    host_list = read_hosts(ctx.params, transport, tuple(access))
    command = shlex.join(["shoal", "run", *ctx.meta[WORDS], *(["--", *passed] if passed else [])])
    kept = read_records(runs, log, command)
    outcome = Outcome(json, report, watch=watch, plan=read_plan(plan), **kept)

    from shoal.cli.launching import launch  # imports torch

    settings = {
        "access": access,
        "strategy": strategy,
        "strategy_options": options,
        "codec": codec,
        "collective": collective,
        "device": device,
        "servers": servers,
        "durability": durability,
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "every": every,
        "timeout": timeout,
        "patience": patience,
        **({} if transport is None else {"transport": transport}),
    }
    membership = {"min_workers": min_workers, "spares": spares, "max_workers": max_workers}
    launch(script, rest, workers, settings, outcome, quiet, host_list, on, group, membership)


def check_device(word: str | None, *, elsewhere: bool) -> None:
    """Raise ValueError for a device that is not known, or that cannot be given to workers of other hosts."""
    if word is None:
        return
    check_word("device", word, DEVICES)
    if elsewhere:
        raise ValueError(
            f"--device {word} is for workers on this host; elsewhere a worker sees the GPUs that its host "
            "gives it"
        )


def check_workers(workers: int | None, group: int | None, *, elsewhere: bool, durability: str) -> None:
    """Raise ValueError for a number of workers that cannot be, or for what groups of processes cannot do."""
    if workers is not None and workers < 1:
        raise ValueError(f"-n {workers}: a run needs at least 1 worker")
    if group is not None and elsewhere:
        raise ValueError(
            "--group starts the processes of a worker on this host; on several hosts start them with "
            "torchrun or srun, and call attach(..., mesh=mesh)"
        )
    if group is None or group == 1:
        return
    if durability == "journal":
        raise ValueError(
            f"--group {group}: a process that dies ends its group, so no server comes back to read a "
            "journal; take durability 'memory'"
        )


def find_script(words: Sequence[str], passed: Sequence[str]) -> tuple[str, list[str]]:
    """The script and its arguments, before and after a bare `--`."""
    all_words = [*words, *passed]
    if not all_words:
        raise ValueError("name the script to run, as in: shoal run -n 4 train.py")
    if not Path(all_words[0]).is_file():
        raise ValueError(f"there is no script {all_words[0]!r}")
    return all_words[0], all_words[1:]


def check_strategy(
    text: str | None, options: Mapping[str, str], servers: int
) -> tuple[str | None, dict[str, str]]:
    """The strategy's word and its options, also those that follow the word, as in bmuf:period=8.

    Raises ValueError for an unknown strategy or option, and for options without a strategy.
    """
    if text is not None:
        word, own = split_options(text)
        STRATEGIES.check(word, **{**options, **own})
        return word, {**options, **own}
    if options:
        raise ValueError(f"--strategy.{next(iter(options))} belongs to a strategy; name it with --strategy")
    if servers > 1:
        raise ValueError(f"--servers {servers} belongs to a strategy with a server; name one with --strategy")
    return None, {}


def check_words(codec: str | None, transport: str | None, collective: str, durability: str) -> None:
    """Raise ValueError with the nearest name for a word that is not known."""
    CODECS.check_text(codec or "none")
    check_word("collective", collective, COLLECTIVES)
    check_word("durability", durability, DURABILITY)
    if transport is not None:
        check_word("transport", transport, [word for word in TRANSPORTS if word != "sim"])
        check_durability(durability, transport)
