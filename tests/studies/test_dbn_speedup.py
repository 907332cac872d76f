"""Time to accuracy of a belief net against cores: where tasks stand, what a row holds, what rows decide."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sampling import mostly_soak
from shoal.api.run import run
from shoal.core.errors import Diverged
from shoal.core.task import Data, Task
from shoal.profiling.step import Step
from shoal.programs.models.rbm import RBM
from shoal.programs.tasks import TASKS
from shoal.runs.result import Result
from shoal.sim import Compute, Link
from shoal.strategies.asgd import ASGD
from shoal.strategies.bmuf import BMUF
from shoal.strategies.local import Local
from shoal.strategies.single import Single
from shoal.strategies.sync import Sync
from shoal.studies import STUDIES, dbn_speedup
from shoal.studies.belief_stages import Examples, pretraining, read_labelled, read_rows
from shoal.studies.dbn_figures import (
    FIXED_NODES,
    FIXED_TASKS,
    PUBLISHED,
    REAL,
    SERVER,
    claims,
    compared,
)
from shoal.studies.dbn_speedup import Cluster, ClusterRuns, DbnSpeedup
from shoal.studies.study import Lab
from shoal.vocabulary.strategy import Strategy

SMALL = DbnSpeedup(
    task="digits",
    layers="16",
    accuracy=30.0,
    cores="2/8",
    server="2",
    batch=8,
    pretrain=1,
    finetune_lr=0.3,
    between="100Mbit,1ms",
)


def line(table: str, cores: int, seconds: float | None) -> dict[str, Any]:
    paper = PUBLISHED.get(table, {}).get(cores, (None, None))
    row = {"table": table, "cores": cores, "seconds": seconds, "finetuning": seconds and seconds / 10}
    return {**row, "paper_seconds": paper[0], "paper_speed_up": paper[1]}


GOOD = [
    line(FIXED_NODES, 1, 100.0),
    line(FIXED_NODES, 4, 26.0),
    line(FIXED_NODES, 16, 6.5),  # 15.4
    line(FIXED_NODES, 32, 4.0),  # 25
    line(FIXED_TASKS, 1, 100.0),
    line(FIXED_TASKS, 4, 26.0),
    line(FIXED_TASKS, 16, 7.0),  # 14.3
    line(FIXED_TASKS, 32, 4.5),  # 22.2
    line(SERVER, 1, 100.0),
    line(SERVER, 32, 20.0),
    line(REAL, 1, 100.0),
    line(REAL, 2, 60.0),
]
NAMES = ("16n", "32n", "more n", "16t", "32t", "more t", "between", "server", "real")


def small_data() -> Data:
    x = torch.rand(40, 6, generator=torch.Generator().manual_seed(0))
    return Data(x, torch.arange(40) % 3, x[:5], torch.arange(5) % 3)


def missed(*changed: dict[str, Any]) -> set[str]:
    """Which claims fall when these rows stand for those of the same table and cores."""
    places = {(row["table"], row["cores"]): row for row in (*GOOD, *changed)}
    found = list(claims(compared([dict(row) for row in places.values()])))
    return {name for name, claim in zip(NAMES, found, strict=True) if not claim.met}


def test_published_times_and_speed_ups_belong_together() -> None:
    for table in PUBLISHED.values():
        assert list(table) == [4, 8, 12, 16, 20, 24, 28, 32]
        assert all(4450 <= seconds * speed_up <= 4464 for seconds, speed_up in table.values())


def test_tasks_of_a_node_have_the_better_links() -> None:
    network = Cluster(2, 2).network("80Gbit,2us", "10Gbit,50us")
    assert set(network.links) == {(0, 1), (1, 0), (2, 3), (3, 2)}
    assert network.link(0, 1) == Link(2e-6, 1e10)
    assert network.link(1, 2) == Link(50e-6, 1.25e9)


def test_a_server_stands_on_the_first_node() -> None:
    links = Cluster(2, 2).network("80Gbit,2us", "10Gbit,50us", servers=1).links
    assert {pair for pair in links if 4 in pair} == {(0, 4), (4, 0), (1, 4), (4, 1)}


def test_fine_tuning_has_more_rows_and_a_higher_rate_with_more_workers() -> None:
    study = DbnSpeedup(lr=0.05, finetune_lr=0.1, most_finetune_lr=0.5, labelled=5000, labelled_each=1000)
    recipes = [study.recipe(workers, 60_000) for workers in (1, 4, 32)]
    assert [recipe.finetune_lr for recipe in recipes] == [0.1, 0.4, 0.5]
    assert [recipe.labelled for recipe in recipes] == [5000, 5000, 32_000]
    assert {recipe.lr for recipe in recipes} == {0.05}


def test_the_papers_way_is_plain_gradients_that_come_to_the_same() -> None:
    study = DbnSpeedup(lr=0.05, momentum=0.5, finetune_lr=0.1, finetune_momentum=0.9)
    papers = study.papers(32, 60_000)
    assert papers.strategy == papers.finetune_strategy == ASGD()
    assert papers.momentum == papers.finetune_momentum == 0
    assert papers.lr == 0.1 and papers.finetune_lr == pytest.approx(1.0)  # 0.05 / 0.5, 0.1 / 0.1
    assert papers.labelled == study.recipe(32, 60_000).labelled


def test_a_strategy_gets_those_options_that_it_has() -> None:
    study = DbnSpeedup(batch=10, averages=24)
    # 60,000 rows are 188 steps of 32 x 10: 24 averages are 8 steps apart; with 4 workers 1,500 steps, 63
    many, few = study.recipe(32, 60_000), study.recipe(4, 60_000)
    assert many.strategy == BMUF(period=8, momentum=0.9, warmup=0) and many.finetune_strategy == Sync()
    assert few.strategy == BMUF(period=63, momentum=0.75, warmup=0)
    assert replace(study, strategy="local").recipe(32, 60_000).strategy == Local(period=8)
    assert study.recipe(1, 60_000).strategy == study.recipe(1, 60_000).finetune_strategy == Single()


@pytest.mark.parametrize(
    "strategy", mostly_soak([BMUF(period=3, momentum=0.5, warmup=0), Sync(), Local(period=2)], few=1)
)
def test_a_clockwork_takes_as_long_as_the_run_it_stands_for(strategy: Strategy, tmp_path: Path) -> None:
    examples = Examples(small_data(), tmp_path)
    network = Cluster(2, 2).network("1Gbit,10us", "10Mbit,1ms")

    def make(stage: str, task: Task, strategy: Strategy, epochs: int) -> Result:
        own: dict[str, Any] = {"workers": 4, "transport": "sim", "network": network, "collective": "ring"}
        return run(task, strategy, epochs=epochs, compute=Compute(0.01, jitter=0.2), **own)

    study = DbnSpeedup(layers="4-3", pretrain=2, labelled=31, labelled_each=1, batch=3)
    recipe = replace(study.recipe(4, 40), strategy=strategy, finetune_strategy=strategy)
    net = examples.train(recipe, make)
    again = net.timed(recipe, make)
    for one, other in zip((*net.layers, net.finetuning), (*again.layers, again.finetuning), strict=True):
        assert other.seconds == one.seconds and other.curve == one.curve


def test_inputs_go_from_0_to_1_and_units_begin_as_often_on_as_in_the_data(tmp_path: Path) -> None:
    x = torch.tensor([[-1.0, 3.0], [0.0, 3.0], [-1.0, 3.0], [0.0, -1.0]])
    examples = Examples(Data(x, torch.tensor([0, 1, 2, 0]), x[:1], torch.tensor([2])), tmp_path)
    assert examples.classes == 3
    assert np.array_equal(examples.rows.x, [[0, 1], [0.25, 1], [0, 1], [0.25, 0]])  # (x + 1) / 4
    assert torch.equal(read_rows(tmp_path).x, torch.from_numpy(examples.rows.x))
    part = read_labelled(tmp_path, 3)
    assert part.y.tolist() == [0, 1, 2] and part.test_y.tolist() == [2] and len(part.x) == 3
    bias = pretraining(SMALL.recipe(1, 4), examples.rows, tmp_path, hidden=2).model().visible_bias
    # means 1/8 and 3/4: log(1/7) and log(3)
    assert bias.tolist() == pytest.approx([math.log(1 / 7), math.log(3)])


def test_each_stage_begins_where_the_one_before_has_ended(tmp_path: Path) -> None:
    examples = Examples(small_data(), tmp_path)
    seen: dict[str, Task] = {}
    inputs: dict[str, torch.Tensor] = {}

    def make(stage: str, task: Task, strategy: Strategy, epochs: int) -> Result:
        seen[stage], inputs[stage] = task, task.data().x.clone()
        return run(task, strategy, transport="sim", epochs=epochs)

    recipe = DbnSpeedup(layers="4-3", pretrain=2, labelled=20, labelled_each=1, batch=5).recipe(1, 40)
    net = examples.train(recipe, make)
    below, above = (result.model for result in net.layers)
    assert isinstance(below, RBM) and isinstance(above, RBM)
    with torch.no_grad():
        assert torch.allclose(inputs["layer 2"], below.hidden(inputs["layer 1"]))
    begin = dict(seen["fine-tuning"].model().named_parameters())
    assert torch.equal(begin["layer1.weight"], below.weight)
    assert torch.equal(begin["layer2.weight"], above.weight) and begin["output.weight"].shape == (3, 3)
    assert [result.samples for result in (*net.layers, net.finetuning)] == [80, 80, 20]  # 2 epochs; 20 rows


def test_all_claims_hold_for_rows_as_they_should_be() -> None:
    assert missed() == set()
    sentences = [claim.sentence for claim in claims(compared([dict(row) for row in GOOD]))]
    assert "15.4 times as fast on 16 cores (aim 14.2, paper 14.2)" in sentences[0]
    assert "22.2 times as fast on 32 cores (aim 20, paper 5.2)" in sentences[4]
    assert "1.08 to 1.12 times as long" in sentences[6]  # 7 / 6.5 and 4.5 / 4; the 4 cores are the same run
    assert "5.0 times as fast, 25.0 without" in sentences[7]


def test_each_claim_falls_with_its_own_row() -> None:
    assert missed(line(FIXED_NODES, 16, 7.05)) == {"16n", "between"}  # 14.18, and no faster than 7 by much
    assert missed(line(FIXED_NODES, 32, 5.1), line(FIXED_TASKS, 32, 5.2)) == {"32n", "32t"}
    assert missed(line(FIXED_TASKS, 16, 7.1)) == {"16t"}
    assert missed(line(FIXED_NODES, 16, 3.9)) == {"more n"}  # 16 faster than 32: the paper's collapse
    assert missed(line(FIXED_TASKS, 32, None)) == {"32t", "more t", "between"}
    assert missed(line(SERVER, 32, 7.9)) == missed(line(SERVER, 32, None)) == {"server"}
    assert missed(line(REAL, 2, 100.0)) == {"real"}


@pytest.mark.soak
def test_a_small_run_has_all_tables_and_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    # on a fast machine these links would be slower than the work that they save
    monkeypatch.setattr(dbn_speedup, "measure_step", lambda task: Step(2e-3, jitter=0.0, steps=10))
    lab = Lab()
    findings = SMALL.run(lab)
    assert [len(table.rows) for table in findings.tables] == [3, 3, 2]
    rows = [row for table in findings.tables for row in table.rows]
    assert [row["place"] for row in rows] == [
        *("1 x 1", "2 x 1", "2 x 4"),
        *("1 x 1", "1 x 2", "4 x 2"),
        *("1 x 1", "2 x 1"),
    ]
    assert {row["clock"] for row in rows} == {"virtual"}
    for table in findings.tables:
        assert all(heading.key in row for heading in table.headings for row in table.rows)
    for row in rows:
        assert row["seconds"] == pytest.approx(row["pretraining"] + row["finetuning"])
        assert row["finetuning"] > 0
    two, eight = rows[1], rows[2]
    assert rows[0]["speed_up"] == 1 < two["speed_up"] < eight["speed_up"] < 8
    assert rows[5]["seconds"] > eight["seconds"]  # by four nodes rather than two
    assert rows[5]["reconstruction"] == eight["reconstruction"]  # links change the clock, not the numbers
    names = [record["name"] for record in lab.records]
    assert len(set(names)) == len(names) == 6 * 2  # nets and clocks, each a layer and fine-tuning
    assert sum("the clock" in name for name in names) == 2 * 2  # 1 x 2 and 4 x 2; one worker is made once
    steps = findings.settings["step_seconds"]
    assert steps == {"layer 1": 2e-3, "fine-tuning": 2e-3}
    assert [c.met for c in findings.claims] == [c.met for c in claims(rows)]
    assert [chart.log_y for chart in findings.charts] == [False, True]


def test_numbers_that_are_no_longer_finite_leave_an_empty_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab()

    def diverges(name: str, task: Task, strategy: Strategy, **settings: Any) -> Result:
        raise Diverged("loss is nan")

    monkeypatch.setattr(lab, "run", diverges)
    study = DbnSpeedup(task="digits", layers="4", cores="2", server=None)
    rows = ClusterRuns(study, lab, Examples(TASKS.make("digits").data(), tmp_path)).virtual()
    assert {row["seconds"] for row in rows} == {row["speed_up"] for row in rows} == {None}
    assert not any(claim.met for claim in claims(rows))
    assert lab.records == [{"name": name, "diverged": True} for name in ("one worker", "2 x 1")]


ON_PROCESSES = DbnSpeedup(task="digits", layers="8", accuracy=5.0, virtual=False, real="2", batch=32)


def test_real_processes_have_a_table_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run asks for processes with one thread; here they are made in virtual time."""
    lab = Lab()
    asked: list[tuple[str, int, int]] = []

    def virtual(name: str, task: Task, strategy: Strategy, **settings: Any) -> Result:
        asked.append((settings.pop("transport"), settings["workers"], settings.pop("threads")))
        return run(task, strategy, transport="sim", **settings)

    monkeypatch.setattr(lab, "run", virtual)
    (table,) = ON_PROCESSES.run(lab).tables
    assert asked == [("processes", 1, 1)] * 2 + [("processes", 2, 1)] * 2  # a layer and fine-tuning each
    assert [(row["cores"], row["clock"]) for row in table.rows] == [(1, "real"), (2, "real")]


@pytest.mark.soak
def test_real_processes_take_time() -> None:
    (table,) = ON_PROCESSES.run(Lab()).tables
    assert [(row["cores"], row["clock"]) for row in table.rows] == [(1, "real"), (2, "real")]
    assert all(row["seconds"] > 0 for row in table.rows)


def test_it_is_in_the_catalogue_and_says_what_is_wrong(tmp_path: Path) -> None:
    read = STUDIES.read("dbn-speedup:virtual=false,real=1/2/4/8/16")
    assert read == DbnSpeedup(virtual=False, real="1/2/4/8/16")
    with pytest.raises(ValueError, match=r"layers='200,200'.*as in 200-200"):
        DbnSpeedup(layers="200,200").recipe(1, 100)
    with pytest.raises(ValueError, match=r"cores='3'.*even numbers"):
        DbnSpeedup(task="digits", cores="3").run(Lab())
    with pytest.raises(ValueError, match="nothing to do; add numbers of processes"):
        DbnSpeedup(virtual=False)
    x, y = torch.rand(4, 2), torch.rand(4)
    with pytest.raises(ValueError, match=r"needs a task with classes, such as mnist"):
        Examples(Data(x, y, x, y), tmp_path)
