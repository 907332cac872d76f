"""The stack of RBMs, and the perceptron it becomes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from shoal.core.task import Data
from shoal.programs.models.belief_network import BeliefNet, perceptron
from shoal.programs.models.pretraining import Pretraining, contrast, monitored, monitors
from shoal.programs.models.rbm import RBM

X = torch.rand(5, 6, generator=torch.Generator().manual_seed(1))


def stack(*sizes: int) -> BeliefNet:
    torch.manual_seed(0)
    net = BeliefNet([RBM(a, b, scale=1.0) for a, b in pairwise(sizes)])
    for p in net.parameters():
        p.data.normal_()
    return net


def test_parameters_are_counted_as_by_hand():
    weights = 784 * 1000 + 1000 * 1000 + 1000 * 1000 + 1000 * 10
    with torch.device("meta"):
        net = perceptron([784, 1000, 1000, 1000, 10])
    assert sum(p.numel() for p in net.parameters()) == weights + 1000 + 1000 + 1000 + 10 == 2_797_010


def test_a_net_of_one_layer_is_the_way_up_of_its_rbm():
    net = stack(6, 4)
    up = net.unroll(3)[:2]  # without the output
    assert torch.equal(up(X), net.layers[0].hidden(X))
    assert torch.equal(net(X), net.layers[0].hidden(X))
    assert torch.equal(net.features(X), net(X))


def test_the_unrolled_net_has_the_weights_of_the_rbms_to_the_last_bit():
    net = stack(6, 5, 4, 3)
    flat = net.unroll(2)
    assert net.sizes == [6, 5, 4, 3]
    for number, rbm in enumerate(net.layers, start=1):
        layer = flat.get_submodule(f"layer{number}")
        assert torch.equal(layer.weight, rbm.weight) and torch.equal(layer.bias, rbm.bias)
        assert layer.weight.data_ptr() != rbm.weight.data_ptr()  # fine-tuning leaves the stack as it is
    assert torch.equal(flat[:-1](X), net(X))
    assert flat(X).shape == (5, 2)


def test_dropout_is_where_it_was_asked_for_and_only_in_training():
    net = stack(6, 5, 4)
    names = [name for name, _ in net.unroll(2, dropout=0.5, input_dropout=0.2).named_children()]
    assert names == [
        *("dropout0", "layer1", "sigmoid1", "dropout1"),
        *("layer2", "sigmoid2", "dropout2", "output"),
    ]
    wet = net.unroll(2, dropout=0.5, input_dropout=0.2).eval()
    assert torch.equal(wet[:-1](X), net(X))


def test_sharing_gives_the_visible_bias_to_the_layer_below():
    net = stack(6, 5, 4)
    net.share(1)
    assert torch.equal(net.layers[0].bias, net.layers[1].visible_bias)


def test_dreams_are_means_and_a_chain_of_no_steps_is_up_and_down():
    net = stack(6, 5, 4)
    below = net.layers[0]
    assert torch.equal(net.dream(X, 0), below.visible(below.hidden(X)))
    seen = net.dream(X, 3)
    assert seen.shape == X.shape and (seen > 0).all() and (seen < 1).all()
    net = stack(6, 5)
    (rbm,) = net.layers
    assert torch.equal(net.dream(X, 0), X)
    torch.manual_seed(3)
    seen = net.dream(X, 2)
    torch.manual_seed(3)
    once = rbm.gibbs(X, 1)
    assert torch.equal(seen, rbm.visible(torch.bernoulli(rbm.hidden(once))))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="7 visible units cannot stand on 5"):
        BeliefNet([RBM(6, 5), RBM(7, 4)])
    with pytest.raises(ValueError, match="standardise"):
        BeliefNet([RBM(6, 5, units="gaussian", sigma=2.0)]).unroll(2)


# -- the task of a layer -----------------------------------------------------------------------------


def pictures() -> Data:
    x = torch.arange(24.0).view(6, 2, 2) / 24
    return Data(x, torch.arange(6), x[:3] + 0.01, torch.arange(3))


def test_monitors_see_each_test_row_beside_a_training_row():
    data = monitored(pictures)
    assert data.x.shape == (6, 4) and data.test_x.shape == (3, 2, 4)
    assert torch.equal(data.test_x[:, 0], pictures().test_x.flatten(1))
    assert torch.equal(data.test_x[:, 1], data.x[[0, 2, 4]])  # from all over


def test_monitors_are_means_of_what_the_rbm_measures():
    out = torch.tensor([[[1.0, 10.0, -4.0], [9.0, 7.0, 9.0]], [[3.0, 20.0, -6.0], [9.0, 15.0, 9.0]]])
    told = {name: metric(out, torch.zeros(2)) for name, metric in monitors("binary").items()}
    assert told == {"reconstruction error": 2.0, "pseudo-likelihood": -5.0, "free-energy gap": 4.0}
    assert list(monitors("gaussian")) == ["reconstruction error", "free-energy gap"]
    assert contrast(out, torch.zeros(2)) == 2.0  # of the test rows
    assert contrast(torch.tensor([1.0, 2.0]), torch.zeros(2)) == 1.5  # in training


def test_a_layer_is_a_task_whose_name_says_what_must_not_change():
    settings = Pretraining(steps=3, chains=20, units="gaussian")
    task = settings.task(4, 2, pictures, visible_bias=(1.0, 2.0, 3.0, 4.0))
    assert task.name == "rbm 4-2, gaussian units, v / sigma, pcd-3 with 20 chains, probability, shared bias"
    rbm = task.model()
    assert rbm.visible_bias.tolist() == [1.0, 2.0, 3.0, 4.0] and rbm.fantasies.shape == (20, 4)
    assert Pretraining().name(4, 2) == "rbm 4-2, cd-1, probability"
