"""Candidates for a step: what is fastest, what fits, and the sentences about it."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from shoal.pipelines.chain import trace
from shoal.pipelines.layer_costs import LayerCost, LinearShape
from shoal.pipelines.proposal import DATA_PARALLEL, HYBRID, OVERLAPPED, Proposal
from shoal.pipelines.split_record import split_record
from shoal.pipelines.split_tables import sentences, split_text, tables_of, timeline_lines
from shoal.report.files import plain
from shoal.sim import Network

MB = 10**6


def proposal(microbatches=8, layers=8, stages=4, network=None, memory=None, linears=(), **cost):
    """Equal layers of 1 s forward and 2 s backward, cut evenly."""
    chain = trace(nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers))), torch.ones(1, 2))
    costs = [LayerCost(name, 1.0, 2.0, linears=linears, **cost) for name in chain.names]
    bounds = tuple(layers * k // stages for k in range(stages + 1))
    chunked = tuple(range(layers + 1)) if layers == 2 * stages else None
    return Proposal(chain, costs, bounds, chunked, microbatches, 16, network or Network(), memory)


def by_name(made):
    return {candidate.name: candidate for candidate in made.candidates}


def test_steps_of_equal_stages_follow_the_formulas():
    found = by_name(proposal())
    assert found["GPipe"].seconds == found["1F1B"].seconds == pytest.approx((8 + 3) * 2 * 3.0)
    assert found["interleaved 1F1B"].seconds == pytest.approx(8 * 6.0 * (1 + 3 / (2 * 8)))
    assert found[DATA_PARALLEL].seconds == pytest.approx(8 * 6.0)  # no bubble, and no network to wait for
    assert HYBRID not in found


def test_a_free_network_favours_data_parallelism_and_a_slow_one_the_pipeline():
    assert proposal(parameter_bytes=MB).best.name == DATA_PARALLEL  # as fast as overlapped, and named first
    slow = proposal(parameter_bytes=MB, output_bytes=100, input_bytes=100, network=Network(bandwidth=1e5))
    assert slow.best.name == "interleaved 1F1B"
    assert "Take a pipeline, interleaved 1F1B" in sentences(slow)[0]


def test_what_does_not_fit_is_not_taken():
    # a device: 2 layers of 10 MB; 1F1B keeps 4 microbatches of 2 MB there, GPipe 8
    made = proposal(state_bytes=10 * MB, activation_bytes=MB, memory=[29 * MB] * 4)
    found = by_name(made)
    assert found["1F1B"].memory == 28 * MB and found["1F1B"].refusal is None
    assert found["GPipe"].refusal == "device 0 needs 36.0 MB and has 29.0 MB"
    assert found[DATA_PARALLEL].refusal == "device 0 needs 88.0 MB and has 29.0 MB"
    assert made.best is found["1F1B"]
    told = sentences(made)[0]
    assert "Take a pipeline, 1F1B: 66,000 ms a step." in told
    assert "data parallel: device 0 needs 88.0 MB" in told


def test_nothing_fits():
    made = proposal(state_bytes=10 * MB, memory=[MB] * 4)
    assert made.best is made.best_pipeline is None
    assert sentences(made)[0].startswith("Nothing fits: GPipe: device 0 needs 20.0 MB and has 1.00 MB; 1F1B")


def test_a_schedule_that_torch_refuses_is_shown_and_not_taken():
    made = proposal(microbatches=2, output_bytes=10)
    assert "at least as many microbatches as stages" in by_name(made)["1F1B"].refusal
    assert by_name(made)["1F1B"].timeline is not None
    assert made.best_pipeline.name != "1F1B"
    assert "interleaved 1F1B" not in by_name(proposal(microbatches=9))  # 2 rounds do not divide 9


def test_too_few_layers_leave_interleaving_out():
    made = proposal(layers=4)
    assert "interleaved 1F1B" not in by_name(made)
    from shoal.pipelines.schedules import INTERLEAVED

    with pytest.raises(ValueError, match="needs two layers or more for each of the 4 devices"):
        made.bounds_of(INTERLEAVED)


def test_the_device_that_sends_most_counts():
    found = by_name(proposal(output_bytes=10, parameter_bytes=100))
    assert found["1F1B"].sent == 2 * 8 * 10  # a middle stage, activations one way, gradients the other
    assert found[DATA_PARALLEL].sent == pytest.approx(2 * 3 / 4 * 8 * 100)


def test_large_fully_connected_layers_bring_the_hybrid():
    wide = LinearShape("fc6", 4096, 4096, 4, 4 * 4096 * 4096, 4)
    made = proposal(
        layers=4, linears=(wide,), parameter_bytes=wide.parameter_bytes, network=Network(bandwidth=1e7)
    )
    found = by_name(made)
    assert found[HYBRID].seconds < found[OVERLAPPED].seconds
    assert any("Hybrid: split fc6 and 3 more between the devices" in sentence for sentence in sentences(made))


def test_tied_weights_and_batch_normalisation_are_pointed_out():
    shared = nn.Linear(2, 2)
    chain = trace(nn.Sequential(shared, nn.BatchNorm1d(2), shared), torch.ones(2, 2))
    made = Proposal(chain, [LayerCost(n, 1, 1) for n in chain.names], (0, 1, 3), None, 4, 16, Network())
    assert made.tied == {"0.weight": [0, 1], "0.bias": [0, 1]}
    # their gradients travel after the step: 4 and 2 floats in two directions
    assert by_name(made)["GPipe"].sent == 4 * (4 + 2)
    slow = replace(made, network=Network(latency=1.0))
    assert by_name(slow)["GPipe"].seconds - slow.candidates[0].timeline.seconds == pytest.approx(2.0)
    told = "\n".join(sentences(made))
    assert "Stages 0 and 1 share '0.weight': its gradients are added up after each step." in told
    assert "Batch normalisation (1) sees microbatches of 16 samples, not the whole batch." in told


def test_a_timeline_on_a_terminal():
    made = proposal(microbatches=2, stages=2, layers=2)
    # 9 s: 1 s forward and 2 s backward; a cell for each second
    timeline = next(c.timeline for c in made.candidates if c.word == "1f1b")
    assert timeline_lines(timeline, cells=9) == ["▒▒··██·██", "·▒██▒██··"]


def test_tables_have_a_row_for_each_stage_and_candidate():
    made = proposal(state_bytes=1000)
    stages, candidates = tables_of(made)
    assert [row[:2] for row in stages.rows] == [
        ["0", "0 to 1"],
        ["1", "2 to 3"],
        ["2", "4 to 5"],
        ["3", "6 to 7"],
    ]
    assert [row[0] for row in candidates.rows] == list(by_name(made))
    assert [row[-1] for row in candidates.rows].count("fastest") == 1
    assert split_text(made).count("device 3  ") == 3  # a line in each of three timelines


def test_the_record_is_json_and_has_every_event():
    record = json.loads(json.dumps(plain(split_record(proposal())), allow_nan=False))
    assert record["split_points"] == ["2", "4", "6"]
    assert record["chunk_split_points"] == ["1", "2", "3", "4", "5", "6", "7"]
    gpipe = record["candidates"][0]
    assert len(gpipe["timeline"]["events"]) == 4 * 8 * 2
    assert gpipe["timeline"]["in_flight"] == [8] * 4
    assert record["network"]["bandwidth"] is None  # infinite
    assert record["recommended"] == DATA_PARALLEL


def test_modules_compute_what_the_model_computes():
    made = proposal()
    x = y = torch.randn(3, 2)
    for module in made.chain.modules(made.bounds):
        y = module(y)
    assert torch.equal(y, made.chain.model(x))
