"""run(): Shoal owns the training loop, on real processes or in virtual time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import nn

from shoal.collectives import LinkCost
from shoal.core.codec import Codec
from shoal.core.errors import Interrupted
from shoal.core.task import Data, Task
from shoal.core.vector import trainable
from shoal.engine.engine import Engine, Instrument
from shoal.engine.group import Mean
from shoal.launch.audience import Audience
from shoal.launch.control import PROGRESS_SECONDS, Activity, Control, progress
from shoal.launch.crew import Listener
from shoal.launch.join import choose_codec, choose_mean
from shoal.loggers.log_option import make_loggers
from shoal.loggers.logger import Logger
from shoal.programs.tasks import TASKS
from shoal.records.recording import RunRecording, both, record_run
from shoal.records.run_store import RunDescription, RunStore, open_store
from shoal.replicas.module import build_model, build_replica, build_served, module_of
from shoal.runs.curve import POINTS, holders, put_together
from shoal.runs.evaluation import Buffers
from shoal.runs.plan import Plan
from shoal.runs.processes import keep_model, run_processes
from shoal.runs.result import Result, report, summarise
from shoal.sim import Compute, Faults, Network, Simulation
from shoal.strategies import STRATEGIES
from shoal.vocabulary.strategy import Strategy


def run(
    task: Task | str,
    strategy: Strategy | str = "sync",
    *,
    workers: int = 1,
    servers: int = 1,
    codec: Codec | str | None = None,
    epochs: int = 1,
    seed: int = 0,
    batch: int | None = None,
    lr: float | None = None,
    grow_batch: str | None = None,
    largest_batch: int | None = None,
    transport: str = "processes",
    collective: str = "auto",
    network: Network | str | None = None,
    compute: Compute | str | None = None,
    faults: Faults | None = None,
    durability: str = "memory",
    timeout: float = 300.0,
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
    `transport` is "processes", "gloo", "grpc" or "sim"; `network`, `compute` and `faults` are for "sim" only.
    `network="1Gbit,100us"` and `compute="20ms,10%"` read as `shoal compare --network` and `--compute` do.
    `batch` is the number of samples per worker and step. `grow_batch="2@10,2@20"` doubles it after 10 and 20
    epochs; where it would exceed `largest_batch`, the learning rate is divided instead. With `balance`, for
    strategies that average over all workers, faster workers take larger batches, and `batch` is the mean.
    `scale_lr` multiplies the learning rate by the number of workers ("linear"), its square root ("sqrt"), or
    as suits the strategy ("auto"); with "none" it is what you or the task say. `result.config["lr"]` is the
    rate that was trained with.
    `servers` nodes share each server of the strategy, each with a slice of the model. A server that dies is
    restarted, and `durability` says what it remembers: with "memory" its last snapshot, with "journal" every
    update it has acknowledged. With a server, the run continues when a worker dies.
    `checkpoint` is a folder; if it holds a checkpoint of this run, training resumes there. `every` is the
    number of steps between checkpoints. A node that waits `timeout` seconds for a message gives up and names
    the peer. `threads` is the number of torch threads per process; by default they share the host's cores.
    `tests` is how often the model is tested for the learning curve; with 0, at the end alone.
    `on_progress` is called with the nodes' progress.
    `log` names loggers, as in "tensorboard:runs/" or ["csv", MyLogger()]: "tensorboard", "wandb", "mlflow",
    "csv", or an object with the methods of `Logger`. `runs` is a folder in which the run is kept, for
    `shoal runs` and `shoal report`; by default it is not.
    Raises WorkerFailed with the traceback of a worker that raised, and Interrupted after Ctrl-C.
    """
    chosen = TASKS.make(task) if isinstance(task, str) else task
    algorithm = STRATEGIES.make(strategy) if isinstance(strategy, str) else strategy
    plan = Plan(
        task=chosen.but(batch, lr, grow_batch, largest_batch),
        strategy=algorithm,
        codec=choose_codec(codec, algorithm),
        workers=workers,
        servers=servers,
        epochs=epochs,
        seed=seed,
        transport=transport,
        collective=collective,
        durability=durability,
        timeout=timeout,
        threads=threads,
        checkpoint=None if checkpoint is None else str(checkpoint),
        every=every,
        balance=balance,
        scale_lr=scale_lr,
        tests=tests,
    )
    if transport != "sim" and (network or compute or faults):
        raise ValueError(f"network, compute and faults are for transport='sim', not for {transport!r}")
    links = Network.parse(network) if isinstance(network, str) else network or Network()
    speeds = Compute.parse(compute) if isinstance(compute, str) else compute or Compute()
    config = plan.config() if transport != "sim" else _config(plan, None, links, speeds)
    with _recording(plan, config, log, runs) as kept:
        listener = Audience(both(kept.event, on_progress))
        if transport == "sim":
            result = _simulate(plan, links, speeds, faults, listener)
        else:
            result = run_processes(plan, listener)
        kept.done(result.record())
    return result


@contextmanager
def _recording(
    plan: Plan,
    config: dict[str, Any],
    log: str | Logger | Iterable[str | Logger] | None,
    runs: str | Path | RunStore | None,
) -> Iterator[RunRecording]:
    """The recording of a run; Ctrl-C ends it with Interrupted."""
    word, servers = STRATEGIES.name_of(plan.strategy), plan.nodes - plan.workers
    about = RunDescription(plan.task.name, word, plan.workers, servers, config)
    with record_run(about, open_store(runs), make_loggers(log)) as kept:
        try:
            yield kept
        except KeyboardInterrupt:  # in virtual time, or while models are tested after training
            raise Interrupted("stopped by Ctrl-C") from None


# -- virtual time ----------------------------------------------------------------------------------


def _simulate(
    plan: Plan, network: Network, compute: Compute, faults: Faults | None, listener: Audience
) -> Result:
    data, model = plan.task.data(), build_model(plan.task, plan.seed)
    curve, between_steps = plan.curve(data), plan.between_steps(Control(), model)
    place: dict[str, Any] = {"workers": plan.workers, "seed": plan.seed}
    task = plan.scaled_task(data)
    simulation = Simulation(
        plan.strategy,
        partial(build_replica, task, model, data, plan.strategy, **place),
        **place,
        steps=plan.steps(data),
        passes=plan.epochs,
        shards=plan.servers,
        served=partial(build_served, task, model),
        network=network,
        compute=compute,
        batch=plan.task.batch if plan.balance or plan.task.growth else None,
        faults=faults,
        layout=trainable(model)[1],
        codec=plan.codec,
        mean=_choose_mean(plan, network),
        between_steps=between_steps,
        balanced=plan.balance,
        observers=(curve, _Ticker(listener)),
    )
    between_steps.resume_all(simulation.nodes)
    for node in simulation.nodes:
        curve.begin(node)
    with _threads(plan.threads_each):
        simulation.run()
        ranks = holders(plan.strategy, plan.workers, plan.servers, simulation.finished)
        for rank in ranks:
            curve.end(simulation.nodes[rank])
        copies = [curve.snapshots[rank] for rank in ranks]
        modules, buffers = _modules(simulation, ranks, model), _buffers(simulation, model)
        model, points = put_together(
            plan.strategy, modules, copies, buffers, plan.task, data, listener.tested
        )
    keep_model(plan, model)
    reports = [report(node, simulation.seconds) for node in simulation.nodes]
    reports[ranks[0]]["curve"] = points
    return summarise(_config(plan, data, network, compute), reports, model, digest=simulation.digest())


def _modules(simulation: Simulation, ranks: Iterable[int], model: nn.Module) -> list[nn.Module]:
    """The modules of these nodes; `model` for a server."""
    return [module_of(simulation.nodes[rank].replica, model) for rank in ranks]


def _buffers(simulation: Simulation, model: nn.Module) -> list[Buffers]:
    """The buffers of the workers that got to the end."""
    there = [rank for rank in simulation.finished if rank < simulation.workers]
    return [dict(module.named_buffers()) for module in _modules(simulation, there, model)]


def _choose_mean(plan: Plan, network: Network) -> Mean:
    link = LinkCost.of_network(network.latency, network.bandwidth)
    return choose_mean(plan.collective, None, plan.codec, plan.workers, link)


def _config(plan: Plan, data: Data | None, network: Network, compute: Compute) -> dict[str, Any]:
    """All settings as plain values, for the record of the run."""
    links = {f"{a}-{b}": asdict(link) for (a, b), link in network.links.items()}
    return {
        **plan.config(data),
        "network": {**asdict(network), "links": links},
        "compute": asdict(compute),
    }


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Use `number` torch threads inside the block: small models are slower with many."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Ticker(Instrument):
    """Reports the progress of simulated nodes to a listener, a few times per second of real time."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._next: dict[int, float] = {}
        self._activities: defaultdict[int, Activity] = defaultdict(Activity)
        self._lost: set[int] = set()  # told of, and not seen since

    def step(self, engine: Engine) -> None:
        rank = engine.rank
        if (now := monotonic()) >= self._next.get(rank, 0.0):
            self._next[rank] = now + PROGRESS_SECONDS
            self._listener(self._progress(engine, rank))

    def update(self, engine: Engine) -> None:
        self.step(engine)

    def fault(self, engine: Engine, what: str) -> None:
        """Tell once of a lost node; every node that misses it reports the same."""
        lost = next(reversed(engine.mailbox.gone), None)
        if lost is None or lost in self._lost:
            return
        self._lost.add(lost)
        role = "worker" if lost < engine.identity.workers else "server"
        of_it = {"rank": lost, "role": role, "step": 0, "steps": None, "loss": float("nan")}
        news = {"seconds": engine.channel.now(), "lost": True, "state": "dead", "fault": what}
        self._listener({**of_it, **news})

    def _progress(self, engine: Engine, rank: int) -> dict[str, Any]:
        before, activity = engine.progress.samples_before, self._activities[rank]
        said = progress(engine, engine.channel.now(), before, activity=activity)
        if rank in self._lost:
            self._lost.discard(rank)
            said["fault"] = f"{engine.name} is back"
        return said
