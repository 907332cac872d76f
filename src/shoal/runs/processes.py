"""The processes of a run on this host: starts them, runs a node in each, and collects their results."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import Interrupted, WorkerFailed
from shoal.core.task import Data, Task
from shoal.core.vector import named_buffers, trainable
from shoal.engine.engine import Engine, Instrument
from shoal.engine.membership import RunIsOver
from shoal.launch.audience import Audience
from shoal.launch.background import BackgroundThread
from shoal.launch.between_steps import BetweenSteps
from shoal.launch.control import Control, Reporter, leave_with_parent
from shoal.launch.crew import Crew
from shoal.launch.drive import drive
from shoal.launch.join import choose_mean, connect, file_store
from shoal.launch.keeper_process import FORK_SERVER, keep
from shoal.launch.member import Member
from shoal.launch.peak_memory import PeakMemory
from shoal.launch.process_handle import ProcessHandle
from shoal.launch.recovery import Recovery
from shoal.launch.spares import Spares
from shoal.launch.stop_signals import ctrl_c_ignored, stopped_by, temporary_folder
from shoal.replicas.module import (
    ModuleReplica,
    build_member,
    build_model,
    build_replica,
    build_served,
    module_of,
)
from shoal.replicas.served import ServedReplica
from shoal.runs.curve import Curve, Snapshot, holders, holds_solution, put_together
from shoal.runs.group_processes import GroupMember, join_processes, position_folder, whole_snapshots
from shoal.runs.joined_legs import LegOutcome, summarise_legs
from shoal.runs.plan import Plan
from shoal.runs.result import Result, report
from shoal.storage.checkpoint import load_model, save_model
from shoal.vocabulary.node import Node

SLOW_IMPORTS = ("torch._dynamo",)
"""Modules that torch imports on first use of an optimizer. The fork server imports them once for all."""

KERNELS = "shoal.codecs.kernel_preload"
"""What the CPU kernels of codecs need. The fork server imports it if the run has a lossy codec."""


def run_processes(plan: Plan, listener: Audience) -> Result:
    """Train with one process for each node, and return the result when all are done."""
    check_it_travels(plan, plan.task)
    context = multiprocessing.get_context("forkserver")
    kernels = () if plan.codec.exact else (KERNELS,)
    context.set_forkserver_preload(
        [FORK_SERVER, "shoal.runs.processes", *SLOW_IMPORTS, *kernels, *plan.task.imports]
    )
    with ctrl_c_ignored():  # the fork server inherits this and keeps it
        forkserver.ensure_running()
    with temporary_folder() as root:
        data = plan.task.data() if plan.crew else None  # to know where legs end; else when training is over
        legs = [plan] if data is None else plan.legs_left(data, root)
        crews = [_crew(leg, context, root, listener) for leg in legs]
        said = _see_through(legs, crews, root, listener)
        data, began, outcomes = data or plan.task.data(), 0.0, []
        for leg, reports in zip(legs, said, strict=True):
            ended = max(r["seconds"] for r in reports if r)
            for r in reports:
                r.update({"seconds": r["seconds"] - began} if r else {})
            model, points = _gather(leg, data, _folder(leg, root), reports, listener)
            reports = join_processes(leg, reports, model) if leg.group > 1 else reports
            outcomes.append(LegOutcome(leg, began, [r for r in reports if r], points, model))
            began = ended
    plan.keep_model(outcomes[-1].model)
    return summarise_legs(plan, plan.config(data), outcomes, data)


def _see_through(
    legs: Sequence[Plan], crews: Sequence[Crew], root: str, listener: Audience
) -> list[list[dict[str, Any]]]:
    """Have one crew train after the other; the reports of each.

    While a crew trains, the processes of the next start, import and load everything, and wait: to start eight
    when their turn comes would keep them from training for seconds.
    """
    reports = []
    try:
        for k, (leg, crew) in enumerate(zip(legs, crews, strict=True)):
            listener.workers_to_come = legs[-1].workers - leg.workers
            crew.began_at = crews[0].began_at
            reports.append(crew.see_through(*(following.start_all for following in crews[k + 1 : k + 2])))
            if (edge := leg.edge_after(root)) is not None:
                edge.seal()
                if crew.was_asked_to_stop:  # too late for this leg; the next has not begun
                    raise stopped_by(crew.was_asked_to_stop)
    finally:
        for crew in crews:
            crew.end_all()
    return reports


def _crew(plan: Plan, context: ForkServerContext, root: str, listener: Audience) -> Crew:
    """The processes of a leg, or of all of a run whose crew does not grow; none is started yet."""

    def launch(name: str, main: Callable[..., None], *args: object) -> tuple[ProcessHandle, Connection]:
        ours, theirs = context.Pipe()
        process = context.Process(name=name, target=main, args=(plan, theirs, root, *args), daemon=True)
        with theirs:
            process.start()
        return process, ours

    def start(number: int, incarnation: int) -> Member:
        rank, position = divmod(number, plan.group)
        name = plan.name_of(rank) if plan.group == 1 else f"{plan.name_of(rank)}, process {position}"
        process, connection = launch(name, _node_process, (rank, position), incarnation)
        return Member(number, name, process, connection, incarnation)

    _folder(plan, root).mkdir()
    for position in range(plan.group) if plan.group > 1 else ():
        position_folder(_folder(plan, root), position).mkdir()
    servers = plan.nodes - plan.workers
    return Crew(
        plan.workers * plan.group,
        servers,
        start,
        listener,
        plan.timeout,
        plan.patience,
        plan.restarts or plan.is_elastic,
        goes_on=plan.strategy.survives,
        takes_over=servers > 0 or plan.is_elastic,
        workers_return=plan.workers_return,
        has_keeper=plan.is_elastic,
        spares=Spares(plan.spares, partial(launch, "a spare", _spare_process)),
        group=plan.group,
    )


def run_in_process(plan: Plan, listener: Audience) -> Result:
    """Train a run of a single node in this process, and return the result. Nothing is started."""
    if plan.nodes * plan.group > 1:
        raise ValueError(f"a run of {plan.nodes * plan.group} nodes needs a process for each")
    with temporary_folder() as root:
        _folder(plan, root).mkdir()
        reports = [_live(plan, (0, 0), 0, Control(), root)]
        data = plan.task.data()
        model, points = _gather(plan, data, _folder(plan, root), reports, listener)
    plan.keep_model(model)
    return summarise_legs(plan, plan.config(data), [LegOutcome(plan, 0.0, reports, points, model)], data)


def _folder(plan: Plan, root: str) -> Path:
    """Where the nodes of a leg meet and leave their models."""
    return Path(root) / f"nodes-{0 if plan.leg is None else plan.leg.number}"


def _gather(
    plan: Plan, data: Data, folder: Path, reports: list[dict[str, Any]], listener: Audience
) -> tuple[nn.Module, list[dict[str, Any]]]:
    """Test the snapshots that the nodes have written, and return the final model and the learning curve."""
    there = [number // plan.group for number, said in enumerate(reports) if "snapshots" in said]
    ranks = there if plan.all_leave_models else holders(plan.strategy, plan.workers, plan.servers, there)
    modules, copies = [], []
    for rank in ranks:
        if not reports[rank * plan.group]:
            raise WorkerFailed(f"{plan.name_of(rank)} ended without a report")
        modules.append(build_member(plan.task, plan.strategy, rank, plan.seed))
        if plan.group > 1:
            copies.append(list(whole_snapshots(plan, rank, reports, folder, modules[-1])))
            continue
        left = load_model(folder / f"solution-{rank}.safetensors")
        times = reports[rank].pop("snapshots")
        copies.append([Snapshot(s, n, left[str(i)]) for i, (s, n) in enumerate(times)])
        for name, buffer in named_buffers(modules[-1]):
            buffer.copy_(left[f"buffer.{name}"])
    if plan.all_leave_models:  # whoever was the first worker at the time took the copies of then
        once = {copy.samples: copy for copy in chain(*copies)}
        modules, copies = modules[:1], [[once[samples] for samples in sorted(once)]]
    buffers = [load_model(path) for path in sorted(folder.glob("buffers-*.safetensors"), key=_rank)]
    return put_together(plan.strategy, modules, copies, buffers, plan.task, data, listener.tested)


def check_it_travels(settings: object, task: Task, processes: str = "worker processes") -> None:
    """Raise ValueError, before any process starts, if a task's settings cannot be pickled for `processes`."""
    try:
        ForkingPickler.dumps(settings)
    except Exception as problem:
        raise ValueError(
            f"task {task.name!r} cannot be handed to {processes}: {problem}. "
            "Define its functions at the top level of a module, without lambdas."
        ) from None


def _spare_process(plan: Plan, connection: Connection, root: str) -> None:
    """The main function of a spare: loads everything, and waits until it is a node's process."""
    leave_with_parent()
    control, data = Control(connection), plan.task.data()
    build_model(plan.task, plan.seed)
    control.tell("spare")
    order = control.await_order()
    _node_process(plan, connection, root, divmod(order["number"], plan.group), order["incarnation"], data)


def _node_process(
    plan: Plan,
    connection: Connection,
    root: str,
    place: tuple[int, int],
    incarnation: int,
    data: Data | None = None,
) -> None:
    """The main function of a node's process; its place is its node's rank, and its position in the group.

    `data` is what a spare has loaded already.
    """
    leave_with_parent()
    control = Control(connection)
    control.defer_sigterm()
    try:
        torch.set_num_threads(plan.threads_each)
        if place[0] == plan.nodes:
            keep(plan.keeper_place(_folder(plan, root)), incarnation, control)
            control.tell("done")
        else:
            control.tell("done", **_live(plan, place, incarnation, control, root, data))
    except RunIsOver:
        control.tell("came too late")
    except Interrupted:
        control.tell("interrupted")
    except BaseException as error:
        control.tell_failure(error)
    finally:
        control.close()


def _live(
    plan: Plan,
    place: tuple[int, int],
    incarnation: int,
    control: Control,
    root: str,
    data: Data | None = None,
) -> dict[str, Any]:
    """Build the node, train when the launcher gives the order, and return the node's report."""
    rank, position = place
    folder = _folder(plan, root)
    data, memory = data or plan.task.data(), PeakMemory()
    model, curve = build_model(plan.task, plan.seed), plan.curve(data)
    member = GroupMember(plan, data, model, place, folder) if plan.group > 1 else None
    memory.forget()
    own_folder = str(folder if member is None else position_folder(folder, position))
    between_steps = plan.between_steps(control, model)
    observers = (curve, Reporter(control))
    engine = _join(plan, rank, incarnation, own_folder, model, data, between_steps, observers, member)
    engine.coding.rehearse()
    if member is not None:
        member.rehearse(_trained(engine))
    resumed = None if incarnation else drive(between_steps.resume(engine))
    control.tell("ready")
    elapsed, finished = control.await_go()
    began = engine.channel.now() - elapsed
    if resumed is None and (before := plan.edge_before(root)) is not None:
        before.enter(engine)
    engine.excuse(finished)
    curve.begin(engine, engine.channel.now() - began, None if member is None else member.whole_bytes)
    try:
        drive(plan.strategy.live(Node(engine)))
    except Interrupted:
        drive(engine.transport.close())
        raise
    if (after := plan.edge_after(root)) is not None:
        after.leave(engine)
    outcome = report(engine, engine.channel.now() - began)
    outcome["memory"] = memory.beyond(sum(s.x.nbytes for s in curve.snapshots.get(rank, ())))
    if member is not None:
        outcome |= member.figures(_trained(engine), outcome["steps"])
    return _ended(plan, engine, curve, model, own_folder, outcome, member)


def _trained(engine: Engine) -> ModuleReplica:
    """The replica of a worker that runs a task."""
    assert isinstance(engine.replica, ModuleReplica)
    return engine.replica


def _ended(
    plan: Plan,
    engine: Engine,
    curve: Curve,
    model: nn.Module,
    folder: str,
    outcome: dict[str, Any],
    member: GroupMember | None,
) -> dict[str, Any]:
    """Leave the trained model in the folder, and the run. Returns the report."""
    rank = engine.rank
    holds = plan.all_leave_models or holds_solution(plan.strategy, engine)
    if holds:
        curve.end(engine)
    drive(engine.transport.close())  # not after a failure: peers notice that by the lost connection
    if member is not None:
        member.leave()
    own = {} if engine.is_server else dict(named_buffers(module_of(engine.replica, model)))
    if own:
        save_model(Path(folder) / f"buffers-{rank}.safetensors", own)
    if holds:
        outcome["snapshots"] = _leave(curve.snapshots[rank], module_of(engine.replica, model), folder, rank)
    return outcome


def _rank(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _leave(
    snapshots: Sequence[Snapshot], model: nn.Module, folder: str, rank: int
) -> list[tuple[float, float]]:
    """Write the snapshots and buffers to the run's folder. Returns seconds and samples of each snapshot."""
    tensors: dict[str, Tensor] = {str(i): snapshot.x for i, snapshot in enumerate(snapshots)}
    tensors |= {f"buffer.{name}": buffer for name, buffer in named_buffers(model)}
    save_model(Path(folder) / f"solution-{rank}.safetensors", tensors)
    return [(snapshot.seconds, snapshot.samples) for snapshot in snapshots]


def _join(
    plan: Plan,
    rank: int,
    incarnation: int,
    folder: str,
    model: nn.Module,
    data: Data,
    between_steps: BetweenSteps,
    observers: Sequence[Instrument],
    member: GroupMember | None,
) -> Engine:
    """Build this process's node and connect it to the others."""
    me = plan.identity(rank, incarnation)
    recovery = Recovery(plan.transport, plan.durability, folder if plan.restarts else "")
    replica: ServedReplica | ModuleReplica
    task = plan.scaled_task(data)
    if me.is_server:
        replica, layout = build_served(task, model, me), trainable(model)[1]
    else:
        part = None if member is None else member.part
        replica = build_replica(
            task, model, data, plan.strategy, rank, plan.workers, plan.seed, True, plan.leg, part
        )
        layout = replica.layout
    vector_bytes = layout.numel * replica.x.element_size()
    store = file_store(folder, me.processes) if me.processes > 1 else None
    transport = connect(
        plan.transport,
        me,
        store,
        vector_bytes=vector_bytes,
        timeout=plan.timeout,
        patience=plan.patience,
        manifest=layout.manifest(replica.x.dtype),
    )
    return Engine(
        transport,
        replica,
        me,
        mean=choose_mean(plan.collective, transport, plan.codec, plan.workers),
        codec=plan.codec,
        seed=plan.seed,
        steps=plan.steps(data),
        passes=plan.epochs,
        timeout=plan.timeout,
        background=BackgroundThread(),
        between_steps=between_steps,
        balanced=plan.balance,
        observers=observers,
        **recovery.settings(me, layout, vector_bytes),
    )
