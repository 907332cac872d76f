"""What a launcher shows of workers that join from elsewhere, and takes of their reports."""

import logging

import pytest

from shoal.launch.visitors import Visitors

CAME = {"event": "came", "from": "ipv4:10.0.0.2:4711", "incarnation": 1}


def heard(*events):
    seen = []
    visitors = Visitors(seen.append)
    for event in events:
        visitors.hear(5, dict(event), 1.0)
    return visitors, seen


def test_one_that_comes_and_goes_is_named(caplog):
    with caplog.at_level(logging.WARNING, "shoal"):
        visitors, seen = heard(CAME, {"event": "progress", "step": 7}, {"event": "gone"})
    assert caplog.messages == ["worker 5 joins from 10.0.0.2", "worker 5 has left; its place is open"]
    assert [(e["rank"], e["step"], e.get("state")) for e in seen] == [
        (5, 0, "joining"),
        (5, 7, None),
        (5, 7, "dead"),
    ]
    assert not visitors.present


def test_one_that_stays_to_the_end_leaves_its_report(caplog):
    report = {"samples": 3, "rank": 0, "role": "server"}
    visitors, _ = heard(CAME, {"event": "done", "report": report}, {"event": "gone"})
    assert "has left" not in caplog.text
    assert visitors.reports_like({"samples": 0}) == [{"samples": 3, "rank": 5, "role": "worker"}]
    assert visitors.reports_like({"samples": 0, "steps": 0}) == []  # not a report as ours are


@pytest.mark.parametrize(
    "event",
    [
        {"event": "progress", "step": "x"},
        {"event": "progress"},
        {"event": "progress", "step": 1, "loss": "high"},
        {"event": "progress", "step": 1, "state": [1]},
        {"event": "done", "report": 3},
        {"event": "other"},
    ],
)
def test_what_is_no_event_of_a_worker_is_ignored_and_said(caplog, event):
    visitors, seen = heard(CAME, event)
    assert len(seen) == 1
    assert not visitors.reports
    assert "it is ignored" in caplog.text


def test_a_report_with_words_for_numbers_does_not_count():
    ours = {"samples": 0, "loss": 1.0, "staleness": {"1": 2}, "faults": []}
    good = {**ours, "loss": None, "samples": 7.0}
    for wrong in ({"samples": "7"}, {"staleness": 3}, {"faults": "x"}):
        visitors, _ = heard(CAME, {"event": "done", "report": {**good, **wrong}})
        assert visitors.reports_like(ours) == []
    visitors, _ = heard(CAME, {"event": "done", "report": good})
    assert [report["samples"] for report in visitors.reports_like(ours)] == [7.0]
