"""How stored figures are compared with new ones. Nothing is timed here."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "regressions.py"
spec = importlib.util.spec_from_file_location("regressions", FILE)
assert spec is not None and spec.loader is not None
regressions = importlib.util.module_from_spec(spec)
sys.modules["regressions"] = regressions  # where dataclasses look their annotations up
spec.loader.exec_module(regressions)

Stored = regressions.Stored
STORED = {"events": Stored(2.0, 0.1, 1.9, 2.1), "steps": Stored(10.0, 0.25, 9.0, 11.0)}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "figures.json"
    regressions.save(path, regressions.machine_kind(), STORED)
    return path


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, float]]]:
    """What the next measurements will say, in turn; each must name the figures that were asked for."""
    coming: list[dict[str, float]] = []

    @contextmanager
    def started(names: list[str]) -> Iterator[dict[str, object]]:
        yield dict.fromkeys(names)

    def measure(works: dict[str, object], rounds: int) -> dict[str, list[float]]:
        ratios = coming.pop(0)
        assert ratios.keys() == works.keys()
        return {name: [ratio] for name, ratio in ratios.items()}

    monkeypatch.setattr(regressions, "started", started)
    monkeypatch.setattr(regressions, "measure", measure)
    yield coming
    assert not coming


def test_a_ratio_within_its_tolerance_is_not_mentioned() -> None:
    assert regressions.compare(STORED, {"events": 2.19, "steps": 7.6}) == ([], [])


def test_a_slower_figure_is_one_sentence_with_both_ratios() -> None:
    slower, remarks = regressions.compare(STORED, {"events": 2.3, "steps": 12.0})
    assert slower == [
        "events has become slower: the stored ratio is 2.000, the new one 2.300 (+15%, tolerance 10%)."
    ]
    assert remarks == []


def test_a_faster_or_an_unknown_figure_is_a_remark() -> None:
    slower, remarks = regressions.compare(STORED, {"events": 1.0, "pulls": 3.0})
    assert slower == []
    assert remarks == [
        "events has become faster: the stored ratio is 2.000, the new one 1.000 (-50%); "
        "run --save to keep it there.",
        "pulls has no stored figure; run --save to store 3.000.",
    ]


def test_a_tolerance_covers_every_run_that_was_seen_with_room_to_spare() -> None:
    runs = [{"events": ratio, "steps": 1.0} for ratio in (2.0, 2.1, 1.9, 2.4, 2.0)]
    found = regressions.summarise(runs)
    assert found["events"] == Stored(2.0, 0.3, 1.9, 2.4)  # 2.4 is 20 % above the median; half as much again
    assert found["steps"] == Stored(1.0, regressions.LEAST_TOLERANCE, 1.0, 1.0)
    assert all(regressions.compare(found, run) == ([], []) for run in runs)


def test_figures_are_stored_by_machine(file: Path) -> None:
    regressions.save(file, "another machine", {"events": Stored(9.0, 0.1, 8.8, 9.2)})
    assert regressions.load(file, regressions.machine_kind()) == STORED
    assert regressions.load(file, "another machine") == {"events": Stored(9.0, 0.1, 8.8, 9.2)}
    assert regressions.load(file, "a third one") is None
    assert regressions.load(file.with_name("nowhere.json"), "another machine") is None


def test_a_machine_without_stored_figures_does_not_fail(
    tmp_path: Path, runs: list[dict[str, float]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert regressions.check(tmp_path / "figures.json", ["events"], rounds=1) == 0
    said = capsys.readouterr().out
    assert said == f"no stored figure for this machine ({regressions.machine_kind()}); run --save\n"


def test_a_figure_that_is_slower_twice_fails_the_check(
    file: Path, runs: list[dict[str, float]], capsys: pytest.CaptureFixture[str]
) -> None:
    runs += [{"events": 2.0, "steps": 20.0}, {"steps": 19.0}]
    assert regressions.check(file, ["events", "steps"], rounds=1) == 1
    assert capsys.readouterr().out.startswith("steps has become slower: the stored ratio is 10.000")


def test_a_figure_that_is_slower_once_does_not(
    file: Path, runs: list[dict[str, float]], capsys: pytest.CaptureFixture[str]
) -> None:
    runs += [{"events": 4.0, "steps": 10.0}, {"events": 2.1}]
    assert regressions.check(file, ["events", "steps"], rounds=1) == 0
    assert capsys.readouterr().out == "Within their tolerances: events, steps.\n"


def test_the_machine_is_named_by_its_processor(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Quick Brown @ 2.50GHz\n")
    assert regressions.cpu_model(cpuinfo) == "Quick Brown @ 2.50GHz"
    assert regressions.cpu_model(tmp_path / "nowhere")
