"""The closing table of a comparison: one row per run, and below it one sentence per run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shoal.report.reading import (
    Record,
    baseline_of,
    highest,
    is_virtual,
    run_names,
    speed_up,
    verdict,
    verdicts,
)
from shoal.report.units import MISSING, bytes_text, count_text, decimal_text, finite, percent_text, ratio_text
from shoal.report.units import seconds_text as _seconds

__all__ = ["Column", "closing_table", "columns_for", "verdict"]


@dataclass(frozen=True)
class Column:
    """One quantity of the summary: its header, its unit where the header needs one, and its text."""

    header: str
    unit: str
    text: Callable[[Record], str]
    spoken: str = ""  # the header in full, where there is room for it


def columns_for(records: Sequence[Record]) -> list[Column]:
    """The columns for these runs; speed-up and staleness only if a run has them."""
    return [
        Column("workers", "", lambda r: count_text(r.get("workers"))),
        Column("test", "acc. %", lambda r: decimal_text(r.get("test_accuracy")), "test accuracy, %"),
        Column("test", "loss", lambda r: decimal_text(r.get("test_loss"), 3), "test loss"),
        *_metric_columns(records),
        _time_column(records),
        Column("samples", "/s", lambda r: count_text(r.get("samples_per_second")), "samples/s"),
        *_speed_up_column(records),
        Column("bytes", "sent", lambda r: bytes_text(r.get("bytes_sent")), "bytes sent"),
        Column("wait-", "ing", lambda r: percent_text(r.get("wait_fraction")), "waiting"),
        *_staleness_column(records),
    ]


def closing_table(records: Sequence[Record]) -> Table:
    """One row per run, the best accuracy in bold; fits a terminal of 80 columns.

    Speed-up is samples per second relative to the `single` run. The caption holds the sentences of `verdict`.
    """
    columns = columns_for(records)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0, caption_justify="left", caption_style="")
    table.add_column("run", overflow="fold", vertical="top", min_width=8)
    for column in columns:
        table.add_column(_header(column), justify="right", vertical="top", no_wrap=True)
    best = highest(records, "test_accuracy") if len(records) > 1 else None
    for index, (record, name) in enumerate(zip(records, run_names(records), strict=True)):
        cells = [column.text(record) for column in columns]
        table.add_row(escape(name), *cells, style="bold green" if index == best else None)
    table.caption = Text("\n" + "\n".join(verdicts(records))) if records else None
    return table


def _header(column: Column) -> str:
    # a header of one line goes to the second line, next to its numbers
    return f"{column.header}\n{column.unit}" if column.unit else f"\n{column.header}"


def _metric_columns(records: Sequence[Record]) -> list[Column]:
    """The metrics of the tasks."""
    names = list(dict.fromkeys(name for record in records for name in record.get("metrics") or ()))

    def of(name: str) -> Callable[[Record], str]:
        return lambda record: decimal_text((record.get("metrics") or {}).get(name), 2)

    return [Column(*_two_lines(name), of(name), name) for name in names]


def _two_lines(name: str) -> tuple[str, str]:
    """The two lines of a header, from a name of one word or more."""
    first, _, rest = name.partition(" ")
    return first, rest


def _time_column(records: Sequence[Record]) -> Column:
    if records and all(is_virtual(record) for record in records):
        return Column("virtual", "s", lambda r: _seconds(r.get("seconds")), "virtual s")
    mixed = any(is_virtual(record) for record in records)

    def text(record: Record) -> str:
        return _seconds(record.get("seconds")) + ("v" if mixed and is_virtual(record) else "")

    return Column("seconds", "v: virtual", text) if mixed else Column("seconds", "", text)


def _speed_up_column(records: Sequence[Record]) -> list[Column]:
    ratios = [speed_up(record, baseline_of(record, records)) for record in records]
    if all(ratio is None for ratio in ratios) or len(records) < 2:
        return []
    return [Column("speed-", "up", lambda r: ratio_text(speed_up(r, baseline_of(r, records))), "speed-up")]


def _staleness_column(records: Sequence[Record]) -> list[Column]:
    if all(finite(record.get("staleness_mean")) is None for record in records):
        return []

    def text(record: Record) -> str:
        mean = finite(record.get("staleness_mean"))
        return MISSING if mean is None else f"{mean:.1f}"

    return [Column("stale-", "ness", text, "staleness")]
