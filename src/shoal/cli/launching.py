"""The script of `shoal run`: started in processes of its own, or run in one that a launcher started."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from shoal.api.attachment import current
from shoal.api.script import run_here, run_script, script_config
from shoal.cli.checkpoint_options import advice, resumable
from shoal.cli.command import INTERRUPTED, check_servers
from shoal.cli.outcome import Outcome
from shoal.cli.watch_options import live_page
from shoal.core.devices import gpus_for
from shoal.core.errors import Interrupted, Unavailable
from shoal.core.words import check_durability, refuse_mpi
from shoal.launch.environment import Place
from shoal.launch.host_link import Printer
from shoal.launch.hosts import HostList
from shoal.launch.join import check_collective, choose_codec
from shoal.launch.stop_signals import signals_kill
from shoal.records.recording import both, last_progress, record_run
from shoal.records.run_store import RunDescription
from shoal.report import ProgressDisplay
from shoal.storage.folder_lock import folder_lock
from shoal.strategies import STRATEGIES
from shoal.vocabulary.strategy import Setting, Strategy

UNSAID = {"min_workers": 1, "spares": 0, "max_workers": None}
"""How workers come and go unless something else is said."""


def launch(
    script: str,
    arguments: Sequence[str],
    workers: int | None,
    settings: Mapping[str, Any],
    outcome: Outcome,
    quiet: bool,
    hosts: HostList | None = None,
    on: str | None = None,
    group: int | None = None,
    membership: Mapping[str, int | None] = UNSAID,
) -> None:
    """Run `script` on so many workers, each of `group` processes.

    `settings` are fields of Place, and a word for the device; `on` is a cluster, such as "ray"; `membership`
    says how many workers there must be at least, how many spares, and how many places.
    """
    device, fields = settings.get("device"), {k: v for k, v in settings.items() if k != "device"}
    place = replace(Place.find(settings.get("transport")), **fields, gpus=gpus_for(device))
    strategy = make_strategy(place)
    codec = choose_codec(place.codec, strategy)
    check_collective(place.collective, codec)
    number = hosts.workers if hosts is not None else workers or 1
    if strategy is not None:
        there = max(1, place.identity(strategy).workers) if place.is_joined else number
        for many in {there, max(there, membership["max_workers"] or 0)}:
            strategy.check(Setting(many, codec, place.durability, own_loop=True, shards=place.servers))
    check_durability(
        place.durability, place.transport, between_hosts=place.is_joined or not (hosts is None and on is None)
    )
    if place.is_joined and (hosts is not None or on is not None):
        option = "--hosts" if on is None else "--on"
        raise ValueError(f"{place.launched} has started this process; {option} starts processes of its own")
    if place.is_joined and device is not None:
        raise ValueError(
            f"{place.launched} has started this process, which sees the GPUs that {place.launched} gives it; "
            "--device is for workers that `shoal run` starts"
        )
    if place.is_joined and group is not None:
        raise ValueError(
            f"{place.launched} has started this process, and --group starts processes of its own; call "
            "attach(..., mesh=mesh), which says which processes are one worker"
        )
    if place.is_joined:
        check_joining(place, strategy, workers, outcome, membership)
        join(script, arguments, place)
    else:
        refuse_mpi(place.transport)
        servers = strategy.servers * place.servers if strategy else 0
        with nullcontext(hosts) if on is None else find_hosts(number, servers) as found:
            start(script, arguments, number, strategy, place, outcome, quiet, found, group, membership)


def find_hosts(workers: int, servers: int) -> AbstractContextManager[HostList]:
    """The nodes of a Ray cluster with room for so many processes."""
    try:
        from shoal.ray.ray_hosts import ray_hosts
    except ModuleNotFoundError as missing:
        if missing.name != "ray":
            raise
        raise Unavailable("--on ray needs Ray. Install it with: pip install 'shoal[ray]'") from None
    return ray_hosts(workers, servers)


def make_strategy(place: Place) -> Strategy | None:
    """The strategy named on the command line; None leaves the choice to the script."""
    if place.strategy is None:
        return None
    strategy = STRATEGIES.make(place.strategy, **place.strategy_options)
    check_servers(place.strategy, strategy.servers, place.servers)
    return strategy


def check_joining(
    place: Place,
    strategy: Strategy | None,
    workers: int | None,
    outcome: Outcome,
    membership: Mapping[str, int | None],
) -> None:
    """Raise ValueError for options that do not work where another launcher started the processes."""
    starter = {"slurm": "srun"}.get(place.launched, place.launched)
    if asked := next(
        (f"{name}={membership[name]}" for name, n in UNSAID.items() if membership[name] != n), ""
    ):
        raise ValueError(f"{asked}: {starter} started the processes, and no other can come to them")
    if place.transport not in (("mpi",) if place.launched == "mpi" else ("gloo", "grpc")):
        raise ValueError(f"transport {place.transport!r} cannot join processes that {starter} started")
    if place.durability == "journal":
        raise ValueError(
            f"{starter} started the processes, and does not restart a server that dies; "
            "take durability 'memory', and --checkpoint"
        )
    servers = 0 if strategy is None else strategy.servers * place.servers
    if workers is not None and workers != place.nodes - servers:
        raise ValueError(
            f"-n {workers} does not fit: the launcher started {place.nodes} processes, {servers} of them for "
            f"servers. Omit -n, or start {workers + servers}"
        )
    if (wanted := outcome.asked_for()) is not None:
        raise ValueError(
            f"{wanted} does not work here: figures are collected only from processes that Shoal started"
        )


def join(script: str, arguments: Sequence[str], place: Place) -> None:
    """Run the script as one node of a run whose processes another program has started.

    When all were asked to stop, the node of rank 0 says so; the exit code of the others tells.
    """
    try:
        with folder_lock(place.checkpoint if place.rank == 0 else None, others_write=True), signals_kill():
            run_here(script, arguments, place)
    except Interrupted as stop:
        if (attachment := current()) is not None:
            attachment.abandon()  # say goodbye, or the others would take this worker for lost
        if place.rank:
            raise typer.Exit(INTERRUPTED + stop.signal) from None
        raise Interrupted(f"{stop}. {advice(place.checkpoint)}.") from None


def start(
    script: str,
    arguments: Sequence[str],
    workers: int,
    strategy: Strategy | None,
    place: Place,
    outcome: Outcome,
    quiet: bool,
    hosts: HostList | None = None,
    group: int | None = None,
    membership: Mapping[str, Any] = UNSAID,
) -> None:
    """Run the script in processes of our own, show their progress, then the closing table."""
    console = Console(stderr=True)
    name = Path(script).name if place.strategy is None else f"{place.strategy} on {Path(script).name}"
    servers = strategy.servers * place.servers if strategy else 0
    places = membership["max_workers"]
    config = script_config(script, arguments, workers, strategy, place, hosts, group, places)
    about = RunDescription(config["task"], config["strategy"], workers, servers, config)
    display = ProgressDisplay(enabled=not quiet, console=console)
    with (
        live_page(outcome.watch) as page,
        display as progress,
        resumable(place.checkpoint),
        record_run(about, outcome.store, outcome.loggers) as kept,
    ):
        progress.start(f"{name}, {count_of(workers, hosts, group)}", workers, servers)
        page.start(name, max(workers, places or 0), servers, facts=place.transport, task=Path(script).name)
        heard = both(progress.update, page.update)
        if (watch := outcome.watch_plan(lambda told: progress.say(f"plan: {told}"))) is not None:
            watch.begin({"strategy": config["strategy"], "config": config})
            heard = both(heard, watch.update)
        result = run_script(
            script,
            arguments,
            workers=workers,
            strategy=strategy,
            place=place,
            on_progress=both(kept.event, heard),
            on_output=both(kept.output, both(printer(console), page.print)),
            hosts=hosts,
            group=group,
            **membership,
        )
        kept.done(result.record())
        for event in last_progress(result.nodes):
            progress.update(event)
            page.update(event)
        page.finish(result.record())
    outcome.write([result.record()])
    outcome.show([result.record()])


def count_of(workers: int, hosts: HostList | None, group: int | None) -> str:
    """How many workers there are, on how many hosts and of how many processes."""
    count = "1 worker" if workers == 1 else f"{workers} workers"
    count += "" if hosts is None else f" on {len(hosts.hosts)} hosts"
    return count + ("" if group is None else f" of {group} processes each")


def printer(display: Console) -> Printer:
    """A function that prints a worker's line: above the live display on the same terminal, else on stdout."""
    shared = display.is_terminal and sys.stdout.isatty()
    console = display if shared else Console()

    def show(name: str, line: str) -> None:
        text = Text.assemble((f"{name.removeprefix('the ')} | ", "dim"), Text.from_ansi(line))
        console.print(text, soft_wrap=True, highlight=False)

    return show
