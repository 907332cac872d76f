"""quick_exit: ends a process that has imported torch in a fifth of the time."""

from __future__ import annotations

import atexit
import gc


def end_quickly() -> None:
    """Have Python not look for garbage when this process ends: among torch's objects that takes a second."""
    atexit.register(gc.freeze)
