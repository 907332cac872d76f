"""Runs in virtual time: all nodes in one process, and a clock that jumps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from time import monotonic
from typing import Any

import torch
from torch import nn

from shoal.collectives import LinkCost
from shoal.core.errors import WorkerFailed
from shoal.core.task import Data
from shoal.core.vector import named_buffers, trainable
from shoal.engine.engine import Engine, Instrument
from shoal.engine.group import Mean
from shoal.launch.audience import Audience
from shoal.launch.control import PROGRESS_SECONDS, Activity, Control, progress
from shoal.launch.crew import Listener
from shoal.launch.join import choose_mean
from shoal.launch.stop_signals import temporary_folder
from shoal.replicas.module import build_model, build_replica, build_served, module_of
from shoal.runs.curve import Curve, count_all, holders, put_together
from shoal.runs.evaluation import Buffers
from shoal.runs.joined_legs import LegOutcome, summarise_legs
from shoal.runs.plan import Plan
from shoal.runs.result import Result, report
from shoal.sim import Compute, Faults, Network, Simulation
from shoal.sim.hardware import Machine


@dataclass(frozen=True)
class VirtualTime:
    """What takes time in a simulation."""

    network: Network
    compute: Compute
    machine: Machine | None = None


def run_simulated(plan: Plan, virtual: VirtualTime, faults: Faults | None, listener: Audience) -> Result:
    """Train in virtual time, and return the result."""
    network, compute = virtual.network, virtual.compute
    if plan.crew and faults is not None:
        raise ValueError("faults name nodes by rank, and a crew that grows moves them; leave crew out")
    compute.check(plan.workers)
    data = plan.task.data()
    legs: list[LegOutcome] = []
    with temporary_folder() as folder, _threads(plan.threads_each):
        for leg in plan.legs_left(data, folder):
            listener.workers_to_come = plan.workers - leg.workers
            began = legs[-1].began + legs[-1].seconds if legs else 0.0
            slow = {rank: factor for rank, factor in compute.slow.items() if rank < leg.workers}
            links = _links_of(network, plan.workers, leg.workers)
            here = replace(virtual, network=links, compute=replace(compute, slow=slow))
            legs.append(_simulate(leg, data, folder, here, faults, began, listener))
    plan.keep_model(legs[-1].model)
    return summarise_legs(plan, describe(plan, data, virtual), legs, data)


def describe(plan: Plan, data: Data | None, virtual: VirtualTime) -> dict[str, Any]:
    """All settings as plain values, for the record of the run."""
    network, machine = virtual.network, virtual.machine
    links = {f"{a}-{b}": asdict(link) for (a, b), link in network.links.items()}
    return {
        **plan.config(data),
        "network": {**asdict(network), "links": links},
        "compute": asdict(virtual.compute),
        **({} if machine is None else {"machine": asdict(machine)}),
    }


def _simulate(
    plan: Plan,
    data: Data,
    folder: str,
    virtual: VirtualTime,
    faults: Faults | None,
    began: float,
    listener: Audience,
) -> LegOutcome:
    """One leg, or all of a run whose crew does not grow."""
    model = build_model(plan.task, plan.seed)
    curve = plan.curve(data)
    between_steps = plan.between_steps(Control(), model, data)
    place: dict[str, Any] = {"workers": plan.workers, "seed": plan.seed}
    task = plan.scaled_task(data)
    elastic = faults is not None and plan.may_be_elastic
    simulation = Simulation(
        plan.strategy,
        partial(build_replica, task, model, data, plan.strategy, leg=plan.leg, **place),
        **place,
        steps=plan.steps(data),
        passes=plan.epochs,
        shards=plan.servers,
        served=partial(build_served, task, model),
        network=virtual.network,
        compute=virtual.compute,
        machine=virtual.machine,
        batch=plan.task.batch if plan.balance or plan.task.growth or virtual.machine else None,
        faults=faults,
        layout=trainable(model)[1],
        codec=plan.codec,
        mean=_choose_mean(plan, virtual),
        between_steps=between_steps,
        balanced=plan.balance,
        elastic=elastic,
        min_workers=plan.min_workers if elastic else 1,  # else nobody goes
        observers=(curve, Ticker(listener, began)),
    )
    if (before := plan.edge_before(folder)) is not None:
        for node in simulation.nodes:
            before.enter(node)
    between_steps.resume_all(simulation.nodes)
    for node in simulation.nodes:
        curve.begin(node, began)
    simulation.run()
    if (after := plan.edge_after(folder)) is not None:
        for rank in simulation.finished:
            after.leave(simulation.nodes[rank])
        after.seal()
    return _tested(plan, data, simulation, curve, model, began, listener)


def _tested(
    plan: Plan,
    data: Data,
    simulation: Simulation,
    curve: Curve,
    model: nn.Module,
    began: float,
    listener: Audience,
) -> LegOutcome:
    ranks = _holders(plan, simulation)
    for rank in ranks:
        curve.end(simulation.nodes[rank])
    copies = [count_all(curve.snapshots[rank], list(curve.counts.values())) for rank in ranks]
    if simulation.keeper is not None:  # whoever was the first at a time has taken the copy
        copies = [sorted(chain(*curve.snapshots.values()), key=attrgetter("samples"))]
    modules, buffers = _modules(simulation, ranks, model), _buffers(simulation, model)
    model, points = put_together(plan.strategy, modules, copies, buffers, plan.task, data, listener.tested)
    reports = [report(node, simulation.seconds) for node in simulation.nodes]
    return LegOutcome(plan, began, reports, points, model, simulation.digest())


def _holders(plan: Plan, simulation: Simulation) -> list[int]:
    """The ranks that hold the result. Where workers come and go, it is the first that got to the end."""
    if simulation.keeper is None:
        return holders(plan.strategy, plan.workers, plan.servers, simulation.finished)
    if not (there := _at_the_end(simulation)):
        raise WorkerFailed("every worker that had the model was killed; resume from a checkpoint")
    return there[:1]


def _at_the_end(simulation: Simulation) -> list[int]:
    """The workers that got to the end, and were not still to join by then."""
    there = [simulation.nodes[rank] for rank in simulation.finished if rank < simulation.workers]
    return [node.rank for node in there if node.membership is None or not node.membership.is_joining]


def _modules(simulation: Simulation, ranks: Iterable[int], model: nn.Module) -> list[nn.Module]:
    """The modules of these nodes; `model` for a server."""
    return [module_of(simulation.nodes[rank].replica, model) for rank in ranks]


def _buffers(simulation: Simulation, model: nn.Module) -> list[Buffers]:
    """The buffers of the workers that got to the end."""
    modules = _modules(simulation, _at_the_end(simulation), model)
    return [dict(named_buffers(module)) for module in modules]


def _choose_mean(plan: Plan, virtual: VirtualTime) -> Mean:
    link = LinkCost.of_network(virtual.network.latency, virtual.network.bandwidth)
    maps_memory = virtual.machine is not None and virtual.machine.maps_memory
    return choose_mean(plan.collective, None, plan.codec, plan.workers, link, maps_memory)


def _links_of(network: Network, most: int, workers: int) -> Network:
    """The network among so many of the `most` workers, and the servers, whose ranks come after theirs."""

    def here(rank: int) -> int | None:
        return rank if rank < workers else rank - most + workers if rank >= most else None

    moved = {(here(a), here(b)): link for (a, b), link in network.links.items()}
    kept = {(a, b): link for (a, b), link in moved.items() if a is not None and b is not None}
    return replace(network, links=kept)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Use `number` torch threads inside the block: small models are slower with many."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Ticker(Instrument):
    """Reports the progress of simulated nodes to a listener, a few times per second of real time.

    The clock of the nodes began `began` seconds after the run.
    """

    def __init__(self, listener: Listener, began: float = 0.0) -> None:
        self._listener = listener
        self._began = began
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
        said["seconds"] += self._began
        if rank in self._lost:
            self._lost.discard(rank)
            said["fault"] = f"{engine.name} is back"
        return said
