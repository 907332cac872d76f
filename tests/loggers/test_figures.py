"""When rows come, and what they hold."""

from __future__ import annotations

import pytest

from logged_figures import node
from shoal.loggers import figures
from shoal.loggers.figures import FigureTable


def rows_in(seconds, events_per_second=5):
    table, rows = FigureTable(1, 0), 0
    for tick in range(seconds * events_per_second):
        rows += table.is_due(tick / events_per_second)
    return rows


def test_rows_come_twice_a_second_at_first_and_ever_more_rarely():
    assert rows_in(10) in range(15, 21)
    assert rows_in(24 * 3600, events_per_second=1) < 6000


def test_there_is_no_row_before_a_worker_has_reported():
    table = FigureTable(1, 1)
    assert table.row() is None
    table.hear(node(2, 1))  # the server
    assert table.row() is None


def test_of_many_nodes_a_row_has_the_sums_only():
    table = FigureTable(figures.MOST_NODES + 1, 0)
    table.hear(node(0, 3))
    assert not [name for name in table.row().figures if "/" in name]


def test_a_test_gets_the_step_of_its_samples():
    table = FigureTable(1, 0)
    for step in (10, 20):
        table.hear(node(0, step))
        table.row()
    point = {"samples": 1500, "seconds": 1.0, "test_accuracy": None, "test_loss": 1.0}
    (row,) = table.tested([point])
    assert row.step == 15 and row.figures == {"samples": 1500, "seconds": 1.0, "test_loss": 1.0}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "x", True])
def test_what_is_no_finite_number_is_left_out(value):
    table = FigureTable(1, 0)
    table.hear(node(0, 1, loss=value))
    assert "loss" not in table.row().figures and "worker_0/loss" not in table.row().figures
