"""Numbers as text, the same in the table, the progress display and the report."""

from __future__ import annotations

import math
from typing import Any

MISSING = "\N{EN DASH}"


def finite(value: Any) -> float | None:
    """`value` as a float, or None if it is missing, not a number or not finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def bytes_text(value: Any) -> str:
    """Three digits and a decimal unit: 999 B, 12.3 kB, 1.50 GB."""
    size = finite(value)
    if size is None:
        return MISSING
    if abs(size) < 999.5:
        return f"{size:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        size /= 1000
        if abs(size) < 999.5:
            return f"{_three_digits(size)} {unit}"
    return f"{size / 1000:,.0f} PB"


def count_text(value: Any) -> str:
    """A whole number with thousands separators, in millions from ten million: 10,200 or 12.3 M."""
    number = finite(value)
    if number is None:
        return MISSING
    if abs(number) < 9_999_999.5:
        return f"{number:,.0f}"
    return f"{number / 1e6:,.1f} M"


def seconds_text(value: Any) -> str:
    """Seconds, without the unit, to three digits: 0.0123, 4.56, 78.9, 12,345."""
    seconds = finite(value)
    if seconds is None:
        return MISSING
    if seconds != 0 and abs(seconds) < 0.995:
        return f"{seconds:#.3g}"
    return _three_digits(seconds)


def percent_text(fraction: Any) -> str:
    """A fraction as whole per cent; "<1 %" for a positive one that rounds to 0."""
    part = finite(fraction)
    if part is None:
        return MISSING
    if 0 < part < 0.005:
        return "<1 %"
    return f"{100 * part:.0f} %"


def tick_text(value: float) -> str:
    """A number at an axis: 0.25, 1,000."""
    return f"{value:,.6g}"


def decimal_text(value: Any, digits: int = 2) -> str:
    """A number to a fixed number of decimals."""
    number = finite(value)
    if number is None:
        return MISSING
    text = f"{number:,.{digits}f}"
    # from a million, decimals only take up width
    return text if abs(number) < 1e6 else f"{number:.1e}"


def ratio_text(ratio: Any) -> str:
    """A ratio: 2.9 x, 0.62 x, 14 x."""
    number = finite(ratio)
    if number is None:
        return MISSING
    digits = 2 if number < 0.995 else 1 if number < 9.95 else 0
    return f"{number:,.{digits}f} x"


def scaled_text(rate: float, factor: float) -> str:
    """A learning rate that was multiplied: lr 0.48 (4 x 0.12)."""
    return f"lr {rate:.3g} ({factor:.3g} x {rate / factor:.3g})"


def _three_digits(number: float) -> str:
    digits = 2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0
    return f"{number:,.{digits}f}"
