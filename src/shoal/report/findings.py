"""Findings: the results of a study, with the published figures beside ours."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as Grid
from rich.text import Text

from shoal.report.charts import figure
from shoal.report.files import plain, write_whole
from shoal.report.html import document
from shoal.report.svg import COLOURS, Axis, Point, Series, legend, line_chart, line_swatch
from shoal.report.units import MISSING, decimal_text, tick_text

Row = Mapping[str, Any]
WIDE = 1000  # columns of a terminal that any table fits


@dataclass(frozen=True)
class Heading:
    """A column: the key of its value in a row, its header, and the decimals of a number.

    A pair (mean, spread) is shown as mean ± spread.
    """

    key: str
    text: str
    digits: int = 2


@dataclass(frozen=True)
class Table:
    """Rows of plain values. The clock of a row is "real", "virtual" or "published"."""

    title: str
    headings: Sequence[Heading]
    rows: Sequence[Row]


@dataclass(frozen=True)
class ChartLine:
    """A line of a chart; published figures are dashed."""

    name: str
    points: Sequence[tuple[float, float]]
    published: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines over an axis."""

    title: str
    x: str
    y: str
    lines: Sequence[ChartLine]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Claim:
    """A result that the paper, or our own aim, claims; and whether our runs show it."""

    sentence: str
    met: bool


@dataclass(frozen=True)
class Findings:
    """The results of a study: tables, charts, claims, remarks and settings."""

    study: str
    title: str
    source: str
    tables: Sequence[Table]
    charts: Sequence[Chart] = ()
    claims: Sequence[Claim] = ()
    remarks: Sequence[str] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """The findings as plain values, for JSON."""
        record: dict[str, Any] = plain(asdict(self))
        return record


def show_findings(findings: Findings, console: Console) -> None:
    """Print tables, claims and remarks on a terminal."""
    console.print(Text(f"\n{findings.title}", "bold"))
    console.print(Text(findings.source, "dim"))
    for table in findings.tables:
        console.print(Text(f"\n{table.title}"))
        print_whole(_grid(table), console)
    console.print()
    for claim in findings.claims:
        mark, style = ("✓", "green") if claim.met else ("✗ missed:", "yellow")
        console.print(Text.assemble((f"{mark} ", style), claim.sentence))
    for remark in findings.remarks:
        console.print(Text(remark, "dim"))


def print_whole(grid: Grid, console: Console) -> None:
    """Print all columns of a table; a terminal that is too narrow breaks its lines."""
    least = Measurement.get(console, console.options.update(width=WIDE), grid).minimum
    before = console.width
    console.width = max(before, least)
    try:
        console.print(grid, crop=False)
    finally:
        console.width = before


def _grid(table: Table) -> Grid:
    """The table for a terminal: text wraps, numbers do not, and their headings take several lines."""
    grid = Grid(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1), collapse_padding=True, pad_edge=False)
    for heading in table.headings:
        words = any(isinstance(row.get(heading.key), str) for row in table.rows)
        grid.add_column(
            heading.text if words else heading.text.replace(" ", "\n"),
            justify="left" if words else "right",
            no_wrap=not words,
            overflow="fold",
            min_width=min(10, max((len(_cell(row, heading)) for row in table.rows), default=0)),
            vertical="top",
        )
    for row in table.rows:
        grid.add_row(*(_cell(row, heading) for heading in table.headings))
    return grid


def write_findings(findings: Findings, path: str | os.PathLike[str]) -> Path:
    """Write them as an HTML page with tables and charts to `path`, and return the path."""
    return write_whole(path, findings_page(findings))


def write_findings_json(findings: Findings | None, runs: Sequence[Row], path: str | os.PathLike[str]) -> Path:
    """Write `{"findings": {...}, "runs": [...]}`; the findings are null until all runs are done."""
    record = {"findings": findings.record() if findings else None, "runs": [plain(run) for run in runs]}
    return write_whole(path, json.dumps(record, indent=1, allow_nan=False) + "\n")


def findings_page(findings: Findings) -> str:
    """The whole page as text."""
    claims = "".join(
        f"<li><b>{'met' if claim.met else 'missed'}</b> <span>{escape(claim.sentence)}</span></li>"
        for claim in findings.claims
    )
    parts = [f'<ul class="verdicts">{claims}</ul>' if claims else ""]
    drawn = "".join(_chart(chart) for chart in findings.charts)
    parts += [f'<div class="pair findings">{drawn}</div>' if drawn else ""]
    parts += [_table(table) for table in findings.tables]
    parts += [f'<p class="remark">{escape(remark)}</p>' for remark in findings.remarks]
    settings = ", ".join(f"{key} {_setting(value)}" for key, value in plain(findings.settings).items())
    parts += [f"<h2>Settings</h2><p>{escape(settings)}</p>" if settings else ""]
    return document(findings.title, findings.source, "\n".join(part for part in parts if part))


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(heading.text)}</th>' for heading in table.headings)
    rows = []
    for row in table.rows:
        first, *rest = (escape(_cell(row, heading)) for heading in table.headings)
        cells = "".join(f"<td>{cell}</td>" for cell in rest)
        rows.append(f'<tr><th scope="row">{first}</th>{cells}</tr>')
    grid = f'<table class="summary"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    label = escape(table.title, quote=True)
    return (
        f"<h2>{escape(table.title)}</h2>"
        f'<div class="scroll" role="region" aria-label="{label}" tabindex="0">{grid}</div>'
    )


def _chart(chart: Chart) -> str:
    styles = _styles(chart.lines)
    series = [
        Series(line.name, style, [Point(x, y, f"{line.name}: {x:g}, {y:g}") for x, y in line.points])
        for line, style in zip(chart.lines, styles, strict=True)
    ]
    x, y = Axis(chart.x, tick_text, chart.log_x), Axis(chart.y, tick_text, chart.log_y)
    drawn = line_chart(chart.title, series, x, y)
    key = legend([(line_swatch(line.style), line.name) for line in series])
    # on a logarithmic axis a slope has another meaning
    note = "; ".join(f"{axis.label} logarithmic" for axis in (x, y) if axis.log)
    return f"<div>{figure(f'{chart.title}: {chart.y}', drawn, note)}{key}</div>"


def _styles(lines: Sequence[ChartLine]) -> list[int]:
    """One colour per line of ours, and the same colours, dashed, for the published lines."""
    counts = {True: 0, False: 0}
    styles = []
    for line in lines:
        styles.append(counts[line.published] % COLOURS + COLOURS * line.published)
        counts[line.published] += 1
    return styles


def _cell(row: Row, heading: Heading) -> str:
    value = row.get(heading.key)
    if value is None:
        return MISSING
    if isinstance(value, str):
        return value
    if isinstance(value, (tuple, list)):
        mean, spread = value
        return f"{decimal_text(mean, heading.digits)} ± {decimal_text(spread, heading.digits)}"
    return decimal_text(value, heading.digits)


def _setting(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
