"""Gradients as products: what is recorded of a module, and when it is trusted."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sampling import sampled
from shoal.core.matrices import Matrix
from shoal.core.products import Product, Recorder
from shoal.core.vector import Flat


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def recorded(module, loss):
    """Layers, products and the gradient of one pass: `loss` takes the module."""
    flat = Flat(module)
    recorder = Recorder(module, flat)
    with recorder.recording():
        loss(module).backward()
    g = flat.gradient(torch.empty_like(flat.x))
    recorder.belongs_to(g)
    return recorder.layers, recorder.take(g), g


def trusted(module, loss):
    """For each layer, its number of rows, or None where they do not make the gradient."""
    layers, products, g = recorded(module, loss)
    return [p.terms if p.makes(layer.of(g)) else None for layer, p in zip(layers, products, strict=True)]


# -- by hand ---------------------------------------------------------------------------------------


def test_two_samples_through_a_layer_of_two_by_three_by_hand():
    # x_1 = (1, 2, 0) with error (1, 0), x_2 = (0, 1, -1) with error (2, -1): the gradient is
    # (1, 0)' (1, 2, 0) + (2, -1)' (0, 1, -1) = ((1, 4, -2), (0, -1, 1)), and that of the bias (3, -1)
    x = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, -1.0]])
    errors = torch.tensor([[1.0, 0.0], [2.0, -1.0]])
    (layer,), (product,), g = recorded(nn.Linear(3, 2), lambda m: (m(x) * errors).sum())
    assert layer == Matrix(0, 2, 3)
    assert torch.equal(product.errors, errors) and torch.equal(product.inputs, x)
    assert g.tolist() == [1, 4, -2, 0, -1, 1, 3, -1]
    assert product.makes(layer.of(g))


def test_one_sample_is_of_rank_one():
    (layer,), (product,), g = recorded(nn.Linear(9, 7), lambda m: m(drawn(1, 9)).square().sum())
    assert product.terms == 1
    assert torch.linalg.matrix_rank(layer.of(g)) == 1
    assert torch.allclose(layer.of(g), torch.outer(product.errors[0], product.inputs[0]))


def test_errors_are_those_of_the_mean_loss():
    # so nothing is left to be divided by K
    x, y = drawn(5, 4), drawn(5, 3, seed=1)
    linear = nn.Linear(4, 3)
    _, (product,), _ = recorded(linear, lambda m: (m(x) - y).square().sum(1).mean())
    assert torch.allclose(product.errors, 2 * (linear(x) - y).detach() / 5)


# -- what is recorded ------------------------------------------------------------------------------


class Model(nn.Module):
    """A layer `a` of 6 x 6 that `forward` uses as it likes, and a layer `b` of 2 x 6."""

    def __init__(self, forward):
        super().__init__()
        self.a, self.b, self.how = nn.Linear(6, 6), nn.Linear(6, 2), forward

    def forward(self, x):
        return self.b(self.how(self, x))


def rows(forward, x=None, prepare=lambda model: None):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Model(forward)
    prepare(model)
    return trusted(model, lambda m: m(drawn(4, 6) if x is None else x).square().mean())


def test_a_layer_used_once_has_a_row_for_each_sample():
    assert rows(lambda m, x: m.a(x).tanh()) == [4, 4]


def test_every_place_of_a_sequence_is_a_row():
    assert rows(lambda m, x: m.a(x).tanh(), drawn(3, 5, 6)) == [15, 15]
    assert rows(lambda m, x: m.a(x).tanh(), drawn(6)) == [1, 1]


def test_a_layer_used_twice_has_the_rows_of_both():
    assert rows(lambda m, x: m.a(m.a(x).tanh())) == [8, 4]


def test_a_weight_that_two_layers_share_has_the_rows_of_both():
    def tie(model):
        model.other = nn.Linear(6, 6)
        model.other.weight = model.a.weight

    assert rows(lambda m, x: m.other(m.a(x).tanh()), prepare=tie) == [8, 4]


def test_a_layer_that_is_not_used_has_none_and_its_gradient_is_zeros():
    assert rows(lambda m, x: x) == [0, 4]
    assert rows(lambda m, x: x + m.a(x).detach()) == [0, 4]


def test_inputs_may_have_a_name_and_outputs_be_changed_in_place():
    assert rows(lambda m, x: F.relu_(m.a(input=x))) == [4, 4]


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_computed_again_on_the_way_back_counts_once(reentrant):
    x = drawn(4, 6).requires_grad_()
    assert rows(lambda m, x: checkpoint(m.a, x, use_reentrant=reentrant).tanh(), x) == [4, 4]


def test_hooks_of_others_on_the_layer_do_not_matter():
    def hook(model):
        model.a.register_forward_pre_hook(lambda _, args: (2 * args[0],))
        model.a.register_forward_hook(lambda _, args, output: 3 * output)

    assert rows(lambda m, x: m.a(x).tanh(), prepare=hook) == [4, 4]


def test_frozen_weights_and_layers_of_another_kind_are_left_out():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(nn.Linear(6, 6), Scaled(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    model[0].weight.requires_grad_(False)
    nn.utils.parametrizations.weight_norm(model[2])
    (layer,), (product,), g = recorded(model, lambda m: m(drawn(4, 6)).square().mean())
    assert layer.end == g.numel() - 6 and product.terms == 4 and product.makes(layer.of(g))


def test_the_module_is_as_it_was_afterwards():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    recorded(model, lambda m: m(drawn(4, 3)).square().mean())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    copy.deepcopy(model)


# -- what is not trusted ---------------------------------------------------------------------------


def test_a_gradient_that_somebody_changes_is_not_made_of_its_rows():
    def hook(change):
        return lambda model: model.a.weight.register_hook(change)

    def mask(g):
        g = g.clone()
        g[2, 3] = 0.0
        return g

    for change in (lambda g: 0.999 * g, mask, lambda g: g + 1e-3):
        assert rows(lambda m, x: m.a(x).tanh(), prepare=hook(change)) == [None, 4]


def test_a_weight_that_is_used_in_another_way_too_is_not_made_of_its_rows():
    assert rows(lambda m, x: m.a(x).tanh() @ m.a.weight) == [None, 4]
    tokens = torch.tensor([1, 1, 2, 5])
    assert rows(lambda m, x: m.a(x).tanh() + F.embedding(tokens, m.a.weight)) == [None, 4]
    assert rows(lambda m, x: F.linear(x, m.a.weight)) == [None, 4]


def test_second_derivatives_are_not_made_of_its_rows():
    def penalised(m, x):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(m.a(x).tanh().sum(), x, create_graph=True)
        return m.a(x).tanh() + slope

    assert rows(penalised) == [None, 4]


def test_inputs_that_autocast_has_rounded_are_not_what_was_multiplied():
    def mixed(m, x):
        with torch.autocast("cpu", torch.bfloat16):
            return m.a(x).float()

    assert rows(mixed) == [None, 4]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_trusted(bad):
    d, x = drawn(4, 6), drawn(4, 7)
    d[1, 2] = bad
    assert not Product(d, x).makes(d.T @ x)


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    sampled(
        [(1, 1, 1), (1, 300, 500), (37, 64, 1000), (500, 700, 600)],
        [torch.float32, torch.float64, torch.bfloat16, torch.float16],
    ),
)
def test_rounding_is_told_from_change(shape, dtype, alike):
    terms, n, q = shape
    # terms that are alike add up; others mostly cancel
    d, x = (drawn(terms, side, seed=side).div(8).to(dtype) for side in (n, q))
    d, x = (d.abs(), x.abs()) if alike else (d, x)
    product, g = Product(d, x), (d.float().T @ x.float() if dtype.itemsize == 2 else d.T @ x).to(dtype)
    assert product.makes(g)
    assert product.makes((d.flip(0).double().T @ x.flip(0).double()).to(dtype))
    single = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    few = 32 * max(torch.finfo(dtype).eps, single * (terms + q) ** 0.5)
    assert not product.makes(g * (1 + few))
    changed = g.clone()
    changed[n // 2, q // 2] += few * (terms * q) ** 0.5 / 8
    assert not product.makes(changed)
    if n > 1:
        assert not product.makes(g.roll(1, 0))


def test_only_the_last_gradient_as_it_was_handed_out_has_products():
    module = nn.Linear(3, 2)
    flat = Flat(module)
    recorder, g = Recorder(module, flat), torch.empty_like(flat.x)

    def step():
        with recorder.recording():
            module(drawn(4, 3)).square().mean().backward()
        recorder.belongs_to(flat.gradient(g))

    step()
    assert len(recorder.take(g)) == 1
    assert recorder.take(g) is None  # once only
    step()
    assert recorder.take(g.clone()) is None
    step()
    g.mul_(0.5)
    assert recorder.take(g) is None
    step()
    with recorder.recording():
        pass
    assert recorder.take(g) is None
