"""Imported by the fork server: what Numba loads before the first CPU kernel, half a second, once for all."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("numba") is not None:
    from numba.core.registry import cpu_target

    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()
