"""The processes of a run on this host: starts them, runs a node in each, and collects their results."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from torch import nn

from shoal.core.errors import WorkerFailed
from shoal.core.task import Data, Task
from shoal.core.vector import named_buffers
from shoal.launch.audience import Audience
from shoal.launch.control import Control
from shoal.launch.crew import Crew
from shoal.launch.invitation import Invitation, join_hint, with_credentials
from shoal.launch.keeper_process import FORK_SERVER, SLOW_IMPORTS
from shoal.launch.member import Member
from shoal.launch.open_places import vacate
from shoal.launch.process_handle import ProcessHandle
from shoal.launch.spares import Spares
from shoal.launch.stop_signals import ctrl_c_ignored, stopped_by, temporary_folder
from shoal.replicas.module import (
    build_member,
)
from shoal.runs.curve import Snapshot, count_all, holders, put_together
from shoal.runs.group_processes import join_processes, position_folder, whole_snapshots
from shoal.runs.joined_legs import LegOutcome, summarise_legs
from shoal.runs.node_process import keeper_process, live, node_process, nodes_folder, spare_process
from shoal.runs.plan import Plan
from shoal.runs.plan_words import words_of
from shoal.runs.result import Result
from shoal.storage.model_file import load_model

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
        opens = plan.places > plan.workers
        # to know where legs end, or to tell whether others have the same; else when training is over
        data = plan.task.data() if plan.crew or opens else None
        plan, invitation = _open_up(plan, data, root) if opens and data is not None else (plan, None)
        legs = plan.legs_left(data, root) if plan.crew and data is not None else [plan]
        crews = [_crew(leg, context, root, listener, invitation) for leg in legs]
        said = _see_through(legs, crews, root, listener)
        data, began, outcomes = data or plan.task.data(), 0.0, []
        for leg, reports in zip(legs, said, strict=True):
            ended = max(r["seconds"] for r in reports if r)
            for r in reports:
                r.update({"seconds": r["seconds"] - began} if r else {})
            model, points = gather(leg, data, nodes_folder(leg, root), reports, listener)
            reports = join_processes(leg, reports, model) if leg.group > 1 else reports
            outcomes.append(LegOutcome(leg, began, [r for r in reports if r], points, model))
            began = ended
        outcomes[-1].reports = [
            *outcomes[-1].reports,
            *crews[-1].visitors.reports_like(outcomes[-1].reports[0]),
        ]
    plan.keep_model(outcomes[-1].model)
    return summarise_legs(plan, plan.config(data), outcomes, data)


def _open_up(plan: Plan, data: Data, root: str) -> tuple[Plan, Invitation]:
    """The plan with a token for the run, and what a worker that comes with the token is told."""
    access = with_credentials(plan.access, root)
    told = {"plan": words_of(plan), "data": data.mark}
    return replace(plan, access=access), Invitation(told, join_hint(plan.access, access))


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


def _crew(
    plan: Plan, context: ForkServerContext, root: str, listener: Audience, invitation: Invitation | None
) -> Crew:
    """The processes of a leg, or of all of a run whose crew does not grow; none is started yet."""

    def launch(name: str, main: Callable[..., None], *args: object) -> tuple[ProcessHandle, Connection]:
        ours, theirs = context.Pipe()
        process = context.Process(name=name, target=main, args=(plan, theirs, root, *args), daemon=True)
        with theirs:
            process.start()
        return process, ours

    def start(number: int, incarnation: int) -> Member:
        rank, position = plan.rank_of(number // plan.group), number % plan.group
        name = plan.name_of(rank) if plan.group == 1 else f"{plan.name_of(rank)}, process {position}"
        if rank == plan.identity(0).keeper:
            process, connection = launch(name, keeper_process, incarnation, invitation)
        else:
            process, connection = launch(name, node_process, (rank, position), incarnation)
        return Member(number, name, process, connection, incarnation)

    nodes_folder(plan, root).mkdir()
    for position in range(plan.group) if plan.group > 1 else ():
        position_folder(nodes_folder(plan, root), position).mkdir()
    servers = plan.nodes - plan.workers
    return Crew(
        plan.workers * plan.group,
        servers,
        start,
        listener,
        plan.timeout,
        plan.patience,
        plan.servers_return or plan.is_elastic,
        goes_on=plan.strategy.survives,
        takes_over=servers > 0 or plan.is_elastic,
        workers_return=plan.workers_return,
        has_keeper=plan.is_elastic,
        spares=Spares(plan.spares, partial(launch, "a spare", spare_process)),
        group=plan.group,
        on_given_up=partial(vacate, nodes_folder(plan, root)),
    )


def run_in_process(plan: Plan, listener: Audience) -> Result:
    """Train a run of a single node in this process, and return the result. Nothing is started."""
    if plan.nodes * plan.group > 1:
        raise ValueError(f"a run of {plan.nodes * plan.group} nodes needs a process for each")
    with temporary_folder() as root:
        nodes_folder(plan, root).mkdir()
        reports = [live(plan, (0, 0), 0, Control(), root)]
        data = plan.task.data()
        model, points = gather(plan, data, nodes_folder(plan, root), reports, listener)
    plan.keep_model(model)
    return summarise_legs(plan, plan.config(data), [LegOutcome(plan, 0.0, reports, points, model)], data)


def gather(
    plan: Plan, data: Data, folder: Path, reports: list[dict[str, Any]], listener: Audience
) -> tuple[nn.Module, list[dict[str, Any]]]:
    """Test the snapshots that the nodes have written, and return the final model and the learning curve."""
    there = [number // plan.group for number, said in enumerate(reports) if "snapshots" in said]
    ranks = there if plan.all_leave_models else holders(plan.strategy, plan.workers, plan.servers, there)
    counts = [said.pop("counts") for said in reports if "counts" in said][:: plan.group]  # one of each group
    modules, copies = [], []
    for rank in ranks:
        if not reports[rank * plan.group]:
            raise WorkerFailed(f"{plan.name_of(rank)} ended without a report")
        modules.append(build_member(plan.task, plan.strategy, rank, plan.seed))
        if plan.group > 1:
            taken = list(whole_snapshots(plan, rank, reports, folder, modules[-1]))
        else:
            left = load_model(folder / f"solution-{rank}.safetensors")
            times = reports[rank].pop("snapshots")
            taken = [Snapshot(s, n, left[str(i)]) for i, (s, n) in enumerate(times)]
            for name, buffer in named_buffers(modules[-1]):
                buffer.copy_(left[f"buffer.{name}"])
        copies.append(count_all(taken, counts))
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


def _rank(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])
