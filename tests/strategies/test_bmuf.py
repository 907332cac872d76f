"""Blockwise model-update filtering: worked out on paper, and its identities."""

import pytest
import torch
from blockwise import Bowls, path

from shoal.strategies import BMUF, Local, Single
from shoal.testing.problems import Quadratic, Slope, simulate

# Two workers that go down a slope of 1 and of 3, two steps of rate 1/2: a block moves the average by G = -2.
SLOPES = Slope(lr=0.5, gradients=(1.0, 3.0))
G = -0.5 * 2 * (1 + 3) / 2


def paper(update, *, eta, zeta, nesterov, blocks, start):
    """The paper's recursion, in its own symbols: W and W_g apart."""
    W = W_g = start
    Delta, out = 0.0, []
    for _ in range(blocks):
        Delta = eta * Delta + zeta * update(W_g)
        W = W + Delta
        W_g = W + eta * Delta if nesterov else W
        out.append(W_g)
    return out


def test_nesterov_block_momentum_by_hand():
    delta1 = G
    delta2 = 0.5 * delta1 + G
    delta3 = 0.5 * delta2 + G
    w1, w2, w3 = delta1, delta1 + delta2, delta1 + delta2 + delta3
    expected = [w1 + 0.5 * delta1, w2 + 0.5 * delta2, w3 + 0.5 * delta3]
    assert path(BMUF(period=2, momentum=0.5, warmup=0), SLOPES, 3) == expected == [-3.0, -6.5, -10.25]


def test_classical_block_momentum_by_hand():
    expected = [G, G + (0.5 * G + G), G + (0.5 * G + G) + (0.5 * (0.5 * G + G) + G)]
    classical = BMUF(period=2, momentum=0.5, nesterov=False, warmup=0)
    assert path(classical, SLOPES, 3) == expected == [-2.0, -5.0, -8.5]


def test_the_variant_of_cntk_by_hand():
    delta1 = G
    delta2 = 0.5 * delta1 + G
    delta3 = 0.5 * delta2 + G
    expected = [1.5 * delta1, 1.5 * (delta1 + delta2), 1.5 * (delta1 + delta2 + delta3)]
    variant = BMUF(period=2, momentum=0.5, variant="cntk", warmup=0)
    assert path(variant, SLOPES, 3) == expected == [-3.0, -7.5, -12.75]


def test_the_variant_of_cntk_without_nesterov_is_classical():
    options = {"period": 2, "momentum": 0.5, "nesterov": False, "warmup": 0}
    assert path(BMUF(variant="cntk", **options), SLOPES, 3) == path(BMUF(**options), SLOPES, 3)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("eta", "zeta"), [(0.5, 1.0), (0.5, 0.5), (0.25, 2.0), (0.75, 0.5)])
def test_the_paper_s_recursion_on_a_quadratic(eta, zeta, nesterov):
    # two steps of x -= (x - a) / 2 keep a quarter of the distance to a; the mean target is 1
    problem = Quadratic(lr=0.5, targets=(0.0, 2.0))
    expected = paper(lambda x: (1 - x) * 3 / 4, eta=eta, zeta=zeta, nesterov=nesterov, blocks=5, start=5.0)
    bmuf = BMUF(period=2, momentum=eta, rate=zeta, nesterov=nesterov, warmup=0)
    assert path(bmuf, problem, 5, start=5.0) == expected


def test_models_are_weighted_by_the_samples_behind_them():
    problem = Slope(lr=0.5, gradients=(1.0, 3.0), counts=(1, 3))
    g = (1 * -1 + 3 * -3) / (1 + 3)
    expected = paper(lambda x: g, eta=0.5, zeta=1.0, nesterov=True, blocks=3, start=0.0)
    assert path(BMUF(period=2, momentum=0.5, warmup=0), problem, 3) == expected


@pytest.mark.parametrize(("workers", "eta"), [(1, 0.0), (2, 0.5), (4, 0.75), (8, 0.875)])
def test_block_momentum_is_one_minus_one_over_n_unless_given(workers, eta):
    expected = paper(lambda x: G, eta=eta, zeta=1.0, nesterov=True, blocks=4, start=0.0)
    slope = Slope(lr=0.5, gradients=(2.0,))
    assert path(BMUF(period=2, warmup=0), slope, 4, workers) == expected


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("warmup", [0, 2, 3])
def test_without_block_momentum_it_is_model_averaging_bit_for_bit(nesterov, warmup):
    problem = Bowls(lr=0.3, momentum=0.9, counts=(1, 2))  # no short binary form: bits, not numbers
    bmuf = BMUF(period=2, momentum=0.0, rate=1.0, nesterov=nesterov, warmup=warmup)
    assert path(bmuf, problem, 5, start=0.7) == path(Local(period=2, warmup=warmup), problem, 5, start=0.7)


def torch_outer(optimizer, blocks, start, period=2, lr=0.25):
    """Local SGD on the two bowls inside, a real torch optimizer on -G outside."""
    w, out = torch.tensor([start], dtype=torch.float64), []
    outer = optimizer([w])
    for _ in range(blocks):
        ends = []
        for curvature, target in ((1.0, 0.0), (0.5, 4.0)):
            x = w.item()
            for _ in range(period):
                x -= lr * curvature * (x - target)
            ends.append(x)
        w.grad = w - sum(ends) / 2  # -G
        outer.step()
        out.append(w.item())
    return out


@pytest.mark.slow  # torch imports its compiler with the first optimizer
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("eta", "zeta"), [(0.5, 1.0), (0.5, 0.5), (0.9, 0.7), (0.94, 1.0)])
def test_it_is_torch_sgd_with_momentum_on_the_pseudo_gradient(eta, zeta, nesterov):
    expected = torch_outer(
        lambda p: torch.optim.SGD(p, lr=zeta, momentum=eta, nesterov=nesterov), blocks=12, start=8.0
    )
    bmuf = BMUF(period=2, momentum=eta, rate=zeta, nesterov=nesterov, warmup=0)
    got = path(bmuf, Bowls(lr=0.25), 12, start=8.0)
    assert got == pytest.approx(expected, abs=1e-12)  # a mean of differences rounds unlike one of models


@pytest.mark.parametrize(
    ("options", "gain"),
    [
        ({"nesterov": True}, 0.75 / (1 - 0.5)),
        ({"nesterov": False}, 0.75 / (1 - 0.5)),
        ({"variant": "cntk"}, (1 + 0.5) * 0.75 / (1 - 0.5)),
    ],
)
def test_the_steady_gain_on_a_constant_slope(options, gain):
    *_, before, after = path(BMUF(2, 0.5, rate=0.75, warmup=0, **options), SLOPES, 60)
    assert after - before == pytest.approx(gain * G, rel=1e-12)


def test_warm_up_steps_are_averaged_one_by_one_without_block_momentum():
    bmuf = BMUF(period=2, momentum=0.5, warmup=4)
    runs = [simulate(bmuf, SLOPES, workers=2, steps=k) for k in (1, 2, 3, 4)]
    assert [run.worker(0).x.item() for run in runs] == [-1.0, -2.0, -3.0, -4.0]  # half a block at a time
    assert [run.worker(0).meter.messages_sent for run in runs] == [2, 4, 6, 8]


@pytest.mark.parametrize(("nesterov", "first"), [(True, 1.5 * G), (False, G)])
def test_the_model_that_warm_up_leaves_is_a_start_without_block_momentum(nesterov, first):
    # Delta(0) = 0 at the seed model, which the warm-up has moved to -2
    run = simulate(BMUF(2, 0.5, nesterov=nesterov, warmup=2), SLOPES, workers=2, steps=4)
    assert run.worker(0).x.item() == -2 + first


def test_warm_up_is_plain_averaging_whatever_the_block_rate():
    run = simulate(BMUF(period=2, momentum=0.5, rate=0.5, warmup=2), SLOPES, workers=2, steps=2)
    assert run.worker(0).x.item() == -2.0


def test_warm_up_lasts_one_period_unless_told():
    assert simulate(BMUF(period=3), SLOPES, workers=2, steps=3).worker(0).x.item() == -3.0
    assert simulate(BMUF(period=3), SLOPES, workers=2, steps=3).worker(0).meter.messages_sent == 3 * 2


def test_a_last_short_block_is_merged_too():
    # a block of two, then one of one: G, then G / 2
    delta2 = 0.5 * G + G / 2
    run = simulate(BMUF(period=2, momentum=0.5, nesterov=False, warmup=0), SLOPES, workers=2, steps=3)
    assert [run.worker(k).x.item() for k in (0, 1)] == [G + delta2] * 2 == [-4.0] * 2
    assert run.worker(0).merged == 6


def test_local_momentum_is_forgotten_at_every_block_unless_kept():
    problem = Slope(momentum=0.5)
    g1, g2 = -(1 + 1.5), -(1.75 + 1.875)  # the velocity goes on growing where it is kept
    options = {"period": 2, "momentum": 0.5, "nesterov": False, "warmup": 0}
    assert path(BMUF(**options), problem, 2) == [g1, g1 + 0.5 * g1 + g1]
    assert path(BMUF(reset_momentum=False, **options), problem, 2) == [g1, g1 + 0.5 * g1 + g2]


def test_workers_with_identical_data_equal_one_worker_with_the_same_block_momentum():
    problem, bmuf = Quadratic(lr=0.5, targets=(3.0,)), BMUF(period=2, momentum=0.5, warmup=0)
    assert path(bmuf, problem, 5, 4, 8.0) == path(bmuf, problem, 5, 1, 8.0)


def test_one_worker_has_no_block_momentum_and_is_single():
    problem = Quadratic(lr=0.5, momentum=0.5, targets=(3.0,))
    alone = simulate(Single(), problem, steps=10, start=[8.0]).worker(0).x.item()
    run = simulate(BMUF(period=3, reset_momentum=False), problem, steps=10, start=[8.0])
    assert run.worker(0).x.item() == alone


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"period": 0}, "period=0 must be at least 1"),
        ({"momentum": 1.0}, "momentum=1.0 must be at least 0 and below 1"),
        ({"momentum": -0.1}, "momentum=-0.1"),
        ({"momentum": float("nan")}, "momentum=nan"),
        ({"variant": "fairseq"}, "variant='fairseq' must be one of paper, cntk"),
    ],
)
def test_options_that_cannot_work_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        BMUF(**options)


@pytest.mark.parametrize("options", [{"rate": 0.0}, {"rate": -1.0}, {"warmup": -1}])
def test_options_that_would_train_backwards_or_not_at_all_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        BMUF(**options)
