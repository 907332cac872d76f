"""Joining the run of a script that is under way elsewhere: the same script, in a process on this machine."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shoal.core.errors import Unavailable
from shoal.core.identity import NodeIdentity
from shoal.launch.crew import Listener
from shoal.launch.environment import Place
from shoal.launch.host_link import Printer
from shoal.launch.join import Access
from shoal.launch.keeper_process import tell_model
from shoal.launch.member import Member
from shoal.launch.newcomer import leave_address, take_part
from shoal.launch.place_call import PlaceCall
from shoal.launch.script_process import SCRIPT, ScriptProcess
from shoal.launch.stop_signals import temporary_folder
from shoal.launch.versions import digest_of

TOLD = (
    *("nodes", "begins_with", "transport", "strategy", "strategy_options", "codec", "collective"),
    *("timeout", "patience"),
)
"""The settings of a run that one who joins it takes over."""


def invitation_of(script: str | Path, arguments: Sequence[str], shared: Place) -> dict[str, Any]:
    """What somebody is told who joins the run of a script."""
    settings = {name: getattr(shared, name) for name in TOLD}
    about = {"name": Path(script).name, "digest": digest_of(Path(script)), "arguments": list(arguments)}
    return {"script": about, "place": settings}


def join_script(
    call: PlaceCall,
    access: Access,
    script: str | Path,
    arguments: Sequence[str],
    *,
    on_start: Callable[[str, int], None],
    on_progress: Listener,
    on_output: Printer,
) -> dict[str, Any]:
    """Run `script` as a worker of the run that has granted a place; returns its report.

    The report is empty if the run has ended without this worker's last steps. `on_start` is called with what
    is trained and this worker's rank. Raises Unavailable if the run is that of another script, and
    Interrupted after Ctrl-C, with a goodbye.
    """
    check_script(call.granted["script"], script, arguments)
    with temporary_folder() as folder:
        place = _place(call, access, folder)
        me = NodeIdentity(place.rank, place.nodes, elastic=True, begins_with=place.begins_with)
        tell_model(leave_address(call, me, folder), call.granted["model"])
        on_start(
            Path(script).name if place.strategy is None else f"{place.strategy} on {Path(script).name}",
            me.rank,
        )

        def start() -> Member:
            process, (control,) = ScriptProcess.start(
                [SCRIPT, str(script), *arguments], asdict(place), lambda line: on_output(me.name, line)
            )
            return Member(0, me.name, process, control)

        return take_part(call, start, place.timeout, place.patience, on_progress)


def check_script(theirs: Mapping[str, Any], script: str | Path, arguments: Sequence[str]) -> None:
    """Raise Unavailable unless the run has the same script, with the same arguments."""
    if theirs["digest"] != digest_of(Path(script)):
        raise Unavailable(
            f"{str(script)!r} is another script than the {theirs['name']!r} of the run; take the same"
        )
    if theirs["arguments"] != list(arguments):
        told = shlex.join(theirs["arguments"]) or "no arguments"
        raise Unavailable(
            f"the run has its script with {told}, and not with {shlex.join(arguments) or 'none'}; take the "
            "same, and set what differs between machines in the environment"
        )


def _place(call: PlaceCall, access: Access, folder: str) -> Place:
    """The place of this worker's process."""
    return Place(
        rank=int(call.granted["rank"]),
        incarnation=int(call.granted["incarnation"]),
        launched="shoal",
        access=asdict(access),
        store=folder,
        keeper=True,
        joins=True,
        on_host=1,
        **{name: call.granted["place"][name] for name in TOLD},
    )
