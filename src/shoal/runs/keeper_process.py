"""The process of a run's keeper. It has no data; over gRPC the messages between workers pass through it."""

from __future__ import annotations

from pathlib import Path

from shoal.core.vector import trainable
from shoal.engine.channel import Channel
from shoal.engine.keeper import Keeper
from shoal.engine.mailbox import Mailbox
from shoal.engine.progress import Progress
from shoal.launch.control import Control
from shoal.launch.drive import drive
from shoal.launch.join import connect, file_store
from shoal.launch.recovery import message_limit
from shoal.replicas.module import build_model
from shoal.runs.plan import Plan
from shoal.storage.journal import Journal


def keep_roster(plan: Plan, incarnation: int, control: Control, folder: Path) -> None:
    """Keep the roster of a run whose workers come and go, until all have gone."""
    me = plan.identity(plan.nodes, incarnation)
    parameters, layout = trainable(build_model(plan.task, plan.seed))
    transport = connect(
        plan.transport,
        me,
        file_store(str(folder), me.processes),
        vector_bytes=layout.numel * parameters[0].element_size(),
        timeout=plan.timeout,
        patience=plan.patience,
        manifest=layout.manifest(parameters[0].dtype),
    )
    channel = Channel(transport, me)
    log = Journal(folder / "keeper", "memory", message_limit(0))
    cut_off = 0.0 if plan.transport == "processes" else plan.timeout  # how long it may be, and the run go on
    mailbox = Mailbox(channel, me, Progress(me.workers), recovery=cut_off)
    keeper = Keeper(
        me,
        channel,
        mailbox,
        log,
        least=plan.min_workers,
        relays=plan.transport == "grpc",
        on_wait=lambda why: control.tell("warning", text=why),
    )
    control.tell("ready")
    control.await_go()
    drive(keeper.live())
    drive(transport.close())
