"""The charts of a report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from shoal.report.crews import legs_of
from shoal.report.reading import BASELINE, Record, is_resumed, is_virtual, node_name, run_names, workers_of
from shoal.report.svg import (
    BASE,
    Axis,
    Bar,
    Mark,
    Part,
    Point,
    Series,
    bar_chart,
    column_chart,
    fill_swatch,
    legend,
    line_chart,
    line_swatch,
    series_class,
)
from shoal.report.units import (
    bytes_text,
    count_text,
    decimal_text,
    finite,
    percent_text,
    seconds_text,
    tick_text,
)

PARTS = (("compute", "computing"), ("send", "sending"), ("wait", "waiting"), ("other", "other"))
MOST_NODES = 16
MOST_COLUMNS = 24


def styles_of(records: Sequence[Record]) -> list[int]:
    """A line style for each run; the first `single` run is grey."""
    styles: list[int] = []
    for record in records:
        quiet = record.get("strategy") == BASELINE and BASE not in styles
        styles.append(BASE if quiet else sum(style != BASE for style in styles))
    return styles


def time_unit(records: Sequence[Record]) -> str:
    """Seconds or virtual seconds, or both if the runs use different clocks."""
    virtual = [is_virtual(record) for record in records]
    if virtual and all(virtual):
        return "virtual seconds"
    return "seconds (virtual for simulated runs)" if any(virtual) else "seconds"


def run_legend(records: Sequence[Record]) -> str:
    """The legend of the learning curves."""
    pairs = zip(styles_of(records), run_names(records), strict=True)
    return legend([(line_swatch(style), name) for style, name in pairs])


def learning_curves(records: Sequence[Record], quantity: str) -> str:
    """Test accuracy or test loss, over time and over samples, side by side."""
    accuracy = quantity == "test_accuracy"
    title = "Test accuracy, %" if accuracy else "Test loss"
    over = (
        ("seconds", time_unit(records), tick_text),
        ("samples", "samples seen by all workers", _thousands),
    )
    figures = []
    for key, label, text in over:
        lines = _series(records, key, quantity)
        values = [point.y for line in lines for point in line.points]
        log = not accuracy and bool(values) and min(values) > 0 and max(values) / min(values) > 10
        floor = _floor(lines) if accuracy else None
        chart = line_chart(title, lines, Axis(label, text), Axis(title, tick_text, log), floor)
        notes = [f"axis from {floor:g} %"] if floor is not None else []
        notes += ["logarithmic"] if log else []
        if key == "seconds" and any(map(is_resumed, records)):
            notes.append("without resumed runs, whose whole time is not known")
        figures.append(
            figure(f"{title}, over {'time' if key == 'seconds' else 'samples'}", chart, "; ".join(notes))
        )
    return f'<div class="pair">{"".join(figures)}</div>'


def scaling(records: Sequence[Record]) -> str:
    """Throughput and accuracy over the number of workers, for strategies with several such runs."""
    words = list(dict.fromkeys(str(record.get("strategy")) for record in records))
    several = [word for word in words if len({_workers(r) for r in records if r.get("strategy") == word}) > 1]
    if not several:
        return ""
    chosen = [
        ("samples_per_second", "Samples per second", Axis("samples per second", _thousands, log=True)),
        ("test_accuracy", "Test accuracy, %", Axis("test accuracy, %", tick_text)),
    ]
    figures = []
    for key, title, axis in chosen:
        lines = [_by_workers(records, word, style, key, axis) for style, word in enumerate(several)]
        chart = line_chart(title, lines, Axis("workers", tick_text, log=True), axis)
        figures.append(figure(f"{title}, over workers", chart, "logarithmic"))
    key_to_lines = legend([(line_swatch(style), word) for style, word in enumerate(several)])
    return f'{key_to_lines}<div class="pair">{"".join(figures)}</div>'


def _workers(record: Record) -> int:
    return int(record.get("workers") or 1)


def _by_workers(records: Sequence[Record], word: str, style: int, key: str, axis: Axis) -> Series:
    mine = sorted((r for r in records if r.get("strategy") == word), key=_workers)
    points = []
    for record in mine:
        value = finite(record.get(key))
        if value is not None and (value > 0 or not axis.log):
            note = f"{word}, {_workers(record)} workers: {axis.text(value)}"
            points.append(Point(float(_workers(record)), value, note))
    return Series(word, style, points)


def figure(heading: str, chart: str, note: str = "") -> str:
    """A chart with its caption and an optional note."""
    remark = f' <span class="note">{escape(note)}</span>' if note else ""
    return f"<figure><figcaption>{escape(heading)}{remark}</figcaption>{chart}</figure>"


def traffic(records: Sequence[Record]) -> str:
    """Bytes sent by all nodes of each run; logarithmic if the runs differ by more than a factor of 50."""
    sent = [finite(record.get("bytes_sent")) or 0.0 for record in records]
    positive = [size for size in sent if size > 0]
    log = bool(positive) and max(positive) / min(positive) > 50
    bars = []
    for size, name, style in zip(sent, run_names(records), styles_of(records), strict=True):
        part = Part(series_class(style), size, f"{name}: {size:,.0f} bytes")
        bars.append(Bar(name, bytes_text(size), [part]))
    axis = Axis("bytes sent", _bytes_tick, log)
    return figure(
        "Bytes sent, all nodes together", bar_chart("Bytes sent", bars, axis), "logarithmic" if log else ""
    )


def time_by_run(records: Sequence[Record]) -> str:
    """How an average worker spent its time, one bar per run."""
    bars = []
    for record, name in zip(records, run_names(records), strict=True):
        nodes = [_spent(node, record) for node in workers_of(record)]
        mean = {kind: sum(node[kind] for node in nodes) / max(1, len(nodes)) for kind, _ in PARTS}
        bars.append(_time_bar(name, mean))
    chart = bar_chart("Time of an average worker", bars, Axis(time_unit(records), tick_text))
    return figure("Time of an average worker", chart)


def time_by_node(record: Record, name: str) -> str:
    """How each node of a run spent its time; of many nodes, those that waited longest."""
    nodes = list(record.get("nodes") or ())
    note = ""
    if len(nodes) > MOST_NODES:
        note = f"the {MOST_NODES} of {len(nodes)} nodes that waited longest"
        nodes = sorted(nodes, key=lambda node: -(finite(node.get("wait_seconds")) or 0.0))[:MOST_NODES]
    bars = [_time_bar(node_name(record, node), _spent(node, record)) for node in nodes]
    chart = bar_chart(f"Time of each node of {name}", bars, Axis(time_unit([record]), tick_text))
    return figure(name, chart, note)


def time_legend() -> str:
    """The legend of the time bars."""
    return legend([(fill_swatch(f"t-{kind}"), word) for kind, word in PARTS])


def staleness(record: Record, name: str, style: int) -> str:
    """A histogram of staleness: versions between the model behind an update and the one it is applied to."""
    counts = {int(late): finite(updates) or 0.0 for late, updates in (record.get("staleness") or {}).items()}
    last = max(counts, default=0)
    width = math.ceil((last + 1) / MOST_COLUMNS)
    total = sum(counts.values()) or 1.0
    columns = []
    for start in range(0, last + 1, width):
        updates = sum(counts.get(late, 0.0) for late in range(start, start + width))
        span = f"{start}" if width == 1 else f"{start} to {start + width - 1}"
        columns.append(
            (float(start), updates, f"{span} behind: {updates:,.0f} updates, {percent_text(updates / total)}")
        )
    # a column of several versions is named by the first of them
    axis = Axis("versions behind", lambda middle: f"{middle - width / 2:g}")
    mean = finite(record.get("staleness_mean"))
    note = f"{decimal_text(mean, 1)} versions behind on average" if mean is not None else ""
    chart = column_chart(f"Staleness of updates, {name}: {note}", columns, float(width), style, axis)
    return figure(f"{name}: updates", chart, note)


def _series(records: Sequence[Record], key: str, quantity: str) -> list[Series]:
    lines = []
    for record, name, style in zip(records, run_names(records), styles_of(records), strict=True):
        if key == "seconds" and is_resumed(record):
            lines.append(Series(name, style, []))
            continue
        points = []
        for entry in record.get("curve") or ():
            x, y = finite(entry.get(key)), finite(entry.get(quantity))
            if x is not None and y is not None:
                points.append(Point(x, y, _note(name, entry, is_virtual(record))))
        lines.append(Series(name, style, points, _growth(record, name, key)))
    return lines


def _growth(record: Record, name: str, key: str) -> list[Mark]:
    """Where the crew grew, over time or over samples."""
    marks, samples = [], 0.0
    for leg, following in pairwise(legs_of(record)):
        samples += leg["samples"]
        at = following["began"] if key == "seconds" else samples
        marks.append(Mark(at, f"{name}: {leg['workers']} to {following['workers']} workers"))
    return marks


def _note(name: str, entry: Mapping[str, Any], virtual: bool) -> str:
    unit = "virtual s" if virtual else "s"
    accuracy = finite(entry.get("test_accuracy"))
    reached = [f"{accuracy:.2f} %"] if accuracy is not None else []
    loss = finite(entry.get("test_loss"))
    reached += [f"loss {loss:.4g}"] if loss is not None else []
    when = f"after {seconds_text(entry.get('seconds'))} {unit}, {count_text(entry.get('samples'))} samples"
    return f"{name}: {', '.join(reached)} {when}"


def _floor(lines: Sequence[Series]) -> float | None:
    """Where the accuracy axis may start without hiding a result; None for the lowest value.

    The first evaluations are near chance and would squeeze the interesting part into the top.
    """
    values = sorted(point.y for line in lines for point in line.points)
    if not values:
        return None
    low = min(values[len(values) // 4], *(line.points[-1].y for line in lines if line.points), values[-1])
    low = math.floor(low / 5) * 5.0
    return low if values[-1] - low < 0.6 * (values[-1] - values[0]) else None


def _spent(node: Mapping[str, Any], record: Record) -> dict[str, float]:
    spent = {
        kind: max(0.0, finite(node.get(f"{kind}_seconds")) or 0.0) for kind in ("compute", "send", "wait")
    }
    there = node if legs_of(record) else record  # a worker that joined later was not there all the time
    spent["other"] = max(0.0, (finite(there.get("seconds")) or 0.0) - sum(spent.values()))
    return spent


def _time_bar(name: str, spent: Mapping[str, float]) -> Bar:
    total = sum(spent.values()) or 1.0
    parts = []
    for kind, word in PARTS:
        share = percent_text(spent[kind] / total)
        parts.append(
            Part(f"t-{kind}", spent[kind], f"{name}, {word}: {seconds_text(spent[kind])} s, {share}")
        )
    return Bar(name, f"{percent_text(spent['wait'] / total)} waiting", parts)


def _bytes_tick(value: float) -> str:
    number, unit = bytes_text(value).split()
    return f"{float(number.replace(',', '')):g} {unit}"


def _thousands(value: float) -> str:
    if abs(value) >= 1e6:
        return f"{value / 1e6:,.6g} M"
    return f"{value / 1e3:,.6g} k" if abs(value) >= 1e3 else f"{value:g}"
