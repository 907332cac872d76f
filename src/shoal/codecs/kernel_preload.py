"""Imported by the fork server: what Numba loads before the first CPU kernel, half a second, once for all."""

from __future__ import annotations

from contextlib import suppress

with suppress(ImportError, AttributeError):  # no Numba, or one with other insides: workers load it themselves
    from numba.core.registry import cpu_target

    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()
