"""Runs a user's script in one process per node. `run_script` is the launcher's side, `main` the node's.

Each node's process runs `python -m shoal.api.script train.py …`, which reports failures to the launcher.
"""

from __future__ import annotations

import gc
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch

from shoal.api.attachment import current
from shoal.core.devices import device_variables
from shoal.core.errors import Interrupted, PeerLost, ShoalError, WorkerFailed
from shoal.core.identity import NodeIdentity
from shoal.core.words import may_rejoin
from shoal.engine.membership_errors import RunIsOver
from shoal.launch.control import Control, leave_with_parent, users_traceback
from shoal.launch.crew import Crew, Listener
from shoal.launch.environment import Place
from shoal.launch.fleet import on_hosts
from shoal.launch.host_link import Printer
from shoal.launch.hosts import HostList
from shoal.launch.invitation import RUN_ENDED, Invitation, join_hint, with_credentials
from shoal.launch.join import Access, local_threads, start_mpi
from shoal.launch.keeper_process import SLOW_IMPORTS, KeeperPlace, start_keeper
from shoal.launch.member import Member
from shoal.launch.process_handle import ProcessHandle
from shoal.launch.recovery import peers_return
from shoal.launch.script_process import NO_VARIABLES, SCRIPT, ScriptProcess
from shoal.launch.spares import Spares
from shoal.launch.stop_signals import temporary_folder
from shoal.launch.worker_group import torch_meeting_point, torch_variables
from shoal.runs.refusals import check_membership, check_places
from shoal.runs.result import Result, joined, summarise
from shoal.storage.folder_lock import folder_lock
from shoal.vocabulary.strategy import Strategy

Starter = Callable[[int, int], Member]
"""Starts the process with a number and an incarnation; without groups its number is its rank."""

SPARE = -1
"""The number of a process that is nobody yet."""


def run_script(
    script: str | Path,
    arguments: Sequence[str],
    *,
    workers: int,
    strategy: Strategy | None,
    place: Place,
    on_progress: Listener,
    on_output: Printer,
    hosts: HostList | None = None,
    group: int | None = None,
    min_workers: int = 1,
    spares: int = 0,
    max_workers: int | None = None,
) -> Result:
    """Run `script` in one process for each worker and server, and wait for all of them.

    With `group` each is a group of so many processes, which get torchrun's variables, RANK and so on.
    `place` carries the settings that all nodes share; `attach` checks them in each. `on_output` gets each
    printed line with the name of the node that printed it. The processes run on `hosts`, by default on this
    one. With fewer than `min_workers` the others wait; `spares` processes that have imported torch wait to
    take the place of one that is killed. Over gRPC others may join, up to `max_workers`. Raises WorkerFailed
    with the traceback of the first process that raised.
    """
    place = replace(place, relayed=hosts is not None and hosts.relayed)
    _check_start(script, workers, strategy, place)
    nodes = workers + (strategy.servers * place.servers if strategy is not None else 0)
    each = group or 1
    opened = _open_places(max_workers, workers, place, strategy, is_here=hosts is None and group is None)
    kept, returns = _who_returns(place, strategy, workers + opened, hosts, single=group is None)
    check_membership(min_workers, spares, workers, elastic=kept, returns=kept)
    if spares and hosts is not None:
        raise ValueError(f"spares={spares}: they wait on one host; leave them out with --hosts and --on")
    place = replace(place, nodes=nodes + opened, begins_with=workers if opened else None)
    shared = replace(place, group=each, launched="shoal", keeper=kept, returns=returns)
    names = [NodeIdentity(rank, workers, nodes - workers).name for rank in range(nodes)]
    told = script, arguments, shared, names, on_output, min_workers
    here = partial(_on_this_host, *told, spares, sets_variables=group is not None)
    starting = here() if hosts is None else on_hosts(hosts, *told)
    with starting as start:
        crew = Crew(
            workers * each,
            (nodes - workers) * each,
            start,
            on_progress,
            place.timeout,
            place.patience,
            # a process of a group cannot come back: the others would have to call init_process_group again
            restarts=each == 1
            and may_rejoin(place.transport, between_hosts=hosts is not None)
            and (strategy is None or strategy.recovers != "none"),
            goes_on=strategy is not None and strategy.survives,
            takes_over=kept,
            workers_return=returns,
            ends_because=_why_it_ends(place, strategy, hosts),
            has_keeper=kept,
            group=each,
            spares=_spares(spares, start, on_output),
        )
        reports = joined([report for report in crew.see_through() if "role" in report])
    if not any(report["role"] == "worker" for report in reports):
        raise _no_result(script, nodes, were_ready=any(member.ready for member in crew.members[:nodes]))
    config = script_config(script, arguments, workers, strategy, place, hosts, group, max_workers)
    return summarise(config, [*reports, *crew.visitors.reports_like(reports[0])])


def _check_start(script: str | Path, workers: int, strategy: Strategy | None, place: Place) -> None:
    if place.relayed and strategy is not None and strategy.servers:
        raise ValueError("--relay: with a server all messages are to and from it; leave the option out")
    if workers < 1:
        raise ValueError(f"-n {workers}: a run needs at least 1 worker")
    if not Path(script).is_file():
        raise ValueError(f"there is no script {str(script)!r}")


def _open_places(
    max_workers: int | None, workers: int, place: Place, strategy: Strategy | None, *, is_here: bool
) -> int:
    """How many places others may take. Raises ValueError where nobody could; attach() may yet refuse it."""
    if max_workers is None:
        return 0
    if not is_here:
        raise ValueError(
            f"max_workers={max_workers}: others join a run whose workers are single processes of this host, "
            "without --hosts, --on and --group"
        )
    if place.checkpoint is not None:
        raise ValueError(
            "--checkpoint and --max-workers: a script's run that others join writes no checkpoints; leave "
            "out one of the two"
        )
    elastic = strategy is None or strategy.is_elastic
    check_places(max_workers, workers, place.transport, place.strategy or "the script", elastic=elastic)
    return max_workers - workers


def _spares(number: int, start: Starter, on_output: Printer) -> Spares:
    """Processes in waiting. What one prints is the worker's that it has become."""

    def start_one() -> tuple[ProcessHandle, Connection]:
        spare = start(SPARE, 0)
        return spare.process, spare.connection

    def rename(process: ProcessHandle, name: str) -> None:
        assert isinstance(process, ScriptProcess)
        process.on_line = lambda line: on_output(name, line)

    return Spares(number, start_one, rename)


def _no_result(script: str | Path, nodes: int, *, were_ready: bool) -> ShoalError:
    if were_ready:
        return ShoalError(
            f"{script} has no result: every worker left before the end, after an error it caught"
        )
    return ShoalError(
        f"{script} never called shoal.attach(model, optimizer): its {nodes} copies ran, each on its own"
    )


def _who_returns(
    place: Place, strategy: Strategy | None, workers: int, hosts: HostList | None, *, single: bool
) -> tuple[bool, bool]:
    """Whether to start a keeper, and whether killed workers, `single` processes, are started again.

    Where the script names the strategy, attach() tells if the keeper is needed.
    """
    if not (single and may_rejoin(place.transport, between_hosts=hosts is not None)):
        return False, False
    kept = workers > 1 and (strategy is None or strategy.is_elastic)
    if kept or strategy is None:
        return kept, kept
    if strategy.servers:  # which would wait for a host that nobody calls again
        return False, hosts is None or hosts.start is None
    return False, peers_return(strategy) and not place.relayed


def _why_it_ends(place: Place, strategy: Strategy | None, hosts: HostList | None) -> str:
    """What is added to the name of a killed worker, where a run on other terms would go on without it."""
    there = may_rejoin(place.transport, between_hosts=hosts is not None)
    if there or (strategy is not None and not strategy.is_elastic):
        return ""
    return f"; over {place.transport} between hosts the run of a script ends with it. Take transport 'grpc'"


def script_config(
    script: str | Path,
    arguments: Sequence[str],
    workers: int,
    strategy: Strategy | None,
    place: Place,
    hosts: HostList | None = None,
    group: int | None = None,
    max_workers: int | None = None,
) -> dict[str, Any]:
    """The settings of a script's run as plain values."""
    return {
        "task": Path(script).name,
        "strategy": place.strategy or "as in the script",
        "codec": place.codec or ("none" if strategy is None else strategy.default_codec),
        "transport": place.transport,
        "collective": place.collective,
        "servers": place.servers,
        "durability": place.durability,
        "workers": workers,
        "arguments": list(arguments),
        **({} if hosts is None else {"hosts": str(hosts)}),
        **({} if group is None else {"group": group}),
        **({} if max_workers is None else {"max_workers": max_workers}),
        **{f"strategy.{name}": value for name, value in place.strategy_options.items()},
    }


@contextmanager
def _on_this_host(
    script: str | Path,
    arguments: Sequence[str],
    shared: Place,
    names: Sequence[str],
    on_output: Printer,
    least: int,
    spares: int,
    *,
    sets_variables: bool,
) -> Iterator[Starter]:
    """Yields a function that starts a process of a node on this host, with torch's variables if told so."""
    processes = shared.first_nodes * shared.group
    with (
        folder_lock(shared.checkpoint),
        temporary_folder() as folder,
        torch_meeting_point() if sets_variables else nullcontext() as meeting_point,
    ):
        shared, keeper = _with_keeper(script, arguments, shared, folder, least, spares)

        def start(number: int, incarnation: int) -> Member:
            if number == processes:
                return start_keeper(keeper, number, incarnation)
            rank, position = divmod(number, shared.group)
            name = names[rank] if shared.group == 1 else f"{names[rank]}, process {position}"
            place = replace(shared, rank=rank, position=position, incarnation=incarnation)
            if number == SPARE:
                name, place = "a spare", replace(shared, spare=True)
            variables = torch_variables(number, processes, meeting_point) if meeting_point else NO_VARIABLES
            process, (control,) = ScriptProcess.start(
                [SCRIPT, str(script), *arguments],
                asdict(replace(place, store=folder, on_host=processes)),
                lambda line: on_output(name, line),
                variables={
                    **variables,
                    **({} if number == SPARE else device_variables(place.gpus, number)),
                },
            )
            return Member(number, name, process, control, incarnation)

        yield start


def _with_keeper(
    script: str | Path, arguments: Sequence[str], shared: Place, folder: str, least: int, spares: int
) -> tuple[Place, KeeperPlace]:
    """The settings with a token, if others may join, and the place of a keeper."""
    asked = Access(**shared.access)
    access = asked if shared.begins_with is None else with_credentials(asked, folder)
    limits = shared.transport, shared.timeout, shared.patience
    processes = shared.nodes * shared.group
    keeper = KeeperPlace(processes, folder, *limits, least, access, spares=spares)
    if shared.begins_with is not None:
        from shoal.api.join_script import invitation_of  # needs gRPC, as every open place does

        hint = join_hint(asked, access, [str(script), *arguments])
        invitation = Invitation(invitation_of(script, arguments, shared), hint)
        keeper = invitation.added_to(replace(keeper, begins_with=shared.begins_with))
    return replace(shared, access=asdict(access)), keeper


def run_here(script: str | Path, arguments: Sequence[str], place: Place) -> None:
    """Run `script` in this process, which torchrun, srun or mpiexec has started as the node at `place`.

    Raises WorkerFailed with the traceback of what the script raised.
    """
    os.environ.update(place.to_environment())
    sys.argv = [str(script), *arguments]
    if place.launched == "mpi":
        start_mpi(place.timeout)  # before the script: if the script fails, MPI then ends the whole job
    if place.launched != "torchrun" and "OMP_NUM_THREADS" not in os.environ:  # which torchrun sets
        torch.set_num_threads(place.threads)
    try:
        _run_to_its_end(sys.argv[0])
    except ShoalError:
        raise
    except Exception as error:
        what = f"worker {place.rank} failed: {type(error).__name__}: {error}"
        raise WorkerFailed(what, users_traceback(error)) from error


def main() -> None:
    """Run the script named on the command line as one node of a run."""
    leave_with_parent()
    place = Place.find()
    control = place.open_control()
    control.defer_sigterm()
    if place.spare:
        _wait_to_be_needed(place, control)
    torch.set_num_threads(local_threads(place.local_nodes))
    sys.argv = sys.argv[1:]
    gc.freeze()  # torch's objects, which Python would search for garbage at the end; not the script's
    try:
        _run_to_its_end(sys.argv[0])
    except Interrupted:
        _say_goodbye()
        control.tell("interrupted")
    except RunIsOver:  # in the middle of its loop: it was cut off, and the others are done
        control.tell("came too late")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        if place.joins:
            _say_goodbye()
        _vanish(end.code if isinstance(end.code, int) else 1)
    except BaseException as error:
        is_over = place.joins and isinstance(error, PeerLost)
        if place.joins and not is_over:
            _say_goodbye()
        control.tell_failure(ShoalError(f"{RUN_ENDED}: {error}") if is_over else error)
        _vanish(1)


def _say_goodbye() -> None:
    """Leave the run: the others, and a server, would wait for one that might be cut off or come back."""
    if (attachment := current()) is not None:
        with suppress(Exception):  # why this process ends is told all the same
            attachment.abandon()


def _wait_to_be_needed(place: Place, control: Control) -> None:
    """A spare has imported what takes long, and waits until it is a worker's process."""
    for module in SLOW_IMPORTS:
        import_module(module)
    control.tell("spare")
    order = control.await_order()
    became = replace(place, spare=False, rank=order["number"], incarnation=order["incarnation"])
    os.environ.update(became.to_environment())
    os.environ.update(device_variables(place.gpus, became.rank))


def _vanish(code: int) -> NoReturn:
    """Exit at once, without closing connections in order or joining threads that still receive."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run_to_its_end(script: str) -> None:
    """Run a script as `python script` would, and finish its attachment unless it fails."""
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        if (attachment := current()) is not None:
            attachment.leave()
            attachment.finish()  # which raises what a step has raised
    except BaseException as error:
        sys.last_value = error  # as Python does for an uncaught exception; `Attachment.leave` checks it
        raise


if __name__ == "__main__":
    main()
