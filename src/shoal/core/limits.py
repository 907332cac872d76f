"""Limits of options: each check raises ValueError with the option, its value and the limit.

Torch-free, so that the command line can make these checks before it imports anything that trains.
"""

from __future__ import annotations

from shoal.core.words import FEEDBACK

LONGEST_BLOCK = 2**20

PATIENCE_SECONDS = 60.0
"""How long a peer or a process may be silent before it counts as dead, unless a run says otherwise."""


def at_least(low: float, **options: float | None) -> None:
    """Raise ValueError unless every option given is None or at least `low`."""
    for name, value in options.items():
        if value is not None and not value >= low:
            raise ValueError(f"{name}={value} must be at least {low:g}")


def above(low: float, **options: float | None) -> None:
    """Raise ValueError unless every option given is None or above `low`."""
    for name, value in options.items():
        if value is not None and not value > low:
            raise ValueError(f"{name}={value} must be above {low:g}")


def between(low: float, high: float, **options: float | None) -> None:
    """Raise ValueError unless every option given is None or within [low, high)."""
    for name, value in options.items():
        if value is not None and not low <= value < high:
            raise ValueError(f"{name}={value} must be at least {low:g} and below {high:g}")


def one_of(words: tuple[str, ...], **options: str | None) -> None:
    """Raise ValueError unless every option given is one of the words."""
    for name, value in options.items():
        if value is not None and value not in words:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(words)}")


def check_density(density: float) -> None:
    """Raise ValueError unless it is a share of the elements."""
    if not 0 < density <= 1:
        raise ValueError(f"density={density} should be above 0 and at most 1, as 0.01 for one in a hundred")


def check_block(name: str, block: int, multiple: int = 1) -> None:
    """Raise ValueError unless it is the length of a block, in elements."""
    if not 1 <= block <= LONGEST_BLOCK:
        raise ValueError(f"{name}={block} should be from 1 to {LONGEST_BLOCK}")
    if block % multiple:
        raise ValueError(f"{name}={block} should be a multiple of {multiple}")


def one_of_feedback(feedback: str) -> None:
    """Raise ValueError unless it is one of FEEDBACK."""
    if feedback not in FEEDBACK:
        raise ValueError(f"feedback={feedback!r} should be one of {', '.join(FEEDBACK)}")
