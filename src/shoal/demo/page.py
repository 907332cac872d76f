"""demo.html: the five lines, the next command, and the charts and tables of the three acts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from shoal.demo import sentences, tables
from shoal.demo.eight_machines import MACHINES, PERIOD, EightMachines
from shoal.demo.killed import Killed
from shoal.demo.sentences import SCRIPT, Acts, times
from shoal.demo.this_machine import APART, DDP, ONE, TWO, ThisMachine
from shoal.report.charts import figure, learning_curves, run_legend
from shoal.report.files import write_whole
from shoal.report.html import document
from shoal.report.html_table import html_table
from shoal.report.svg import (
    BASE,
    Axis,
    Bar,
    Part,
    Point,
    Series,
    bar_chart,
    legend,
    line_chart,
    line_swatch,
    series_class,
)
from shoal.report.units import count_text, decimal_text, seconds_text, tick_text


def write_page(acts: Acts, lines: Sequence[str], command: str, path: Path) -> Path:
    """Write the page to `path` and return the path."""
    return write_whole(path, page(acts, lines, command))


def page(acts: Acts, lines: Sequence[str], command: str) -> str:
    """The whole page as text."""
    items = "".join(
        f"<li><b>{number}</b> <span>{escape(line)}</span></li>" for number, line in enumerate(lines, 1)
    )
    body = [
        f'<ol class="verdicts numbered">{items}</ol>',
        "<h2>Next: your own script</h2><p>Three lines in it, then one command:</p>",
        f"<pre>{escape(SCRIPT)}</pre>",
        f"<pre>{escape(command)}</pre>",
        _here(acts.here),
        _eight(acts.eight),
        _killed(acts.killed),
    ]
    return document(
        "What Shoal is good for, in one run", sentences.about_load(acts.here.load), "\n".join(body)
    )


def _here(here: ThisMachine) -> str:
    about = (
        f"Real processes of one thread each. A net of {count_text(here.parameters)} parameters learns from "
        f"{count_text(here.samples)} digits that were drawn in code, {here.batch} a step and worker. "
        f"{len(here.rounds)} round{'s' * (len(here.rounds) > 1)}: in each the four took turns, with a seed "
        "of its own. Two workers that never talk are the ceiling: nothing that talks can be faster."
    )
    styles = {ONE: BASE, TWO: 0, DDP: 1, APART: BASE}
    bars = []
    for kind in (ONE, TWO, DDP, APART):
        ratio = here.speed_up(kind)
        part = Part(series_class(styles[kind]), ratio, f"{kind}: {times(ratio)} times as fast as one worker")
        bars.append(Bar(kind, f"{times(ratio)} times", [part]))
    chart = bar_chart("Speed", bars, Axis("times as fast as one worker", tick_text))
    drawn = f'<div class="pair">{figure("Speed on the same samples", chart)}</div>'
    drawn += _table(tables.this_machine_table(here))
    return _act("Act 1. This machine: one worker, then two", about, drawn)


def _eight(eight: EightMachines) -> str:
    about = (
        f"Simulated: {MACHINES} machines with {sentences.link_text(eight.network)}. Gradients are computed "
        "for real, so the accuracy is real; times are virtual, computed from a step of "
        f"{1e3 * eight.step_seconds:.2f} ms that was measured on this machine, and from the size of the "
        f"messages. A net of {count_text(eight.records[0]['parameters'])} parameters; bmuf and diloco "
        f"average every {PERIOD} steps. {sentences.to_target(eight)} {sentences.foretold(eight)}"
    )
    curves = learning_curves(eight.records, "test_accuracy")
    drawn = f"{run_legend(eight.records)}{curves}{_table(tables.eight_machines_table(eight))}"
    return _act(f"Act 2. {MACHINES} machines on an office link, in virtual time", about, drawn)


def _killed(figures: Killed) -> str:
    about = (
        f"Real processes: {figures.workers} workers and a server (asgd) that writes every update to a "
        f"journal. {figures.left} workers were there at the end, with a test accuracy of "
        f"{decimal_text(figures.test_accuracy, 1)} %."
    )
    points = [Point(x, y, f"loss {y:.2f} after {seconds_text(x)} s") for x, y in figures.curve()]
    high = max(point.y for point in points)
    lines = [Series("loss of the workers' batches", 0, points)]
    for style, kill in enumerate(figures.kills, 1):
        name = f"{kill.name} killed, after {seconds_text(kill.seconds)} s"
        ends = [Point(kill.seconds, height, name) for height in (0.0, high)]
        lines.append(Series(name, style, ends))
    chart = line_chart("Loss", lines, Axis("seconds", tick_text), Axis("loss", tick_text), 0.0)
    key = legend([(line_swatch(line.style), line.name) for line in lines])
    told = "".join(f"<li><b>report</b> <span>{escape(fault)}</span></li>" for fault in figures.faults)
    drawn = (
        f'{key}<div class="pair">{figure("Training loss", chart)}{_table(tables.killed_table(figures))}</div>'
    )
    return _act("Act 3. Killed in mid-run", about, f'{drawn}<ul class="verdicts">{told}</ul>')


def _act(heading: str, about: str, drawn: str) -> str:
    return f"<h2>{escape(heading)}</h2><p>{escape(about)}</p>{drawn}"


def _table(table: tables.TextTable) -> str:
    return html_table(table.headers, table.rows)
