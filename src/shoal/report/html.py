"""The HTML report: one file that opens offline, fetches nothing and can be printed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from shoal.report import charts
from shoal.report.advice import advice
from shoal.report.files import plain, write_whole
from shoal.report.goal import highest_end
from shoal.report.reading import BASELINE, Record, is_virtual, node_name, run_names
from shoal.report.scripts import digest, report_script, uplot_style
from shoal.report.style import CSS
from shoal.report.svg import line_swatch
from shoal.report.table import columns_for
from shoal.report.units import MISSING, count_text
from shoal.report.verdicts import headline, verdicts


def write_html(
    records: Sequence[Record],
    path: str | os.PathLike[str],
    title: str | None = None,
    target: float | None = None,
) -> Path:
    """Write the report of these runs to `path` and return the path. Creates missing folders.

    `target` is the test accuracy (or loss) to which the runs are timed. The same records give the same bytes.
    Raises OSError with the path if the file cannot be written.
    """
    return write_whole(path, page(records, title, target))


def page(records: Sequence[Record], title: str | None = None, target: float | None = None) -> str:
    """The whole document as text."""
    sections = [_reading(records, target), _summary(records, target), _scaling(records), _curves(records)]
    sections += [
        _traffic_and_time(records),
        _nodes(records),
        _staleness(records),
        _faults(records),
        _settings(records),
    ]
    body = "\n".join(section for section in sections if section)
    return document(title or _title(records), _facts(records), body)


def document(title: str, facts: str, body: str) -> str:
    """An HTML page: title, a line of facts, body. Its policy allows its own script and style alone."""
    name, style, script = escape(title), f"{CSS}\n{uplot_style()}", report_script()
    policy = f"default-src 'none'; img-src data:; style-src {digest(style)}; script-src {digest(script)}"
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="generator" content="shoal">\n<title>{name}</title>\n<style>{style}</style>\n</head>\n'
        f'<body>\n<main>\n<h1>{name}</h1>\n<p class="facts">{escape(facts)}</p>\n'
        f"{body}\n</main>\n<script>{script}</script>\n</body>\n</html>\n"
    )


def _title(records: Sequence[Record]) -> str:
    tasks = sorted({str(record["task"]) for record in records if record.get("task")})
    numbers = sorted(
        {int(record.get("workers") or 1) for record in records if record.get("strategy") != BASELINE}
    )
    numbers = numbers or [1] * bool(records)
    span = f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else "".join(map(str, numbers))
    on = f" on {span} workers" if numbers else ""
    on = " on one worker" if numbers == [1] else on
    return f"{', '.join(tasks) or 'Shoal'}{on}"


def _facts(records: Sequence[Record]) -> str:
    runs = "1 run" if len(records) == 1 else f"{len(records)} runs"
    transports = sorted({str(record["transport"]) for record in records if record.get("transport")})
    sizes = sorted({int(record["parameters"]) for record in records if record.get("parameters")})
    sized = f"{' / '.join(count_text(size) for size in sizes)} parameters" if sizes else ""
    clock = "virtual time" if records and all(is_virtual(record) for record in records) else ""
    carried = f"transport {', '.join(transports)}" if transports else ""
    return " · ".join(fact for fact in (runs, sized, carried, clock) if fact)


def _reading(records: Sequence[Record], target: float | None) -> str:
    if not records:
        return '<p class="lead">No run to report.</p>'
    lead = headline(records, target)
    first = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    said = zip(run_names(records), verdicts(records, target), strict=True)
    items = "".join(_entry(name, sentence.removeprefix(f"{name}: ")) for name, sentence in said)
    why = "".join(f'<p class="remark">{escape(sentence)}</p>' for sentence in advice(records))
    return f'{first}<ul class="verdicts">{items}</ul>{why}{_clock_remark(records)}'


def _entry(name: str, text: str) -> str:
    return f"<li><b>{escape(name)}</b> <span>{escape(text)}</span></li>"


def _clock_remark(records: Sequence[Record]) -> str:
    if not any(is_virtual(record) for record in records):
        return ""
    which = (
        "All times" if all(is_virtual(record) for record in records) else "Times of runs on the transport sim"
    )
    text = f"{which} are virtual: the time that the simulated network and workers would have taken."
    return f'<p class="remark">{text}</p>'


def _summary(records: Sequence[Record], target: float | None) -> str:
    if not records:
        return ""
    columns = columns_for(records, target)
    head = "".join(f'<th scope="col">{escape(column.spoken or column.header)}</th>' for column in columns)
    best = highest_end(records) if len(records) > 1 else None
    rows = []
    for index, (record, name) in enumerate(zip(records, run_names(records), strict=True)):
        swatch = line_swatch(charts.styles_of(records)[index])
        cells = "".join(f"<td>{escape(column.text(record))}</td>" for column in columns)
        mark = ' class="best"' if index == best else ""
        rows.append(f'<tr{mark}><th scope="row">{swatch}{escape(name)}</th>{cells}</tr>')
    table = (
        f'<table class="summary"><thead><tr><th scope="col">run</th>{head}</tr></thead><tbody>{"".join(rows)}'
    )
    return (
        f'<h2>Summary</h2><div class="scroll" role="region" aria-label="Summary of the runs" tabindex="0">'
        f"{table}</tbody></table></div>"
    )


def _scaling(records: Sequence[Record]) -> str:
    pictures = charts.scaling(records)
    return f"<h2>Scaling with the number of workers</h2>{pictures}" if pictures else ""


def _curves(records: Sequence[Record]) -> str:
    if not records:
        return ""
    both = "".join(charts.learning_curves(records, quantity) for quantity in ("test_accuracy", "test_loss"))
    return f"<h2>Learning curves</h2>{charts.run_legend(records)}{both}"


def _traffic_and_time(records: Sequence[Record]) -> str:
    if not records:
        return ""
    time = charts.time_by_run(records)
    pair = f'<div class="pair">{charts.traffic(records)}<div>{time}{charts.time_legend()}</div></div>'
    return f"<h2>Traffic and time</h2>{pair}"


def _nodes(records: Sequence[Record]) -> str:
    named = [
        (record, name)
        for record, name in zip(records, run_names(records), strict=True)
        if record.get("nodes")
    ]
    if not named:
        return ""
    figures = "".join(charts.time_by_node(record, name) for record, name in named)
    return f'<h2>Time of each node</h2>{charts.time_legend()}<div class="pair">{figures}</div>'


def _staleness(records: Sequence[Record]) -> str:
    named = zip(records, run_names(records), charts.styles_of(records), strict=True)
    figures = [
        charts.staleness(record, name, style) for record, name, style in named if record.get("staleness")
    ]
    if not figures:
        return ""
    remark = "How many versions old the model behind an update was when the server applied it."
    return f'<h2>Staleness</h2><p class="remark">{remark}</p><div class="pair">{"".join(figures)}</div>'


def _faults(records: Sequence[Record]) -> str:
    items = []
    for record, name in zip(records, run_names(records), strict=True):
        for node in record.get("nodes") or ():
            where = f"{name}, {node_name(record, node)}"
            items += [_entry(where, str(fault)) for fault in node.get("faults") or ()]
    return f'<h2>Faults survived</h2><ul class="verdicts">{"".join(items)}</ul>' if items else ""


def _settings(records: Sequence[Record]) -> str:
    if not records:
        return ""
    blocks = []
    for record, name in zip(records, run_names(records), strict=True):
        rows = "".join(
            f'<tr><th scope="row">{escape(key)}</th><td>{escape(value)}</td></tr>'
            for key, value in _flat(record)
        )
        blocks.append(
            f'<details><summary>{escape(name)}</summary><table class="config">{rows}</table></details>'
        )
    return f'<h2>Settings</h2><div class="settings">{"".join(blocks)}</div>'


def _flat(record: Record) -> list[tuple[str, str]]:
    """The settings of a run line by line, nested ones under dotted names."""
    head = {key: record.get(key) for key in ("strategy", "codec", "transport", "workers", "parameters")}
    return _lines({**head, **(record.get("config") or {})}, "")


def _lines(settings: Mapping[str, Any], prefix: str) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    for key, value in plain(settings).items():
        if isinstance(value, dict):
            lines += _lines(value, f"{prefix}{key}.")
        else:
            lines.append((f"{prefix}{key}", MISSING if value is None else str(value)))
    return lines
