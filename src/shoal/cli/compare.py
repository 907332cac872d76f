"""`shoal compare`: the same task under several strategies, one after the other; one table, one report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.api.run import run
from shoal.cli.command import DOTTED, Collective, Durability, Servers, Timeout
from shoal.cli.outcome import JsonFile, Outcome, ReportFile, last_words
from shoal.cli.saving import CheckpointFolder, Every, check_checkpoint, resumable
from shoal.codecs import CODECS
from shoal.core.catalogue import nearest
from shoal.core.codec import Identity
from shoal.core.errors import Interrupted, ShoalError
from shoal.launch.join import local_threads
from shoal.programs.tasks import TASKS
from shoal.report import Progress
from shoal.runs.plan import Plan
from shoal.sim import Compute, Network
from shoal.storage.checkpoint import Checkpoints
from shoal.strategies import STRATEGIES
from shoal.strategies.single import Single
from shoal.vocabulary.strategy import Strategy

NETWORK, COMPUTE = "1Gbit,100us", "20ms"  # of virtual time, unless told otherwise


def compare(
    ctx: typer.Context,
    task: Annotated[str, typer.Option(help="What to train; see: shoal list tasks.")] = "digits",
    strategies: Annotated[
        str, typer.Option(help="Words with commas between; see: shoal list strategies.")
    ] = "single,sync,local,bmuf,downpour,easgd",
    workers: Annotated[
        str,
        typer.Option(
            "-n", "--workers", help="Workers of each run, or several numbers: 1,4,16. 'single' always has 1."
        ),
    ] = "4",
    epochs: Annotated[int, typer.Option(help="Passes over the data.")] = 5,
    seed: Annotated[int, typer.Option(help="The same seed starts from the same weights and batches.")] = 0,
    batch: Annotated[
        int | None, typer.Option(help="Samples a worker and step.", show_default="the task's own")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.", show_default="the task's own")] = None,
    grow_batch: Annotated[
        str | None, typer.Option(metavar="STEPS", help="2@10,2@20: twice the batch after 10 epochs and 20.")
    ] = None,
    largest_batch: Annotated[
        int | None, typer.Option(help="Beyond it the learning rate is divided instead.")
    ] = None,
    balance: Annotated[
        bool, typer.Option("--balance", help="Faster workers take more of a step's samples.")
    ] = False,
    codec: Annotated[str, typer.Option(help="How messages are compressed, as top_k:density=0.001.")] = "none",
    transport: Annotated[str, typer.Option(help="processes, gloo or sim.")] = "processes",
    collective: Collective = "auto",
    servers: Servers = 1,
    durability: Durability = "memory",
    sim: Annotated[
        bool, typer.Option("--sim", help="The same as --transport sim.", rich_help_panel="Virtual time")
    ] = False,
    network: Annotated[
        str | None,
        typer.Option(
            metavar="LINKS",
            help="Bandwidth,latency and loss, if any: 100Mbit,20ms,1%.",
            show_default=NETWORK,
            rich_help_panel="Virtual time",
        ),
    ] = None,
    compute: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Of a gradient, and jitter, if any: 20ms,10%.",
            show_default=COMPUTE,
            rich_help_panel="Virtual time",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            help="Torch threads of each process, in every run alike.",
            show_default="the cores, shared out among the workers",
        ),
    ] = None,
    timeout: Timeout = 300.0,
    checkpoint: CheckpointFolder = None,
    every: Every = None,
    json: JsonFile = None,
    report: ReportFile = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, only the closing table.")] = False,
) -> None:
    """Train one task under several strategies and compare them.

    --strategy.NAME VALUE sets an option of every strategy that has it, as
    in --strategy.period 8.
    """
    check_checkpoint(checkpoint, every)
    common: dict[str, Any] = {
        "task": TASKS.make(task).but(batch, lr, grow_batch, largest_batch),
        "codec": CODECS.read(codec),
        "epochs": epochs,
        "seed": seed,
        "transport": "sim" if sim else transport,
        "collective": collective,
        "servers": servers,
        "durability": durability,
        "timeout": timeout,
        "threads": threads,
        "every": every,
        "balance": balance,
    }
    chosen, numbers = make_strategies(strategies, ctx.meta[DOTTED]), read_numbers(workers)
    if threads is None and common["transport"] != "sim":
        common["threads"] = local_threads(max(numbers))
    plans = make_plans(chosen, numbers, checkpoint, common)
    virtual = read_virtual(common["transport"] == "sim", network, compute)
    outcome = Outcome(json, report)
    check(list(plans.values()))
    run_all(plans, virtual, outcome, Progress(enabled=not quiet))


# -- what was asked for, checked before the first run starts -----------------------------------------


def make_strategies(text: str, options: Mapping[str, str]) -> dict[str, Strategy]:
    """The strategies of a list such as "sync,bmuf", each with those of the options that it has."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ValueError("--strategies names none; try --strategies single,sync,bmuf")
    if twice := next((word for word in words if words.count(word) > 1), None):
        raise ValueError(f"--strategies names {twice!r} twice")
    known = {word: STRATEGIES.options(word) for word in words}
    every_name = list(dict.fromkeys(name for names in known.values() for name in names))
    for name in options:
        if name not in every_name:
            raise ValueError(
                f"none of {', '.join(words)} has an option {name!r}. {nearest(name, every_name)}"
            )
    return {
        word: _make_strategy(word, {name: value for name, value in options.items() if name in known[word]})
        for word in words
    }


def _make_strategy(word: str, options: Mapping[str, str]) -> Strategy:
    try:
        return STRATEGIES.make(word, **options)
    except ValueError as error:
        named = str(error).startswith("strategy ")
        raise ValueError(str(error) if named else f"strategy {word!r}: {error}") from None


def read_numbers(text: str) -> list[int]:
    """The numbers of a list such as "1,4,16", each once, in order."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() for word in words):
        raise ValueError(f"--workers {text!r} is not a number, or several with commas between, as in 1,4,16")
    return sorted({int(word) for word in words})


def make_plans(
    chosen: Mapping[str, Strategy], numbers: Sequence[int], checkpoint: Path | None, common: Mapping[str, Any]
) -> dict[str, Plan]:
    """The runs of the comparison, by name."""
    plans = {}
    for word, strategy in chosen.items():
        for workers in numbers[:1] if isinstance(strategy, Single) else numbers:
            name = word if len(numbers) == 1 or isinstance(strategy, Single) else f"{word}-{workers}"
            plans[name] = make_plan(name, strategy, checkpoint, {**common, "workers": workers})
    return plans


def make_plan(name: str, strategy: Strategy, checkpoint: Path | None, common: Mapping[str, Any]) -> Plan:
    """One run of the comparison. Who sends nothing has nothing to compress, to average or to share out."""
    settings = {**common, "strategy": strategy}
    if not strategy.servers:
        settings["servers"] = 1
    if isinstance(strategy, Single):
        settings["workers"] = min(1, common["workers"])
    if isinstance(strategy, Single) or strategy.independent:
        settings |= {"codec": Identity(), "collective": "auto", "balance": False}
    return Plan(**settings, checkpoint=None if checkpoint is None else str(checkpoint / name))


def read_virtual(virtual: bool, network: str | None, compute: str | None) -> dict[str, Any]:
    """The network and compute models of a run in virtual time; nothing for a real one."""
    if virtual:
        return {"network": Network.parse(network or NETWORK), "compute": Compute.parse(compute or COMPUTE)}
    if network is not None or compute is not None:
        given = "--network" if network is not None else "--compute"
        raise ValueError(f"{given} describes virtual time; add --sim to run in it")
    return {}


def check(plans: Sequence[Plan]) -> None:
    """Find what would otherwise stop a run only after those before it have taken their minutes."""
    for plan in plans:
        if plan.checkpoint is not None:
            Checkpoints(plan.checkpoint, plan.same_run(), plan.nodes).latest()
    data = plans[0].task.data()  # also fetches it, once for all runs
    for plan in plans:
        for note in notes(plan.strategy, plan.steps(data)):
            typer.echo(f"note: {STRATEGIES.name_of(plan.strategy)} {note}", err=True)


def notes(strategy: Strategy, steps: int) -> Iterator[str]:
    """What in its options does not suit so few steps."""
    period = getattr(strategy, "period", 0) if strategy.deal.blocks is None else 0
    switch = getattr(strategy, "switch", 0)
    takes = f"but each worker takes only {steps}"
    if 2 * period > steps:
        yield f"merges every {period} steps, {takes}; try --strategy.period {max(1, steps // 10)}"
    if switch >= steps:
        yield f"switches after {switch} steps, {takes}; try --strategy.switch {steps // 2}"


# -- the runs ----------------------------------------------------------------------------------------


def run_all(
    plans: Mapping[str, Plan], virtual: Mapping[str, Any], outcome: Outcome, progress: Progress
) -> None:
    """Run them one after the other; whatever stops it, those that finished are written and shown first."""
    records: list[dict[str, Any]] = []
    try:
        with progress:
            for number, (word, plan) in enumerate(plans.items(), 1):
                workers = "1 worker" if plan.workers == 1 else f"{plan.workers} workers"
                title = f"{word} on {plan.task.name}, {workers} ({number} of {len(plans)})"
                progress.start(title, plan.workers, plan.nodes - plan.workers)
                settings = {field.name: getattr(plan, field.name) for field in fields(plan)}
                with named(word), resumable(plan.checkpoint):
                    result = run(**settings, **virtual, on_progress=progress.update)
                for event in last_words(result):
                    progress.update(event)
                records.append(result.record())
                outcome.write(records)
    finally:
        if records:
            outcome.show(records)


@contextmanager
def named(word: str) -> Iterator[None]:
    """Say which of several runs it was that failed."""
    try:
        yield
    except Interrupted:
        raise
    except ShoalError as error:
        error.args = (f"{word}: {error}", *error.args[1:])
        raise
