"""The page, the table and the display of a search, made from searches without processes."""

from __future__ import annotations

import io
from random import Random

import pytest
from asking import drive
from rich.console import Console

from shoal.search import METHODS
from shoal.search.pictures import ScoreScale, ancestry
from shoal.search.search_display import SearchDisplay
from shoal.search.search_page import search_page, write_search_page
from shoal.search.search_result import (
    SearchResult,
    closing_search_table,
    score_text,
    tell_pieces,
    tell_trials,
    value_text,
)
from shoal.search.space import Space

SPACES = {
    "values": Space({"lr": ("log", 1e-4, 1.0), "batch": [16, 32], "note": ["<b>", "plain"]}),
    "layers": Space({"architecture": "layers"}),
    "unspeakable": Space(
        {
            "betas": [[0.9, 0.99], [0.8, 0.9]],
            "codec": ["topk:share=0.1,momentum=0.9", "none"],
            "lr": (0.1234561, 0.1234562),
        }
    ),
}


def found(method: str, space: str = "values", metric: str = "accuracy") -> SearchResult:
    searcher = METHODS.read(method).searcher(SPACES[space], 24, 1)

    def score(piece):
        return Random(f"{piece.values}{piece.end}").uniform(50, 99) * (1 if metric == "accuracy" else -0.01)

    done = drive(searcher, score)
    events = [
        {
            "event": "report",
            "piece": p.number,
            "score": score(p),
            "time": 0.5 * n,
            "seconds": 0.4,
            "message": "",
        }
        for n, p in enumerate(done)
    ]
    pieces = tell_pieces(searcher, [*events, {"event": "killed", "piece": 0}])
    top, number = searcher.best
    best = searcher.pieces[number]
    return SearchResult(
        method.partition(":")[0],
        "digits",
        metric,
        {"trial": best.trial, "piece": number, "score": top, "epochs": best.end, "values": best.values},
        97.5 if metric == "accuracy" else None,
        0.1,
        12.0,
        24,
        24_000,
        1,
        tell_trials(searcher, pieces),
        pieces,
        {"method": method, "space": SPACES[space].text(), "transport": "processes", "workers": 1},
        SPACES[space],
    )


def test_the_page_of_a_population_shows_where_the_best_came_from(tmp_path):
    result = found("pbt:population=4,quantile=0.5")
    assert any(trial["exploits"] for trial in result.trials)
    page = write_search_page(result, tmp_path / "deep" / "page.html").read_text()
    assert page.count("<h2>") == 4 and "Parallel coordinates" in page and "Best so far" in page
    coloured = page.partition("<h2>Lineage")[2].partition("<h2>")[0].count('<circle class="s1"')
    assert coloured == len(ancestry(result.pieces, result.best["piece"]))
    assert "97.50 % on the test set, which was used once" in page
    assert "Killed and continued: 1 times." in page
    assert "<b>,plain" not in page and "&lt;b&gt;" in page  # values are text, not markup


def test_ancestors_are_the_pieces_whose_weights_a_model_has():
    pieces = [{"origin": None}, {"origin": None}, {"origin": 0}, {"origin": 2}]
    assert ancestry(pieces, 3) == [3, 2, 0]


def test_the_page_of_evolved_models_shows_their_parents():
    page = search_page(found("evolution:population=4,sample=2,length=1", "layers", "loss"))
    family = page.partition("<h2>Lineage")[2].partition("<h2>")[0]
    assert "line to its parent" in family and family.count("<circle") == 24
    assert "Parallel coordinates" not in page  # an architecture has no axis


def test_a_loss_that_exploded_does_not_squash_the_picture():
    up = ScoreScale([-1e13, *(-0.1 * 2**k for k in range(10))], "loss")
    assert up(-1e13) == up(-51.2) == 300.0  # the worst tenth lies at the bottom
    assert up(-0.1) == 40.0
    assert up.ticks()[1] == pytest.approx(-((0.1 * 51.2) ** 0.5))  # the middle of a logarithm
    assert up(up.ticks()[1]) == pytest.approx(170.0)
    assert ScoreScale([50.0, 90.0], "accuracy")(70.0) == 170.0
    assert ScoreScale([50.0], "accuracy")(50.0) == 300.0


def test_a_search_without_families_has_no_lineage():
    assert "<h2>Lineage" not in search_page(found("random:length=2"))


def test_the_page_of_ranges_that_no_text_could_say():
    page = search_page(found("random:length=2", "unspeakable"))
    assert "topk:share=0.1,momentum=0.9" in page and "(0.8, 0.9)" in page


def test_the_same_search_gives_the_same_page():
    assert search_page(found("pbt:population=4")) == search_page(found("pbt:population=4"))


@pytest.mark.parametrize(("metric", "wanted"), [("accuracy", "%"), ("loss", "0.")])
def test_the_table_has_the_best_trial_first(metric, wanted):
    result = found("random:length=2", metric=metric)
    console = Console(file=io.StringIO(), width=100)
    console.print(closing_search_table(result))
    lines = console.file.getvalue().splitlines()
    assert lines[0].split() == ["trial", "score", "epochs", "lr", "batch", "note"]
    assert lines[1].split()[0] == str(result.best["trial"]) and wanted in lines[1]
    assert len(lines) == 11  # ten of twelve


def test_values_are_told_briefly():
    assert value_text(0.123456) == "0.1235" and value_text(True) == "True" and value_text(3) == "3"
    layers = [
        {"width": 64, "activation": "relu", "skip": True},
        {"width": 8, "activation": "tanh", "skip": False},
    ]
    assert value_text({"kind": "layers", "layers": layers}) == "64r+ 8t"
    assert score_text(None, "loss") == "failed" and score_text(-0.25, "loss") == "0.25"


def test_the_record_has_everything_but_the_model_and_reads_as_a_run():
    result = found("random:length=2")
    assert "model" not in result.record() and result.record()["kills"] == 1
    run = result.run_record()
    assert run["strategy"] == "random" and run["curve"][-1]["test_accuracy"] == 97.5


def test_the_display_prints_a_line_every_ten_seconds_outside_a_terminal():
    now, out = [0.0], io.StringIO()
    console = Console(file=out, width=120)
    with SearchDisplay("pbt on digits", 4, "accuracy", console=console, clock=lambda: now[0]) as display:
        for number in range(2):
            display(
                "suggest", {"number": number, "trial": number, "begin": 0, "end": 2, "values": {}, "time": 1}
            )
        display("killed", {"piece": 0, "time": 2.0})
        display("report", {"piece": 0, "trial": 0, "score": 90.0, "time": 3.0})
        assert out.getvalue() == ""
        now[0] = 11.0
        display("report", {"piece": 1, "trial": 1, "score": 95.0, "time": 11.0})
        display("stopping", {"running": 0})
    told = out.getvalue().splitlines()
    assert told[0] == (
        "pbt on digits: 4/4 epochs, 2 trials, best 95.00 % (trial 1), 1 killed and continued, 11.0 s"
    )
    assert "Ctrl-C again" in told[1]


def test_the_display_of_a_task_without_accuracy_tells_losses():
    out = io.StringIO()
    console = Console(file=out, width=120)
    clock = iter(range(0, 1000, 20)).__next__
    with SearchDisplay("pbt on a line", 4, "accuracy", console=console, clock=clock) as display:
        display("suggest", {"number": 0, "trial": 0, "begin": 0, "end": 2, "values": {}, "time": 1})
        display("report", {"piece": 0, "trial": 0, "score": -0.21, "accuracy": None, "time": 3.0})
    assert "best 0.21 (trial 0)" in out.getvalue()


def test_the_display_is_live_on_a_terminal_and_silent_when_told():
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True)
    piece = {"number": 0, "trial": 7, "begin": 0, "end": 2, "values": {"lr": 0.5}, "time": 1.0}
    ticks = iter(range(100))
    with SearchDisplay("pbt", 4, "loss", console=console, clock=lambda: float(next(ticks))) as display:
        display("suggest", piece)
    assert "trial 7" in out.getvalue() and "lr 0.5" in out.getvalue()
    silent = io.StringIO()
    with SearchDisplay("pbt", 4, "loss", enabled=False, console=Console(file=silent)) as display:
        display("suggest", piece)
    assert silent.getvalue() == ""
