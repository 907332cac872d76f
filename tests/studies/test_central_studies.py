"""Studies of old gradients, of many replicas and of compression, on something small."""

from __future__ import annotations

import pytest

from shoal.core.errors import Diverged
from shoal.strategies.single import Single
from shoal.studies import compression, downpour_time, staleness
from shoal.studies.compression import CONTROL, PUBLISHED, Compression
from shoal.studies.downpour_time import DownpourTime, Method, ranked
from shoal.studies.staleness import CHANCE, Staleness
from shoal.studies.study import Lab, time_to

SMALL = {"task": "digits", "seeds": 1, "epochs": 1}


def test_time_to_an_accuracy_lies_between_two_points() -> None:
    curve = [
        {"seconds": 0.0, "test_accuracy": 10.0},
        {"seconds": 2.0, "test_accuracy": 50.0},
        {"seconds": 4.0, "test_accuracy": 90.0},
    ]
    assert time_to(70.0, curve) == 3.0  # halfway from 50 to 90
    assert time_to(5.0, curve) == 0.0
    assert time_to(90.0, curve) is None


def test_staleness_has_a_row_for_each_n() -> None:
    lab = Lab()
    findings = Staleness(**SMALL, workers=4, batch=16, n="1/4").run(lab)
    (table,) = findings.tables
    assert [row["n"] for row in table.rows] == [1, 4] and len(lab.records) == 4
    assert table.rows[0]["published_fixed"] == 18.0 and table.rows[1]["published_fixed"] is None
    assert table.rows[1]["staleness"] == pytest.approx(3, abs=0.6)  # of four equal workers
    assert {row["clock"] for row in table.rows} == {"virtual"}


def test_a_run_that_diverged_counts_as_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    def diverge(*args: object, **settings: object) -> None:
        raise Diverged("not finite")

    lab = Lab()
    monkeypatch.setattr(lab, "run", diverge)
    findings = Staleness(**SMALL, workers=2, n="2").run(lab)
    assert findings.tables[0].rows[0]["fixed"] == (CHANCE, 0.0)
    assert [record["diverged"] for record in lab.records] == [True, True]


def test_other_studies_go_on_without_a_run_that_diverged() -> None:
    method = Method("Downpour", 20, Single())
    row = downpour_time.row(method, [None], 20.0)
    assert row["seconds"] is None and row["accuracy"] is None
    assert downpour_time.chart([(method, [None])]).lines == []
    lost = compression.row(PUBLISHED[0], [None], [])
    assert lost["change"] is None and lost["speed_up"] is None
    assert [claim.met for claim in compression.claims([lost])] == [False]
    assert compression.chart([lost]).lines == []


def line(n: int, fixed: float, divided: float, late: float) -> dict[str, object]:
    return {"n": n, "fixed": (fixed, 0.0), "divided": (divided, 0.0), "staleness": late}


def test_claims_about_staleness_follow_from_the_rows() -> None:
    good = [line(1, 5.0, 5.0, 1.0), line(30, 90.0, 6.0, 29.0)]
    assert [claim.met for claim in staleness.claims(good)] == [True, True, True]
    bad = [line(1, 5.0, 5.0, 1.0), line(30, 6.0, 90.0, 15.0)]
    assert [claim.met for claim in staleness.claims(bad)] == [False, False, False]


@pytest.mark.soak
def test_time_to_accuracy_has_the_papers_four_methods() -> None:
    study = DownpourTime(**SMALL, few=2, many=4, servers=2, accuracy=20.0)
    findings = study.run(Lab())
    (table,) = findings.tables
    assert [row["replicas"] for row in table.rows] == [1, 2, 2, 4]
    assert [row["paper"] for row in table.rows] == [1, 2, 3, 4]
    assert sorted(row["rank"] for row in table.rows) == [1, 2, 3, 4]
    assert table.rows[0]["speed_up"] == 1.0 or table.rows[0]["seconds"] is None


def test_claims_about_time_follow_from_the_rows() -> None:
    def rows(*seconds: float | None) -> list[dict[str, object]]:
        return ranked(
            [
                {"method": "m", "replicas": 1, "seconds": None if s is None else (s, 0.0)}  # as made by row()
                for s in seconds
            ]
        )

    assert [claim.met for claim in downpour_time.claims(rows(4.0, 2.0, 1.0))] == [True, True]
    assert [claim.met for claim in downpour_time.claims(rows(4.0, None, 5.0))] == [False, True]
    assert [row["rank"] for row in rows(4.0, None, 5.0)] == [3, 1, 2]


def test_a_seed_that_never_got_there_leaves_no_time() -> None:
    curve = [{"seconds": 0.0, "test_accuracy": 10.0}, {"seconds": 1.0, "test_accuracy": 30.0}]
    runs = [{"curve": curve, "test_accuracy": 30.0, "staleness_mean": None}]
    method = Method("SGD", 1, Single())
    assert downpour_time.row(method, runs, 20.0)["seconds"] == (0.5, 0.0)
    assert downpour_time.row(method, runs, 40.0)["seconds"] is None


@pytest.mark.soak
def test_compression_has_a_row_for_each_codec() -> None:
    findings = Compression(**SMALL, workers=2).run(Lab())
    (table,) = findings.tables
    assert [row["codec"] for row in table.rows] == [published.codec for published in PUBLISHED]
    ratios = {row["codec"]: row["ratio"] for row in table.rows}
    assert ratios["fp16"] == pytest.approx(2, rel=0.02) and ratios["one_bit"] > 10
    assert all(row["speed_up"] > 0.9 for row in table.rows)


def test_claims_about_compression_follow_from_the_rows() -> None:
    rows = [
        {"codec": "one_bit", "change": (-0.4, 0.0), "allowed": 0.5},
        {"codec": "qsgd", "change": (-0.6, 0.0), "allowed": 0.5},
        {"codec": CONTROL, "change": (-0.5, 0.0), "allowed": None},
    ]
    assert [claim.met for claim in compression.claims(rows)] == [True, False, False]
