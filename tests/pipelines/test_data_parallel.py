"""A step without a pipeline, and fully-connected layers that are split: bytes and seconds by hand."""

import pytest

from shoal.collectives.link import LinkCost
from shoal.collectives.rabenseifner import cost
from shoal.pipelines.data_parallel import data_parallel_step
from shoal.pipelines.layer_costs import LayerCost, LinearShape
from shoal.pipelines.linear_layers import COLUMNS, ROWS, linear_split
from shoal.sim import Network

FAST = Network(latency=0.0, bandwidth=1e9)


def shape(inputs, outputs, samples=1):
    return LinearShape("fc", inputs, outputs, samples, 4 * inputs * outputs, 4)


def test_devices_share_the_microbatches_and_all_reduce_the_gradients():
    layers = [LayerCost("a", 1.0, 2.0, activation_bytes=7, parameter_bytes=10**9, state_bytes=20)] * 2
    step = data_parallel_step(layers, 4, 8, FAST)
    assert (step.forward, step.backward) == (4.0, 8.0)  # 2 of 8 microbatches, 2 layers
    assert step.all_reduce == cost(4, 2e9, LinkCost.of_network(0.0, 1e9))
    assert step.all_reduce == pytest.approx(3.0)  # 2 n G (P - 1) / P = 2 * 2 * 3 / 4
    assert step.seconds == pytest.approx(4 + 8 + 3)
    assert step.overlapped == pytest.approx(4 + 8)
    assert step.sent == pytest.approx(3e9)
    assert step.memory == 2 * (20 + 7)


def test_a_weight_that_two_layers_share_travels_once():
    first = LayerCost("a", 1.0, 2.0, parameter_bytes=10**9)
    second = LayerCost("b", 1.0, 2.0, parameter_bytes=10**9, repeated_bytes=10**9)
    assert data_parallel_step([first, second], 4, 8, FAST).all_reduce == pytest.approx(1.5)


def test_a_slow_network_shows_through_the_overlap():
    layers = [LayerCost("a", 1.0, 2.0, parameter_bytes=10**9)]
    step = data_parallel_step(layers, 4, 4, Network(bandwidth=1e8))
    assert step.overlapped == pytest.approx(1 + 15)


def test_traffic_of_a_layer_by_hand():
    split = linear_split(shape(100, 400, samples=5), devices=4, microbatches=2)
    assert split.samples == 10
    assert split.data_parallel == 2 * 3 / 4 * 4 * 100 * 400
    assert split.columns == 2 * 3 / 4 * 10 * 4 * (100 + 400 / 4)
    assert split.rows == 2 * 3 / 4 * 10 * 4 * (100 / 4 + 400)
    assert (split.best, split.cheapest, split.pays) == (COLUMNS, split.columns, True)


def test_the_short_side_is_the_one_that_travels():
    assert linear_split(shape(400, 100), 4, 1).best == ROWS
    assert linear_split(shape(100, 400), 4, 1).best == COLUMNS


def test_splitting_pays_until_the_batch_is_about_as_large_as_the_long_side():
    # data-parallel: in * out; columns: batch * (in + out / P), so up to batch = in * out / (in + out / P)
    limit = 100 * 400 / (100 + 400 / 4)
    assert linear_split(shape(100, 400, samples=int(limit) - 1), 4, 1).pays
    assert not linear_split(shape(100, 400, samples=int(limit) + 1), 4, 1).pays


def test_in_the_hybrid_gradients_of_split_layers_do_not_travel_and_activations_do():
    fc = shape(1000, 1000)
    layers = [
        LayerCost("conv", 1.0, 1.0, parameter_bytes=1000, state_bytes=2000),
        LayerCost("fc", 1.0, 1.0, parameter_bytes=fc.parameter_bytes, state_bytes=2 * fc.parameter_bytes),
    ]
    split = linear_split(fc, 4, 4)
    step = data_parallel_step(layers, 4, 4, Network(latency=0.001, bandwidth=1e6), [split])
    link = LinkCost.of_network(0.001, 1e6)
    assert step.sent == pytest.approx(2 * 3 / 4 * 1000 + split.columns)
    assert step.activations == pytest.approx(4 * link.latency + split.columns * 1e-6)
    assert step.memory == pytest.approx(2000 + 2 * fc.parameter_bytes / 4)
    assert step.all_reduce < 0.01
