"""The convolutional networks: their sizes, their layers, and that workers share nothing but parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.programs.models.convolutional import digit_cnn, large_net, photo_net
from shoal.programs.tasks import TASKS
from shoal.replicas.module import build_model


def test_it_has_1111946_parameters():
    convolutions = (32 * 5 * 5 + 32) + (64 * 32 * 5 * 5 + 64)
    layers = (4 * 4 * 64 * 1024 + 1024) + (1024 * 10 + 10)
    assert sum(p.numel() for p in digit_cnn().parameters()) == convolutions + layers == 1_111_946


def test_pixels_shrink_to_4_x_4():
    shapes = []
    x = torch.zeros(2, 1, 28, 28)
    for part in digit_cnn():
        x = part(x)
        shapes.append(tuple(x.shape[1:]))
    assert shapes == [(32, 24, 24), (32, 12, 12), (64, 8, 8), (64, 4, 4), (1024,), (1024,), (1024,), (10,)]


def test_only_the_large_layer_has_an_activation_and_nothing_is_dropped():
    kinds = [type(part) for part in digit_cnn()]
    assert kinds.count(nn.ReLU) == 1 and kinds.index(nn.ReLU) == kinds.index(nn.Linear) + 1
    assert nn.Dropout not in kinds


@pytest.mark.slow
def test_it_learns_to_tell_two_patterns_apart():
    task = TASKS["mnist-cnn"]()
    model = build_model(task, seed=0)
    optimizer = task.optimizer(model.parameters(), lr=task.lr)
    x = torch.zeros(2, 1, 28, 28)
    x[0, 0, 10:18] = 1.0  # a bar that lies
    x[1, 0, :, 10:18] = 1.0  # and one that stands
    y = torch.tensor([3, 7])
    before = F.cross_entropy(model(x), y).item()
    for _ in range(5):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert F.cross_entropy(model(x), y).item() < 0.2 * before
    assert model(x).argmax(dim=1).tolist() == [3, 7]


# -- the networks for photographs --------------------------------------------------------------------


def count(model):
    return sum(p.numel() for p in model.parameters())


def test_the_photo_net_is_as_large_as_it_says():
    # 9 weights for each pair of channels, a scale and a shift for each channel, 4 x 4 x 192 -> 102
    convolutions = 9 * (3 * 24 + 24 * 48 + 48 * 96 + 96 * 192)
    norms = 2 * (24 + 48 + 96 + 192)
    assert count(photo_net()) == convolutions + norms + 4 * 4 * 192 * 102 + 102 == 532_542


def test_a_picture_gets_a_score_for_every_class():
    assert photo_net()(torch.zeros(2, 3, 64, 64)).shape == (2, 102)
    assert photo_net(classes=7, widths=(8, 16))(torch.zeros(2, 3, 64, 64)).shape == (2, 7)


def test_the_photo_net_has_no_buffers():
    assert not list(photo_net().buffers())


def test_a_picture_is_scored_alike_in_any_company():
    model = photo_net(widths=(8, 16)).eval()
    pictures = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(pictures)[:1], model(pictures[:1]))


def test_every_parameter_learns():
    model = photo_net(widths=(8, 8), dropout=0.0)
    pictures = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    nn.functional.cross_entropy(model(pictures), torch.arange(4)).backward()
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("widths", [(), (8,) * 7, (12,), (0,), (8, -8)])
def test_widths_that_do_not_fit_are_refused(widths):
    with pytest.raises(ValueError, match=r"take 1 to 6 widths, each a multiple of 8"):
        photo_net(widths=widths)


def test_the_large_net_has_74_770_901_parameters():
    # 7 x 7 from 3 to 64 channels, 3 x 3 from 64 to 64, 8 x 8 x 64 -> 17,800 -> 101, all with biases
    layers = (49 * 3 * 64 + 64, 9 * 64 * 64 + 64, 4096 * 17_800 + 17_800, 17_800 * 101 + 101)
    with torch.device("meta"):  # the sizes alone: 299 MB are not needed
        model = large_net()
        assert model(torch.empty(2, 3, 64, 64)).shape == (2, 101)
    assert count(model) == sum(layers) == 74_770_901
