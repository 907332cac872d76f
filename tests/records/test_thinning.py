"""A folder stays small however long the run, and loses no news."""

from __future__ import annotations

import pytest

from shoal.records import thinning
from shoal.records.thinning import BoundedLog, EventThinning

EVENT_BYTES = 300


def times(seconds):
    """Five events a second at first, later one every few seconds: more than are kept."""
    now = 0.0
    while now < seconds:
        yield now
        now += max(0.2, now / 20_000)


@pytest.mark.parametrize(("nodes", "megabytes"), [(1, 3), (8, 4), (1000, 8)])
def test_a_days_events_fit_into_a_few_megabytes(nodes, megabytes):
    kept = EventThinning(nodes)
    of_one = sum(kept.keeps({"rank": 0, "step": 1}, now) for now in times(24 * 3600))
    assert of_one > 5
    assert nodes * of_one * EVENT_BYTES < megabytes * 1e6


def test_a_short_run_keeps_two_events_a_second_of_each_node():
    kept = EventThinning(4)
    assert [sum(kept.keeps({"rank": rank}, now / 5) for now in range(50)) for rank in range(4)] == [17] * 4


def test_news_are_kept_whatever_the_time():
    kept = EventThinning(100)
    plain = {"rank": 3, "step": 1, "loss": 0.5}
    assert kept.keeps(plain, 1000.0)
    assert not kept.keeps(plain, 1000.1)
    for number in range(50):
        assert kept.keeps({**plain, "lost": True}, 1000.1 + number / 1000)
    assert kept.keeps({"what": "of no node"}, 1000.2)


def test_a_long_output_keeps_its_beginning_and_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(thinning, "MOST_LOG_BYTES", 2000)
    monkeypatch.setattr(thinning, "KEPT_BYTES", 500)
    log = BoundedLog(tmp_path / "log.txt")
    for number in range(1000):
        log.write(f"worker 0 | line {number:04}")
    log.close()
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert (tmp_path / "log.txt").stat().st_size < 2100
    (note,) = (line for line in lines if "left out" in line)
    assert lines[0].endswith("line 0000") and lines[-1].endswith("line 0999")
    missing = 1000 - (len(lines) - 1)
    assert note == f"… {missing:,} lines are left out …"
    assert [p.name for p in tmp_path.iterdir()] == ["log.txt"]


def test_one_endless_line_is_cut_and_says_so(tmp_path):
    log = BoundedLog(tmp_path / "log.txt")
    log.write("x" * 50_000)
    log.close()
    assert (tmp_path / "log.txt").read_text() == "x" * 10_000 + " … (40,000 characters are left out)\n"
