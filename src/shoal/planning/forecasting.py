"""Forecasts: when each setting gets to the goal, and how accurate it is then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import hypot, isfinite, log

from shoal.planning.contenders import SINGLE, Contender
from shoal.planning.curves_ahead import Baseline, Estimate, PowerLaw, continued
from shoal.planning.objectives import Objective
from shoal.planning.run_time import RunCost
from shoal.planning.short_runs import Race
from shoal.planning.training_plan import FORMULA_DOUBT, Forecast
from shoal.planning.workload import Workload


def goal_samples(objective: Objective, baseline: Baseline, samples: int) -> float:
    """Samples that one worker needs to the goal; `samples` are those of an epoch."""
    if objective.target is None:
        return float(objective.epochs * samples)
    law, y = _target(objective, baseline)
    return law.samples_to(y)


def goal_doubt(objective: Objective, baseline: Baseline) -> float:
    """How far the logarithm of these samples may be off; it is the same for all settings."""
    if objective.target is None:
        return 0.0
    law, y = _target(objective, baseline)
    return law.samples_doubt(y)


def _target(objective: Objective, baseline: Baseline) -> tuple[PowerLaw, float]:
    """The law that tells when the target is reached, and where it is on it."""
    assert objective.target is not None
    if objective.is_loss or baseline.error is None:
        return baseline.loss, objective.target
    return baseline.error, 100.0 - (objective.percent or 0.0)


def forecast_all(
    costs: Mapping[Contender, RunCost], workload: Workload, objective: Objective, found: Race | None
) -> list[Forecast]:
    """A forecast for every setting; those that were tried tell more."""
    tried = {} if found is None else {each.contender: each for each in found.tried}
    forecasts = []
    for contender, cost in costs.items():
        if found is None or contender not in tried:
            forecasts.append(Forecast(contender, cost))
            continue
        goal = _goal(objective, found.baseline, cost, workload.samples)
        ratio = tried[contender].ratio
        if contender != SINGLE:
            ratio = continued(ratio, tried[contender].samples, goal, own=objective.asks_score)
        one = _forecast(contender, cost, ratio, workload.samples, objective, found.baseline)
        forecasts.append(replace(one, given_up=tried[contender].given_up))
    return forecasts


def _goal(objective: Objective, baseline: Baseline, cost: RunCost, epoch: int) -> float:
    """Samples up to which ratios are continued: one worker's to the goal, or the setting's own."""
    if objective.within is not None:
        return objective.within / cost.seconds * epoch
    return goal_samples(objective, baseline, epoch)


def _forecast(
    contender: Contender, cost: RunCost, ratio: Estimate, epoch: int, objective: Objective, baseline: Baseline
) -> Forecast:
    if not isfinite(ratio.value):
        return Forecast(contender, cost, ratio)
    each = cost.seconds / epoch
    if objective.within is not None:
        samples = objective.within / each
    elif objective.by_epochs:
        samples = float(objective.epochs * epoch)
    else:
        samples = goal_samples(objective, baseline, epoch) * ratio.value
    far = log(ratio.high / ratio.value) if not (objective.within or objective.by_epochs) else 0.0
    if objective.within is None and not objective.by_epochs:
        far = hypot(far, goal_doubt(objective, baseline))
    far = hypot(far, FORMULA_DOUBT)
    seconds = Estimate.around(samples * each, far)
    score = score_after(samples, ratio, baseline)
    return Forecast(contender, cost, ratio, seconds, score, samples / epoch, samples / epoch * cost.nbytes)


def score_after(samples: float, ratio: Estimate, baseline: Baseline) -> Estimate:
    """Accuracy in per cent, or loss, after so many samples of a setting with this ratio."""
    law: PowerLaw = baseline.error or baseline.loss
    middle = law.at(samples / ratio.value)
    best, worst = law.at(samples / ratio.low).low, law.at(samples / ratio.high).high
    if baseline.error is None:
        return Estimate(middle.value, best, worst)
    return Estimate(100 - min(100.0, middle.value), 100 - min(100.0, worst), 100 - best)
