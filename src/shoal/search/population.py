"""Population-based training, PBT (Jaderberg et al. 2017): the worst copy the best, and explore from there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shoal.core.limits import at_least, between
from shoal.search.searcher import FAILED, Searcher, SearchMethod, SearchTrial, TrialPiece, Wish
from shoal.search.space import Space, Values


@dataclass(frozen=True)
class PBT(SearchMethod):
    """A population trains; now and then the worst take weights, optimizer and data cursor of the best.

    Every `interval` epochs a member is ready: if it is among the worst `quantile`, it copies a member drawn
    from the best `quantile` and explores: each hyper-parameter is drawn anew with probability `resample`,
    else multiplied by 1 + `factor` or 1 - `factor`. With `synchronous`, all members wait for each other.
    """

    population: int = 8  # n
    interval: int = 1  # epochs
    quantile: float = 0.25  # q
    resample: float = 0.25
    factor: float = 0.2
    synchronous: bool = False

    def __post_init__(self) -> None:
        at_least(1, population=self.population, interval=self.interval)
        between(0, 1, quantile=self.quantile, resample=self.resample, factor=self.factor)
        if self.quantile > 0.5:
            raise ValueError(f"quantile={self.quantile} must be at most 0.5: nobody is both worst and best")

    @property
    def least(self) -> int:
        return self.population * (self.interval + 1)

    def searcher(self, space: Space, epochs: int, seed: int, fixed: frozenset[str] = frozenset()) -> Searcher:
        return _PBTSearcher(self, space, epochs, seed, fixed)


@dataclass
class _Member:
    """The next piece of a trial of the population."""

    values: Values
    begin: int = 0
    origin: int | None = None
    done: int = 0  # epochs that it has trained itself, whoever's weights it has
    checked: int = 0  # epochs in its weights when it was last ready, inherited with them
    exploits: int = 0


class _PBTSearcher(Searcher):
    def __init__(self, method: PBT, space: Space, epochs: int, seed: int, fixed: frozenset[str]) -> None:
        super().__init__(space, epochs, seed)
        self._method = method
        self._fixed = fixed
        self._members: list[_Member] = []
        self._each = epochs // method.population  # so that all train equally long

    def _next(self) -> Wish | None:
        if len(self._members) < self._method.population and self._each:
            return self._fresh(1)
        idle = [n for n, trial in enumerate(self.trials) if trial.pending is None]
        idle = [n for n in idle if self._members[n].done < self._each]
        if self._method.synchronous:
            slowest = min(member.done for member in self._members)
            idle = [n for n in idle if self._members[n].done == slowest]
        if not idle:
            return None
        number = min(idle, key=lambda n: (self._members[n].done, n))
        member = self._members[number]
        return Wish(member.values, member.begin + 1, number, member.begin, member.origin)

    def _began(self, piece: TrialPiece) -> None:
        if piece.trial == len(self._members):
            self._members.append(_Member(piece.values))
        self._members[piece.trial].done += 1

    def _heard(self, trial: SearchTrial) -> None:
        member = self._members[trial.number]
        member.values, member.begin, member.origin = trial.values, trial.epochs, trial.piece
        if not self._method.synchronous:
            self._consider([trial])
        elif self._all_wait():
            self._consider(self.trials)

    def _all_wait(self) -> bool:
        """Whether the whole population has trained equally long and none trains now."""
        whole = len(self._members) == self._method.population
        return whole and not self.running and len({member.done for member in self._members}) == 1

    def _consider(self, trials: Sequence[SearchTrial]) -> None:
        """Let those of these members that are ready, and all that failed, copy one of the best."""
        best, worst = self._ranked()
        ready = {t.number for t in trials if self._is_ready(t)}
        for number in ready:
            self._members[number].checked = self.trials[number].epochs
        for trial in trials:
            if trial.has_failed or trial.number in ready & worst:
                self._exploit(trial, self._members[trial.number], best)

    def _is_ready(self, trial: SearchTrial) -> bool:
        return trial.epochs - self._members[trial.number].checked >= self._method.interval

    def _ranked(self) -> tuple[list[SearchTrial], set[int]]:
        """The best `quantile` of the members that have a score, best first, and the numbers of the worst."""
        scored = [trial for trial in self.trials if trial.score is not None]
        order = sorted(scored, key=lambda trial: (-(trial.score or 0.0), trial.number))
        count = min(math.ceil(self._method.quantile * len(order)), len(order) // 2)
        best = [trial for trial in order[:count] if trial.score != FAILED]
        return best, {trial.number for trial in order[len(order) - count :]}

    def _exploit(self, trial: SearchTrial, member: _Member, best: Sequence[SearchTrial]) -> None:
        """Take over a donor's weights and hyper-parameters, and explore from these.

        A member that failed and finds no donor starts anew.
        """
        donors = [donor for donor in best if donor is not trial]
        member.exploits += 1
        rng = self.rng("explore", trial.number, member.exploits)
        if donors:
            donor = rng.choice(donors)
            # what the donor trained with when it wrote that checkpoint: it may have explored since
            values = self.pieces[donor.piece].values  # type: ignore[index]
            method = self._method
            member.values = self.space.explore(values, rng, self._fixed, method.factor, method.resample)
            member.begin, member.origin = self.pieces[donor.piece].end, donor.piece  # type: ignore[index]
            member.checked = self._members[donor.number].checked
        elif trial.has_failed:
            member.values, member.begin, member.origin = self.space.sample(rng), 0, None
            member.checked = 0
        else:
            member.exploits -= 1

    def _kept(self) -> set[int]:
        donors = {trial.piece for trial in self.trials} | {member.origin for member in self._members}
        return {piece for piece in donors if piece is not None}

    def _own_state(self) -> dict[str, Any]:
        return {"members": [asdict(member) for member in self._members]}
