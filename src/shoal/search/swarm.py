"""Particle swarm optimisation, PSO (Kennedy & Eberhart 1995; over hyper-parameters: Lorenzo et al. 2017)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from shoal.core.limits import above, at_least
from shoal.search.searcher import FAILED, Searcher, SearchMethod, SearchTrial, TrialPiece, Wish
from shoal.search.space import Space

START_SPEED = 0.1


@dataclass(frozen=True)
class PSO(SearchMethod):
    """Particles fly through the space, drawn to the best place of their own and of the whole swarm.

    Every hyper-parameter is scaled to [0, 1], logarithmic ones by their logarithm. Whole numbers and choices
    are read from their place only for the evaluation, a trial of `length` epochs. Asynchronous: a particle
    uses the swarm's best place of the moment at which it moves.
    """

    particles: int = 10
    length: int = 2
    inertia: float = 0.7298  # omega; with the two below Clerc's constriction
    own: float = 1.4962  # c1: pull of the particle's own best place
    swarm: float = 1.4962  # c2: pull of the swarm's best place
    fastest: float = 0.5  # largest speed in each dimension

    def __post_init__(self) -> None:
        at_least(1, particles=self.particles, length=self.length)
        at_least(0, inertia=self.inertia, own=self.own, swarm=self.swarm)
        above(0, fastest=self.fastest)

    def check(self, space: Space) -> None:
        if space.architecture is not None:
            raise ValueError(
                "method 'pso' moves between numbers, and an architecture is none; take 'evolution', or "
                "leave the architecture out"
            )

    @property
    def least(self) -> int:
        return (self.particles + 1) * self.length

    def searcher(self, space: Space, epochs: int, seed: int, fixed: frozenset[str] = frozenset()) -> Searcher:
        return _SwarmSearcher(self, space, epochs, seed)


@dataclass
class _Particle:
    x: list[float]
    v: list[float]
    best_x: list[float]
    best: float = FAILED
    moves: int = 0
    is_flying: bool = False  # a trial evaluates its place


class _SwarmSearcher(Searcher):
    def __init__(self, method: PSO, space: Space, epochs: int, seed: int) -> None:
        super().__init__(space, epochs, seed)
        self._method = method
        self._particles = [self._first(k) for k in range(method.particles)]
        self._best_x: list[float] | None = None
        self._of_trial: list[int] = []  # the particle of each trial
        self._best_score = FAILED

    def _first(self, k: int) -> _Particle:
        rng = self.rng("particle", k)
        x = [rng.random() for _ in self.space]
        v = [rng.uniform(-START_SPEED, START_SPEED) for _ in self.space]
        return _Particle(x, v, list(x))

    def _next(self) -> Wish | None:
        idle = [k for k, particle in enumerate(self._particles) if not particle.is_flying]
        if not idle:
            return None
        k = min(idle, key=lambda k: (self._particles[k].moves, k))
        x, _ = self._moved(k)
        ranges = self.space.placed
        values = {name: ranges[name].at(place) for name, place in zip(self.space, x, strict=True)}
        return Wish(values, self._method.length)

    def _moved(self, k: int) -> tuple[list[float], list[float]]:
        """The place and the speed of a particle at its next evaluation; the first is where it begins."""
        particle = self._particles[k]
        if not particle.moves:
            return particle.x, particle.v
        rng = self.rng("move", k, particle.moves)
        best = self._best_x if self._best_x is not None else particle.best_x
        return move(self._method, particle.x, particle.v, particle.best_x, best, rng.random)

    def _began(self, piece: TrialPiece) -> None:
        idle = [k for k, particle in enumerate(self._particles) if not particle.is_flying]
        k = min(idle, key=lambda k: (self._particles[k].moves, k))
        particle = self._particles[k]
        particle.x, particle.v = self._moved(k)
        particle.moves, particle.is_flying = particle.moves + 1, True
        self._of_trial.append(k)

    def _heard(self, trial: SearchTrial) -> None:
        particle = self._particles[self._of_trial[trial.number]]
        particle.is_flying = False
        assert trial.score is not None
        if trial.score > particle.best:
            particle.best, particle.best_x = trial.score, list(particle.x)
        if trial.score > self._best_score:
            self._best_score, self._best_x = trial.score, list(particle.x)

    def _own_state(self) -> dict[str, Any]:
        particles = [asdict(particle) for particle in self._particles]
        return {"particles": particles, "swarm": [self._best_score, self._best_x]}


def move(
    method: PSO,
    x: list[float],
    v: list[float],
    own: list[float],
    swarm: list[float],
    draw: Callable[[], float],
) -> tuple[list[float], list[float]]:
    """One step of a particle: fresh draws for each dimension, speed and place clamped.

    v = inertia * v + c1 r1 (own - x) + c2 r2 (swarm - x). A dimension that would leave [0, 1] stops there.
    """
    new_x, new_v = [], []
    for place, speed, mine, ours in zip(x, v, own, swarm, strict=True):
        first, second = draw(), draw()
        pulled = method.own * first * (mine - place) + method.swarm * second * (ours - place)
        faster = max(-method.fastest, min(method.fastest, method.inertia * speed + pulled))
        inside = max(0.0, min(1.0, place + faster))
        new_x.append(inside)
        new_v.append(faster if inside == place + faster else 0.0)
    return new_x, new_v
