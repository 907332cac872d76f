"""How a kernel for the processor is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., Any])


def compiled(f: F) -> F:
    """Kept on disk; other threads run meanwhile; division by zero is what it is in numpy.

    A check for zero in a loop would keep the loop from several elements at a time.
    """
    return cast(F, njit(cache=True, nogil=True, error_model="numpy")(f))
