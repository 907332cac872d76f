"""scale_lr: the learning rate of N workers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt

import pytest
import torch

import shoal
from shoal import Node, Strategy
from shoal.runs.scaling import lr_factor
from shoal.strategies import STRATEGIES
from shoal.testing import blobs

MANY = 1_000_000  # samples


def auto(strategy, workers=4, task=None, samples=MANY):
    made = STRATEGIES.make(strategy) if isinstance(strategy, str) else strategy
    return lr_factor("auto", made, workers, task or blobs(), samples)


def test_the_words_say_what_they_do():
    sync, task = STRATEGIES.make("sync"), blobs()
    found = [lr_factor(word, sync, 16, task, MANY) for word in ("none", "linear", "sqrt")]
    assert found == [1.0, 16.0, 4.0]


@pytest.mark.parametrize("word", ["sync", "sync_server", "hierarchical", "softsync"])
def test_a_mean_of_all_gradients_bears_as_many_times_the_rate(word):
    assert auto(word, 4) == 4.0


@pytest.mark.parametrize(
    "word",
    ["local", "post_local", "easgd", "ensemble", "gossip", "gossipgrad", "dpsgd", "sgp", "adpsgd", "choco"],
)
def test_workers_that_step_on_their_own_batches_take_the_square_root(word):
    assert auto(word, 4) == 2.0


@pytest.mark.parametrize("word", ["bmuf", "diloco", "streaming_diloco", "eamsgd"])
def test_momentum_that_makes_up_for_the_average_leaves_the_rate_alone(word):
    assert auto(word, 4) == 1.0


def test_momentum_that_makes_up_for_half_leaves_the_other_half():
    assert auto("slowmo", 4) == pytest.approx(sqrt(2))


@pytest.mark.parametrize("word", ["asgd", "staleness_aware", "ssp", "dcasgd", "downpour", "hogwild", "strom"])
def test_where_every_push_is_a_step_the_rate_stays(word):
    assert auto(word, 4) == 1.0


@pytest.mark.parametrize(
    "word", [word for word in STRATEGIES if word != "halos"]
)  # has workers in two groups
@pytest.mark.parametrize("rule", ["linear", "sqrt", "auto"])
def test_one_worker_trains_at_the_task_s_rate(word, rule):
    assert lr_factor(rule, STRATEGIES.make(word), 1, blobs(), MANY) == 1.0


def test_optimizers_that_divide_by_the_gradient_take_the_square_root():
    assert auto("sync", 4, replace(blobs(), optimizer=torch.optim.Adam)) == 2.0


def momentum_sgd(parameters, lr):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def test_sgd_from_a_function_is_still_sgd():
    assert auto("sync", 4, replace(blobs(), optimizer=momentum_sgd)) == 4.0


def test_a_batch_of_more_than_a_twentieth_of_the_data_bears_no_larger_rate():
    task = replace(blobs(), batch=32)
    assert auto("sync", 8, task, samples=1437) == pytest.approx(1437 / 20 / 32)
    assert auto("local", 4, task, samples=1437) == 2.0
    assert auto("sync", 64, task, samples=100) == 1.0


@dataclass(frozen=True)
class Own(Strategy):
    async def worker(self, w: Node) -> None:
        async for _ in w.steps():
            w.descend(await w.mean(w.grad()))


def test_a_strategy_of_your_own_takes_the_square_root_unless_it_says_more():
    assert auto(Own(), 4) == 2.0


def test_the_run_trains_at_the_scaled_rate_and_says_so():
    plain = shoal.run(blobs(), "sync", workers=4, transport="sim", lr=0.4)
    scaled = shoal.run(blobs(), "sync", workers=4, transport="sim", lr=0.1, scale_lr="linear")
    assert scaled.digest == plain.digest and scaled.test_loss == plain.test_loss
    told = {key: scaled.config[key] for key in ("lr", "scale_lr", "lr_factor", "steps_per_update")}
    assert told == {"lr": 0.4, "scale_lr": "linear", "lr_factor": 4.0, "steps_per_update": 4}
    assert (plain.config["lr"], plain.config["scale_lr"], plain.config["lr_factor"]) == (0.4, "none", 1.0)


@pytest.mark.slow
def test_real_processes_scale_it_too():
    real, virtual = (
        shoal.run(blobs(), "sync", workers=2, transport=word, scale_lr="sqrt")
        for word in ("processes", "sim")
    )
    assert real.config["lr_factor"] == virtual.config["lr_factor"] == sqrt(2)
    assert real.test_loss == virtual.test_loss


def test_a_checkpoint_of_another_rule_is_another_run(tmp_path):
    shoal.run(blobs(), "sync", workers=2, transport="sim", checkpoint=tmp_path, every=5)
    with pytest.raises(shoal.CheckpointError, match="scale_lr"):
        shoal.run(blobs(), "sync", workers=2, transport="sim", checkpoint=tmp_path, scale_lr="sqrt")


def test_an_unknown_word_gets_the_nearest():
    with pytest.raises(ValueError, match=r"unknown scale_lr 'linar'\. Did you mean 'linear'"):
        shoal.run(blobs(), "sync", workers=2, transport="sim", scale_lr="linar")
