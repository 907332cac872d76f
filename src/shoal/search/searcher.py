"""Searcher: decides what is trained next, from what it was told. Pure: no clock, no process, no file.

The same seed and the same order of `suggest` and `report` give the same decisions, so a journal of both is
all that a search needs to be resumed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

from shoal.core.seeds import derive
from shoal.search.space import Space, Values

METRICS = ("accuracy", "loss")
"""What a search may maximise: the accuracy, or the loss with a minus."""

TRIAL_TRANSPORTS = ("processes", "gloo", "grpc")
"""How bytes may move inside a trial: on real processes that this host starts."""

FAILED = -math.inf
"""The score of a trial that diverged or was given up."""


@dataclass(frozen=True)
class TrialPiece:
    """Some epochs of one trial, and the piece whose checkpoint they start from."""

    number: int
    trial: int
    values: Values
    begin: int  # epochs that are in the checkpoint it starts from
    end: int  # epochs when it ends
    origin: int | None = None  # number of the piece it continues; None: fresh weights

    def plain(self) -> dict[str, Any]:
        """The piece as plain values."""
        return asdict(self)


@dataclass
class SearchTrial:
    """One model of the search, as far as it has been told of."""

    number: int
    values: Values
    parent: int | None = None  # the trial that its first values come from
    epochs: int = 0  # in its weights
    score: float | None = None  # the last one
    piece: int | None = None  # that wrote its last checkpoint
    pending: int | None = None  # the piece it trains now
    history: list[tuple[int, float]] = field(default_factory=list)  # epochs, score

    @property
    def has_failed(self) -> bool:
        """Whether its last piece did."""
        return self.score == FAILED


@dataclass(frozen=True)
class Wish:
    """What a method wants to have trained next. Without a `trial`, a new one begins."""

    values: Values
    end: int
    trial: int | None = None
    begin: int = 0
    origin: int | None = None
    parent: int | None = None


class Searcher(ABC):
    """Suggests pieces and hears of their scores; higher is better.

    `epochs` is the budget: no piece is suggested that would exceed it, all trials together.
    """

    def __init__(self, space: Space, epochs: int, seed: int) -> None:
        self.space = space
        self.epochs = epochs
        self.seed = seed
        self.spent = 0  # epochs suggested so far
        self.trials: list[SearchTrial] = []
        self.pieces: list[TrialPiece] = []
        self.best: tuple[float, int] | None = None  # score and piece; the first of equals

    def suggest(self) -> TrialPiece | None:
        """The next piece to train; None if there is none before the next report, or none any more.

        None changes nothing: you may ask again as often as you like.
        """
        wish = self._wish()
        if wish is None:
            return None
        number = len(self.trials) if wish.trial is None else wish.trial
        if wish.trial is None:
            self.trials.append(SearchTrial(number, wish.values, wish.parent))
        piece = TrialPiece(len(self.pieces), number, wish.values, wish.begin, wish.end, wish.origin)
        self.pieces.append(piece)
        self.spent += wish.end - wish.begin
        trial = self.trials[number]
        trial.pending, trial.values = piece.number, wish.values
        self._began(piece)
        return piece

    def report(self, trial: int, score: float, step: int) -> None:
        """Take the score of a trial that has reached `step` epochs; one that is not finite is a failure."""
        told = self.trials[trial]
        piece = None if told.pending is None else self.pieces[told.pending]
        if piece is None or piece.end != step:
            raise ValueError(f"trial {trial} was not asked to reach {step} epochs")
        told.pending, told.epochs = None, step
        told.score = score if math.isfinite(score) else FAILED
        told.history.append((step, told.score))
        if not told.has_failed:
            told.piece = piece.number
            if self.best is None or told.score > self.best[0]:
                self.best = (told.score, piece.number)
        self._heard(told)

    @property
    def has_more(self) -> bool:
        """Whether `suggest` would suggest a piece now."""
        return self._wish() is not None

    def needed(self) -> set[int]:
        """The pieces whose checkpoints may be needed, besides those that train now and their origins."""
        return self._kept() | (set() if self.best is None else {self.best[1]})

    def affords(self, epochs: int) -> bool:
        """Whether so many more epochs are in the budget."""
        return self.spent + epochs <= self.epochs

    @property
    def running(self) -> list[TrialPiece]:
        """The pieces that were suggested and not reported."""
        return [self.pieces[trial.pending] for trial in self.trials if trial.pending is not None]

    def rng(self, *names: str | int) -> Random:
        """The random stream of that name; asking twice gives the same numbers."""
        return Random(derive(self.seed, "search", *names))

    def state(self) -> dict[str, Any]:
        """Everything it knows, as plain values; two searchers of equal state decide alike."""
        return {
            "spent": self.spent,
            "best": self.best,
            "pieces": [piece.plain() for piece in self.pieces],
            "trials": [asdict(trial) for trial in self.trials],
            **self._own_state(),
        }

    # -- what a method answers -----------------------------------------------------------------

    @abstractmethod
    def _next(self) -> Wish | None:
        """What to train next. Must change nothing: the budget may not allow it."""

    def _kept(self) -> set[int]:
        """The pieces that later ones may start from."""
        return set()

    def _began(self, piece: TrialPiece) -> None:
        """A wish was granted."""
        return

    def _heard(self, trial: SearchTrial) -> None:
        """A trial has a new score."""
        return

    def _own_state(self) -> dict[str, Any]:
        return {}

    def _wish(self) -> Wish | None:
        wish = self._next()
        return wish if wish is not None and self.affords(wish.end - wish.begin) else None

    def _fresh(self, end: int) -> Wish:
        """A new trial with values from the priors."""
        return Wish(self.space.sample(self.rng("sample", len(self.trials))), end)


@dataclass(frozen=True)
class SearchMethod(ABC):
    """The options of one way of searching; frozen, printable, and the same for every search."""

    def check(self, space: Space) -> None:
        """Raise ValueError for a space that it cannot search."""
        return

    @property
    def least(self) -> int:
        """The epochs with which the first score decides what is trained next; less is random search."""
        return 1

    def check_budget(self, epochs: int) -> None:
        """Raise ValueError if the budget ends with the first generation."""
        if epochs < self.least:
            raise ValueError(
                f"epochs={epochs} ends with the first generation of {self}, whose scores would decide "
                f"nothing; take {self.least} or more, or fewer or shorter trials"
            )

    @abstractmethod
    def searcher(self, space: Space, epochs: int, seed: int, fixed: frozenset[str] = frozenset()) -> Searcher:
        """A searcher of that space with a budget of `epochs`, all trials together.

        `fixed` names hyper-parameters that cannot change while a trial trains.
        """
