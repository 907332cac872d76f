"""Which device a word means, and which GPU each worker takes."""

import pytest
import torch

from shoal.core.devices import VISIBLE, choose_device, device_variables, gpus_for, on_device
from shoal.testing import blobs


@pytest.fixture
def gpus(monkeypatch):
    """How many GPUs torch finds; call it with a number."""
    monkeypatch.delenv(VISIBLE, raising=False)

    def find(number):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)

    return find


def test_auto_is_a_gpu_where_there_is_one(gpus):
    gpus(1)
    assert choose_device("auto") == "cuda"
    gpus(0)
    assert choose_device("auto") == "cpu"


def test_a_gpu_that_is_not_there_is_refused(gpus):
    gpus(0)
    with pytest.raises(ValueError, match="torch finds no GPU here; take 'cpu', or 'auto'"):
        choose_device("cuda")


def test_an_unknown_word_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="cuda"):
        choose_device("cuda0")


def test_each_worker_of_a_script_sees_the_next_gpu(gpus):
    gpus(2)
    assert [device_variables(gpus_for("cuda"), rank)[VISIBLE] for rank in range(4)] == ["0", "1", "0", "1"]


def test_workers_share_out_the_gpus_that_the_launcher_sees(gpus, monkeypatch):
    gpus(2)
    monkeypatch.setenv(VISIBLE, "5,GPU-7f")
    assert [device_variables(gpus_for("auto"), rank)[VISIBLE] for rank in range(3)] == ["5", "GPU-7f", "5"]


def test_on_the_processor_a_script_sees_no_gpu_and_without_a_word_all(gpus):
    gpus(2)
    assert device_variables(gpus_for("cpu"), 1) == {VISIBLE: ""}
    assert device_variables(gpus_for(None), 1) == {}


def test_a_task_stays_where_it_is_unless_a_word_says_otherwise(gpus):
    gpus(1)
    moved = blobs().on("cuda")
    assert on_device(moved, None) is moved
    assert on_device(moved, "cuda") is moved
    assert on_device(moved, "cpu").device == "cpu"
    assert on_device(blobs(), "auto").device == "cuda"
