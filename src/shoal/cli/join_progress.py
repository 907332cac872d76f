"""One worker of a run that is under way elsewhere, with its progress on this terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from shoal.core.errors import Interrupted
from shoal.launch.join import Access
from shoal.report import ProgressDisplay
from shoal.report.units import count_text
from shoal.runs.plan import Plan
from shoal.strategies import STRATEGIES


def take_part(address: str, access: Mapping[str, Any], threads: int | None, quiet: bool) -> None:
    """Join the run at that address, and say at the end what this worker has done."""
    from shoal.transports.grpc import security  # raises Unavailable without grpcio

    security.split_address(address)
    from shoal.runs.joining import join_run

    display = ProgressDisplay(enabled=not quiet)
    told: dict[str, Any] = {}

    def start(plan: Plan, rank: int) -> None:
        word = STRATEGIES.name_of(plan.strategy)
        told["title"] = f"worker {rank} of {word} on {plan.task.name} at {address}"
        display.start(told["title"], 0)
        if not quiet:
            Console(stderr=True, highlight=False).print(f"joining as {told['title']}", soft_wrap=True)

    try:
        with display as progress:
            report = join_run(
                address, Access(**access), threads=threads, on_start=start, on_progress=progress.update
            )
    except Interrupted as stop:
        raise Interrupted(f"{stop}; the run goes on without this worker") from None
    if not report:
        print(f"{told['title']}: the run is over; it has ended without the last steps of this worker")
    elif not quiet:
        done = f"{report['steps']} steps, {count_text(report['samples'])} samples"
        print(f"{told['title']}: done after {done}")
