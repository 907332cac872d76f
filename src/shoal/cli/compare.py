"""`shoal compare`: its options, checked before torch is imported. comparison.py makes the runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.checkpoint_options import CheckpointFolder, Every, check_checkpoint
from shoal.cli.command import (
    DOTTED,
    WORDS,
    Collective,
    Device,
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
    check_opening,
    read_access,
)
from shoal.cli.outcome import JsonFile, Outcome, PlanFile, ReportFile, read_plan
from shoal.cli.record_options import KeptRuns, Loggers, read_records
from shoal.cli.watch_options import Watch
from shoal.codecs import CODECS
from shoal.core.catalogue import check_word, nearest, split_list, split_options
from shoal.core.crew_sizes import CrewSizes
from shoal.core.growth import Growth
from shoal.core.limits import PATIENCE_SECONDS
from shoal.core.words import (
    COLLECTIVES,
    DEVICES,
    DURABILITY,
    SCALING,
    TRANSPORTS,
    check_durability,
    refuse_mpi,
)
from shoal.layouts import LAYOUTS
from shoal.programs.tasks import TASKS
from shoal.strategies import STRATEGIES

if TYPE_CHECKING:
    from shoal.planning.training_plan import TrainingPlan

PASSED_ON = (
    *("epochs", "seed", "collective", "servers", "durability", "timeout", "patience", "min_workers"),
    *("spares", "max_workers", "threads", "every", "balance", "scale_lr"),
)
"""Options that are fields of Plan as they are."""

NETWORK, COMPUTE = "1Gbit,100us", "20ms"  # the defaults of virtual time


def compare(
    ctx: typer.Context,
    task: Annotated[
        str, typer.Option(metavar="WORD", help="Model and data to train; see: shoal list tasks.")
    ] = "digits",
    strategies: Annotated[
        str,
        typer.Option(
            metavar="WORDS",
            help="Strategies, separated by commas; see: shoal list strategies.",
            show_default="single, sync, local, bmuf, downpour, easgd",
        ),
    ] = "single,sync,local,bmuf,downpour,easgd",
    workers: Annotated[
        str | None,
        typer.Option(
            "-n",
            "--workers",
            metavar="NUMBERS",
            help="Workers of each run, or several numbers: 1,4,16. 'single' always has 1. With --layouts, "
            "processes, which layouts make workers of.",
            show_default="4; none with --crew",
        ),
    ] = None,
    crew: Annotated[
        str | None,
        typer.Option(
            metavar="WORKERS@STEP",
            help="Grow the crew: 2@0,8@500 adds workers at step 500. With -n, compared with so many.",
        ),
    ] = None,
    layouts: Annotated[
        str | None,
        typer.Option(
            metavar="WORDS",
            help="How the model lies in the processes of a worker: data,hybrid,pipeline:schedule=1f1b.",
            show_default="data: one process each",
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            metavar="CUTS",
            help="Where pipelines are cut: auto, as shoal split proposes; even; or layers, 5-4-4-5.",
            show_default="auto",
        ),
    ] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the training data.")] = 5,
    seed: Annotated[int, typer.Option(help="Seed of the initial weights and the order of batches.")] = 0,
    batch: Annotated[
        int | None, typer.Option(help="Samples per process and step.", show_default="the task's own")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.", show_default="the task's own")] = None,
    scale_lr: Annotated[
        str,
        typer.Option(
            metavar="WORD",
            help="Learning rate of N workers: none (as of one), linear, sqrt, auto (by strategy).",
        ),
    ] = "none",
    target: Annotated[
        float | None,
        typer.Option(
            help="Test accuracy in % (or test loss) to which runs are timed.",
            show_default="the lowest best of all runs",
        ),
    ] = None,
    grow_batch: Annotated[
        str | None,
        typer.Option(
            metavar="FACTOR@EPOCH", help="Grow the batch: 2@10,2@20 doubles it after epochs 10 and 20."
        ),
    ] = None,
    largest_batch: Annotated[
        int | None, typer.Option(help="Where the batch stops growing and the learning rate falls instead.")
    ] = None,
    balance: Annotated[
        bool, typer.Option("--balance", help="Give faster workers more samples of each step.")
    ] = False,
    codec: Annotated[
        str | None,
        typer.Option(
            metavar="WORD",
            help="How messages are compressed, such as top_k:density=0.001.",
            show_default="the strategy's own: none, but for strom",
        ),
    ] = None,
    transport: Annotated[
        str, typer.Option(metavar="WORD", help="processes, gloo, grpc or sim.")
    ] = "processes",
    collective: Collective = "auto",
    servers: Servers = 1,
    durability: Durability = "memory",
    sim: Annotated[
        bool, typer.Option("--sim", help="Short for --transport sim.", rich_help_panel="Virtual time")
    ] = False,
    network: Annotated[
        str | None,
        typer.Option(
            metavar="LINKS",
            help="Bandwidth, latency and, optionally, loss of every link: 100Mbit,20ms,1%; or home, office.",
            show_default=NETWORK,
            rich_help_panel="Virtual time",
        ),
    ] = None,
    compute: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Time of a gradient and, optionally, its jitter: 20ms,10%.",
            show_default=COMPUTE,
            rich_help_panel="Virtual time",
        ),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="What `shoal calibrate` has measured: it costs time too.",
            rich_help_panel="Virtual time",
        ),
    ] = None,
    device: Device = "cpu",
    threads: Annotated[
        int | None,
        typer.Option(
            help="Torch threads of each process, the same in every run.",
            show_default="the cores, divided among the workers",
        ),
    ] = None,
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
    checkpoint: CheckpointFolder = None,
    every: Every = None,
    json: JsonFile = None,
    report: ReportFile = None,
    watch: Watch = False,
    runs: KeptRuns = None,
    log: Loggers = None,
    plan: PlanFile = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the closing table only.")] = False,
) -> None:
    """Train one task with several strategies and compare the results.

    --strategy.NAME VALUE sets an option of every strategy that has it, such
    as --strategy.period 8.
    """
    check_checkpoint(checkpoint, every)
    transport = "sim" if sim else transport
    check_words(task, codec, transport, collective, durability, scale_lr)
    check_word("device", device, DEVICES)
    check_numbers(epochs, batch, lr, threads)
    Growth.parse(grow_batch, largest_batch)
    chosen, sizes = check_strategies(strategies, ctx.meta[DOTTED]), CrewSizes.parse(crew)
    laid_out = check_layouts(layouts, split)
    numbers = [] if sizes and workers is None else read_numbers("4" if workers is None else workers)
    planned = read_plan(plan)
    virtual = read_virtual(transport == "sim", network, compute, profile, planned)
    access = read_access(transport, **{name: ctx.params[name] for name in ACCESS})
    check_opening(max_workers, transport, access)
    command = shlex.join(["shoal", "compare", *ctx.meta[WORDS]])
    kept = read_records(runs, log, command)
    outcome = Outcome(json, report, target, command, watch=watch, plan=planned, **kept)

    from shoal.cli.comparison import compare_strategies  # imports torch
    from shoal.core.devices import on_device
    from shoal.launch.join import Access

    compare_strategies(
        chosen,
        numbers,
        laid_out,
        on_device(TASKS.read(task).but(batch, lr, grow_batch, largest_batch), device),
        {
            "codec": None if codec is None else CODECS.read(codec),
            **{name: ctx.params[name] for name in PASSED_ON},
            "transport": transport,
            "access": Access(**access),
            "crew": sizes,
        },
        virtual,
        checkpoint,
        outcome,
        quiet,
    )


def check_words(
    task: str, codec: str | None, transport: str, collective: str, durability: str, scale_lr: str
) -> None:
    """Raise ValueError with the nearest name for a word that is not known."""
    TASKS.check_text(task)
    CODECS.check_text(codec or "none")
    check_word("transport", transport, TRANSPORTS)
    refuse_mpi(transport)
    check_word("collective", collective, COLLECTIVES)
    check_word("durability", durability, DURABILITY)
    check_durability(durability, transport)
    check_word("scale-lr", scale_lr, SCALING)


def check_numbers(epochs: int, batch: int | None, lr: float | None, threads: int | None) -> None:
    """Raise ValueError for a number that is too small."""
    if epochs < 1:
        raise ValueError(f"--epochs {epochs}: a run needs at least 1 epoch")
    if batch is not None and batch < 1:
        raise ValueError(f"--batch {batch}: a batch holds at least 1 sample")
    if lr is not None and not lr > 0:
        raise ValueError(f"--lr {lr:g}: the learning rate must be positive")
    if threads is not None and threads < 1:
        raise ValueError(f"--threads {threads}: a process computes with at least 1 thread")


def check_strategies(text: str, options: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The strategies of a list such as "sync,local:period=8", each with those of the options that it has.

    What a word says itself counts more.
    """
    words = split_list(text)
    if not words:
        raise ValueError("--strategies names none; try --strategies single,sync,bmuf")
    if twice := next((word for word in words if words.count(word) > 1), None):
        raise ValueError(f"--strategies names {twice!r} twice")
    own = {text: split_options(text) for text in words}
    known = {text: STRATEGIES.options(word) for text, (word, _) in own.items()}
    every_name = list(dict.fromkeys(name for names in known.values() for name in names))
    for name in options:
        if name not in every_name:
            raise ValueError(
                f"none of {', '.join(words)} has an option {name!r}. {nearest(name, every_name)}"
            )
    shared = {text: {name: v for name, v in options.items() if name in known[text]} for text in words}
    return {text: STRATEGIES.check(word, **{**shared[text], **said}) for text, (word, said) in own.items()}


def check_layouts(text: str | None, split: str | None) -> list[str]:
    """The layouts of a list such as "data,pipeline:schedule=1f1b,microbatches=8,hybrid".

    `split` is the cut of all pipelines that do not name their own.
    """
    found = split_list(text or "data")
    for place, layout in enumerate(found):
        word, _, options = layout.partition(":")
        LAYOUTS.check_text(layout)
        if split is not None and "split" in LAYOUTS.options(word) and "split=" not in options:
            found[place] = f"{layout}{',' if options else ':'}split={split}"
            LAYOUTS.check_text(found[place])
    if split is not None and not any("split=" in layout for layout in found):
        raise ValueError(f"--split {split} cuts pipelines, and --layouts names none; add pipeline to it")
    if twice := next((layout for layout in found if found.count(layout) > 1), None):
        raise ValueError(f"--layouts names {twice!r} twice")
    return found


def read_numbers(text: str) -> list[int]:
    """The numbers of a list such as "1,4,16", each once, in order."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdecimal() for word in words):
        raise ValueError(f"--workers {text!r} is not a number, or several separated by commas, as in 1,4,16")
    numbers = sorted({int(word) for word in words})
    if numbers[0] < 1:
        raise ValueError(f"--workers {text}: a run needs at least 1 worker")
    return numbers


def read_virtual(
    virtual: bool,
    network: str | None,
    compute: str | None,
    profile: str | None = None,
    plan: TrainingPlan | None = None,
) -> dict[str, Any]:
    """What takes time in virtual time; nothing for a real run. What is not given is as in the plan."""
    given = {"--network": network, "--compute": compute, "--profile": profile}
    if not virtual:
        for option, value in given.items():
            if value is not None:
                raise ValueError(f"{option} describes virtual time; add --sim to run in it")
        return {}
    from shoal.sim.models import Compute, Network

    if plan is not None:
        return {
            "network": plan.network if network is None else Network.parse(network),
            "compute": plan.compute if compute is None else Compute.parse(compute),
            "profile": plan.profile if profile is None else profile,
        }
    if profile is None:
        return {"network": Network.parse(network or NETWORK), "compute": Compute.parse(compute or COMPUTE)}
    return {
        "network": None if network is None else Network.parse(network),
        "compute": None if compute is None else Compute.parse(compute),
        "profile": profile,
    }
