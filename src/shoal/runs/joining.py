"""Joining a task's run that is under way elsewhere: one worker on this machine, in a place it grants."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from typing import Any

from shoal.core.errors import Unavailable
from shoal.launch.crew import Listener
from shoal.launch.join import Access, local_threads
from shoal.launch.keeper_process import FORK_SERVER, SLOW_IMPORTS
from shoal.launch.member import Member
from shoal.launch.newcomer import leave_address, take_part
from shoal.launch.place_call import PlaceCall
from shoal.launch.stop_signals import ctrl_c_ignored, temporary_folder
from shoal.runs.node_process import node_process, nodes_folder
from shoal.runs.plan import Plan
from shoal.runs.plan_words import plan_of


def join_run(
    call: PlaceCall,
    access: Access,
    *,
    threads: int | None = None,
    on_start: Callable[[Plan, int], None] = lambda plan, rank: None,
    on_progress: Listener = lambda event: None,
) -> dict[str, Any]:
    """Take part in the run that has granted a place until it ends; returns this worker's report.

    The report is empty if the run has ended without this worker's last steps. `on_start` is called with the
    run's settings and this worker's rank. Raises Unavailable if the run has other data than this machine, and
    Interrupted after Ctrl-C, with a goodbye.
    """
    with temporary_folder() as root:
        rank, incarnation = int(call.granted["rank"]), int(call.granted["incarnation"])
        told = plan_of(call.granted["plan"])
        plan = replace(told, access=access, threads=threads or local_threads(1), joins=True)
        check_data(plan, call.granted["data"])
        prepare(plan, call, rank, root)
        on_start(plan, rank)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([FORK_SERVER, "shoal.runs.node_process", *SLOW_IMPORTS])
        with ctrl_c_ignored():  # the fork server inherits this and keeps it
            forkserver.ensure_running()
        start = partial(_start, plan, context, (rank, incarnation), root)
        return take_part(call, start, plan.timeout, plan.patience, on_progress)


def check_data(plan: Plan, theirs: str) -> None:
    """Raise Unavailable if the run has other training data than there is here."""
    ours = plan.task.data().mark
    if ours != theirs:
        raise Unavailable(
            f"task {plan.task.name!r} has other training data here ({ours}) than in the run ({theirs})"
        )


def prepare(plan: Plan, call: PlaceCall, rank: int, root: str) -> None:
    """Leave how to reach the keeper where the worker's process looks for it."""
    folder = nodes_folder(plan, root)
    folder.mkdir()
    leave_address(call, plan.identity(rank), folder)


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
