"""The timeline of a pipeline as SVG: a piece for each pass at its place, with its note."""

from xml.etree import ElementTree

from shoal.report.pipeline_chart import BAR_TOP, ROW_HEIGHT, Pass, pipeline_chart, pipeline_legend
from shoal.report.svg import Axis

AXIS = Axis("milliseconds", lambda value: f"{value:g}")
PASSES = [
    Pass(0, 0.0, 1.0, True, "0", "forward 0 <first>"),
    Pass(1, 1.0, 2.0, True, "0", "forward 0"),
    Pass(1, 2.0, 3.99, False, "0", "backward 0"),
    Pass(0, 3.99, 4.0, False, "0", "short"),
]


def drawn():
    return ElementTree.fromstring(pipeline_chart("GPipe", ["device 0", "device 1"], PASSES, AXIS))


def test_pieces_are_placed_by_time_and_row():
    pieces = [rect for rect in drawn().iter("rect") if rect.find("title") is not None]
    assert [(r.get("x"), r.get("width"), r.get("y")) for r in pieces[:3]] == [
        ("0.000%", "25.000%", str(BAR_TOP)),
        ("25.000%", "25.000%", str(ROW_HEIGHT + BAR_TOP)),
        ("50.000%", "49.750%", str(ROW_HEIGHT + BAR_TOP)),
    ]
    assert [r.get("class") for r in pieces] == ["fill piece s0"] * 2 + ["fill piece s1"] * 2
    assert pieces[0].find("title").text == "forward 0 <first>"


def test_a_short_piece_has_no_number():
    texts = [text.text for text in drawn().iter("text")]
    assert texts.count("0") == 3 + 1  # pieces, and the tick at 0
    assert {"device 0", "device 1", "4", "milliseconds"} <= {*texts}


def test_it_says_in_words_what_it_shows():
    assert drawn().get("aria-label") == "GPipe: 2 devices, 4 milliseconds"
    assert "bubble" in pipeline_legend()
