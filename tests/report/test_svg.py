"""Ticks and scales worked out by hand; charts that hold what they were given."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from shoal.report.svg import (
    BASE,
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    Axis,
    Bar,
    Part,
    Point,
    Scale,
    Series,
    bar_chart,
    column_chart,
    legend,
    line_chart,
    line_swatch,
    log_ticks,
    nice_ticks,
    series_class,
)


def svg_of(chart: str) -> str:
    """The picture of a chart, without the points beside it."""
    return chart.partition("<script")[0]


PLAIN = Axis("seconds", lambda value: f"{value:g}")


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),  # 10 / 5 = 2
        (0, 68.2, [0, 20, 40, 60, 80]),  # 68.2 / 5 = 13.6, next is 20
        (85, 98.4, [85, 90, 95, 100]),  # 2.68, next is 5
        (0, 0.5, [0, 0.1, 0.2, 0.3, 0.4, 0.5]),  # no 0.30000000000000004
        (-3, 3, [-4, -2, 0, 2, 4]),  # 1.2, next is 2
        (0, 0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),  # nothing to span: one unit
        (97, 97, [85, 90, 95, 100, 105, 110]),  # a tenth to either side: 87.3 to 106.7
    ],
)
def test_nice_ticks(low, high, ticks):
    assert nice_ticks(low, high) == ticks


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.07, 2.3, [0.05, 0.1, 0.2, 0.5, 1, 2, 5]),
        (1, 1000, [1, 10, 100, 1000]),
        (3, 5000, [1, 10, 100, 1000, 10000]),
        (1, 10, [1, 2, 5, 10]),
        (1, 1, [1, 2, 5]),
    ],
)
def test_log_ticks(low, high, ticks):
    assert log_ticks(low, high) == ticks


def test_scale_maps_its_ends_and_its_middle():
    up = Scale(80, 100, BOTTOM, TOP)
    assert (up(80), up(100), up(90)) == (BOTTOM, TOP, (BOTTOM + TOP) / 2)


def test_log_scale_maps_its_ends_and_equal_ratios_to_equal_steps():
    along = Scale(0.1, 10, 0, 100, log=True)
    assert (along(0.1), along(1), along(10)) == pytest.approx((0, 50, 100))


def test_line_goes_from_corner_to_corner():
    line = Series("bmuf", 0, [Point(0, 0, "start"), Point(10, 10, "end")])
    chart = ElementTree.fromstring(svg_of(line_chart("Accuracy", [line], PLAIN, PLAIN)))
    path = next(item for item in chart.iter("path") if item.get("class", "").startswith("line"))
    assert path.get("d") == f"M{LEFT:.1f},{BOTTOM:.1f}L{RIGHT:.1f},{TOP:.1f}"
    assert [title.text for title in chart.iter("title")] == ["bmuf", "start", "end"]
    assert chart.get("aria-label") == "Accuracy, over seconds: bmuf ends at 10"


@pytest.mark.parametrize("points", [[], [Point(0, 0, "")], [Point(3, 97.0, "")]])
@pytest.mark.parametrize("log", [False, True])
def test_charts_of_no_or_one_point_are_drawn(points, log):
    if log and points and points[0].y == 0:
        points = [Point(0, 1, "")]
    y = Axis("loss", str, log=log)
    chart = line_chart("Loss", [Series("a", 0, points), Series("b", 1, [])], PLAIN, y)
    ElementTree.fromstring(svg_of(chart))
    assert ("no measurements" in chart) == (not points)


def test_long_curves_keep_few_markers_and_always_the_last():
    line = Series("a", 0, [Point(x, x, f"at {x}") for x in range(1000)])
    chart = ElementTree.fromstring(svg_of(line_chart("t", [line], PLAIN, PLAIN)))
    notes = [title.text for title in chart.iter("title")]
    assert len(notes) <= 25
    assert notes[-1] == "at 999"


def test_stacked_pieces_lie_end_to_end():
    bar = Bar(
        "worker 0", "30 %", [Part("t-compute", 6, "6 s"), Part("t-send", 0, "none"), Part("t-wait", 4, "4 s")]
    )
    chart = ElementTree.fromstring(bar_chart("Time", [bar], PLAIN))
    pieces = [(piece.get("x"), piece.get("width")) for piece in chart.iter("rect")]
    assert pieces == [("0.00%", "60.00%"), ("60.00%", "40.00%")]  # of an axis that ends at 10


def test_log_bars_start_a_decade_below_the_shortest_and_zero_has_no_length():
    bars = [Bar(str(size), "", [Part("s0", size, "")]) for size in (0, 100, 10_000)]
    chart = ElementTree.fromstring(bar_chart("Bytes", bars, Axis("bytes", str, log=True)))
    assert [piece.get("width") for piece in chart.iter("rect")] == ["33.33%", "100.00%"]  # 10 to 10,000


def test_bars_of_nothing_say_so():
    assert "nothing to show" in bar_chart("Bytes", [Bar("single", "0 B", [Part("base", 0, "")])], PLAIN)


def test_columns_fill_the_width():
    chart = ElementTree.fromstring(column_chart("Staleness", [(0, 5, "a"), (1, 10, "b")], 1, 2, PLAIN))
    first, second = chart.iter("rect")
    assert float(first.get("x")) == LEFT + 2
    assert float(second.get("x")) + float(second.get("width")) == RIGHT - 2
    assert float(second.get("y")) < float(first.get("y"))


def test_styles_repeat_colours_only_with_another_dash():
    assert len({series_class(style) for style in (BASE, *range(18))}) == 19


def test_names_are_escaped_in_every_chart():
    evil = '<script>"&'
    line = Series(evil, 0, [Point(1, 1, evil)])
    charts = [
        line_chart(evil, [line], Axis(evil, lambda _: evil), Axis(evil, lambda _: evil)),
        bar_chart(evil, [Bar(evil, evil, [Part("s0", 1, evil)])], Axis(evil, lambda _: evil)),
        column_chart(evil, [(0, 1, evil)], 1, 0, Axis(evil, lambda _: evil)),
        legend([(line_swatch(0), evil)]),
    ]
    for chart in charts:
        ElementTree.fromstring(svg_of(chart))
        assert evil not in chart and "<script" not in svg_of(chart)


def test_a_logarithmic_x_axis_has_equal_steps_for_equal_ratios():
    line = Series("s", 0, [Point(float(x), 1.0, "") for x in (1, 10, 100)])
    drawn = line_chart("t", [line], Axis("n", str, log=True), PLAIN)
    paths = ElementTree.fromstring(svg_of(drawn)).iter("path")
    line_drawn = next(item.get("d") for item in paths if item.get("class", "").startswith("line"))
    places = [float(pair.split(",")[0]) for pair in line_drawn[1:].split("L")]
    assert places == pytest.approx([LEFT, (LEFT + RIGHT) / 2, RIGHT], abs=0.1)


def test_a_logarithmic_axis_names_a_few_counts_and_else_round_values():
    def named(*values: float) -> list[str]:
        line = Series("a", 0, [Point(value, 1.0, "") for value in values])
        drawn = ElementTree.fromstring(
            svg_of(line_chart("t", [line], Axis("n", lambda v: f"x{v:g}", log=True), PLAIN))
        )
        return [text.text for text in drawn.iter() if text.text and text.text.startswith("x")]

    assert named(1, 4, 16) == ["x1", "x4", "x16"]
    assert named(0.03, 0.4, 0.41, 7.2) == ["x0.1", "x1"]
    assert named(*range(1, 40)) == ["x1", "x2", "x5", "x10", "x20"]
    assert named(3.1, 3.2) == ["x3.1", "x3.2"]  # nothing round between them
