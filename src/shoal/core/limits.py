"""Limits of options: each check raises ValueError with the option, its value and the limit.

Torch-free, so that the command line can make these checks before it imports anything that trains.
"""

from __future__ import annotations


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
