"""Pictures of a search as inline SVG: lineage, descent, parallel coordinates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from shoal.report.svg import Scale
from shoal.search.ranges import Placed
from shoal.search.search_result import score_text, value_text
from shoal.search.space import Space

WIDTH = 960
LEFT, RIGHT, TOP = 70, 930, 26
ROW = 30
MOST_ROWS = 40
AXES_TOP, AXES_BOTTOM = 40, 300
BEST_SHARE = 0.1

Piece = Mapping[str, Any]


def lineage(pieces: Sequence[Piece], best: int, metric: str) -> str:
    """One row for each member of the population; a line down or up is a copy of another's weights.

    The ancestors of the best model, the piece `best`, are drawn in colour.
    """
    done = [piece for piece in pieces if piece["time"] is not None]
    members = sorted({piece["trial"] for piece in done})[:MOST_ROWS]
    rows = {trial: TOP + ROW * (k + 0.5) for k, trial in enumerate(members)}
    places, ends = _places([piece for piece in done if piece["trial"] in rows])
    ancestors = set(ancestry(pieces, best))
    along = Scale(0.0, max(ends.values(), default=1), LEFT, RIGHT)
    parts = [_rows(rows)]
    shown = [piece for piece in done if piece["trial"] in rows]
    parts += [
        _stretch(piece, pieces, rows, along, places, piece["number"] in ancestors, metric)
        for piece in sorted(shown, key=lambda piece: piece["number"] in ancestors)  # these on top
    ]
    bottom = TOP + ROW * len(members)
    label = (
        f'<text class="label" x="{WIDTH / 2}" y="{bottom + 32}" text-anchor="middle">epochs trained</text>'
    )
    parts.append(_ticks(along, bottom) + label)
    told = f"Lineage of {len(members)} members; the best descends from pieces {sorted(ancestors)}"
    return _svg(told, bottom + 42, "".join(parts))


def ancestry(pieces: Sequence[Piece], number: int | None) -> list[int]:
    """A piece and all whose weights it has, newest first."""
    found = []
    while number is not None:
        found.append(number)
        number = pieces[number]["origin"]
    return found


def _places(pieces: Sequence[Piece]) -> tuple[dict[int, int], dict[int, int]]:
    """Where each piece begins: the epochs that its member has trained before; and where each member ends."""
    places: dict[int, int] = {}
    ends: dict[int, int] = {}
    for piece in pieces:
        places[piece["number"]] = ends.get(piece["trial"], 0)
        ends[piece["trial"]] = places[piece["number"]] + piece["end"] - piece["begin"]
    return places, ends


def _stretch(
    piece: Piece,
    pieces: Sequence[Piece],
    rows: Mapping[int, float],
    along: Scale,
    places: Mapping[int, int],
    is_ancestor: bool,
    metric: str,
) -> str:
    y, begin = rows[piece["trial"]], places[piece["number"]]
    left, right = along(begin), along(begin + piece["end"] - piece["begin"])
    kind, width = ("s1", 4) if is_ancestor else ("base", 2)
    drawn = (
        f'<path class="{kind}" stroke="var(--c)" stroke-width="{width}" fill="none" opacity="{{}}" d="{{}}"/>'
    )
    out = drawn.format(1 if is_ancestor else 0.55, f"M{left:.1f},{y}H{right - 2:.1f}")
    origin = piece["origin"]
    if origin is not None and pieces[origin]["trial"] != piece["trial"] and pieces[origin]["trial"] in rows:
        source = pieces[origin]
        x = along(places[origin] + source["end"] - source["begin"])
        path = f"M{x:.1f},{rows[source['trial']]}L{left:.1f},{y}"
        out += drawn.format(1 if is_ancestor else 0.55, path)
    values = ", ".join(f"{name} {value_text(value)}" for name, value in piece["values"].items())
    note = f"trial {piece['trial']}, epoch {piece['end']}: {score_text(piece['score'], metric)}; {values}"
    dot = (
        f'<circle class="{kind}" fill="var(--c)" cx="{right - 2:.1f}" cy="{y}" r="{2 + is_ancestor * 1.5}"/>'
    )
    return f"<g><title>{escape(note)}</title>{out}{dot}</g>"


def _rows(rows: Mapping[int, float]) -> str:
    return "".join(
        f'<path class="grid" d="M{LEFT},{y}H{RIGHT}"/>'
        f'<text x="{LEFT - 12}" y="{y + 4}" text-anchor="end">trial {trial}</text>'
        for trial, y in rows.items()
    )


def _ticks(along: Scale, bottom: float) -> str:
    every = max(1, round(along.high / 10))
    return "".join(
        f'<text x="{along(tick):.1f}" y="{bottom + 12}" text-anchor="middle">{tick}</text>'
        for tick in range(0, int(along.high) + 1, every)
    )


def descent(trials: Sequence[Mapping[str, Any]], best: int, metric: str) -> str:
    """A dot for each model at its score, in the order of birth, and a line to its parent."""
    scored = [trial for trial in trials if trial["best_score"] is not None]
    along = Scale(0, max(1, len(trials) - 1), LEFT, RIGHT)
    up = ScoreScale([trial["best_score"] for trial in scored], metric)
    family: set[int] = set()
    number: int | None = best
    while number is not None:
        family.add(number)
        number = trials[number]["parent"]
    parts = [_score_axis(up, metric)]
    for trial in sorted(scored, key=lambda trial: trial["trial"] in family):
        mine = trial["trial"] in family
        kind, x, y = "s1" if mine else "base", along(trial["trial"]), up(trial["best_score"])
        parent = None if trial["parent"] is None else trials[trial["parent"]]
        if parent is not None and parent["best_score"] is not None:
            path = f"M{along(parent['trial']):.1f},{up(parent['best_score']):.1f}L{x:.1f},{y:.1f}"
            look = f'stroke-width="{2.5 if mine else 1}" opacity="{1 if mine else 0.4}"'
            parts.append(f'<path class="{kind}" stroke="var(--c)" fill="none" {look} d="{path}"/>')
        note = f"trial {trial['trial']}: {score_text(trial['best_score'], metric)}; {_values_text(trial)}"
        circle = f'<circle class="{kind}" fill="var(--c)" cx="{x:.1f}" cy="{y:.1f}" r="{4 if mine else 3}">'
        parts.append(f"{circle}<title>{escape(note)}</title></circle>")
    label = f'<text class="label" x="{WIDTH / 2}" y="{AXES_BOTTOM + 36}" text-anchor="middle">trial</text>'
    axis = "".join(
        f'<text x="{along(n):.1f}" y="{AXES_BOTTOM + 18}" text-anchor="middle">{n}</text>'
        for n in range(0, len(trials), max(1, len(trials) // 10))
    )
    return _svg("Descent of the models", AXES_BOTTOM + 46, "".join(parts) + axis + label)


class ScoreScale:
    """The height of a score. Losses are drawn by their logarithm, the worst tenth of them at the bottom."""

    def __init__(self, scores: Sequence[float], metric: str) -> None:
        ordered = sorted(scores)
        self._log = metric != "accuracy" and ordered[-1] < 0
        low, high = ordered[len(ordered) // 10 if self._log else 0], ordered[-1]
        self.ends = (low, high)
        bottom, top = self._drawn(low), self._drawn(high)
        self._scale = Scale(bottom, top if top > bottom else bottom + 1.0, AXES_BOTTOM, AXES_TOP)

    def __call__(self, score: float) -> float:
        return self._scale(self._drawn(max(score, self.ends[0])))

    def ticks(self) -> list[float]:
        """The scores at the ends and in the middle."""
        middle = (self._drawn(self.ends[0]) + self._drawn(self.ends[1])) / 2
        return [self.ends[0], -(10**-middle) if self._log else middle, self.ends[1]]

    def _drawn(self, score: float) -> float:
        return -math.log10(-score) if self._log else score


def _score_axis(up: ScoreScale, metric: str) -> str:
    return "".join(
        f'<path class="grid" d="M{LEFT},{up(tick):.1f}H{RIGHT}"/>'
        f'<text x="{LEFT - 8}" y="{up(tick) + 4:.1f}" text-anchor="end">{score_text(tick, metric)}</text>'
        for tick in up.ticks()
    )


def _values_text(trial: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value_text(value)}" for name, value in trial["values"].items())


def parallel_coordinates(pieces: Sequence[Piece], space: Space, metric: str) -> str:
    """One axis for each hyper-parameter and one for the score; a line for each piece that was scored.

    The best tenth is drawn in colour. Architectures have no axis.
    """
    ranges = space.placed
    scored = [piece for piece in pieces if piece["score"] is not None]
    if not ranges or not scored:
        return ""
    names = [*ranges, "score"]
    along = Scale(0, len(names) - 1, LEFT + 20, RIGHT - 30)
    ranked = sorted(scored, key=lambda piece: piece["score"])
    up = ScoreScale([piece["score"] for piece in ranked], metric)
    best = max(1, round(BEST_SHARE * len(ranked)))
    lines = []
    for number, piece in enumerate(ranked):
        heights = [_height(found, piece["values"][name]) for name, found in ranges.items()]
        points = [*heights, up(piece["score"])]
        path = "L".join(f"{along(k):.1f},{y:.1f}" for k, y in enumerate(points))
        top = number >= len(ranked) - best
        look = 'class="s1" opacity="0.95" stroke-width="2"' if top else 'class="base" opacity="0.3"'
        note = f"trial {piece['trial']}: {score_text(piece['score'], metric)}; {_values_text(piece)}"
        drawn = f'<path {look} stroke="var(--c)" fill="none" d="M{path}">'
        lines.append(f"{drawn}<title>{escape(note)}</title></path>")
    axes = "".join(_axis(along(k), name, space, up, metric) for k, name in enumerate(names))
    return _svg("Parallel coordinates of all trials", AXES_BOTTOM + 30, "".join(lines) + axes)


def _height(found: Placed, value: Any) -> float:
    return AXES_BOTTOM - (AXES_BOTTOM - AXES_TOP) * found.place(value)


def _axis(x: float, name: str, space: Space, up: ScoreScale, metric: str) -> str:
    found = space.get(name)
    if isinstance(found, Placed):
        texts = [value_text(found.at(0.0)), value_text(found.at(1.0))]
    else:
        texts = [score_text(end, metric) for end in up.ends]
    return (
        f'<path class="axis" d="M{x:.1f},{AXES_TOP}V{AXES_BOTTOM}"/>'
        f'<text class="name" x="{x:.1f}" y="{AXES_TOP - 22}" text-anchor="middle">{escape(name)}</text>'
        f'<text x="{x:.1f}" y="{AXES_TOP - 7}" text-anchor="middle">{escape(texts[1])}</text>'
        f'<text x="{x:.1f}" y="{AXES_BOTTOM + 18}" text-anchor="middle">{escape(texts[0])}</text>'
    )


def _svg(label: str, height: float, body: str) -> str:
    view = f'viewBox="0 0 {WIDTH} {height:g}"'
    return f'<svg class="chart" {view} role="img" aria-label="{escape(label)}">{body}</svg>'
