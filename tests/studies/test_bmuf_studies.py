"""The studies of block momentum: what they set up, what their rows hold, claims that rows alone decide."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from shoal.core.task import Data
from shoal.programs.tasks import TASKS
from shoal.strategies.bmuf import BMUF
from shoal.strategies.local import Local
from shoal.strategies.single import Single
from shoal.studies import STUDIES, bmuf_time, bmuf_wer
from shoal.studies.block_momentum import (
    AVERAGING,
    CHUNKS,
    CLASSICAL,
    DNN,
    MERGING,
    NESTEROV,
    SINGLE,
    WHOLE,
    MomentumSetting,
    PublishedRow,
    published,
)
from shoal.studies.bmuf_time import BmufTime, validation_seconds
from shoal.studies.bmuf_wer import BmufWer, beginning_of
from shoal.studies.study import Lab


def wer_row(method: str, workers: int, error: float, spread: float = 0.1, **other: Any) -> dict[str, Any]:
    row = {"method": method, "workers": workers, "error": (error, spread), "above": error - 2.5}
    return {**row, "plenty": 1.5 if workers > 1 else None, **other}


GOOD = [
    wer_row(SINGLE, 1, 2.5),
    *(wer_row(AVERAGING, n, error) for n, error in ((8, 2.7), (16, 2.65), (32, 3.0), (64, 3.7))),
    *(
        wer_row(m, n, e)
        for m in (CLASSICAL, NESTEROV)
        for n, e in ((8, 2.4), (16, 2.9), (32, 3.3), (64, 3.4))
    ),
]


def met(rows: list[dict[str, Any]]) -> list[bool]:
    return [claim.met for claim in bmuf_wer.claims(rows)]


def doctored(method: str, workers: int, error: float, **other: Any) -> list[dict[str, Any]]:
    new = wer_row(method, workers, error, **other)
    return [new if (row["method"], row["workers"]) == (method, workers) else row for row in GOOD]


def test_published_speed_ups_are_the_ratios_of_the_published_times() -> None:
    alone = DNN[SINGLE, 1].minutes
    assert alone == pytest.approx(2483.1)
    for row in DNN.values():
        assert alone / row.minutes == pytest.approx(row.speed_up, abs=0.06)


def test_a_dblstm_stands_beside_its_own_tables() -> None:
    assert published("mnist") == (3, DNN)
    assert published("speech-csc") == (1, CHUNKS) and published("speech-dblstm") == (2, WHOLE)
    for table in (CHUNKS, WHOLE):
        for workers in (8, 16):  # the shape of the paper's tables
            assert table[AVERAGING, workers].wer > table[SINGLE, 1].wer + 0.5
            assert max(table[method, workers].wer for method in (CLASSICAL, NESTEROV)) <= 15.0


def test_steps_are_of_plain_sgd(monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(TASKS.make("digits"), optimizer=torch.optim.AdamW)
    monkeypatch.setattr(TASKS, "make", lambda word: other)
    assert MomentumSetting.of("digits", None, batch=4, period=2).task.optimizer is torch.optim.SGD


def test_the_rule_is_as_many_blocks_as_workers() -> None:
    x, y = torch.zeros(60_000, 1), torch.zeros(60_000, dtype=torch.int64)
    digits = MomentumSetting.of("digits", None, batch=7, period=2)
    setting = MomentumSetting(digits.task, Data(x, y, x[:1], y[:1]), period=2)
    assert setting.split == 14
    assert setting.plenty(64) == 60_000 / (14 * 64 * 64)  # 1.05: 14 samples are the most with 64 workers
    assert setting.partition(64) == "64 x 67"  # 60,000 / (14 * 64) = 66.96
    assert setting.partition(8) == "8 x 536"  # 60,000 / (14 * 8) = 535.7
    assert setting.partition(1) == "–"


def test_methods_differ_in_their_momentum_alone() -> None:
    setting = MomentumSetting.of("digits", 16, batch=4, period=3)
    assert setting.strategy(SINGLE, 1) == Single()
    assert setting.strategy(AVERAGING, 8) == Local(period=3)
    assert setting.strategy(CLASSICAL, 64) == BMUF(period=3, momentum=0.986, nesterov=False, warmup=0)
    assert setting.strategy(NESTEROV, 2) == BMUF(period=3, momentum=None, nesterov=True, warmup=0)
    assert sum(p.numel() for p in setting.task.model().parameters()) == 64 * 16 + 16 + 16 * 10 + 10


def test_a_hidden_layer_is_for_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    digits = MomentumSetting.of("digits", None, batch=4, period=3)
    pictures = Data(digits.data.x.view(-1, 8, 8), digits.data.y, digits.data.test_x, digits.data.test_y)
    monkeypatch.setattr("shoal.programs.tasks.digits.digits_data", lambda: pictures)
    with pytest.raises(ValueError, match=r"hidden=16 needs vectors.*take hidden=none"):
        MomentumSetting.of("digits", 16, batch=4, period=3)


def test_all_begin_with_a_sixth_of_the_data() -> None:
    data = MomentumSetting.of("digits", None, batch=4, period=3).data
    part = beginning_of(data)
    assert len(part.x) == len(part.y) == 1437 // 6 and torch.equal(part.x, data.x[:239])


def test_claims_hold_for_rows_like_the_papers() -> None:
    assert met(GOOD) == [True] * 6
    sentences = [claim.sentence for claim in bmuf_wer.claims(GOOD)]
    assert "2.70 % with 8" in sentences[1] and "+1.20 points" in sentences[1]
    assert "+0.40 with 16" in sentences[2] and "N = 64" in sentences[3]


def test_each_claim_falls_with_its_own_row() -> None:
    assert met(doctored(AVERAGING, 64, 3.7, plenty=0.9)) == [False, True, True, True, True, True]
    assert met(doctored(AVERAGING, 16, 2.4)) == [True, False, True, True, True, True]  # 0.3 down, 0.2 spread
    assert met(doctored(AVERAGING, 64, 2.81)) == [
        True,
        False,
        True,
        True,
        True,
        True,
    ]  # no more than the spread
    assert met(doctored(CLASSICAL, 8, 3.01)) == [True, True, False, True, True, True]
    assert met(doctored(CLASSICAL, 64, 3.51)) == [True, True, True, False, True, True]
    assert met(doctored(NESTEROV, 16, 3.6)) == [True, True, True, True, False, False]


def test_error_and_speed_up_of_a_small_run(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {(SINGLE, 1): PublishedRow(14.8, 1.0), (CLASSICAL, 4): PublishedRow(15.0, 3.9)}
    monkeypatch.setattr(bmuf_wer, "published", {"digits": (1, rows)}.get)
    lab = Lab()
    study = BmufWer(task="digits", workers="2/4", seeds=1, epochs=2, hidden=16, batch=24, lr=0.3)
    findings = study.run(lab)
    (table,) = findings.tables
    assert [(row["method"], row["workers"]) for row in table.rows] == [
        (SINGLE, 1),
        *((method, count) for method in MERGING for count in (2, 4)),
    ]
    assert {row["clock"] for row in table.rows} == {"virtual"}
    assert all(heading.key in row for heading in table.headings for row in table.rows)
    told = {(row["method"], row["workers"]): row["paper_wer"] for row in table.rows if row["paper_wer"]}
    assert told == {(SINGLE, 1): 14.8, (CLASSICAL, 4): 15.0} and findings.source.endswith(", table 1")
    assert table.rows[0]["above"] == 0 and table.rows[0]["speed_up"] == 1
    assert all(1 < row["speed_up"] <= row["workers"] for row in table.rows[1:])
    runs = {record["name"]: record for record in lab.records}
    assert len(runs) == 8 and runs["first model, seed 0"]["samples"] == 239
    assert runs["NBM, N = 4, seed 0"]["samples"] == 2 * 1437  # the same sweeps for all
    starts = {runs[name]["curve"][0]["test_loss"] for name in runs if name != "first model, seed 0"}
    assert starts == {runs["first model, seed 0"]["test_loss"]}  # all begin where the first model ended
    assert findings.settings["step_seconds"] > 0
    assert [claim.met for claim in findings.claims] == met(list(table.rows))
    assert [chart.log_x for chart in findings.charts] == [True, True, False]


def time_row(method: str, workers: int, share: float | None, total: float) -> dict[str, Any]:
    clock = "virtual"
    return {"method": method, "workers": workers, "clock": clock, "aggregate_share": share, "total": total}


def test_claims_of_time_are_made_of_the_rows() -> None:
    rows = [time_row(SINGLE, 1, None, 100.0), *(time_row(method, 8, 5.0, 14.0) for method in MERGING)]
    assert [claim.met for claim in bmuf_time.claims(rows)] == [True, True]
    assert "7.1 times as fast as with one (paper 7.3)" in list(bmuf_time.claims(rows))[1].sentence
    waiting = [*rows[:3], time_row(NESTEROV, 8, 10.5, 14.0)]
    assert [claim.met for claim in bmuf_time.claims(waiting)] == [False, True]
    slow = [*rows[:3], time_row(NESTEROV, 8, 5.0, 16.0)]  # 100 / 16 = 6.25, below 0.8 x 8
    assert [claim.met for claim in bmuf_time.claims(slow)] == [True, False]
    real = {**time_row(NESTEROV, 8, 90.0, 99.0), "clock": "real"}
    assert [claim.met for claim in bmuf_time.claims([*rows, real])] == [True, True]


@pytest.mark.soak
def test_times_of_a_small_run_add_up() -> None:
    lab = Lab()
    study = BmufTime(task="digits", real=None, workers="2/4", hidden=16, batch=24)
    table, shares = study.run(lab).tables
    assert shares.rows == table.rows
    assert len(table.rows) == len(lab.records) == 7
    assert {row["clock"] for row in table.rows} == {"virtual"}
    for row in table.rows:
        assert row["total"] == pytest.approx(row["optimise"] + (row["aggregate"] or 0) + row["validate"])
        assert row["validate"] > 0
    two, four = (next(r for r in table.rows if r["method"] == NESTEROV and r["workers"] == n) for n in (2, 4))
    # 1,437 samples: 30 steps of 2 x 24, 15 of 4 x 24
    assert two["optimise"] / four["optimise"] == pytest.approx(2, rel=0.1)
    assert 0 < two["aggregate_share"] < 100


@pytest.mark.soak
def test_real_processes_have_rows_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bmuf_time, "MERGING", (AVERAGING, NESTEROV))
    table, _ = BmufTime(task="digits", real="2", workers="2", hidden=16, batch=64).run(Lab()).tables
    assert [row["clock"] for row in table.rows] == ["real"] * 3 + ["virtual"] * 3
    for row in table.rows[1:3]:
        assert row["optimise"] > 0 and row["aggregate"] > 0


def test_a_part_of_the_test_set_costs_part_of_the_time() -> None:
    setting = MomentumSetting.of("digits", None, batch=4, period=3)
    seen: list[int] = []
    ticks = iter(range(100))

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.append(len(y))
        return out.sum()

    object.__setattr__(setting.task, "loss", loss)
    assert validation_seconds(setting.task, setting.data, 4, lambda: float(next(ticks))) == 1
    assert set(seen) == {90}  # a quarter of 360


def test_both_are_in_the_catalogue() -> None:
    assert STUDIES.read("bmuf-wer:workers=8/16,hidden=none,seeds=1") == BmufWer(
        workers="8/16", hidden=None, seeds=1
    )
    assert STUDIES.read("bmuf-time:real=none") == BmufTime(real=None)
    with pytest.raises(ValueError, match="at least 1 seed"):
        BmufWer(seeds=0)
    for refused in (BmufWer, BmufTime):
        with pytest.raises(ValueError, match="workers='1': take 2 or more workers"):
            refused(workers="1")
    with pytest.raises(ValueError, match="real='1': take 2 or more workers"):
        BmufTime(real="1")
    with pytest.raises(ValueError, match="is not a number"):
        BmufTime(real="two")
