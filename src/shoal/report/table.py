"""The closing table of a comparison: one row per run, and below it one sentence per run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shoal.report.crews import crew_size_text
from shoal.report.goal import LOSS, Goal, end_text, goal_of, highest_end, score_of
from shoal.report.reading import (
    Record,
    baseline_of,
    group_of,
    is_virtual,
    run_names,
    speed_up,
    whole_seconds,
    workers_of,
)
from shoal.report.units import MISSING, bytes_text, count_text, finite, percent_text, ratio_text
from shoal.report.units import seconds_text as _seconds
from shoal.report.verdicts import verdict, verdicts

__all__ = ["Column", "closing_table", "columns_for", "verdict"]


@dataclass(frozen=True)
class Column:
    """One quantity of the summary: its header, its unit where the header needs one, and its text."""

    header: str
    unit: str
    text: Callable[[Record], str]
    spoken: str = ""  # the header in full, where there is room for it
    wide: bool = False  # for pages only: a terminal has no room for it


def columns_for(records: Sequence[Record], target: float | None = None) -> list[Column]:
    """The columns for these runs; those of which no run has a value are left out.

    The time to the goal comes first, and how the runs end: means of the last evaluations with their spread.
    """
    goal, judged_by_loss = goal_of(records, target), score_of(records) == LOSS
    seen = any(record.get("curve") for record in records)
    loss = Column("test", "loss", lambda r: end_text(r, LOSS), "test loss", wide=seen and not judged_by_loss)
    accuracy = Column("test", "acc. %", lambda r: end_text(r, "test_accuracy"), "test accuracy, %")
    return [
        Column("work-", "ers", crew_size_text, "workers"),
        *_goal_columns(records, goal),
        *([] if seen and judged_by_loss else [accuracy]),
        loss,
        *_metric_columns(records),
        *_rate_column(records),
        _time_column(records),
        Column(
            "samples", "/s", lambda r: count_text(r.get("samples_per_second")), "samples/s", goal is not None
        ),
        *_speed_up_column(records, goal),
        *_group_columns(records),
        Column("bytes", "sent", lambda r: bytes_text(r.get("bytes_sent")), "bytes sent"),
        Column("wait-", "ing", lambda r: percent_text(r.get("wait_fraction")), "waiting"),
        *_staleness_column(records),
    ]


def closing_table(records: Sequence[Record], target: float | None = None) -> Table:
    """One row per run, the one that ends best in bold; fits a terminal of 80 columns.

    `target` is the test accuracy (or loss) to which the runs are timed. The caption holds the sentences of
    `verdict`.
    """
    columns = [column for column in columns_for(records, target) if not column.wide]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0, caption_justify="left", caption_style="")
    table.add_column("run", overflow="fold", vertical="top", min_width=8)
    for column in columns:
        table.add_column(_header(column), justify="right", vertical="top", no_wrap=True)
    best = highest_end(records) if len(records) > 1 else None
    for index, (record, name) in enumerate(zip(records, run_names(records), strict=True)):
        cells = [column.text(record) for column in columns]
        table.add_row(escape(name), *cells, style="bold green" if index == best else None)
    table.caption = Text("\n" + "\n".join(verdicts(records, target))) if records else None
    return table


def _header(column: Column) -> str:
    # a header of one line goes to the second line, next to its numbers
    return f"{column.header}\n{column.unit}" if column.unit else f"\n{column.header}"


def _goal_columns(records: Sequence[Record], goal: Goal | None) -> list[Column]:
    """The time to the goal and, if there is a run on one worker, the speed against it."""
    if goal is None:
        return []
    unit = "virtual s" if all(is_virtual(record) for record in records) else "seconds"
    text = _clock(records)
    columns = [Column("to", goal.text, lambda r: text(r, goal.seconds(r)), f"{unit} to {goal.text}")]
    if any(baseline_of(record, records) for record in records):
        columns += [
            Column(
                "speed-",
                "up",
                lambda r: ratio_text(goal.speed_up(r, baseline_of(r, records))),
                f"speed-up to {goal.text}",
            )
        ]
    return columns


def _rate_column(records: Sequence[Record]) -> list[Column]:
    """The learning rate, if the runs have different ones."""

    def rate(record: Record) -> float | None:
        return finite((record.get("config") or {}).get("lr"))

    if len({rate(record) for record in records}) < 2:
        return []

    def text(record: Record) -> str:
        known = rate(record)
        return MISSING if known is None else f"{known:.3g}"

    return [Column("lr", "", text, "learning rate")]


def _metric_columns(records: Sequence[Record]) -> list[Column]:
    """The metrics of the tasks."""
    names = list(dict.fromkeys(name for record in records for name in record.get("metrics") or ()))

    def of(name: str) -> Callable[[Record], str]:
        return lambda record: end_text(record, name)

    return [Column(*_two_lines(name), of(name), name) for name in names]


def _two_lines(name: str) -> tuple[str, str]:
    """The two lines of a header, from a name of one word or more."""
    first, _, rest = name.partition(" ")
    return first, rest


def _time_column(records: Sequence[Record]) -> Column:
    text = _clock(records)
    if records and all(is_virtual(record) for record in records):
        return Column("virtual", "s", lambda r: text(r, whole_seconds(r)), "virtual s")
    mixed = any(is_virtual(record) for record in records)
    return Column("seconds", "v: virtual" if mixed else "", lambda r: text(r, whole_seconds(r)))


def _clock(records: Sequence[Record]) -> Callable[[Record, float | None], str]:
    """Seconds as text; simulated ones have a v where other runs took real time."""
    mixed = len({is_virtual(record) for record in records}) > 1
    return lambda record, seconds: (
        _seconds(seconds) + ("v" if mixed and is_virtual(record) and seconds is not None else "")
    )


def _speed_up_column(records: Sequence[Record], goal: Goal | None) -> list[Column]:
    """Samples per second against one worker: beside the time to a goal only where there is room."""
    ratios = [speed_up(record, baseline_of(record, records)) for record in records]
    if all(ratio is None for ratio in ratios) or len(records) < 2:
        return []

    def text(record: Record) -> str:
        return ratio_text(speed_up(record, baseline_of(record, records)))

    if goal is None:
        return [Column("speed-", "up", text, "speed-up")]
    return [Column("speed-", "up", text, "speed-up in samples/s", wide=True)]


def _group_columns(records: Sequence[Record]) -> list[Column]:
    """The time of a step and the memory of a process, where workers are groups of processes."""
    if all(group_of(record) == 1 for record in records):
        return []

    def step(record: Record) -> str:
        steps = max((int(node.get("steps") or 0) for node in workers_of(record)), default=0)
        seconds = whole_seconds(record)
        return MISSING if seconds is None or not steps else f"{1e3 * seconds / steps:.3g}"

    return [
        Column("ms a", "step", step, "ms a step"),
        Column("mem-", "ory", lambda r: bytes_text(r.get("memory")), "memory of the fullest process"),
    ]


def _staleness_column(records: Sequence[Record]) -> list[Column]:
    if all(finite(record.get("staleness_mean")) is None for record in records):
        return []

    def text(record: Record) -> str:
        mean = finite(record.get("staleness_mean"))
        return MISSING if mean is None else f"{mean:.1f}"

    return [Column("stale-", "ness", text, "staleness")]
