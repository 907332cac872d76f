"""Joining a run that is under way elsewhere: one worker on this machine, in a place that the run grants."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from typing import Any

from shoal.core.errors import ShoalError, Unavailable
from shoal.launch.crew import Crew, Listener
from shoal.launch.join import RUN_KEY, Access, file_store, local_threads
from shoal.launch.keeper_process import FORK_SERVER, SLOW_IMPORTS
from shoal.launch.member import Member
from shoal.launch.place_call import PlaceCall
from shoal.launch.stop_signals import ctrl_c_ignored, temporary_folder
from shoal.runs.node_process import node_process, nodes_folder
from shoal.runs.plan import Plan
from shoal.runs.plan_words import data_mark, plan_of
from shoal.transports.rendezvous import hub_key

AWAY_SECONDS = 30.0
"""How long the run may be away: its keeper may be killed, and is then started again."""


def join_run(
    address: str,
    access: Access,
    *,
    threads: int | None = None,
    on_start: Callable[[Plan, int], None] = lambda plan, rank: None,
    on_progress: Listener = lambda event: None,
) -> dict[str, Any]:
    """Take part in the run at that address until it ends; returns this worker's report.

    The report is empty if the run has ended without this worker's last steps. `on_start` is called with the
    run's settings and this worker's rank. Raises Unavailable if the run lets nobody in, or has other data
    than this machine, and Interrupted after Ctrl-C, with a goodbye.
    """
    with closing(PlaceCall(address, access)) as call, temporary_folder() as root:
        rank, incarnation = int(call.granted["rank"]), int(call.granted["incarnation"])
        told = plan_of(call.granted["plan"])
        plan = replace(told, access=access, threads=threads or local_threads(1), joins=True)
        _check_data(plan, call.granted["data"])
        _prepare(plan, call, rank, root)
        on_start(plan, rank)
        report = _take_part(plan, call, (rank, incarnation), root, on_progress)
        if report:
            call.tell({"event": "done", "report": report})
    return report


def _check_data(plan: Plan, theirs: dict[str, Any]) -> None:
    ours = data_mark(plan.task.data())
    if ours["samples"] != theirs["samples"]:
        raise Unavailable(
            f"task {plan.task.name!r} has {ours['samples']:,} training samples here, and "
            f"{theirs['samples']:,} in the run; take the same data"
        )
    if ours != theirs:
        raise Unavailable(f"task {plan.task.name!r} has other training data here than in the run")


def _prepare(plan: Plan, call: PlaceCall, rank: int, root: str) -> None:
    """Leave what the worker's process looks for where it looks for it: how to reach the keeper."""
    folder = nodes_folder(plan, root)
    folder.mkdir()
    me = plan.identity(rank)
    store = file_store(folder, me.processes)
    store.set(RUN_KEY, call.granted["run_id"])
    store.set(hub_key(me.keeper), call.address)


def _take_part(
    plan: Plan, call: PlaceCall, place: tuple[int, int], root: str, on_progress: Listener
) -> dict[str, Any]:
    """Run the worker's process to its end, and return its report; an empty one if the run ended before."""
    rank, incarnation = place
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([FORK_SERVER, "shoal.runs.node_process", *SLOW_IMPORTS])
    with ctrl_c_ignored():  # the fork server inherits this and keeps it
        forkserver.ensure_running()

    steps = 0  # that it has done, or others before it

    def listen(event: dict[str, Any]) -> None:
        nonlocal steps
        if call.lost_for > AWAY_SECONDS:
            raise ShoalError(f"the run at {call.address} has been away for {AWAY_SECONDS:g} s; it is over")
        if event.get("step") is not None:
            steps = event["step"]
            call.tell({"event": "progress", **event})
        on_progress(event)

    def start(number: int, _: int) -> Member:
        return _start(plan, context, (rank, incarnation), root)

    crew = Crew(1, 0, start, listen, plan.timeout, plan.patience)
    (report,) = crew.see_through()
    if not report and not steps:
        raise Unavailable("the run came to its end before this worker could take part")
    report.pop("snapshots", None)
    return report


def _start(plan: Plan, context: ForkServerContext, place: tuple[int, int], root: str) -> Member:
    rank, incarnation = place
    ours, theirs = context.Pipe()
    name = plan.name_of(rank)
    process = context.Process(
        name=name, target=node_process, args=(plan, theirs, root, (rank, 0), incarnation), daemon=True
    )
    with theirs:
        process.start()
    return Member(0, name, process, ours)
