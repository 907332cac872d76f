"""A plan as words: what a worker that joins from another machine must know, in JSON.

No code travels: the task, the strategy and the codec are made from their names there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any

from shoal.codecs import CODECS
from shoal.core.growth import Growth
from shoal.core.task import Task
from shoal.programs.tasks import TASKS
from shoal.runs.plan import Plan
from shoal.strategies import STRATEGIES

PLAIN = (
    *("workers", "max_workers", "epochs", "seed", "transport", "collective", "timeout", "patience"),
    *("scale_lr", "tests", "min_workers"),
)
"""Settings that are numbers or words already."""


def words_of(plan: Plan) -> dict[str, Any]:
    """The settings of a run as plain values. Raises ValueError if they cannot be said so."""
    task = plan.task
    words = {
        "task": task.name,
        "lr": task.lr,
        "batch": task.batch,
        "growth": [list(map(list, task.growth.at)), task.growth.largest],
        "strategy": [STRATEGIES.name_of(plan.strategy), asdict(plan.strategy)],
        "codec": CODECS.text_of(plan.codec),
        **{name: getattr(plan, name) for name in PLAIN},
    }
    _check(plan, words)
    return words


def plan_of(words: Mapping[str, Any]) -> Plan:
    """The settings that `words_of` has said."""
    at, largest = words["growth"]
    growth = Growth(tuple((int(epoch), float(factor)) for epoch, factor in at), largest)
    task = replace(TASKS.make(words["task"]), lr=words["lr"], batch=words["batch"], growth=growth)
    word, options = words["strategy"]
    return Plan(
        task=task,
        strategy=STRATEGIES.make(word, **options),
        codec=CODECS.read(words["codec"]),
        **{name: words[name] for name in PLAIN},
    )


def _check(plan: Plan, words: dict[str, Any]) -> None:
    """Raise ValueError unless another machine would make the same from these words."""
    why = f"max_workers={plan.max_workers}: a worker that joins makes everything from names, and"
    if plan.task.name not in TASKS:
        raise ValueError(f"{why} there is no task {plan.task.name!r} in `shoal list tasks`")
    if words["strategy"][0] not in STRATEGIES:
        raise ValueError(f"{why} there is no strategy {words['strategy'][0]!r} in `shoal list strategies`")
    try:
        made = plan_of(json.loads(json.dumps(words)))
    except (TypeError, ValueError) as problem:
        raise ValueError(f"{why} this cannot be made so: {problem}") from None
    if made.strategy != plan.strategy or made.codec != plan.codec:
        raise ValueError(f"{why} the strategy or the codec has options that have no word")
    if not _alike(made.task, plan.task):
        raise ValueError(f"{why} this task {plan.task.name!r} has settings of its own beside lr and batch")


def _alike(one: Task, other: Task) -> bool:
    return all(_same(getattr(one, f.name), getattr(other, f.name)) for f in fields(Task) if f.compare)


def _same(one: Any, other: Any) -> bool:
    """Whether two settings are equal; functions with some arguments given are by their parts."""
    if isinstance(one, partial) and isinstance(other, partial):
        parts = ((p.func, p.args, p.keywords) for p in (one, other))
        return all(_same(a, b) for a, b in zip(*parts, strict=True))
    return bool(one == other)
