"""One worker of a run that is under way elsewhere, with its progress on this terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from rich.console import Console

from shoal.cli.launching import printer
from shoal.core.errors import Interrupted, Unavailable
from shoal.launch.join import Access
from shoal.report import ProgressDisplay
from shoal.report.units import count_text
from shoal.runs.plan import Plan
from shoal.strategies import STRATEGIES

if TYPE_CHECKING:
    from shoal.launch.place_call import PlaceCall


def take_part(
    address: str, access: Mapping[str, Any], script: Sequence[str], threads: int | None, quiet: bool
) -> None:
    """Join the run at that address, and say at the end what this worker has done.

    `script` has the words of the script and its arguments; it is empty for the run of a task.
    """
    from shoal.transports.grpc import security  # raises Unavailable without grpcio

    security.split_address(address)
    from shoal.launch.place_call import PlaceCall

    joining = Joining(address, Access(**access), quiet)
    try:
        with closing(PlaceCall(address, joining.access)) as call, joining.display:
            check_kind(call.granted, script)
            report = joining.script(call, script) if script else joining.task(call, threads)
    except Interrupted as stop:
        raise Interrupted(f"{stop}; the run goes on without this worker") from None
    if not report:
        print(f"{joining.title}: the run is over; it has ended without the last steps of this worker")
    elif not quiet:
        done = f"{report['steps']} steps, {count_text(report['samples'])} samples"
        print(f"{joining.title}: done after {done}")


def check_kind(granted: Mapping[str, Any], script: Sequence[str]) -> None:
    """Raise Unavailable for a script in the run of a task, and for none in the run of a script."""
    if "script" in granted and not script:
        name = granted["script"]["name"]
        raise Unavailable(f"this is the run of the script {name!r}; add it, with the arguments of the run")
    if script and "script" not in granted:
        raise Unavailable(
            f"this is the run of task {granted['plan']['task']!r}, which tells all settings itself; leave "
            f"{script[0]!r} out"
        )


class Joining:
    """What is shown of one worker's part in the run at an address."""

    def __init__(self, address: str, access: Access, quiet: bool) -> None:
        self.access = access
        self.title = ""
        self.console = Console(stderr=True, highlight=False)
        self.display = ProgressDisplay(enabled=not quiet, console=self.console)
        self._address, self._quiet = address, quiet

    def task(self, call: PlaceCall, threads: int | None) -> dict[str, Any]:
        """Take part in the run of a task."""
        from shoal.runs.joining import join_run

        def start(plan: Plan, rank: int) -> None:
            self._start(f"{STRATEGIES.name_of(plan.strategy)} on {plan.task.name}", rank)

        return join_run(call, self.access, threads=threads, on_start=start, on_progress=self.display.update)

    def script(self, call: PlaceCall, words: Sequence[str]) -> dict[str, Any]:
        """Take part in the run of a script."""
        from shoal.api.join_script import join_script

        return join_script(
            call,
            self.access,
            words[0],
            words[1:],
            on_start=self._start,
            on_progress=self.display.update,
            on_output=printer(self.console),
        )

    def _start(self, what: str, rank: int) -> None:
        self.title = f"worker {rank} of {what} at {self._address}"
        self.display.start(self.title, 0)
        if not self._quiet:
            self.console.print(f"joining as {self.title}", soft_wrap=True)
