"""The page of a plan: its table, the front of time against accuracy, and a map of what is best where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from statistics import median

from shoal.planning.contenders import Contender, contenders, crews, one_sided_words
from shoal.planning.forecasting import score_after
from shoal.planning.plan_text import cells, commands, conclusion, headers, network_text, row_name, shown
from shoal.planning.run_time import run_cost
from shoal.planning.surroundings import Machines
from shoal.planning.survivors import guessed_ratio, machines
from shoal.planning.training_plan import Forecast, TrainingPlan
from shoal.report.charts import figure
from shoal.report.html import document
from shoal.report.html_table import html_table
from shoal.report.svg import BASE, Axis, Point, Series, legend, line_chart, line_swatch, series_class
from shoal.report.units import count_text, ratio_text, seconds_text, tick_text
from shoal.sim import Network

BANDWIDTHS = {"1 Mbit/s": 1e6, "10 Mbit/s": 1e7, "100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10}
LATENCY = 200e-6  # where a plan is for processes of one machine
CELL_WIDTH, CELL_HEIGHT, SIDE, TOP = 172, 44, 90, 26


def plan_page(plan: TrainingPlan, file: Path) -> str:
    """The whole page as text."""
    lead, *more = conclusion(plan)
    body = [f'<p class="lead">{escape(lead)}</p>', *(f"<p>{escape(sentence)}</p>" for sentence in more)]
    body += [f"<pre>{escape(line)}</pre>" for line in commands(plan, file)]
    rows = [[row_name(forecast), *cells(plan, forecast)] for forecast in shown(plan)]
    body.append(
        html_table(
            ["setting", *(" ".join(h.replace("-\n", "").split()) for h in headers(plan))], rows, "Settings"
        )
    )
    if plan.baseline is not None:
        body.append(front_figure(plan))
    body.append(map_figure(plan))
    facts = (
        f"{count_text(plan.workload.parameters)} parameters · {1e3 * plan.compute.mean:.3g} ms a step · "
        f"{network_text(plan.network)} · {plan.looked_at:,} settings priced"
    )
    return document(f"A plan for {plan.task}", facts, "\n".join(body))


# -- time against accuracy ---------------------------------------------------------------------------


def front_figure(plan: TrainingPlan) -> str:
    """Where each setting that was tried is after the epochs of the plan, and the front of them."""
    score = "test loss" if plan.judged_by_loss else "test accuracy, %"
    placed = [(forecast, *_place(plan, forecast)) for forecast in plan.tried]
    series = [Series("front", BASE, [_point(plan, *entry) for entry in _front(plan, placed)])]
    for style, entry in enumerate(placed):
        series.append(Series(entry[0].contender.name, style, [_point(plan, *entry)]))
    chart = line_chart(
        "Time against accuracy", series, Axis("seconds", tick_text, log=True), Axis(score, tick_text)
    )
    names = [(line_swatch(line.style), line.name) for line in series]
    after = f"after {plan.objective.epochs} epochs of each; who is on the front is beaten by nobody in both"
    return f"<h2>Time against accuracy</h2>{legend(names)}{figure(score, chart, after)}"


def _place(plan: TrainingPlan, forecast: Forecast) -> tuple[float, float]:
    """Seconds of the plan's epochs, and the score after them."""
    assert plan.baseline is not None
    assert forecast.ratio is not None
    epochs = plan.objective.epochs
    score = score_after(epochs * plan.workload.samples, forecast.ratio, plan.baseline)
    return epochs * forecast.cost.seconds, score.value


def _front(
    plan: TrainingPlan, placed: Sequence[tuple[Forecast, float, float]]
) -> list[tuple[Forecast, float, float]]:
    """Those that no other beats in time and accuracy, the fastest first."""
    sign = -1.0 if plan.judged_by_loss else 1.0
    found: list[tuple[Forecast, float, float]] = []
    for entry in sorted(placed, key=lambda entry: (entry[1], -sign * entry[2])):
        if not found or sign * entry[2] > sign * found[-1][2]:
            found.append(entry)
    return found


def _point(plan: TrainingPlan, forecast: Forecast, seconds: float, score: float) -> Point:
    unit = "" if plan.judged_by_loss else " %"
    return Point(
        seconds, score, f"{forecast.contender.name}: {score:.3g}{unit} after {seconds_text(seconds)} s"
    )


# -- what is best where ------------------------------------------------------------------------------


def map_figure(plan: TrainingPlan) -> str:
    """The best setting for each bandwidth and number of workers."""
    most = max(f.contender.workers for f in plan.forecasts)
    numbers = crews(most)
    if not numbers:
        return ""
    best = best_by_place(plan, numbers)
    words = list(dict.fromkeys(c.word for c, _ in best.values()))
    columns = list(BANDWIDTHS)
    drawn = []
    for (workers, column), (contender, up) in best.items():
        x, y = SIDE + columns.index(column) * CELL_WIDTH, TOP + numbers.index(workers) * CELL_HEIGHT
        drawn.append(_cell(x, y, contender, up, words.index(contender.word)))
    for k, name in enumerate(columns):
        drawn.append(f'<text x="{SIDE + (k + 0.5) * CELL_WIDTH:g}" y="16" text-anchor="middle">{name}</text>')
    for k, workers in enumerate(numbers):
        middle = TOP + (k + 0.6) * CELL_HEIGHT
        drawn.append(f'<text x="{SIDE - 8}" y="{middle:g}" text-anchor="end">{workers} workers</text>')
    width, height = SIDE + CELL_WIDTH * len(columns), TOP + CELL_HEIGHT * len(numbers) + 4
    opening = f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="Best setting">'
    note = (
        "By formulas. How many samples those settings need that were not tried is a guess from the noise "
        "scale, times what the guesses of the others were off by. "
        "The number is the speed-up over one worker."
    )
    drawn_map = f"{opening}{''.join(drawn)}</svg>"
    about = f'<p class="remark">{escape(note)}</p>'
    return f"<h2>What is best where</h2>{about}{figure('Bandwidth and workers', drawn_map)}"


def _cell(x: float, y: float, contender: Contender, up: float, style: int) -> str:
    box = f'x="{x + 2:g}" y="{y + 2:g}" width="{CELL_WIDTH - 4}" height="{CELL_HEIGHT - 4}" rx="4"'
    often = [f"every {contender.period}"] if contender.period > 1 else []
    coded = [contender.codec] if contender.codec != "none" else []
    first, second = contender.word, ", ".join([ratio_text(up), *often, *coded])
    middle = x + CELL_WIDTH / 2
    return (
        f'<g><rect class="fill {series_class(style)}" fill-opacity="0.2" {box}>'
        f"<title>{escape(contender.name)}</title></rect>"
        f'<text x="{middle:g}" y="{y + 19:g}" text-anchor="middle">{escape(first)}</text>'
        f'<text x="{middle:g}" y="{y + 35:g}" text-anchor="middle">{escape(second)}</text></g>'
    )


def best_by_place(
    plan: TrainingPlan, numbers: Sequence[int]
) -> Mapping[tuple[int, str], tuple[Contender, float]]:
    """For each number of workers and bandwidth: the setting that is soonest, and how much over one worker."""
    steps = plan.objective.epochs * -(-plan.workload.samples // plan.workload.batch)
    refused = {**plan.workload.refused, **one_sided_words()}
    own_loop = plan.script is not None
    listed = contenders(numbers[-1], steps, plan.workload.codecs, refused=refused, own_loop=own_loop)
    tried = {f.contender: f.ratio.value for f in plan.tried if f.ratio is not None}
    guesses = {c: guessed_ratio(c, plan.workload, plan.noise) for c in listed}
    off = [ratio / guesses[c] for c, ratio in tried.items() if c in guesses and c.workers > 1]
    scale = median(off) if off else 1.0  # as much as the guesses of those that were tried were too low
    ratios = {c: tried.get(c) or (scale if c.workers > 1 else 1.0) * guesses[c] for c in listed}
    network, found = plan.network or Network(LATENCY), {}
    for column, bits in BANDWIDTHS.items():
        site = Machines(plan.profile, replace(network, bandwidth=bits / 8), None, plan.compute)
        costs = {c: run_cost(c, plan.workload, site, plan.objective.epochs).seconds for c in listed}
        alone = costs[listed[0]]
        for workers in numbers:
            able = [c for c in listed if c.workers in (1, workers)]
            best = min(able, key=lambda c: (costs[c] * ratios[c], machines(c)))
            found[workers, column] = best, alone / (costs[best] * ratios[best])
    return found
