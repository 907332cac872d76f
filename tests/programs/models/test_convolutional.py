"""The convolutional network for digits: its sizes, and that it is the plain composition it says it is."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.programs.models.convolutional import digit_cnn
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
