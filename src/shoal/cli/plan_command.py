"""`shoal plan`: its options, checked before torch is imported. shoal.planning makes the plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.command import PASSED
from shoal.cli.compare import check_numbers
from shoal.cli.outcome import ReportFile
from shoal.cli.telling import telling
from shoal.core.catalogue import check_word, split_list
from shoal.core.paths import check_file
from shoal.core.words import SCALING
from shoal.programs.tasks import TASKS
from shoal.strategies import STRATEGIES

if TYPE_CHECKING:
    from shoal.planning.training_plan import TrainingPlan

FILE = Path("plan.json")


def plan(
    ctx: typer.Context,
    task: Annotated[
        str | None, typer.Option(metavar="WORD", help="A built-in task; see: shoal list tasks.")
    ] = None,
    workers: Annotated[int, typer.Option("-n", "--workers", help="Workers that there may be at most.")] = 8,
    network: Annotated[
        str | None,
        typer.Option(
            metavar="LINKS",
            help="Links between machines: 100Mbit,20ms,1%; or home, office.",
            show_default="none: processes of this machine",
        ),
    ] = None,
    compute: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Time of a step: 20ms,10%.", show_default="measured here"),
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="What shoal calibrate has kept.", show_default="measured now"),
    ] = None,
    target: Annotated[
        float | None, typer.Option(help="Soonest at this test accuracy: 0.97 (or at this test loss).")
    ] = None,
    within: Annotated[
        str | None, typer.Option(metavar="TIME", help="The best accuracy within 10min, 90s or 2h.")
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(help="The best accuracy after so many epochs; with another goal, the run's length."),
    ] = None,
    fewest_bytes: Annotated[
        bool, typer.Option("--fewest-bytes", help="The goal with the fewest bytes sent.")
    ] = False,
    price: Annotated[
        float | None, typer.Option(metavar="MONEY", help="Of a machine for an hour: the cheapest.")
    ] = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of each machine: 16GB.")] = None,
    strategies: Annotated[
        str | None, typer.Option(metavar="WORDS", help="Look at these alone.", show_default="all")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Samples per worker and step.", show_default="the task's own")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.", show_default="the task's own")] = None,
    scale_lr: Annotated[
        str, typer.Option(metavar="WORD", help="Learning rate of N workers: none, linear, sqrt, auto.")
    ] = "auto",
    trials: Annotated[
        bool, typer.Option("--trials/--no-trials", help="Train the best settings for a while.")
    ] = True,
    save: Annotated[Path, typer.Option(metavar="FILE", help="Keep the plan, for --plan FILE.")] = FILE,
    report: ReportFile = None,
    seed: Annotated[int, typer.Option(help="Seed of the short runs.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Find out which strategy, period, codec and number of workers suits you.

    Prices every setting by formulas, trains the few best for a while in
    virtual time, and prints the best with the command that runs it.
    """
    check_words(task, strategies, scale_lr, list(ctx.args))
    check_numbers(1 if epochs is None else epochs, batch, lr, None)
    if workers < 1:
        raise ValueError(f"-n {workers}: a run needs at least 1 worker")
    check_file("--save", save)
    if report is not None:
        check_file("--report", report)
    settings = read_settings(network, compute, memory)
    settings |= {"profile": profile, "strategies": None if strategies is None else split_list(strategies)}
    goals = {"target": target, "within": within, "epochs": epochs, "price": price}
    goals["fewest_bytes"] = fewest_bytes
    if task is None:
        refuse_for_script(ctx)
        made = plan_for([*ctx.args, *ctx.meta[PASSED]], workers, goals, settings, quiet)
    else:
        settings |= {"batch": batch, "lr": lr, "scale_lr": scale_lr, "trials": trials, "seed": seed}
        made = plan_task(task, workers, {**goals, **settings}, quiet)
    show(made, save, report)


FOR_TASKS = {
    **dict.fromkeys(("batch", "lr", "seed"), "a script has its own"),
    "scale_lr": "a script sets its own learning rate",
    "trials": "a script is never trained for a plan",
    "epochs": "a script has its own, and tells no accuracy before it has run",
}
"""Options that only a task can be told, and why a script cannot."""


def refuse_for_script(ctx: typer.Context) -> None:
    """Raise ValueError for what only a task can be told."""
    for name, why in FOR_TASKS.items():
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = "--trials and --no-trials are" if name == "trials" else f"--{name.replace('_', '-')} is"
            raise ValueError(f"{option} for a task; {why}")


def check_words(task: str | None, strategies: str | None, scale_lr: str, script: list[str]) -> None:
    """Raise ValueError with the nearest name for a word that is not known."""
    if task is None and not script:
        raise ValueError("name a script or a task, as in: shoal plan train.py -n 8, or --task mnist")
    if task is not None and script:
        raise ValueError(f"--task {task} and {script[0]}: plan one of the two")
    if task is not None:
        TASKS.check_text(task)
    named = None if strategies is None else split_list(strategies)
    if named == []:
        raise ValueError(
            "--strategies names none; try --strategies sync,bmuf, or leave it out to look at all"
        )
    for word in named or ():
        STRATEGIES.check_text(word)
    check_word("scale-lr", scale_lr, SCALING)


def read_settings(network: str | None, compute: str | None, memory: str | None) -> dict[str, Any]:
    """Links, step and memory, read from text."""
    from shoal.sim.models import Compute, Network, byte_count

    return {
        "network": None if network is None else Network.parse(network),
        "compute": None if compute is None else Compute.parse(compute),
        "memory": None if memory is None else byte_count(memory),
    }


def plan_task(task: str, workers: int, settings: dict[str, Any], quiet: bool) -> TrainingPlan:
    """The plan of a task."""
    from shoal.planning.planner import plan as make  # imports torch

    with telling(quiet) as tell:
        return make(task, workers, tell=tell, **settings)


def plan_for(
    script: list[str], workers: int, goals: dict[str, Any], settings: dict[str, Any], quiet: bool
) -> TrainingPlan:
    """The plan of a script, by time alone."""
    from shoal.planning.objectives import DEFAULT_EPOCHS, Objective, duration
    from shoal.planning.script_plan import plan_script  # imports torch

    if not Path(script[0]).is_file():
        raise ValueError(f"there is no script {script[0]!r}")
    limit = None if goals["within"] is None else duration(goals["within"])
    objective = Objective(
        DEFAULT_EPOCHS,
        goals["target"],
        limit,
        fewest_bytes=goals["fewest_bytes"],
        price=goals["price"],
    )
    with telling(quiet) as tell:
        return plan_script(script, workers, objective=objective, tell=tell, **settings)


def show(made: TrainingPlan, save: Path, report: Path | None) -> None:
    """Print the plan and keep it."""
    from rich.console import Console

    from shoal.planning.plan_text import heading, lines, plan_table

    console = Console(highlight=False)
    console.print(heading(made), soft_wrap=True, markup=False)
    console.print()
    console.print(plan_table(made))
    made.save(save)
    console.print("\n" + "\n".join(lines(made, save)), soft_wrap=True, markup=False)
    console.print(f"\nkept: {save}", soft_wrap=True, markup=False)
    if report is not None:
        from shoal.planning.plan_page import plan_page
        from shoal.report.files import write_whole

        write_whole(report, plan_page(made, save))
        console.print(f"report: {report}", soft_wrap=True, markup=False)
