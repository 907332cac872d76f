"""What a launcher shows of workers that join from elsewhere, and takes of their reports."""

import logging

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
