"""Driving a searcher without processes: ask, score, tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.search.searcher import Searcher, TrialPiece
from shoal.search.space import Space

LR = Space({"lr": ("log", 1e-4, 1.0), "batch": [16, 32, 64]})

Objective = Callable[[TrialPiece], float]


def drive(searcher: Searcher, objective: Objective, at_once: int = 1) -> list[TrialPiece]:
    """Train until nothing is left, `at_once` pieces at a time, reported in the order in which they began."""
    done: list[TrialPiece] = []
    running: list[TrialPiece] = []
    while True:
        while len(running) < at_once and (piece := searcher.suggest()) is not None:
            running.append(piece)
        if not running:
            return done
        piece = running.pop(0)
        searcher.report(piece.trial, objective(piece), piece.end)
        done.append(piece)


def by_trial(scores: list[float]) -> Objective:
    return lambda piece: scores[piece.trial]


def plain(searcher: Searcher) -> dict[str, Any]:
    return searcher.state()
