"""What a study shows: the table on a terminal, the page, the figures for machines; and its command."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from shoal.cli import app
from shoal.profiling.step import measure_step
from shoal.programs.tasks import TASKS
from shoal.report.findings import (
    Chart,
    ChartLine,
    Claim,
    Findings,
    Heading,
    Table,
    findings_page,
    show_findings,
    write_findings_json,
)
from shoal.studies import STUDIES
from shoal.studies.allreduce_cost import AllreduceCost, claims
from shoal.studies.study import Lab, numbers

ROWS = [
    {"method": "ours & theirs", "error": (1.234, 0.05), "clock": "virtual"},
    {"method": "paper", "error": 1.5, "clock": "published"},
    {"method": "nobody", "error": None, "clock": "real"},
]
FINDINGS = Findings(
    study="errors",
    title="Errors <again>",
    source="Somebody 1999",
    tables=[Table("Errors", [Heading("method", "method"), Heading("error", "error %")], ROWS)],
    charts=[
        Chart(
            "Errors",
            "workers",
            "error %",
            [ChartLine("ours", [(1, 2), (2, 3)]), ChartLine("paper", [(1, 2)], True)],
        )
    ],
    claims=[Claim("it is small", True), Claim("it is zero", False)],
    remarks=["All in all."],
    settings={"seeds": 3},
)


def test_on_a_terminal() -> None:
    out = io.StringIO()
    show_findings(FINDINGS, Console(file=out, width=80))
    text = out.getvalue()
    assert "1.23 ± 0.05" in text and "1.50" in text and "–" in text
    assert "✓ it is small" in text and "✗ missed: it is zero" in text and "All in all." in text


def test_no_column_is_lost_on_a_narrow_terminal() -> None:
    headings = [Heading(f"k{n}", f"a_long_heading_{n}") for n in range(9)]
    wide = replace(FINDINGS, tables=[Table("Wide", headings, [{f"k{n}": 1000.0 * n for n in range(9)}])])
    out = io.StringIO()
    console = Console(file=out, width=60)
    show_findings(wide, console)
    shown = out.getvalue()
    assert all(f"a_long_heading_{n}" in shown and f"{n},000.00" in shown for n in range(1, 9))
    assert console.width == 60


def test_as_a_page() -> None:
    page = findings_page(FINDINGS)
    assert "Errors &lt;again&gt;" in page and "ours &amp; theirs" in page and "<again>" not in page
    assert page.count('<path class="line s0 d0"') == 2 and page.count('<path class="line s0 d1"') == 2
    assert "<b>met</b>" in page and "<b>missed</b>" in page


def test_for_machines(tmp_path: Path) -> None:
    path = write_findings_json(FINDINGS, [{"name": "a", "seconds": float("nan")}], tmp_path / "f.json")
    kept = json.loads(path.read_text())
    assert kept["runs"] == [{"name": "a", "seconds": None}]
    assert kept["findings"]["tables"][0]["rows"][0]["error"] == [1.234, 0.05]
    assert kept["findings"]["claims"][1] == {"sentence": "it is zero", "met": False}


def test_numbers_of_an_option() -> None:
    assert numbers("workers", "16/8/ 8") == [8, 16]
    with pytest.raises(ValueError, match=r"workers='8,16'.*as in 8/16/32"):
        numbers("workers", "8,16")


def test_a_step_is_measured() -> None:
    step = measure_step(TASKS.make("digits"))
    assert 1e-5 < step.seconds < 1 and step.jitter >= 0 and step.steps >= 10
    assert step.compute().mean == step.seconds


@pytest.mark.soak
def test_a_sum_costs_what_its_formula_says() -> None:
    lab = Lab()
    findings = AllreduceCost(workers="4", kilobytes="1/2048", real=0).run(lab)
    (table,) = findings.tables
    assert len(table.rows) == len(lab.records) == 10
    ratios = {(row["algorithm"], row["kilobytes"]): row["ratio"] for row in table.rows}
    assert all(ratios[name, 2048] == pytest.approx(1, abs=0.002) for name in ("tree", "ring", "butterfly"))
    assert {row["clock"] for row in table.rows} == {"virtual"}
    assert all(claim.met for claim in findings.claims)


def test_its_claims_can_fail() -> None:
    row = {"workers": 4, "clock": "virtual", "published_ms": 1.0}
    rows = [
        {**row, "algorithm": "butterfly", "kilobytes": 1, "ms": 2.0, "ratio": 2.0},
        {**row, "algorithm": "tree", "kilobytes": 1, "ms": 1.0, "ratio": 1.0},
        {**row, "algorithm": "rabenseifner", "kilobytes": 8, "ms": 1.5, "ratio": 1.5},
        {**row, "algorithm": "tree", "kilobytes": 8, "ms": 1.0, "ratio": 1.0},
    ]
    assert [claim.met for claim in claims(rows)] == [False, False, False]


def test_the_command_writes_page_and_figures(tmp_path: Path) -> None:
    page, figures = tmp_path / "sum.html", tmp_path / "sum.json"
    word = "allreduce-cost:workers=2/4,kilobytes=1/16,real=0"
    done = CliRunner().invoke(app, f"reproduce {word} --quiet --report {page} --json {figures}".split())
    assert done.exit_code == 0, done.output
    assert "The cost of an all-reduce" in done.output and f"report: {page}" in done.output
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert len(json.loads(figures.read_text())["runs"]) == 20


def test_the_command_refuses_what_it_does_not_know() -> None:
    done = CliRunner().invoke(app, ["reproduce", "allreduce-costs"])
    assert done.exit_code == 2
    done = CliRunner().invoke(app, ["reproduce", "allreduce-cost:worker=2"])
    assert done.exit_code == 2


def test_every_study_names_its_source() -> None:
    assert all(STUDIES.make(word).source for word in STUDIES)
