"""Newcomer: a worker on this machine in a place that a run elsewhere grants, from its start to its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.core.errors import ShoalError, Unavailable
from shoal.core.identity import NodeIdentity
from shoal.launch.crew import Crew, Listener
from shoal.launch.join import RUN_KEY, file_store
from shoal.launch.member import Member
from shoal.launch.place_call import FAILURE_SECONDS, PlaceCall
from shoal.transports.rendezvous import Store, hub_key

AWAY_SECONDS = 30.0
"""How long the run may be away at least: its keeper may be killed, and is then started again."""


def leave_address(call: PlaceCall, me: NodeIdentity, folder: str | Path) -> Store:
    """Leave how to reach the keeper where the worker's process looks for it; the store that is there."""
    store = file_store(folder, me.processes)
    store.set(RUN_KEY, call.granted["run_id"])
    store.set(hub_key(me.keeper), call.address)
    return store


def take_part(
    call: PlaceCall, start: Callable[[], Member], timeout: float, patience: float, on_progress: Listener
) -> dict[str, Any]:
    """Run the worker's process to its end, and tell the run its report; an empty one if the run ended before.

    Raises Unavailable if the run ended before this worker could take part.
    """
    steps = 0  # that it has done, or others before it
    longest = max(AWAY_SECONDS, FAILURE_SECONDS + patience)

    def listen(event: dict[str, Any]) -> None:
        nonlocal steps
        if call.lost_for > longest:
            raise ShoalError(f"the run at {call.address} has been away for {longest:g} s; it is over")
        if event.get("step") is not None:
            steps = event["step"]
            call.tell({"event": "progress", **event})
        on_progress(event)

    crew = Crew(1, 0, lambda number, incarnation: start(), listen, timeout, patience)
    (report,) = crew.see_through()
    if not report and not steps:
        raise Unavailable("the run came to its end before this worker could take part")
    report.pop("snapshots", None)
    if report:
        call.tell({"event": "done", "report": report})
    return report
