"""A plan in words: its table, why the choice is what it is, what the plan cost, and the command to run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich import box
from rich.markup import escape
from rich.table import Table

from shoal.planning.contenders import Contender
from shoal.planning.curves_ahead import Estimate
from shoal.planning.rules import reason_for
from shoal.planning.training_plan import Forecast, TrainingPlan
from shoal.report.units import MISSING, bytes_text, ratio_text, seconds_text
from shoal.sim import Network

ROWS = 10
MOST_COMMANDS = 3
MOST_NAMED = 4
SHOWN_SECONDS = 0.05
WORTH_A_WORD = 1.1  # times as fast as one worker


def plan_table(plan: TrainingPlan) -> Table:
    """The best settings, the choice in bold; fits a terminal of 80 columns."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column("\nsetting", overflow="fold", vertical="top", min_width=12)
    for header in headers(plan):
        table.add_column(header, justify="right", vertical="top", no_wrap=True)
    for forecast in shown(plan):
        chosen = forecast.contender == plan.choice.contender
        style = "bold green" if chosen else "dim" if forecast.given_up else None
        table.add_row(escape(row_name(forecast)), *cells(plan, forecast), style=style)
    return table


def row_name(forecast: Forecast) -> str:
    """The name of a setting, and whether it was given up after a shorter run than others."""
    return f"{forecast.contender.name} (given up)" if forecast.given_up else forecast.contender.name


def shown(plan: TrainingPlan) -> list[Forecast]:
    """The rows: the best, the choice, and one worker."""
    rows = plan.ranked[:ROWS]
    rest = [f for f in (plan.choice, plan.single) if f not in rows]
    return [*rows[: ROWS - len(rest)], *rest]


def headers(plan: TrainingPlan) -> list[str]:
    """Above the columns; the one with intervals is what the objective asks for."""
    asks_score = plan.objective.asks_score
    score = "loss then\n(90 %)" if plan.judged_by_loss else "accuracy, %\n(90 %)"
    goal = score if asks_score else "seconds to goal\n(90 %)"
    money = ["price\n"] if plan.objective.price is not None else []
    return ["s an\nepoch", "samples\nneeded", goal, "speed-\nup", *money, "\nsent", "mem-\nory"]


def cells(plan: TrainingPlan, forecast: Forecast) -> list[str]:
    """One row, in the order of the headers."""
    up, objective, at = speed_up(plan, forecast), plan.objective, forecast.seconds
    asked = forecast.score if objective.asks_score else at
    write = partial(_score, loss=plan.judged_by_loss) if objective.asks_score else _seconds
    sent = forecast.nbytes if forecast.nbytes is not None else forecast.cost.nbytes * objective.epochs
    hours = MISSING if at is None else f"{forecast.machines * at.value / 3600 * (objective.price or 0.0):.3g}"
    return [
        seconds_text(forecast.cost.seconds),
        MISSING if forecast.ratio is None else ratio_text(forecast.ratio.value),
        MISSING if asked is None else write(asked),
        MISSING if up is None else ratio_text(up),
        *([hours] if objective.price is not None else []),
        bytes_text(sent),
        bytes_text(forecast.cost.memory),
    ]


def speed_up(plan: TrainingPlan, forecast: Forecast) -> float | None:
    """How many times as soon as one worker it is where that would be; by samples if it was not tried."""
    if forecast.ratio is not None:
        return plan.single.cost.seconds / (forecast.cost.seconds * forecast.ratio.value)
    return plan.single.cost.seconds / forecast.cost.seconds if forecast.cost.seconds else None


def conclusion(plan: TrainingPlan) -> list[str]:
    """Who is best, or who may be; whether it pays; why; and what to beware of."""
    return [winner(plan), *goal(plan), pays(plan), *reasons(plan), *(f"Note: {note}." for note in plan.notes)]


def goal(plan: TrainingPlan) -> list[str]:
    """Where one worker is at the goal, as all settings then are; nothing where accuracy is asked for."""
    alone = plan.single
    if alone.score is None or plan.objective.asks_score:
        return []
    score = _score(alone.score, plan.judged_by_loss)
    reached = f"a test loss of {score}" if plan.judged_by_loss else f"{score} % test accuracy"
    when = f"after {alone.epochs:.3g} epochs"
    return [f"One worker has {reached} {when}, if its learning curve goes on as it began."]


def winner(plan: TrainingPlan) -> str:
    """The best setting for what is asked, or those that are equal within the noise."""
    names, chosen = [forecast.contender.name for forecast in plan.equals], plan.choice.contender.name
    if len(names) == 1:
        by = ", going by time alone" if plan.is_by_time else ""
        return f"For {plan.objective.text}: {names[0]}{by}."
    told = f"For {plan.objective.text} there is no winner: {_listed(names)} are equal within the noise."
    if plan.is_by_time:
        return f"{told} They were not trained; {chosen} is likely to need the fewest samples."
    return f"{told} {_preferred(plan)}"


def _preferred(plan: TrainingPlan) -> str:
    """Why the choice is preferred to its equals."""
    chosen, finalists = plan.choice, plan.finalists
    among = "of those not given up" if len(finalists) < len(plan.equals) else "of them"
    name = chosen.contender.name
    if len(finalists) == 1:
        return f"The others were given up after a shorter run than {name}."
    if plan.objective.by_epochs:
        return f"{name} takes the least time {among}."
    if sum(f.machines == chosen.machines for f in finalists) == 1:
        return f"{name} needs the fewest {nodes_text(plan)} {among}."
    return f"{name} sends least {among} that need as few {nodes_text(plan)}."


def nodes_text(plan: TrainingPlan) -> str:
    """What nodes are: machines on a network, or processes of one."""
    return "processes" if plan.network is None else "machines"


def _listed(names: Sequence[str]) -> str:
    if len(names) > MOST_NAMED:
        return f"{', '.join(names[:MOST_NAMED])} and {len(names) - MOST_NAMED:,} others"
    return f"{', '.join(names[:-1])} and {names[-1]}"


def pays(plan: TrainingPlan) -> str:
    """Whether more than one worker is worth it."""
    choice, alone = plan.choice, plan.single
    if choice.contender == alone.contender:
        return f"Does it pay? {_stays_alone(plan)}"
    up = speed_up(plan, choice)
    times = ratio_text(up)
    if choice.ratio is not None and alone in plan.equals:
        return f"Does it pay? Perhaps: {times} as fast as one worker, within the noise of it."
    told = f"Does it pay? {times} as fast as one worker, "
    if plan.network is None:
        return f"{told}with {choice.machines} processes on one machine."
    cost = choice.machines / up if up else 0.0
    return f"{told}on {choice.machines} machines: {cost:.2g} times its machine-hours."


def _stays_alone(plan: TrainingPlan) -> str:
    """Why one worker is the choice."""
    alone = plan.single
    if len(plan.forecasts) == 1:
        return "There is nothing to compare one worker with."
    if not plan.is_by_time and plan.tried == [alone]:
        return "No: nothing that was tried learnt as one worker does."
    if all(f.cost.seconds >= alone.cost.seconds for f in plan.forecasts if f is not alone):
        return "No: here every other setting takes longer for an epoch than one worker."
    fastest = max(plan.equals, key=lambda f: speed_up(plan, f) or 0.0)
    up = speed_up(plan, fastest) or 0.0
    if up > WORTH_A_WORD and not plan.is_by_time:
        times = ratio_text(up)
        return f"Perhaps: {row_name(fastest)} may be {times} as fast as one worker, within the noise of it."
    return "No: one worker is as good as any other setting."


def reasons(plan: TrainingPlan) -> list[str]:
    """The rule that explains the choice, and the one that the situation asks for if that is another."""
    (number, because), own = plan.rule, reason_for(plan.choice.contender)
    if own.number == number:
        return [f"Why: rule {number}, {because}."]
    return [f"Why: rule {own.number}, {own.because}. Rule of thumb {number} would have said: {because}."]


def account(plan: TrainingPlan) -> str:
    """What the plan cost beside the run."""
    total, run = sum(plan.taken.values()), plan.run_seconds
    share = total / run if run else 0.0
    long = {part: seconds for part, seconds in plan.taken.items() if seconds >= SHOWN_SECONDS}
    parts = ", ".join(f"{part} {seconds_text(seconds)} s" for part, seconds in long.items())
    unit = "process-seconds" if plan.network is None else "machine-seconds"
    told = f"The plan took {seconds_text(total)} s ({parts}), {share:.0%} of the {unit} of its run"
    return f"{told}." if share <= 0.1 else f"{told}: for so short a run, just try it."


def commands(plan: TrainingPlan, file: Path) -> list[str]:
    """The command for the choice, and those for its equals."""
    rest = [f for f in plan.equals if f.contender != plan.choice.contender and not plan.is_by_time]
    return [command(plan, f.contender, file) for f in (plan.choice, *rest)][:MOST_COMMANDS]


def command(plan: TrainingPlan, contender: Contender, file: Path) -> str:
    """The exact command of one setting; a task on a network runs in virtual time."""
    if plan.script is not None:
        words = ["shoal", "run", "--plan", str(file), "--strategy", contender.word, *contender.arguments]
        return shlex.join([*words, *plan.script])
    words = ["shoal", "compare", "--task", plan.task, "--strategies", contender.word, *contender.arguments]
    words += ["--epochs", str(contender_epochs(plan, contender)), "--batch", str(plan.workload.batch)]
    words += [] if plan.lr is None else ["--lr", str(plan.lr)]
    if contender.workers > 1 and plan.scale_lr != "none":
        words += ["--scale-lr", plan.scale_lr]
    return shlex.join([*words, *([] if plan.network is None else ["--sim"]), "--plan", str(file)])


def contender_epochs(plan: TrainingPlan, contender: Contender) -> int:
    """Whole epochs to the goal."""
    forecast = next(f for f in plan.forecasts if f.contender == contender)
    needed = plan.objective.epochs if forecast.epochs is None else forecast.epochs
    return max(1, -int(-needed // 1))


def network_text(network: Network | None) -> str:
    """The links in words."""
    if network is None:
        return "processes of this machine"
    lossy = f", {100 * network.loss:g} % lost" if network.loss else ""
    return f"links of {network.bandwidth * 8 / 1e6:g} Mbit/s and {1e3 * network.latency:g} ms{lossy}"


def heading(plan: TrainingPlan) -> str:
    """What was planned, and with what figures."""
    step = f"{1e3 * plan.compute.mean:.3g} ms a step"
    model = f"{plan.workload.parameters:,} parameters"
    return f"{plan.task}: {model}, {step}; {network_text(plan.network)}; {plan.looked_at:,} settings priced"


def _seconds(estimate: Estimate) -> str:
    low, high = seconds_text(estimate.low), seconds_text(estimate.high)
    return f"{seconds_text(estimate.value)} ({low}–{high})"


def _score(estimate: Estimate, loss: bool) -> str:
    digits = 3 if loss else 1
    return f"{estimate.value:.{digits}f} ({estimate.low:.{digits}f}–{estimate.high:.{digits}f})"


def lines(plan: TrainingPlan, file: Path) -> Sequence[str]:
    """Everything below the table; the commands name the file of the plan, to be compared with it."""
    return [*conclusion(plan), account(plan), "", "Run it:", *(f"  {line}" for line in commands(plan, file))]
