"""The runs of `shoal compare`: all checked before the first one starts, then run one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import typer

from shoal.api.run import run
from shoal.cli.checkpoint_options import resumable
from shoal.cli.outcome import Outcome
from shoal.cli.watch_options import live_page
from shoal.core.catalogue import split_options
from shoal.core.codec import Identity
from shoal.core.crew_sizes import CrewSizes
from shoal.core.errors import Interrupted, ShoalError
from shoal.core.task import Data, Task
from shoal.launch.join import choose_codec, local_threads
from shoal.layouts import LAYOUTS
from shoal.layouts.model_layout import ModelLayout
from shoal.records.recording import both, last_progress
from shoal.report import ProgressDisplay
from shoal.report.units import scaled_text
from shoal.runs.plan import Plan
from shoal.runs.plan_words import words_of
from shoal.strategies import STRATEGIES
from shoal.strategies.single import Single
from shoal.vocabulary.strategy import Strategy

INNER = ("leg", "joins")
"""Fields of a plan that `run` does not take."""


def compare_strategies(
    chosen: Mapping[str, Mapping[str, Any]],
    numbers: Sequence[int],
    layouts: Sequence[str],
    task: Task,
    settings: Mapping[str, Any],
    virtual: Mapping[str, Any],
    checkpoint: Path | None,
    outcome: Outcome,
    quiet: bool,
) -> None:
    """Train `task` with each strategy on each number of workers, and with a crew that grows, if there is one.

    With layouts each number is one of processes, which every layout makes workers of. `chosen` holds the
    options of each strategy, `settings` the fields of Plan that all runs share, `virtual` the network and
    compute models of virtual time.
    """
    common = {**settings, "task": task}
    if common["threads"] is None and common["transport"] != "sim":
        common["threads"] = local_threads(max([*numbers, common["crew"].size_of(None)]))
    made = {text: STRATEGIES.make(split_options(text)[0], **options) for text, options in chosen.items()}
    plans = make_plans(made, numbers, [LAYOUTS.read(word) for word in layouts], checkpoint, common)
    data = check(list(plans.values()))
    run_all(plans, data, virtual, outcome, ProgressDisplay(enabled=not quiet))


def make_plans(
    chosen: Mapping[str, Strategy],
    numbers: Sequence[int],
    layouts: Sequence[ModelLayout],
    checkpoint: Path | None,
    common: Mapping[str, Any],
) -> dict[str, Plan]:
    """The runs of the comparison, by name."""
    plans, crew, alone = {}, common["crew"], {"crew": CrewSizes()}
    for word, strategy in chosen.items():
        if isinstance(strategy, Single):
            plans[word] = make_plan(word, strategy, checkpoint, {**common, **alone})
            continue
        for workers in numbers:
            name = word if len(numbers) == 1 else f"{word}-{workers}"
            for layout in layouts:
                settings = {**common, **alone, **laid_out(layout, workers, common["task"])}
                called = name if settings["layout"].group == 1 else f"{name}, {LAYOUTS.text_of(layout)}"
                plans[called] = make_plan(called, strategy, checkpoint, settings)
        if crew:
            name = f"{word}-crew" if numbers else word
            plans[name] = make_plan(name, strategy, checkpoint, {**common, "workers": crew.largest})
    return plans


def laid_out(layout: ModelLayout, processes: int, task: Task) -> dict[str, Any]:
    """The settings of so many processes as workers of a layout: all together, they take the same samples."""
    over = layout.over(processes)
    group = over.group or 1
    task = replace(task, batch=task.batch * group)
    return {"layout": over, "workers": processes // group, "task": task}


def make_plan(name: str, strategy: Strategy, checkpoint: Path | None, common: Mapping[str, Any]) -> Plan:
    """One run of the comparison. A strategy that sends nothing ignores what it is for."""
    settings = {**common, "strategy": strategy, "codec": choose_codec(common["codec"], strategy)}
    if not strategy.servers:
        settings["servers"] = 1
    if isinstance(strategy, Single):
        settings["workers"] = 1
    if isinstance(strategy, Single) or strategy.independent:
        settings |= {"codec": Identity(), "collective": "auto", "balance": False}
        settings |= {"min_workers": 1, "spares": 0, "max_workers": None}
    return Plan(**settings, checkpoint=None if checkpoint is None else str(checkpoint / name))


def check(plans: Sequence[Plan]) -> Data:
    """Find now what would otherwise stop a later run, after those before it have taken their minutes.

    Returns the data, which is that of all runs.
    """
    data = plans[0].task.data()  # also downloads it, once for all runs
    for plan in plans:
        plan.check_checkpoints(data)
        if plan.places > plan.workers:
            words_of(plan)
    for plan in plans:
        for note in notes(plan.strategy, plan.steps(data)):
            typer.echo(f"note: {STRATEGIES.name_of(plan.strategy)} {note}", err=True)
    return data


def notes(strategy: Strategy, steps: int) -> Iterator[str]:
    """Options that do not suit so few steps."""
    period = getattr(strategy, "period", 0) if strategy.deal.blocks is None else 0
    switch = getattr(strategy, "switch", 0)
    takes = f"but each worker takes only {steps}"
    if 2 * period > steps:
        yield f"merges every {period} steps, {takes}; try --strategy.period {max(1, steps // 10)}"
    if switch >= steps:
        yield f"switches after {switch} steps, {takes}; try --strategy.switch {steps // 2}"


def run_all(
    plans: Mapping[str, Plan],
    data: Data,
    virtual: Mapping[str, Any],
    outcome: Outcome,
    progress: ProgressDisplay,
) -> None:
    """Run them one after the other. If one fails, the figures of those before it are written and shown."""
    records: list[dict[str, Any]] = []
    watch = outcome.watch_plan(lambda told: progress.say(f"plan: {told}"))
    try:
        with live_page(outcome.watch) as page, progress:
            for number, (word, plan) in enumerate(plans.items(), 1):
                title = f"{word} on {plan.task.name}, {told(plan, data)} ({number} of {len(plans)})"
                progress.start(title, plan.workers, plan.nodes - plan.workers)
                page.start(word, plan.places, plan.nodes - plan.workers, **about(plan))
                settings = {
                    field.name: getattr(plan, field.name) for field in fields(plan) if field.name not in INNER
                }
                heard = both(progress.update, page.update)
                if watch is not None:
                    watch.begin({"strategy": STRATEGIES.name_of(plan.strategy), "config": plan.config(data)})
                    heard = both(heard, watch.update)
                with named(word), resumable(plan.checkpoint):
                    result = run(
                        **settings,
                        **virtual,
                        on_progress=heard,
                        log=outcome.loggers,
                        runs=outcome.store,
                    )
                for event in last_progress(result.nodes):
                    progress.update(event)
                    page.update(event)
                page.finish(result.record())
                records.append(result.record())
                outcome.write(records)
    finally:
        if records:
            outcome.show(records)


def about(plan: Plan) -> dict[str, Any]:
    """What the live page says of a run."""
    facts = f"{plan.task.name} · {plan.transport}"
    return {"virtual": plan.transport == "sim", "facts": facts, "task": plan.task.name}


def told(plan: Plan, data: Data) -> str:
    """The workers and, if it was scaled, the learning rate: "4 workers, lr 0.48 (4 x 0.12)"."""
    first = f"{plan.crew.at[0][1]} to " if len(plan.crew.at) > 1 else ""
    workers = "1 worker" if plan.workers == 1 else f"{first}{plan.workers} workers"
    workers += f" of {plan.group} processes" if plan.group > 1 else ""
    factor = plan.lr_factor(data)
    return workers if factor == 1 else f"{workers}, {scaled_text(plan.scaled_task(data).lr, factor)}"


@contextmanager
def named(word: str) -> Iterator[None]:
    """Begin the message of a failure with the name of the run."""
    try:
        yield
    except Interrupted:
        raise
    except ShoalError as error:
        error.args = (f"{word}: {error}", *error.args[1:])
        raise
