"""The timeline of a pipeline as inline SVG: a row for each device, a piece for each pass, bubbles empty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from shoal.report.svg import Axis, Scale, fill_swatch, legend, nice_ticks, vertical_grid

FORWARD_CLASS, BACKWARD_CLASS = "s0", "s1"
ROW_HEIGHT, BAR_TOP, BAR_HEIGHT = 44, 18, 20  # pixels
LEAST_LABELLED = 1.7  # per cent of the width: a narrower piece has no number in it


@dataclass(frozen=True)
class Pass:
    """A piece of a row: when it begins and ends, its number, and its tooltip."""

    row: int
    start: float
    end: float
    is_forward: bool
    label: str
    note: str


def pipeline_chart(title: str, rows: Sequence[str], passes: Sequence[Pass], axis: Axis) -> str:
    """Rows from top to bottom, time from left to right; x is in per cent, so that any width is filled."""
    end = max(one.end for one in passes)
    along = Scale(0.0, end, 0.0, 100.0)
    bottom = ROW_HEIGHT * len(rows)
    ticks = [t for t in nice_ticks(0.0, end, 4) if t <= end * 1.0001]
    parts = [vertical_grid(axis, along, ticks, bottom, edge=97, below=38)]
    for index, name in enumerate(rows):
        top = ROW_HEIGHT * index + BAR_TOP
        parts.append(f'<text class="name" x="0" y="{top - 5}">{escape(name)}</text>')
        parts.append(f'<rect class="idle" x="0" y="{top}" width="100%" height="{BAR_HEIGHT}"/>')
    parts += [_piece(one, along) for one in passes]
    words = f"{title}: {len(rows)} devices, {axis.text(end)} {axis.label}"
    return (
        f'<svg class="chart bars pipeline" width="100%" height="{bottom + 44}" role="img" '
        f'aria-label="{escape(words)}">{"".join(parts)}</svg>'
    )


def pipeline_legend() -> str:
    """The two colours, and what an empty place is."""
    return legend(
        [
            (fill_swatch(FORWARD_CLASS), "forward"),
            (fill_swatch(BACKWARD_CLASS), "backward"),
            (fill_swatch("idle"), "bubble: the device waits"),
        ]
    )


def _piece(one: Pass, along: Scale) -> str:
    left, width = along(one.start), along(one.end) - along(one.start)
    top = ROW_HEIGHT * one.row + BAR_TOP
    kind = FORWARD_CLASS if one.is_forward else BACKWARD_CLASS
    drawn = (
        f'<rect class="fill piece {kind}" x="{left:.3f}%" y="{top}" width="{width:.3f}%" '
        f'height="{BAR_HEIGHT}"><title>{escape(one.note)}</title></rect>'
    )
    if width < LEAST_LABELLED:
        return drawn
    middle = f'x="{left + width / 2:.3f}%" y="{top + 14}" text-anchor="middle"'
    return f'{drawn}<text class="number" {middle}>{escape(one.label)}</text>'
