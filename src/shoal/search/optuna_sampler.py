"""A sampler of Optuna (Akiba et al. 2019) as a method of search, for those who trust theirs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.core.errors import Unavailable
from shoal.core.limits import at_least, one_of
from shoal.core.seeds import derive
from shoal.search.ranges import Choice, Interval
from shoal.search.searcher import Searcher, SearchMethod, SearchTrial, TrialPiece, Wish
from shoal.search.space import Space, Values

if TYPE_CHECKING:
    import optuna

SAMPLERS = ("tpe", "random", "gp", "cmaes", "qmc")
MOST_SEED = 2**32


@dataclass(frozen=True)
class OptunaSearch(SearchMethod):
    """Every trial asks Optuna for its values, trains for `length` epochs and tells the score.

    `sampler` is tpe, random, gp, cmaes or qmc. The study is in memory: Shoal's journal keeps what was asked
    and told, and Optuna's samplers with a seed give the same answers again.
    """

    sampler: str = "tpe"
    length: int = 5

    def __post_init__(self) -> None:
        at_least(1, length=self.length)
        one_of(SAMPLERS, sampler=self.sampler)

    def check(self, space: Space) -> None:
        if space.architecture is not None:
            raise ValueError(
                "method 'optuna' samples numbers and words, and an architecture is neither; take "
                "'evolution', or leave the architecture out"
            )

    def searcher(self, space: Space, epochs: int, seed: int, fixed: frozenset[str] = frozenset()) -> Searcher:
        return _OptunaSearcher(self, space, epochs, seed)


class _OptunaSearcher(Searcher):
    def __init__(self, method: OptunaSearch, space: Space, epochs: int, seed: int) -> None:
        super().__init__(space, epochs, seed)
        self._method = method
        library = load_optuna()
        self._failed = library.trial.TrialState.FAIL
        self._study = library.create_study(direction="maximize", sampler=make_sampler(method.sampler, seed))
        self._distributions = {name: distribution(self.space[name]) for name in space}
        self._asked: Any = None  # the trial that comes next

    def _next(self) -> Wish | None:
        if not self.affords(self._method.length):
            return None
        if self._asked is None:
            self._asked = self._study.ask(self._distributions)
        return Wish(self._decoded(self._asked.params), self._method.length)

    def _began(self, piece: TrialPiece) -> None:
        assert self._asked.number == piece.trial
        self._asked = None

    def _heard(self, trial: SearchTrial) -> None:
        if trial.has_failed:
            self._study.tell(trial.number, state=self._failed)
        else:
            self._study.tell(trial.number, trial.score)

    def _decoded(self, params: Values) -> Values:
        """Choices travel as their index: Optuna takes no tuples."""
        ranges = self.space.placed
        return {
            name: found.values[params[name]] if isinstance(found, Choice) else params[name]
            for name, found in ranges.items()
        }


def load_optuna() -> Any:
    """The library. Raises Unavailable with the install command where it is missing."""
    try:
        import optuna
    except ImportError:
        raise Unavailable(
            "method 'optuna' needs Optuna. Install it with: pip install 'shoal[optuna]'"
        ) from None
    optuna.logging.disable_default_handler()
    return optuna


def make_sampler(word: str, seed: int) -> optuna.samplers.BaseSampler:
    """A sampler of Optuna with a seed."""
    samplers = load_optuna().samplers
    classes = {
        "tpe": samplers.TPESampler,
        "random": samplers.RandomSampler,
        "gp": samplers.GPSampler,
        "cmaes": samplers.CmaEsSampler,
        "qmc": samplers.QMCSampler,
    }
    sampler: optuna.samplers.BaseSampler = classes[word](seed=derive(seed, "optuna") % MOST_SEED)
    return sampler


def distribution(found: object) -> optuna.distributions.BaseDistribution:
    """A range as Optuna has it."""
    kinds = load_optuna().distributions
    if isinstance(found, Choice):
        return kinds.CategoricalDistribution(range(len(found.values)))
    if not isinstance(found, Interval):
        raise TypeError(f"{found!r} is no range that Optuna has")
    if found.integer:
        return kinds.IntDistribution(int(found.low), int(found.high), log=found.log)
    return kinds.FloatDistribution(found.low, found.high, log=found.log)
