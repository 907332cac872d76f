"""A run one of whose workers is killed, and perhaps comes back, at whatever speed the machine goes."""

from __future__ import annotations

import math
import os
import signal
from typing import Any

import shoal
from shoal.core.task import Task
from shoal.launch.crew import Crew
from throttled import Throttle


def run_with_a_kill(
    task: Task,
    strategy: Any,
    victim: int,
    crews: list[Crew],
    throttle: Throttle,
    *,
    returns: bool,
    after: int = 20,
    pause: float = 0.0,
    **settings: Any,
) -> shoal.Result:
    """A run of that task, which `throttle` slows, in which that worker is killed after so many steps.

    If it `returns`, the others stand still until it is back, and are slow until it trains again. A batch
    takes `pause` seconds at least from then on.
    """
    killed = False

    def kill(event: dict[str, Any]) -> None:
        # Its own event, so that a warning can say how many steps it leaves undone.
        nonlocal killed
        member = crews[0].members[victim]
        if event["rank"] == victim and after < event["step"] < (event["steps"] or math.inf) and not killed:
            killed = True
            throttle.slow(math.inf)
            os.kill(member.process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        if event.get("fault") == f"worker {victim} is back":
            throttle.slow(0.5)
        if killed and (not returns or (member.incarnation and member.first_progress)):
            throttle.slow(pause)

    result = shoal.run(task, strategy, timeout=60, on_progress=kill, **settings)
    assert killed, "the run was over before the kill"
    return result
