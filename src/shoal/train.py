"""run(): Shoal owns the loop, on real processes or in virtual time."""

from __future__ import annotations

import copy
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from shoal.checkpoint import Checkpoints, load_model, save_model
from shoal.codecs import CODECS
from shoal.core.codec import Codec
from shoal.core.errors import Interrupted, WorkerFailed
from shoal.core.instrument import Instrument
from shoal.core.node import Node, name_of
from shoal.core.replica import Parameters, Replica
from shoal.core.strategy import Strategy
from shoal.core.task import Data, Task
from shoal.core.vector import Flat, named_weights
from shoal.curve import Curve, holder, holds_solution
from shoal.launch.boundary import Boundary
from shoal.launch.control import PROGRESS_SECONDS, Control, Reporter, leave_with_parent, progress
from shoal.launch.crew import Crew, Member, ctrl_c_ignored
from shoal.launch.drive import drive
from shoal.launch.join import (
    COLLECTIVES,
    TRANSPORTS,
    check_word,
    choose_mean,
    connect,
    file_store,
    local_threads,
)
from shoal.modules import build_model, build_replica, module_of, steps_per_epoch
from shoal.result import Result, report, summarise
from shoal.sim import Compute, Faults, Network, Simulation
from shoal.strategies import STRATEGIES
from shoal.tasks import TASKS

Listener = Callable[[dict[str, Any]], None]

SLOW_IMPORTS = ("torch._dynamo",)
"""What torch imports on first use of an optimizer: seconds that are spent once, not once in every process."""


@dataclass(frozen=True)
class Plan:
    """Everything that says what a run is; the same in every process of it."""

    task: Task
    strategy: Strategy
    codec: Codec
    workers: int = 1
    epochs: int = 1
    seed: int = 0
    transport: str = "processes"
    collective: str = "auto"
    timeout: float = 300.0
    threads: int | None = None
    checkpoint: str | None = None
    every: int | None = None

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers={self.workers}: a run needs at least 1 worker")
        if self.epochs < 1:
            raise ValueError(f"epochs={self.epochs}: a run needs at least 1 epoch")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads={self.threads}: a process computes with at least 1 thread")
        if self.every is not None and self.checkpoint is None:
            raise ValueError("every=... says how often to write a checkpoint; say where with checkpoint=DIR")
        check_word("transport", self.transport, TRANSPORTS)
        check_word("collective", self.collective, COLLECTIVES)
        if self.collective == "native" and not (self.transport == "gloo" and self.codec.exact):
            raise ValueError(
                "collective 'native' needs transport 'gloo' and no codec; take 'auto' or 'stripes'"
            )
        self.strategy.check(self.workers)
        self.strategy.check_codec(self.codec)

    @property
    def nodes(self) -> int:
        """Processes in all, servers included."""
        return self.workers + self.strategy.servers

    @property
    def threads_each(self) -> int:
        """Torch threads of each process: its share of this host's cores, or 1 in virtual time."""
        shared_out = 1 if self.transport == "sim" else local_threads(self.nodes)
        return shared_out if self.threads is None else self.threads

    def steps(self, data: Data) -> int:
        """Steps that every worker takes."""
        return self.epochs * steps_per_epoch(len(data.x), self.task.batch, self.workers)

    def same_run(self) -> dict[str, Any]:
        """What must not change between a checkpoint and its resumption."""
        return {
            **self.task.config(),
            "strategy": STRATEGIES.name_of(self.strategy),
            **{f"strategy.{name}": value for name, value in asdict(self.strategy).items()},
            "codec": CODECS.name_of(self.codec),
            "workers": self.workers,
            "seed": self.seed,
        }

    def config(self) -> dict[str, Any]:
        """All settings as plain values, for the record of the run."""
        return {
            **self.same_run(),
            "epochs": self.epochs,
            "transport": self.transport,
            "collective": self.collective,
            "timeout": self.timeout,
            "threads": self.threads_each,
        }

    def boundary(self, control: Control, model: nn.Module) -> Boundary:
        """What happens between two steps of a node whose weights fit `model`."""
        saved = None
        if self.checkpoint is not None:
            saved = Checkpoints(self.checkpoint, self.same_run(), self.nodes)
        return Boundary(control, saved, self.every, lambda node: self._weights(node, model))

    def _weights(self, node: Node, model: nn.Module) -> Mapping[str, Tensor] | None:
        """The solution under the model's own names, at the node that holds it."""
        if not holds_solution(self.strategy, node):
            return None
        return named_weights(module_of(node, model), self.strategy.solution(node))


def run(
    task: Task | str,
    strategy: Strategy | str = "sync",
    *,
    workers: int = 1,
    codec: Codec | str = "none",
    epochs: int = 1,
    seed: int = 0,
    batch: int | None = None,
    lr: float | None = None,
    transport: str = "processes",
    collective: str = "auto",
    network: Network | None = None,
    compute: Compute | None = None,
    faults: Faults | None = None,
    timeout: float = 300.0,
    threads: int | None = None,
    checkpoint: str | Path | None = None,
    every: int | None = None,
    on_progress: Listener | None = None,
) -> Result:
    """Train `task` on many workers kept together by `strategy`, and return what came of it.

    `transport` is "processes", "gloo" or "sim"; `network`, `compute` and `faults` belong to "sim".
    `batch` samples a worker and step. A checkpoint folder that holds a checkpoint of this run is resumed.
    A node that hears nothing for `timeout` seconds gives up, naming whom it waited for. Each process gets its
    share of the host's cores unless `threads` says otherwise.
    Raises WorkerFailed with the traceback of a worker that raised; Ctrl-C stops processes with Interrupted.
    """
    chosen = TASKS.make(task) if isinstance(task, str) else task
    plan = Plan(
        task=replace(
            chosen, batch=chosen.batch if batch is None else batch, lr=chosen.lr if lr is None else lr
        ),
        strategy=STRATEGIES.make(strategy) if isinstance(strategy, str) else strategy,
        codec=CODECS.make(codec) if isinstance(codec, str) else codec,
        workers=workers,
        epochs=epochs,
        seed=seed,
        transport=transport,
        collective=collective,
        timeout=timeout,
        threads=threads,
        checkpoint=None if checkpoint is None else str(checkpoint),
        every=every,
    )
    listener = on_progress or (lambda event: None)
    if transport == "sim":
        return _simulate(plan, network or Network(), compute or Compute(), faults, listener)
    if network or compute or faults:
        raise ValueError(f"network, compute and faults are for transport='sim', not for {transport!r}")
    return _run_processes(plan, listener)


def _keep_model(plan: Plan, model: nn.Module) -> None:
    """Leave the trained model beside the checkpoints, where they were asked for."""
    if plan.checkpoint is not None:
        save_model(Path(plan.checkpoint) / "model.safetensors", model.state_dict())


# -- virtual time ----------------------------------------------------------------------------------


def _simulate(
    plan: Plan, network: Network, compute: Compute, faults: Faults | None, listener: Listener
) -> Result:
    data, model = plan.task.data(), build_model(plan.task, plan.seed)
    steps = plan.steps(data)
    curve = Curve(plan.strategy, len(data.x) * plan.epochs)
    boundary = plan.boundary(Control(), model)

    def replica(rank: int) -> Replica:
        return build_replica(plan.task, model, data, rank=rank, workers=plan.workers, seed=plan.seed)

    simulation = Simulation(
        plan.strategy,
        replica,
        workers=plan.workers,
        steps=steps,
        network=network,
        compute=compute,
        faults=faults,
        codec=plan.codec,
        seed=plan.seed,
        boundary=boundary,
        observers=(curve, _Ticker(listener)),
    )
    for node in simulation.nodes:
        boundary.resume(node)
    result_node = simulation.nodes[holder(plan.strategy, plan.workers)]
    curve.begin(result_node)
    with _threads(plan.threads_each):
        simulation.run()
        curve.end(result_node)
        model = module_of(result_node, model)
        points = curve.evaluate(model, plan.task, data)
    _keep_model(plan, model)
    reports = [report(node, simulation.seconds) for node in simulation.nodes]
    reports[result_node.rank]["curve"] = points
    config = {**plan.config(), "network": asdict(network), "compute": asdict(compute)}
    config["network"]["links"] = {f"{a}-{b}": asdict(link) for (a, b), link in network.links.items()}
    return summarise(config, reports, model, digest=simulation.digest())


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Compute with so many threads for a while: small models are slower on many."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Ticker(Instrument):
    """Tells a listener in this process how simulated nodes get on, a few times a second of real time."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._next: dict[int, float] = {}

    def step(self, node: Node) -> None:
        if (now := monotonic()) >= self._next.get(node.rank, 0.0):
            self._next[node.rank] = now + PROGRESS_SECONDS
            self._listener(progress(node, node.transport.now(), node.samples_before))


# -- real processes --------------------------------------------------------------------------------


def _run_processes(plan: Plan, listener: Listener) -> Result:
    _check_it_travels(plan)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["shoal.train", *SLOW_IMPORTS, *plan.task.imports])
    with ctrl_c_ignored():  # for good by the fork server, which inherits it
        forkserver.ensure_running()
    crew = Crew(plan.workers, listener, start_seconds=plan.timeout)
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        for rank in range(plan.nodes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_node_process, args=(plan, rank, theirs, folder), daemon=True)
            process.start()
            theirs.close()
            crew.members.append(Member(rank, name_of(rank, plan.workers), process, ours))
        reports = crew.see_through()
        if not all(reports):
            raise WorkerFailed("a process ended without a report of its work")
        model = build_model(plan.task, plan.seed)
        model.load_state_dict(load_model(Path(folder) / "model.safetensors"))
    _keep_model(plan, model)
    return summarise(plan.config(), reports, model)


def _check_it_travels(plan: Plan) -> None:
    """Worker processes import the task's functions by name: say so before any of them starts."""
    try:
        ForkingPickler.dumps(plan)
    except Exception as problem:
        raise ValueError(
            f"task {plan.task.name!r} cannot be handed to worker processes: {problem}. "
            "Define its functions at the top level of a module, without lambdas."
        ) from None


def _node_process(plan: Plan, rank: int, connection: Connection, folder: str) -> None:
    """The whole life of a node's process."""
    leave_with_parent()
    control = Control(connection)
    try:
        torch.set_num_threads(plan.threads_each)
        control.tell("done", **_live(plan, rank, control, folder))
    except Interrupted:
        control.tell("interrupted")
    except BaseException as error:
        control.tell_failure(error)
    finally:
        control.close()


def _live(plan: Plan, rank: int, control: Control, folder: str) -> dict[str, Any]:
    """Build the node, train when the launcher says so, and report."""
    data, model = plan.task.data(), build_model(plan.task, plan.seed)
    curve = Curve(plan.strategy, len(data.x) * plan.epochs)
    boundary = plan.boundary(control, model)
    node = _join(plan, rank, folder, model, data, boundary, (curve, Reporter(control)))
    boundary.resume(node)
    control.tell("ready")
    control.await_go()
    began = node.transport.now()
    curve.begin(node)
    try:
        drive(plan.strategy.live(node))
    except Interrupted:
        drive(node.transport.close())
        raise
    outcome = report(node, node.transport.now() - began)
    curve.end(node)
    drive(node.transport.close())  # not after a failure: to vanish is what tells the others
    if holds_solution(plan.strategy, node):
        model = module_of(node, model)
        save_model(Path(folder) / "model.safetensors", named_weights(model, plan.strategy.solution(node)))
        outcome["curve"] = curve.evaluate(model, plan.task, data)
    return outcome


def _join(
    plan: Plan,
    rank: int,
    folder: str,
    model: nn.Module,
    data: Data,
    boundary: Boundary,
    observers: Sequence[Instrument],
) -> Node:
    """This process's node, connected to all others."""
    is_worker = rank < plan.workers
    replica: Replica = Parameters(Flat(copy.deepcopy(model)).x)
    if is_worker:
        replica = build_replica(plan.task, model, data, rank=rank, workers=plan.workers, seed=plan.seed)
    transport = connect(
        plan.transport,
        rank,
        plan.nodes,
        file_store(folder, plan.nodes) if plan.nodes > 1 else None,
        workers=plan.workers,
        vector_bytes=replica.x.numel() * replica.x.element_size(),
        timeout=plan.timeout,
    )
    return Node(
        transport,
        replica,
        workers=plan.workers,
        mean=choose_mean(plan.collective, transport, plan.codec),
        codec=plan.codec,
        seed=plan.seed,
        steps=plan.steps(data) if is_worker else None,
        timeout=plan.timeout,
        boundary=boundary,
        observers=observers,
    )
