"""TrainingPlan: what is predicted of each setting, their order, and the file that keeps it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from math import isfinite, log, sqrt
from pathlib import Path
from typing import Any

from shoal.planning.contenders import SINGLE, Contender
from shoal.planning.curves_ahead import Baseline, Estimate, PowerLaw
from shoal.planning.objectives import Objective
from shoal.planning.run_time import RunCost, run_cost
from shoal.planning.survivors import guessed_ratio, machines
from shoal.planning.workload import CodecCost, Surroundings, Workload
from shoal.sim import Compute, Network
from shoal.sim.hardware import Profile

FORMAT = 2
FORMULA_DOUBT = 0.10
"""How far the formulas are off, in logarithms, in nine of ten cases; see tests/planning/test_run_time.py."""


@dataclass(frozen=True)
class Forecast:
    """What is predicted of one setting."""

    contender: Contender
    cost: RunCost  # of an epoch
    ratio: Estimate | None = None  # of samples needed over those of one worker; None: it was not tried
    seconds: Estimate | None = None  # to the goal
    score: Estimate | None = None  # accuracy in per cent, or loss, that it has then
    epochs: float | None = None  # to the goal
    nbytes: float | None = None  # sent by then
    given_up: bool = False  # after a short run that others were better in

    @property
    def machines(self) -> int:
        """Nodes, servers included."""
        return machines(self.contender)

    @property
    def sent(self) -> float:
        """Bytes that all nodes send: to the goal if that is known, or in an epoch."""
        return self.cost.nbytes if self.nbytes is None else self.nbytes

    def key(self, objective: Objective) -> Estimate:
        """What is to be small, with the doubt about it."""
        assert self.ratio is not None, "only what was tried is ordered"
        value = objective.key(self.cost, self.machines, self.ratio.value)
        far = sqrt(log(self.ratio.high / self.ratio.value) ** 2 + FORMULA_DOUBT**2)
        if objective.by_epochs or objective.fewest_bytes:
            far = log(self.ratio.high / self.ratio.value)
        return Estimate.around(value, far)


@dataclass(frozen=True)
class TrainingPlan:
    """A plan: what was measured and assumed, and the forecasts, the best first.

    `tried` were run for a while; the others are known by formulas alone.
    """

    task: str
    script: Sequence[str] | None
    workload: Workload
    profile: Profile
    network: Network | None
    compute: Compute  # of a worker on one machine
    objective: Objective
    lr: float | None  # of the task; None: a script has its own
    scale_lr: str
    forecasts: Sequence[Forecast]
    looked_at: int  # settings
    rule: tuple[int, str]
    noise: float | None = None  # the gradient noise scale, in samples
    baseline: Baseline | None = None  # the learning curve of one worker; None: nothing was trained
    notes: Sequence[str] = ()
    taken: Mapping[str, float] = field(default_factory=dict)  # seconds that the plan took, by part

    @property
    def judged_by_loss(self) -> bool:
        """Whether labels are not classes."""
        return self.baseline is not None and self.baseline.error is None

    @property
    def tried(self) -> list[Forecast]:
        """The settings that were tried and came to something, the best first, then those given up."""
        good = [f for f in self.forecasts if f.ratio is not None and isfinite(f.ratio.value)]
        return sorted(good, key=lambda f: (f.given_up, f.key(self.objective).value))

    @property
    def single(self) -> Forecast:
        """One worker."""
        return next(f for f in self.forecasts if f.contender == SINGLE)

    @property
    def ranked(self) -> list[Forecast]:
        """All settings that can be chosen, the best first: those that were tried, or by time if none was.

        Where bytes count, one worker sends none: it is chosen only if no other is faster.
        """
        if self.is_by_time:
            return sorted(self.forecasts, key=lambda f: self.objective.key(f.cost, f.machines, 1.0))
        if not self.objective.fewest_bytes:
            return self.tried
        alone = self.single.cost.seconds
        faster = [f for f in self.tried if f.ratio and f.cost.seconds * f.ratio.value < alone]
        return faster or [self.single]

    @property
    def equals(self) -> list[Forecast]:
        """The best, and those that may be as good, given up or not: they differ within the noise of both."""
        first, *rest = self.ranked
        best = self._key(first)
        return [first, *(f for f in rest if not _is_worse(self._key(f), best))]

    def _key(self, forecast: Forecast) -> Estimate:
        """What is to be small; of what was not tried, by time alone."""
        tried = replace(forecast, ratio=forecast.ratio or Estimate(1.0, 1.0, 1.0))
        return tried.key(self.objective)

    @property
    def choice(self) -> Forecast:
        """Of those that may be the best and ran to the end: the fewest machines, then the fewest bytes.

        If accuracy after so many epochs is asked for, the soonest. If nothing was tried, the one that is
        likely to need the fewest samples.
        """
        if self.is_by_time:
            return min(self.equals, key=lambda f: guessed_ratio(f.contender, self.workload, self.noise))
        if self.objective.by_epochs:
            return min(self.finalists, key=lambda f: f.cost.seconds)
        return min(self.finalists, key=lambda f: (f.machines, f.sent))

    @property
    def finalists(self) -> list[Forecast]:
        """Of those that may be the best, the ones that ran to the end; all of them if none did."""
        return [f for f in self.equals if not f.given_up] or self.equals

    @property
    def is_by_time(self) -> bool:
        """Whether nothing is known but how long an epoch takes."""
        return self.baseline is None

    @property
    def run_seconds(self) -> float:
        """Machine-seconds of the run that the plan proposes."""
        choice = self.choice
        seconds = choice.seconds.value if choice.seconds else choice.cost.seconds * self.objective.epochs
        return seconds * choice.machines

    def reranked(self, surroundings: Surroundings) -> TrainingPlan:
        """The same settings elsewhere: where steps or links turned out other than planned."""
        epochs = self.objective.epochs
        there = [
            replace(f, cost=run_cost(f.contender, self.workload, surroundings, epochs), seconds=None)
            for f in self.forecasts
        ]
        return replace(self, forecasts=there)

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        fields_of = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "profile"}
        known = {name: _values(value) for name, value in fields_of.items()}
        known |= {"profile": _kept(self.profile), "format": FORMAT}
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(_plain(known), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> TrainingPlan:
        """Read what `save` wrote. Raises ValueError with the path for anything else."""
        try:
            known = json.loads(Path(path).read_text(encoding="utf-8"))
            if known.pop("format") != FORMAT:
                raise KeyError("of another format; plan again")
            return _read(known)
        except OSError as error:
            raise ValueError(f"plan {path} cannot be read: {error.strerror}") from None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no plan of this `shoal plan` ({error})") from None


def _is_worse(one: Estimate, other: Estimate) -> bool:
    """Whether a figure is larger than another one beyond the doubt about both."""
    if not (one.value and other.value):
        return one.value > other.value
    doubt = sqrt(log(one.high / one.value) ** 2 + log(other.high / other.value) ** 2)
    return log(one.value / other.value) > doubt


def _values(value: Any) -> Any:
    """Dataclasses as their fields."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return [_values(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _plain(value: Any) -> Any:
    """Without what JSON does not know: infinity is written as text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def _kept(profile: Profile) -> Any:
    """A profile as its own file has it."""
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        file = Path(folder) / "profile.json"
        profile.save(file)
        return json.loads(file.read_text(encoding="utf-8"))


def _profile(entry: Any) -> Profile:
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        file = Path(folder) / "profile.json"
        file.write_text(json.dumps(entry), encoding="utf-8")
        return Profile.load(file)


def _estimate(entry: Mapping[str, Any] | None) -> Estimate | None:
    return None if entry is None else Estimate(*(float(entry[name]) for name in ("value", "low", "high")))


def _forecast(entry: dict[str, Any]) -> Forecast:
    ratio, seconds, score = (_estimate(entry[name]) for name in ("ratio", "seconds", "score"))
    cost = RunCost(**{name: float(v) for name, v in entry["cost"].items()})
    epochs, nbytes = (None if entry[name] is None else float(entry[name]) for name in ("epochs", "nbytes"))
    told = ratio, seconds, score, epochs, nbytes, bool(entry["given_up"])
    return Forecast(Contender(**entry["contender"]), cost, *told)


def _network(entry: dict[str, Any] | None) -> Network | None:
    if entry is None:
        return None
    latency, bandwidth, loss, retry = (
        float(entry[name]) for name in ("latency", "bandwidth", "loss", "retry")
    )
    return Network(latency, bandwidth, loss, retry, download=entry["download"])


def _baseline(entry: dict[str, Any] | None) -> Baseline | None:
    if entry is None:
        return None
    error = None if entry["error"] is None else PowerLaw(**entry["error"])
    points = [(m, y) for m, y in entry["points"]]
    return Baseline(points, PowerLaw(**entry["loss"]), error, entry["seeds"])


def _compute(entry: dict[str, Any]) -> Compute:
    return Compute(**{**entry, "slow": {int(rank): factor for rank, factor in entry["slow"].items()}})


def _read(known: dict[str, Any]) -> TrainingPlan:
    workload = known.pop("workload")
    codecs = {word: CodecCost(**entry) for word, entry in workload.pop("codecs").items()}
    return TrainingPlan(
        workload=Workload(**workload, codecs=codecs),
        profile=_profile(known.pop("profile")),
        network=_network(known.pop("network")),
        compute=_compute(known.pop("compute")),
        objective=Objective(**known.pop("objective")),
        forecasts=[_forecast(entry) for entry in known.pop("forecasts")],
        rule=tuple(known.pop("rule")),
        baseline=_baseline(known.pop("baseline")),
        **known,
    )
