"""A plan as words, from which a worker on another machine makes the same plan."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from shoal.codecs import CODECS
from shoal.core.growth import Growth
from shoal.core.task import Data
from shoal.programs.tasks import TASKS
from shoal.runs.plan import Plan
from shoal.runs.plan_words import plan_of, words_of
from shoal.strategies import BMUF, STRATEGIES, Sync

COMMON = {"workers": 2, "max_workers": 5, "transport": "grpc", "codec": CODECS.make("none")}
ELASTIC = [w for w in STRATEGIES if w not in ("hogwild", "single") and STRATEGIES.make(w).is_elastic]


@pytest.mark.parametrize("word", ELASTIC)
def test_every_strategy_that_lets_others_in_travels_as_words(word):
    plan = Plan(task=TASKS.make("digits"), strategy=STRATEGIES.make(word), **COMMON)
    assert plan_of(json.loads(json.dumps(words_of(plan)))) == plan


@pytest.mark.parametrize("word", TASKS)
def test_every_task_travels_as_words(word):
    plan = Plan(task=TASKS.make(word).but(batch=7, lr=0.1 + 0.2), strategy=Sync(), **COMMON)
    made = plan_of(json.loads(json.dumps(words_of(plan)))).task
    assert (made.name, made.batch, made.lr) == (word, 7, 0.1 + 0.2)


def test_options_travel():
    task = replace(TASKS.make("digits"), growth=Growth(((1, 1.1234567890123),), 999))
    codec = CODECS.make("top_k", density=0.125)
    settings = {**COMMON, "codec": codec, "seed": 7, "epochs": 3, "scale_lr": "linear", "patience": 9.5}
    plan = Plan(task=task, strategy=BMUF(period=5, momentum=0.125), **settings)
    assert plan_of(json.loads(json.dumps(words_of(plan)))) == plan


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"name": "mine"}, "there is no task 'mine'"),
        ({"model": partial(torch.nn.Linear, 64, 10)}, "this task 'digits' has settings of its own"),
        ({"optimizer": torch.optim.Adam}, "this task 'digits' has settings of its own"),
    ],
)
def test_a_task_of_your_own_does_not_travel(change, why):
    plan = Plan(task=replace(TASKS.make("digits"), **change), strategy=Sync(), **COMMON)
    with pytest.raises(ValueError, match=why):
        words_of(plan)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"max_workers": 1}, "2 workers begin"),
        ({"transport": "processes"}, "take transport 'grpc'"),
        ({"strategy": STRATEGIES.make("asgd")}, "nobody can join workers of 'asgd' here"),
        ({"strategy": STRATEGIES.make("gossip")}, "nobody can join workers of 'gossip' here"),
        ({"balance": True}, "without balance, crew and layout"),
    ],
)
def test_where_nobody_can_join_open_places_are_refused(change, why):
    with pytest.raises(ValueError, match=why):
        Plan(**{"task": TASKS.make("digits"), "strategy": Sync(), **COMMON, **change})


def test_other_data_has_another_mark():
    x, y = torch.randn(100, 3), torch.arange(100)
    marks = [
        Data(part, labels, x, y).mark for part, labels in ((x, y), (x + 1, y), (x, y + 1), (x[:99], y[:99]))
    ]
    assert len(set(marks)) == 4
    assert Data(x[:0], y[:0], x, y).mark.startswith("0 samples")
    assert marks[0] == Data(x.clone(), y.clone(), x + 1, y + 1).mark  # what is tested does not count
