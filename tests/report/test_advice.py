"""Why a run ends below one worker, and what to try: only where the runs show it."""

from __future__ import annotations

import pytest

from shoal.report import advice
from shoal.report.html import page


@pytest.fixture
def short(make_run, make_node):
    """A run on 4 workers, each with a quarter of the steps of one worker, at an accuracy."""

    def make(word="sync", accuracy=95.0, steps=1175, **config):
        settings = {"epochs": 5, "batch": 64, "workers": 4, "steps_per_update": 4, "lr_factor": 1.0, **config}
        nodes = [make_node(rank, steps=steps) for rank in range(4)]
        return make_run(word, test_accuracy=accuracy, config=settings, nodes=nodes, samples=300_000)

    return make


@pytest.fixture
def single(make_run, make_node):
    config = {"epochs": 5, "batch": 64, "workers": 1, "steps_per_update": 1, "lr_factor": 1.0}
    return make_run("single", 1, test_accuracy=97.8, config=config, nodes=[make_node(0, steps=4690)])


def test_it_counts_the_steps_and_extends_the_command(single, short):
    told = advice([single, short()], "shoal compare -n 4 --task mnist")
    assert told == [
        "With 4 workers, 5 epochs are 1,175 steps for each instead of 4,690, 3.99 times fewer. sync averages "
        "them at the rate of one worker, and ends below it.",
        "Try: shoal compare -n 4 --task mnist --scale-lr auto",
    ]


def test_runs_of_the_same_length_share_a_sentence(single, short):
    because, _ = advice([single, short("sync"), short("local"), short("sgp")])
    assert because.endswith("sync, local and sgp average them at the rate of one worker, and end below it.")


def test_a_page_has_it_too(single, short):
    assert "Try --scale-lr auto." in page([single, short()])


def test_a_rate_that_was_raised_already_leaves_more_epochs(single, short):
    because, command = advice([single, short(lr_factor=4.0)], "shoal compare")
    assert because.endswith("sync ends below one worker although the learning rate is larger.")
    assert command == "Try: shoal compare --epochs 10"


def test_a_batch_that_is_large_for_the_data_needs_more_epochs_too(single, short):
    run = {**short(), "samples": 5 * 1437}
    assert advice([single, run], "shoal compare")[-1] == "Try: shoal compare --scale-lr auto --epochs 10"


def test_nothing_is_said_of_runs_that_end_as_high(single, short):
    assert advice([single, short(accuracy=97.8)]) == []


def test_nothing_is_said_of_a_difference_within_the_noise(single, short):
    noisy = short()
    noisy["curve"] = [
        {"seconds": float(t), "samples": 990 + t, "test_accuracy": a, "test_loss": 0.1}
        for t, a in enumerate((94.0, 99.0, 98.0))
    ]
    assert advice([single, noisy]) == []


def test_nothing_is_said_where_every_push_is_a_step(single, short):
    assert advice([single, short("asgd", steps_per_update=1)]) == []


def test_nothing_is_said_of_other_epochs_or_without_one_worker(single, short):
    assert advice([single, short(epochs=2)]) == []
    assert advice([short(), short("local")]) == []
    assert advice([]) == []
