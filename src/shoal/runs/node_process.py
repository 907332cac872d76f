"""A node's process in a run that owns the training loop: builds the node, trains, leaves its model."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.devices import take_gpu
from shoal.core.errors import Interrupted, PeerLost, ShoalError
from shoal.core.task import Data
from shoal.core.vector import named_buffers, trainable
from shoal.engine.engine import Engine, Instrument
from shoal.engine.membership_errors import RunIsOver
from shoal.launch.background import BackgroundThread
from shoal.launch.between_steps import BetweenSteps
from shoal.launch.control import Control, Reporter, leave_with_parent
from shoal.launch.drive import drive
from shoal.launch.invitation import RUN_ENDED, Invitation
from shoal.launch.join import choose_mean, connect, file_store
from shoal.launch.keeper_process import keep
from shoal.launch.peak_memory import PeakMemory
from shoal.launch.recovery import Recovery
from shoal.replicas.module import ModuleReplica, build_model, build_replica, build_served, module_of
from shoal.replicas.served import ServedReplica
from shoal.runs.curve import Curve, Snapshot, holds_solution
from shoal.runs.group_processes import GroupMember, position_folder
from shoal.runs.plan import Plan
from shoal.runs.result import report
from shoal.storage.model_file import save_model
from shoal.vocabulary.node import Node


def nodes_folder(plan: Plan, root: str) -> Path:
    """Where the nodes of a leg meet and leave their models."""
    return Path(root) / f"nodes-{0 if plan.leg is None else plan.leg.number}"


def spare_process(plan: Plan, connection: Connection, root: str) -> None:
    """The main function of a spare: loads everything, and waits until it is a node's process."""
    leave_with_parent()
    control, data = Control(connection), plan.task.data()
    build_model(plan.task, plan.seed)
    control.tell("spare")
    order = control.await_order()
    node_process(plan, connection, root, divmod(order["number"], plan.group), order["incarnation"], data)


def keeper_process(
    plan: Plan, connection: Connection, root: str, incarnation: int, invitation: Invitation | None
) -> None:
    """The main function of the keeper's process."""
    leave_with_parent()
    control = Control(connection)
    control.defer_sigterm()
    torch.set_num_threads(1)
    try:
        place = plan.keeper_place(nodes_folder(plan, root))
        keep(place if invitation is None else invitation.added_to(place), incarnation, control)
        control.tell("done")
    except BaseException as error:
        control.tell_failure(error)
    finally:
        control.close()


def node_process(
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
        if plan.task.device == "cuda":
            take_gpu(place[0] * plan.group + place[1])
            data = None if data is None else data.on("cuda")  # a spare did not know which it would take
        control.tell("done", **live(plan, place, incarnation, control, root, data))
    except RunIsOver:
        control.tell("came too late")
    except PeerLost as lost:
        ended = ShoalError(f"{RUN_ENDED}: {lost}")
        control.tell_failure(ended if plan.joins else lost)
    except Interrupted:
        control.tell("interrupted")
    except BaseException as error:
        control.tell_failure(error)
    finally:
        control.close()


def live(
    plan: Plan,
    place: tuple[int, int],
    incarnation: int,
    control: Control,
    root: str,
    data: Data | None = None,
) -> dict[str, Any]:
    """Build the node, train when the launcher gives the order, and return the node's report."""
    rank, position = place
    folder = nodes_folder(plan, root)
    data, memory = data or plan.task.data(), PeakMemory()
    model, curve = build_model(plan.task, plan.seed), plan.curve(data)
    member = GroupMember(plan, data, model, place, folder) if plan.group > 1 else None
    memory.forget()
    own_folder = str(folder if member is None else position_folder(folder, position))
    between_steps = plan.between_steps(control, model, data)
    observers = (curve, Reporter(control))
    engine = _join(plan, rank, incarnation, own_folder, model, data, between_steps, observers, member)
    engine.coding.rehearse()
    if member is not None:
        member.rehearse(_trained(engine))
    resumed = None if incarnation else drive(between_steps.resume(engine))
    control.tell("ready")
    elapsed, finished, deal = control.await_go()
    began = engine.channel.now() - elapsed
    if resumed is None and (before := plan.edge_before(root)) is not None:
        before.enter(engine)
    engine.excuse(finished)
    between_steps.rejoin(engine, deal)
    curve.begin(engine, engine.channel.now() - began, None if member is None else member.whole_bytes)
    try:
        drive(plan.strategy.live(Node(engine)))
    except (Interrupted, PeerLost) as stop:
        if plan.joins or isinstance(stop, Interrupted):
            drive(_leave(plan, engine, stop))
        raise
    if (after := plan.edge_after(root)) is not None:
        after.leave(engine)
    outcome = report(engine, engine.channel.now() - began)
    outcome["memory"] = memory.beyond(sum(s.x.nbytes for s in curve.snapshots.get(rank, ())))
    if member is not None:
        outcome |= member.figures(_trained(engine), outcome["steps"])
    return _ended(plan, engine, curve, model, own_folder, outcome, member)


async def _leave(plan: Plan, engine: Engine, stop: Exception) -> None:
    """Close the transport; a run that goes on without this worker is told before, or sees it vanish."""
    if not plan.joins:
        is_free = True
    elif isinstance(stop, Interrupted):
        is_free = await engine.say_goodbye()
    else:
        is_free = engine.mailbox.has_left(engine.identity.keeper)
    if is_free:
        await engine.transport.close()


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
    if curve.counts:
        outcome["counts"] = curve.counts[rank]
    if holds:
        curve.end(engine)
    drive(engine.transport.close())  # not after a failure: peers notice that by the lost connection
    if member is not None:
        member.leave()
    own = {} if engine.is_server else dict(named_buffers(module_of(engine.replica, model)))
    if own:
        save_model(Path(folder) / f"buffers-{rank}.safetensors", own)
    if holds:
        outcome["snapshots"] = _leave_model(
            curve.snapshots[rank], module_of(engine.replica, model), folder, rank
        )
    return outcome


def _leave_model(
    snapshots: Sequence[Snapshot], model: nn.Module, folder: str, rank: int
) -> list[tuple[float, float]]:
    """Write the snapshots and buffers to the run's folder. Returns seconds and samples of each snapshot."""
    tensors: dict[str, Tensor] = {str(i): snapshot.x for i, snapshot in enumerate(snapshots)}
    tensors |= {f"buffer.{name}": buffer for name, buffer in named_buffers(model)}
    save_model(Path(folder) / f"solution-{rank}.safetensors", tensors)
    return [(snapshot.seconds, snapshot.samples) for snapshot in snapshots]


def _recovery(plan: Plan, folder: str) -> Recovery:
    journals = folder if plan.servers_return else ""
    return Recovery(plan.durability, journals, plan.workers_return)


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
        access=plan.access,
    )
    return Engine(
        transport,
        replica,
        me,
        mean=choose_mean(plan.collective, transport, plan.codec, plan.places),
        codec=plan.codec,
        seed=plan.seed,
        steps=plan.steps(data),
        passes=plan.epochs,
        timeout=plan.timeout,
        background=BackgroundThread(),
        between_steps=between_steps,
        balanced=plan.balance,
        observers=observers,
        **_recovery(plan, folder).settings(me, layout, vector_bytes),
    )
