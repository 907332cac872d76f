"""quick_exit: a process that has imported torch ends sooner."""

from __future__ import annotations

import atexit
import gc


def end_quickly() -> None:
    """Have Python not look for garbage when this process ends: among torch's objects that takes long."""
    atexit.register(gc.freeze)
