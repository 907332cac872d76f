"""A model that lies over a group of processes trains what whole models train on the same samples."""

import functools
import json
import multiprocessing

import pytest
import torch

import shoal
from laid_out_tasks import letters, pictures, two_inputs

TASKS = {"pictures": pictures, "letters": letters, "two inputs": two_inputs}

KILLED = "worker 0, process 1 failed: it was ended by SIGKILL; its group of 2 processes ends with it"
PIPELINE = "pipeline:group=2,schedule=gpipe,microbatches=4,split=3-8"
EACH = 2 * 10 * 8 * 8  # of two processes, in ten steps: 8 samples of float64
INSIDE = {  # of a sum, each of two processes sends as much as it has; of what is gathered, its part, padded
    "tensor:group=2": EACH
    * (9 + 3 + 18 + 9),  # sums of the outputs of each pair, and of their inputs' gradients
    "columns:group=2": EACH
    * (6 + 5 + 4 + 2 + 18 + 12 + 9 + 7),  # outputs gathered, gradients of inputs summed
    PIPELINE: EACH * 18 + 10 * 8,  # 18 features there and their gradients back, and the loss
}


def weights(result):
    return torch.cat([p.detach().reshape(-1) for p in result.model.parameters()])


@functools.cache
def whole(task, workers, **settings):
    """Data parallelism: every worker has all of the model, and 4 samples of a step."""
    return shoal.run(TASKS[task](), "sync", workers=workers, batch=4, epochs=2, tests=1, **settings)


def laid_out(task, layout, processes, **settings):
    return shoal.run(
        TASKS[task](), "sync", batch=4 * processes, epochs=2, tests=1, layout=f"{layout}", **settings
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "layout", "processes"),
    [
        *(
            pytest.param("pictures", f"{cut}:group={n}", n, marks=pytest.mark.soak)
            for cut, n in (("columns", 2), ("rows", 2), ("rows", 3))
        ),
        ("pictures", "tensor:group=2", 2),
        pytest.param("pictures", "hybrid:group=3", 3, marks=pytest.mark.soak),
        ("pictures", "hybrid:group=2", 2),
        ("two inputs", "branches", 2),
        ("pictures", PIPELINE, 2),
        *(  # tests/pipelines/test_pipeline.py has every schedule
            pytest.param(task, f"pipeline:{schedule}", size, marks=pytest.mark.soak)
            for task, schedule, size in (
                ("letters", "group=2", 2),
                ("pictures", "group=3,schedule=1f1b,microbatches=6,split=even", 3),
                ("letters", "group=2,schedule=interleaved,microbatches=4,split=even", 2),
            )
        ),
    ],
)
def test_the_weights_are_those_of_whole_models(task, layout, processes):
    twin, ours = whole(task, processes), laid_out(task, layout, processes)
    assert torch.allclose(weights(ours), weights(twin), rtol=0, atol=1e-6)
    assert (weights(ours) - weights(whole(task, 1))).abs().max() > 1e-3  # they have moved, and another way
    assert ours.samples == twin.samples and ours.workers == 1
    assert ours.nodes[0]["steps"] == twin.nodes[0]["steps"]
    assert ours.test_loss == pytest.approx(twin.test_loss, abs=1e-6)
    if layout in INSIDE:
        assert ours.bytes_sent == INSIDE[layout]
    assert ours.nodes[0]["bytes_inside"] == ours.bytes_sent > 0
    assert ours.parameters == twin.parameters
    assert ours.config["layout"] == layout and ours.config["group"] == processes
    json.dumps(ours.record())


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    ["tensor:group=2", pytest.param("pipeline:group=2,split=even,schedule=gpipe", marks=pytest.mark.soak)],
)
def test_a_strategy_keeps_groups_together_as_it_keeps_whole_models(layout):
    settings = {"workers": 2, "batch": 8, "epochs": 2, "tests": 1}
    strategy = shoal.BMUF(period=2)
    twin = shoal.run(pictures(), strategy, **settings)
    ours = shoal.run(pictures(), strategy, layout=layout, **settings)
    assert torch.allclose(weights(ours), weights(twin), rtol=0, atol=1e-6)
    assert [node["rank"] for node in ours.nodes] == [0, 1]
    assert ours.bytes_sent > sum(node["bytes_inside"] for node in ours.nodes)  # and some between the groups


@pytest.mark.slow
def test_a_killed_process_ends_its_group_and_the_run_by_name():
    def kill(event):
        """The second process of the only worker, once it trains."""
        for process in multiprocessing.active_children():
            if process.name == "worker 0, process 1" and event["step"] > 2:
                process.kill()

    settings = {"batch": 8, "epochs": 2000, "tests": 0, "layout": "tensor:group=2"}
    with pytest.raises(shoal.ShoalError, match=KILLED):
        shoal.run(pictures(), "sync", on_progress=kill, **settings)


@pytest.mark.slow
def test_the_memory_of_a_process_is_told():
    result = whole("pictures", 2)
    assert result.memory is not None and result.memory == max(node["memory"] for node in result.nodes)


@pytest.mark.slow
def test_a_stage_without_parameters_is_refused_by_name():
    with pytest.raises(shoal.ShoalError, match="process 1 would get layers without parameters"):
        laid_out("pictures", "pipeline:group=3,schedule=gpipe,split=5-1-5", 3)


@pytest.mark.slow
def test_a_loss_that_a_pipeline_cannot_cut_ends_the_run_with_a_sentence():
    with pytest.raises(shoal.ShoalError, match="is not the mean of its microbatches' losses"):
        shoal.run(pictures(loss=weighted), "sync", batch=8, epochs=2, tests=0, layout=PIPELINE)


def weighted(out, y):
    return torch.nn.functional.cross_entropy(out, y, weight=torch.tensor([1.0, 2.0, 5.0]).double())
