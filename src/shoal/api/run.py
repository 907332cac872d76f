"""run(): Shoal owns the training loop, on real processes or in virtual time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.codecs import CODECS
from shoal.core.codec import Codec
from shoal.core.crew_sizes import CrewSizes
from shoal.core.devices import on_device
from shoal.core.limits import PATIENCE_SECONDS
from shoal.core.task import Task
from shoal.launch.audience import Audience
from shoal.launch.crew import Listener
from shoal.launch.join import Access, choose_codec
from shoal.launch.stop_signals import number_of, stopped_by
from shoal.layouts import LAYOUTS
from shoal.layouts.model_layout import ModelLayout
from shoal.loggers.log_option import make_loggers
from shoal.loggers.logger import Logger
from shoal.profiling.trials import compute_here
from shoal.programs.tasks import TASKS
from shoal.records.recording import RunRecording, both, record_run
from shoal.records.run_store import RunDescription, RunStore, open_store
from shoal.runs.curve import POINTS
from shoal.runs.plan import Plan
from shoal.runs.processes import run_processes
from shoal.runs.result import Result
from shoal.runs.simulated import VirtualTime, describe, run_simulated
from shoal.sim import Compute, Faults, Network
from shoal.sim.hardware import Profile
from shoal.storage.folder_lock import folder_lock
from shoal.strategies import STRATEGIES
from shoal.vocabulary.strategy import Strategy


def run(
    task: Task | str,
    strategy: Strategy | str = "sync",
    *,
    workers: int | None = None,
    servers: int = 1,
    codec: Codec | str | None = None,
    epochs: int = 1,
    seed: int = 0,
    batch: int | None = None,
    lr: float | None = None,
    grow_batch: str | None = None,
    largest_batch: int | None = None,
    device: str | None = None,
    crew: str | CrewSizes | None = None,
    layout: str | ModelLayout = "data",
    transport: str = "processes",
    collective: str = "auto",
    network: Network | str | None = None,
    compute: Compute | str | None = None,
    profile: Profile | str | Path | None = None,
    faults: Faults | None = None,
    durability: str = "memory",
    timeout: float = 300.0,
    patience: float = PATIENCE_SECONDS,
    min_workers: int = 1,
    spares: int = 0,
    max_workers: int | None = None,
    access: Access | None = None,
    threads: int | None = None,
    checkpoint: str | Path | None = None,
    every: int | None = None,
    balance: bool = False,
    scale_lr: str = "none",
    tests: int = POINTS,
    on_progress: Listener | None = None,
    log: str | Logger | Iterable[str | Logger] | None = None,
    runs: str | Path | RunStore | None = None,
) -> Result:
    """Train `task` on many workers that `strategy` synchronises, and return the result.

    Without a `codec` messages are as the strategy has them: uncompressed, but for "strom".
    `transport` is "processes", "gloo", "grpc" or "sim"; `network`, `compute`, `profile` and `faults` are for
    "sim" only. `network="1Gbit,100us"` and `compute="20ms,10%"` read as `shoal compare --network` and
    `--compute` do. With a `profile`, what `shoal calibrate` has measured costs time too: messages, merging,
    codecs, and processes that share cores; a gradient then takes by default what it takes here, with as many
    threads as a process would have.
    `batch` is the number of samples per worker and step. `grow_batch="2@10,2@20"` doubles it after 10 and 20
    epochs; where it would exceed `largest_batch`, the learning rate is divided instead.
    `device` is "cpu", "cuda" or "auto", by default that of the task: of several GPUs worker k takes the k-th,
    beginning again after the last.
    `crew="2@0,4@500"` trains on 2 workers at first and on 4 from step 500 on, instead of `workers`, which is
    1 by default. With `balance`, for strategies that average over all workers, faster workers take larger
    batches, and `batch` is the mean.
    `layout` says how the model lies in a worker: "data" has all of it in one process, and
    "pipeline:group=4,schedule=1f1b" stages in four; "columns", "rows", "tensor", "hybrid" and "branches" cut
    it in other ways. Every worker is then such a group of processes, and `batch` is that of the group.
    `scale_lr` multiplies the learning rate by the number of workers ("linear"), its square root ("sqrt"), or
    as suits the strategy ("auto"); with "none" it is what you or the task say. `result.config["lr"]` is the
    rate that was trained with.
    `servers` nodes share each server of the strategy, each with a slice of the model. A server that dies is
    restarted, and `durability` says what it remembers: with "memory" its last snapshot, with "journal" every
    update it has acknowledged. With a server, the run continues when a worker dies.
    `checkpoint` is a folder; if it holds a checkpoint of this run, training resumes there. `every` is the
    number of steps between checkpoints. A node that waits `timeout` seconds for a message gives up and names
    the peer. A process, or a peer over gRPC or gloo, that is silent for `patience` seconds counts as dead.
    Where workers come and go, training waits while fewer than `min_workers` are there, and `spares` processes
    that have loaded everything wait to take the place of one that is killed. With `max_workers`, over "grpc",
    workers of other machines may join while the run is under way, as `shoal join` does; `access` says where
    it listens for them, and with which token and certificates.
    `threads` is the number of torch threads per process; by default they share the host's cores.
    `tests` is how often the model is tested for the learning curve; with 0, at the end alone.
    `on_progress` is called with the nodes' progress.
    `log` names loggers, as in "tensorboard:runs/" or ["csv", MyLogger()]: "tensorboard", "wandb", "mlflow",
    "csv", or an object with the methods of `Logger`. `runs` is a folder in which the run is kept, for
    `shoal runs` and `shoal report`; by default it is not.
    Raises WorkerFailed with the traceback of a worker that raised, and Interrupted after Ctrl-C.
    """
    chosen = TASKS.read(task) if isinstance(task, str) else task
    algorithm = STRATEGIES.read(strategy) if isinstance(strategy, str) else strategy
    sizes = crew if isinstance(crew, CrewSizes) else CrewSizes.parse(crew)
    plan = Plan(
        task=on_device(chosen, device).but(batch, lr, grow_batch, largest_batch),
        strategy=algorithm,
        codec=choose_codec(codec, algorithm),
        workers=sizes.size_of(workers),
        servers=servers,
        epochs=epochs,
        seed=seed,
        transport=transport,
        collective=collective,
        durability=durability,
        timeout=timeout,
        patience=patience,
        min_workers=min_workers,
        spares=spares,
        max_workers=max_workers,
        access=access or Access(),
        threads=threads,
        checkpoint=None if checkpoint is None else str(checkpoint),
        every=every,
        balance=balance,
        scale_lr=scale_lr,
        tests=tests,
        crew=sizes,
        layout=LAYOUTS.read(layout) if isinstance(layout, str) else layout,
    )
    _check_real(transport, network or compute or profile or faults)
    virtual = _virtual(plan, network, compute, profile)
    config = plan.config() if transport != "sim" else describe(plan, None, virtual)
    with _recording(plan, config, log, runs) as kept, folder_lock(plan.checkpoint):
        listener = Audience(both(kept.event, on_progress))
        if transport == "sim":
            result = run_simulated(plan, virtual, faults, listener)
        else:
            result = run_processes(plan, listener)
        kept.done(result.record())
    return result


def _check_real(transport: str, virtual: object) -> None:
    """Raise ValueError for models of virtual time in real time."""
    if transport != "sim" and virtual:
        raise ValueError(f"network, compute, profile and faults are for transport='sim', not {transport!r}")


def _virtual(
    plan: Plan,
    network: Network | str | None,
    compute: Compute | str | None,
    profile: Profile | str | Path | None,
) -> VirtualTime:
    """What takes time in virtual time."""
    links = Network.parse(network) if isinstance(network, str) else network
    speeds = Compute.parse(compute) if isinstance(compute, str) else compute
    if profile is None:
        return VirtualTime(links or Network(), speeds or Compute())
    known = profile if isinstance(profile, Profile) else Profile.load(profile)
    threads = plan.threads or max(1, known.cores // (1 if links else plan.nodes))
    codec, has_server = CODECS.name_of(plan.codec), plan.nodes > plan.workers
    wires, machine = known.of_run(plan.nodes, codec, links, threads, has_server)
    beside = machine.per_host if links is None else 1
    return VirtualTime(wires, speeds or compute_here(plan.task, machine, beside, plan.seed, threads), machine)


@contextmanager
def _recording(
    plan: Plan,
    config: dict[str, Any],
    log: str | Logger | Iterable[str | Logger] | None,
    runs: str | Path | RunStore | None,
) -> Iterator[RunRecording]:
    """The recording of a run; a signal ends it with Interrupted."""
    word, servers = STRATEGIES.name_of(plan.strategy), plan.nodes - plan.workers
    about = RunDescription(plan.task.name, word, plan.workers, servers, config)
    with record_run(about, open_store(runs), make_loggers(log)) as kept:
        try:
            yield kept
        except KeyboardInterrupt as stop:  # in virtual time, or while models are tested after training
            raise stopped_by(number_of(stop)) from None
