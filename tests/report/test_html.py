"""The report page: whole, self-contained, escaped."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from shoal.report import write_html
from shoal.report.html import page
from shoal.report.reading import run_names
from shoal.report.scripts import source

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Reader(HTMLParser):
    """Collects tags, attributes and text, and checks that every tag is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(document):
    reader = Reader()
    reader.feed(document)
    reader.close()
    assert reader.open == []
    return reader


def headings(document):
    return re.findall(r"<h2>(.*?)</h2>", document)


def test_sections_come_in_order(runs):
    document = page(runs)
    read(document)
    assert headings(document) == [
        "Summary",
        "Learning curves",
        "Traffic and time",
        "Time of each node",
        "Staleness",
        "Settings",
    ]


def test_all_charts_are_there_and_described(runs):
    document = page(runs)
    labels = [
        value for tag, name, value in read(document).attributes if tag == "svg" and name == "aria-label"
    ]
    for start in (
        "Test accuracy, %, over seconds",
        "Test accuracy, %, over samples",
        "Test loss, over seconds",
        "Test loss, over samples",
        "Bytes sent",
        "Time of an average worker",
        "Time of each node of downpour",
        "Staleness of updates, downpour",
    ):
        assert any(label.startswith(start) for label in labels), start
    assert len(labels) == 4 + 2 + len(runs) + 1


def without_library(document):
    """The page without uPlot, whose first comment names its home."""
    return document.replace(source("uplot.js"), "").replace(source("uplot.css"), "")


def test_nothing_is_fetched(runs):
    document = without_library(page(runs))
    reader = read(document)
    assert not {"link", "iframe", "img", "object"} & set(reader.tags)
    assert not [
        value for _, name, value in reader.attributes if name in ("src", "href", "xlink:href", "action")
    ]
    assert not re.search(r"https?://|url\(|@import", document)
    assert "default-src 'none'" in document
    assert source("uplot_license.txt") in document and "uPlot 1.6.32" in document


def test_only_the_scripts_of_the_package_may_run(runs):
    document = page(runs)
    allowed = re.search(r"script-src '(sha256-[^']+)'", document)[1]
    (script,) = re.findall(r"<script>(.*?)</script>", document, flags=re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert allowed == f"sha256-{digest}"


def test_a_chart_carries_its_points(runs):
    found = re.findall(r'<script type="application/json" class="points">(.*?)</script>', page(runs))
    charts = [json.loads(text) for text in found]
    assert [chart["title"] for chart in charts] == ["Test accuracy, %"] * 2 + ["Test loss"] * 2
    lines = {line["name"]: line["points"] for line in charts[0]["lines"]}
    last = runs[1]["curve"][-1]
    assert lines[run_names(runs)[1]][-1][:2] == [last["seconds"], last["test_accuracy"]]


def test_every_string_is_escaped(make_run, make_node):
    evil = '<script>alert("1")</script>'
    run = make_run(
        evil,
        codec=evil,
        transport=evil,
        task=evil,
        config={evil: evil, "nested": {evil: [evil]}},
        nodes=[make_node(0, faults=[evil]), make_node(1, evil)],
        staleness={"0": 1},
    )
    document = page([run, run], title=evil)
    assert evil not in document and "<script>alert" not in document
    kinds = [value for tag, name, value in read(document).attributes if tag == "script" and name == "type"]
    assert read(document).tags.count("script") == len(kinds) + 1  # data, and the script of the page
    assert "&lt;script&gt;" in document


def test_page_says_its_language_and_title(runs):
    document = page(runs)
    assert ("html", "lang", "en") in read(document).attributes
    assert "<title>digits on 4 workers</title>" in document
    assert "<h1>digits on 4 workers</h1>" in document
    assert "<h1>Friday</h1>" in page(runs, title="Friday")


def test_the_reading_holds_the_verdicts(runs):
    text = "".join(read(page(runs)).text)
    first = "bmuf was first at 97.00 %, after 10.0 s, 2.9 x as fast as one worker"
    assert f"{first}; sync + top_k(0.01) ends with the best test accuracy, 97.41 %." in text
    assert "2.9 x as fast as one worker to 97.00 %, ends 0.4 points below it" in text
    assert "distribution did not pay" in text


def test_a_target_replaces_the_lowest_best(runs):
    document = page(runs, target=97.41)
    assert '<th scope="col">seconds to 97.41 %</th>' in document
    assert "sync + top_k(0.01) was first at 97.41 %" in document and "it also ends with the best" in document
    assert "no run reached 99.00 %" in page(runs, target=99.0)


def test_the_summary_has_the_columns_that_a_terminal_has_no_room_for(runs):
    document = page(runs)
    for header in (
        "seconds to 97.00 %",
        "speed-up to 97.00 %",
        "test loss",
        "samples/s",
        "speed-up in samples/s",
    ):
        assert f'<th scope="col">{header}</th>' in document


def test_summary_marks_the_best_run(runs):
    (best,) = re.findall(r'<tr class="best">.*?</tr>', page(runs))
    assert "sync + top_k(0.01)" in best
    assert "97.41" in best


def test_simulated_runs_are_in_virtual_time(runs):
    assert "virtual" not in without_library(page(runs)).replace(source("charts.js"), "")
    document = page([{**run, "transport": "sim"} for run in runs])
    assert "virtual time" in document
    assert "over virtual seconds" in document


@pytest.mark.parametrize(
    "curve", [[], None, [{"seconds": 0.0, "samples": 0, "test_accuracy": 11.0, "test_loss": 2.3}]]
)
def test_empty_and_single_point_curves_are_drawn(make_run, curve):
    read(page([make_run("bmuf", curve=curve)]))


def test_holes_in_a_curve_are_left_out(make_run):
    hole = {"seconds": 1.0, "samples": 64, "test_accuracy": None, "test_loss": float("nan")}
    document = without_library(
        page([make_run("bmuf", curve=[hole], test_accuracy=None, test_loss=float("inf"))])
    )
    read(document)
    assert "no measurements" in document
    assert "nan" not in re.sub(r"<(style|script)>.*?</\\1>", "", document, flags=re.S).lower()


def test_a_record_with_nothing_but_a_name_is_reported():
    read(page([{"strategy": "bmuf"}]))


def test_no_runs_make_a_page_that_says_so():
    assert "No run to report." in page([])


def test_a_result_below_the_crowd_stays_in_the_picture(make_run):
    lost = make_run(
        "lost", curve=[{"seconds": s, "samples": s, "test_accuracy": 10.0, "test_loss": 2.3} for s in (0, 10)]
    )
    assert "axis from" not in page([make_run("bmuf"), lost])


def test_traffic_is_logarithmic_only_where_it_must_be(make_run):
    near, far = make_run("near", bytes_sent=2_000_000), make_run("far", bytes_sent=1_000_000_000)
    heading = "Bytes sent, all nodes together"
    assert f"{heading}</figcaption>" in page([make_run("a"), near])
    assert f'{heading} <span class="note">logarithmic' in page([near, far])


def test_of_many_nodes_those_that_waited_longest_are_shown(make_run, make_node):
    nodes = [make_node(rank, wait_seconds=float(rank)) for rank in range(1000)]
    document = page([make_run("bmuf", 1000, nodes=nodes)])
    assert "the 16 of 1000 nodes that waited longest" in document
    assert ">worker 999<" in document
    assert ">worker 5<" not in document


def test_faults_and_settings_are_listed(make_run, make_node):
    document = page([make_run("bmuf", nodes=[make_node(0, faults=["worker 3 was lost at step 5"])])])
    assert "worker 3 was lost at step 5" in document
    assert '<th scope="row">period</th><td>50</td>' in document


def test_light_dark_and_paper_are_styled(runs):
    document = page(runs)
    assert "prefers-color-scheme: dark" in document
    assert "@media print" in document


def test_the_same_runs_give_the_same_file(runs, tmp_path):
    first = write_html(runs, tmp_path / "new" / "a.html")
    second = write_html(runs, str(tmp_path / "b.html"))
    assert first.read_bytes() == second.read_bytes()
    assert [path.name for path in first.parent.iterdir()] == ["a.html"]


def test_runs_of_one_strategy_with_several_numbers_of_workers_make_a_picture(make_run):
    several = [
        make_run(strategy=word, workers=n, samples_per_second=100.0 * n, test_accuracy=95.0 - n)
        for word in ("sync", "bmuf")
        for n in (16, 1, 4)
    ]
    text = page(several)
    assert "Scaling with the number of workers" in text
    assert "bmuf, 16 workers: 79" in text
    assert "on 1 to 16 workers" in text
    assert "Scaling with the number of workers" not in page(several[:1])


def test_a_resumed_run_has_no_line_over_time(runs):
    later = [node | {"samples_before": 100} for node in runs[1]["nodes"]]
    note, document = "without resumed runs", page([runs[0], {**runs[1], "nodes": later}])
    assert note in document and note not in page(runs)
    assert (
        document.count("bmuf: 90.00 %, loss 0.4 after")
        == page(runs).count("bmuf: 90.00 %, loss 0.4 after") / 2
    )
