"""What the world does to a run, as exceptions.

    ShoalError
    ├── PeerLost          a node that was waited for crashed, left or stayed silent
    ├── Fenced            this worker was given up on meanwhile: others have taken its work
    ├── Deadlock          virtual time: every node waits and nothing is under way
    ├── Diverged          a loss, gradient or parameter is not finite
    ├── WorkerFailed      a worker process raised or died; carries its traceback
    ├── Interrupted       Ctrl-C or SIGTERM: the run has ended, with a checkpoint where one was asked for
    ├── WireError         bytes that are not a message of ours
    ├── CheckpointError   a checkpoint is damaged, or belongs to another run
    ├── DataMissing       a data set is in none of the places it may be in
    └── Unavailable       this machine or installation cannot do it; says what to install

Wrong arguments are a ValueError or TypeError where they are given, never one of these.
"""

from signal import SIGINT


class ShoalError(Exception):
    """Anything that goes wrong in a run through no fault of the call itself."""


class PeerLost(ShoalError):
    """A node that was waited for crashed, left or stayed silent."""


class Fenced(ShoalError):
    """This worker was given up on meanwhile; it must not go on, for others have taken its work."""


class Deadlock(ShoalError):
    """Every simulated node waits and nothing is under way."""


class Diverged(ShoalError):
    """A loss, gradient or parameter is not finite."""


class WorkerFailed(ShoalError):
    """A worker process raised or died; `details` is its traceback, if it could still send one."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class Interrupted(ShoalError):
    """Ctrl-C, or another signal, ended the run. In virtual time, and after a second one, nothing was saved.

    `signal` is its number. `saved` is whether there is a checkpoint to resume from; None if its folder is on
    this host.
    """

    signal: int = SIGINT
    saved: bool | None = None


class WireError(ShoalError):
    """Bytes that are not a message of ours: refused before anything is allocated for them."""


class CheckpointError(ShoalError):
    """A checkpoint is damaged, or belongs to another run."""


class DataMissing(ShoalError):
    """A data set is in none of the places it may be in."""


class Unavailable(ShoalError):
    """This machine or installation cannot do what was asked; the text says what to install."""


def advice_on_overflow(lr: float) -> str:
    """What to do about values that are not finite."""
    return f"Try a smaller learning rate (it is {lr:g}) or look for inputs that are not finite."


def describe_refusal(worker: str, clock: int, why: str) -> str:
    """One sentence about an update that a server does not apply, for both ends."""
    return f"an update of {worker} at its step {clock} was refused: {why}"
