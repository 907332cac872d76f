"""Shakespeare: characters as numbers, pieces and their labels, and what DiLoCo saves on them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import shoal
from shoal.core.task import Data, Task
from shoal.programs.tasks import TASKS
from shoal.programs.tasks.shakespeare import CONTEXT, bits, encode, sequences
from shoal.replicas.module import build_model
from shoal.runs.evaluation import evaluate

CHARACTERS = 1_115_394


@pytest.fixture
def task(monkeypatch) -> Task:
    monkeypatch.setenv("SHOAL_OFFLINE", "1")
    return TASKS["shakespeare"]()


@pytest.fixture
def data(task) -> Data:
    try:
        return task.data()
    except shoal.DataMissing as error:
        pytest.skip(str(error))


def test_characters_are_numbered_in_the_order_of_their_codes():
    assert encode(b"to be\n").tolist() == [5, 4, 1, 2, 3, 0]  # newline, space, b, e, o, t


def test_pieces_do_not_overlap_and_each_label_is_the_next_character():
    x, y = sequences(torch.arange(8), 3)
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert y.tolist() == [[1, 2, 3], [4, 5, 6]]  # 7 would begin a piece that is too short


def test_a_text_that_just_fills_its_pieces_keeps_them_all():
    x, y = sequences(torch.arange(7), 3)
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]] and y[-1, -1] == 6


def test_bits_are_those_of_a_guess_among_so_many():
    assert bits(torch.zeros(2, 3, 8), torch.ones(2, 3, dtype=torch.int64)) == pytest.approx(3.0)


@pytest.mark.slow
def test_the_text_is_whole_and_split_nine_to_one(data):
    cut = int(0.9 * CHARACTERS)
    assert len(data.x) == (cut - 1) // CONTEXT == 15_685
    assert len(data.test_x) == (CHARACTERS - cut - 1) // CONTEXT == 1_742
    assert data.x.shape[1:] == data.y.shape[1:] == (CONTEXT,)
    assert torch.equal(data.x[0, 1:], data.y[0, :-1]) and torch.equal(data.x[1, 0], data.y[0, -1])
    everything = torch.cat([data.x.flatten(), data.test_x.flatten()])
    assert everything.unique().tolist() == list(range(65))


@pytest.mark.slow
def test_it_begins_with_the_first_citizen(data):
    symbols = "\n !$&',-.3:;?" + "ABCDEFGHIJKLMNOPQRSTUVWXYZ" + "abcdefghijklmnopqrstuvwxyz"
    assert len(symbols) == 65
    assert "".join(symbols[k] for k in data.x[0]).startswith("First Citizen:\nBefore we proceed")


@pytest.mark.slow
def test_untrained_it_knows_nothing(task, data):
    few = Data(data.x[:1], data.y[:1], data.test_x[:100], data.test_y[:100])
    score = evaluate(build_model(task, seed=0), task, few)
    assert score.loss == pytest.approx(math.log(65), abs=0.1)
    assert score.metrics["bits a character"] == pytest.approx(score.loss / math.log(2))


@pytest.mark.soak
def test_it_is_learnt(task, data):
    few = Data(data.x[:1600], data.y[:1600], data.test_x[:100], data.test_y[:100])
    small = Task("few", task.model, lambda: few, task.loss, task.optimizer, task.lr, batch=16)
    result = shoal.run(small, "single", transport="sim", epochs=1)
    assert result.test_loss < 3.1  # the frequencies of characters alone give 3.3
    assert result.test_accuracy > 17  # spaces alone are 15 %


@pytest.mark.slow
@pytest.mark.soak
def test_diloco_learns_it_with_a_hundredth_of_the_traffic(task, data):
    """14 steps of 8 workers; how large a batch is does not show in what is sent, so it is one piece."""
    few = Data(data.x[: 8 * 14], data.y[: 8 * 14], data.test_x[:50], data.test_y[:50])
    small = replace(task, data=lambda: few, batch=1)
    sync = shoal.run(small, "sync", workers=8, transport="sim")
    diloco = shoal.run(small, shoal.DiLoCo(period=14), codec="e3m0", workers=8, transport="sim")
    ring = 2 * 7 * 4 * 29_600  # 2 (N - 1) times the model's bytes, by all workers together
    assert sync.bytes_sent == pytest.approx(14 * ring, rel=0.01)  # and headers
    assert sync.bytes_sent > 100 * diloco.bytes_sent > 0  # 14 times fewer rounds, of 4 bits for 32 and scales
    for result in (sync, diloco):
        assert result.test_loss < result.curve[0]["test_loss"] - 0.1
