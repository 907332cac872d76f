"""The restricted Boltzmann machine against enumeration: 4 visible and 3 hidden units have 128 states."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from sampling import mostly_soak
from shoal.programs.models.pretraining import Momentum
from shoal.programs.models.rbm import RBM

V = torch.tensor(list(itertools.product([0.0, 1.0], repeat=4)), dtype=torch.float64)
H = torch.tensor(list(itertools.product([0.0, 1.0], repeat=3)), dtype=torch.float64)
DATA = (
    torch.tensor([5, 0, 1, 2, 0, 0, 3, 1, 0, 4, 0, 0, 1, 0, 2, 6], dtype=torch.float64) / 25
)  # of each row of V


def small(scale: float = 1.0, **options: object) -> RBM:
    torch.manual_seed(3)
    rbm = RBM(4, 3, **options).double()  # type: ignore[arg-type]
    for p in rbm.parameters():
        p.data = scale * torch.randn_like(p)
    return rbm


def statistics(rbm: RBM, law: Tensor) -> list[Tensor]:
    """The means of p(h|v) v', p(h|v) and v, when v has this law."""
    p = torch.sigmoid(V @ rbm.weight.T + rbm.bias).detach()
    return [torch.einsum("n,ni,nj->ij", law, p, V), law @ p, law @ V]


def model_law(rbm: RBM) -> Tensor:
    """p(v), from the energies of all 128 states."""
    energy = -(V @ rbm.visible_bias)[:, None] - (H @ rbm.bias)[None] - V @ rbm.weight.T @ H.T
    weight = torch.exp(-energy).sum(dim=1)
    return (weight / weight.sum()).detach()


def transition(rbm: RBM) -> Tensor:
    """T(v, v') = sum over h of P(h|v) P(v'|h)."""
    up = torch.sigmoid(V @ rbm.weight.T + rbm.bias)
    down = torch.sigmoid(H @ rbm.weight + rbm.visible_bias)
    to_h = torch.prod(torch.where(H[None] == 1, up[:, None], 1 - up[:, None]), dim=2)
    to_v = torch.prod(torch.where(V[None] == 1, down[:, None], 1 - down[:, None]), dim=2)
    return (to_h @ to_v).detach()


def direction(rbm: RBM, negative: Tensor) -> list[Tensor]:
    """(data - model) where the negative statistics come from that law."""
    return [a - b for a, b in zip(statistics(rbm, DATA), statistics(rbm, negative), strict=True)]


def expected(rbm: RBM, k: int) -> list[Tensor]:
    """What CD-k does on average."""
    return direction(rbm, DATA @ torch.linalg.matrix_power(transition(rbm), k))


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    return max((x - y).abs().max().item() for x, y in zip(a, b, strict=True))


def gradients(rbm: RBM, rows: Tensor) -> list[Tensor]:
    rbm.zero_grad()
    rbm(rows).mean().backward()
    return [p.grad.clone() for p in (rbm.weight, rbm.bias, rbm.visible_bias)]


# A statistic lies in [0, 1], so its deviation is at most 0.5: the mean of n rows errs by 0.5 / sqrt(n).
# Five deviations are allowed for.
SAMPLES = 25 * 10_000
BOUND = 5 * 0.5 / math.sqrt(SAMPLES)


def with_law(law: Tensor) -> Tensor:
    """Rows of which as many are alike as the law says, to half a row: only the chain is left to chance."""
    return V.repeat_interleave((law * SAMPLES).round().long(), dim=0)


def sampled(rbm: RBM, law: Tensor) -> list[Tensor]:
    """What the machine itself does on average, when v has this law."""
    return [-g for g in gradients(rbm, with_law(law))]


# -- energies ----------------------------------------------------------------------------------------


def test_the_free_energy_is_that_of_all_hidden_states_together():
    rbm = small()
    energies = torch.stack([rbm.energy(V, h.expand(16, 3)) for h in H])
    assert torch.allclose(rbm.free_energy(V), -torch.logsumexp(-energies, dim=0), atol=1e-12)
    v, h = V[11], H[5]
    by_hand = -(rbm.visible_bias @ v) - rbm.bias @ h - h @ rbm.weight @ v
    assert rbm.energy(v[None], h[None]).item() == pytest.approx(by_hand.item(), abs=1e-12)


def test_the_conditionals_are_those_of_the_joint_law():
    rbm = small()
    joint = torch.exp(-torch.stack([rbm.energy(V, h.expand(16, 3)) for h in H], dim=1))  # v x h
    assert torch.allclose(rbm.hidden(V), (joint @ H) / joint.sum(1, keepdim=True), atol=1e-12)
    assert torch.allclose(rbm.visible(H), (joint.T @ V) / joint.sum(0)[:, None], atol=1e-12)


# -- the gradient ------------------------------------------------------------------------------------


def test_the_exact_gradient_is_data_minus_model_and_what_finite_differences_say():
    rbm = small()
    exact = direction(rbm, model_law(rbm))

    def likelihood() -> float:
        free = rbm.free_energy(V)
        return (-(DATA @ free) - torch.logsumexp(-free, dim=0)).item()

    for p, g in zip((rbm.weight, rbm.bias, rbm.visible_bias), exact, strict=True):
        for place in itertools.product(*map(range, p.shape)):
            with torch.no_grad():
                p[place] += 1e-5
                above = likelihood()
                p[place] -= 2e-5
                below = likelihood()
                p[place] += 1e-5
            assert (above - below) / 2e-5 == pytest.approx(g[place].item(), abs=1e-9)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("positive", ["probability", "sample"])
def test_the_gradient_of_the_contrast_is_minus_the_difference_of_the_statistics(k, positive):
    rbm = small(steps=k, positive=positive)
    rows = V[[3, 7, 7, 12, 15]]
    torch.manual_seed(8)
    got = gradients(rbm, rows)
    torch.manual_seed(8)  # the same draws again, by hand
    with torch.no_grad():
        p0 = rbm.hidden(rows)
        h0 = torch.bernoulli(p0)
        h = h0
        for step in range(k):
            v = torch.bernoulli(rbm.visible(h))
            pk = rbm.hidden(v)
            if step < k - 1:
                h = torch.bernoulli(pk)
    up = h0 if positive == "sample" else p0
    by_hand = [(up.T @ rows - pk.T @ v) / 5, (up - pk).mean(0), (rows - v).mean(0)]
    assert distance(got, [-g for g in by_hand]) < 1e-14


@pytest.mark.parametrize(("k", "positive"), [(1, "probability"), (1, "sample"), (2, "probability")])
def test_the_mean_of_the_sampler_is_what_the_transition_matrix_says(k, positive):
    rbm = small(scale=4.0, steps=k, positive=positive)
    bound = BOUND if positive == "probability" else BOUND * math.sqrt(2)  # a sample adds as much again
    got = sampled(rbm, DATA)
    assert distance(got, expected(rbm, k)) < bound
    assert distance(got, expected(rbm, 3 - k)) > 4 * bound  # so it can tell one step from two


def two_modes(k: int) -> RBM:
    """What is likely lies around some v and around its opposite: the chain is slow between them."""
    rbm = small(scale=3.0, steps=k)
    rbm.bias.data = -rbm.weight.data.sum(dim=1) / 2
    rbm.visible_bias.data = 1 - rbm.weight.data.sum(dim=0) / 2  # the 1 makes one likelier
    return rbm


@pytest.mark.slow
def test_the_error_of_cd_falls_geometrically_with_the_second_eigenvalue():
    rbm = two_modes(1)
    exact = direction(rbm, model_law(rbm))
    got = {k: sampled(two_modes(k), DATA) for k in (1, 2, 4)}
    errors = {k: [a - b for a, b in zip(g, exact, strict=True)] for k, g in got.items()}
    size = {k: distance(g, exact) for k, g in got.items()}
    assert size == pytest.approx({k: distance(expected(rbm, k), exact) for k in got}, abs=BOUND)
    assert size[1] > size[2] + 4 * BOUND > size[4] + 8 * BOUND > 12 * BOUND
    second = torch.linalg.eigvals(transition(rbm)).abs().sort().values[-2].item()
    assert 0.6 < second < 0.7  # the third is 0.22, and its square small beside that of the second
    assert distance(errors[4], [second**2 * e for e in errors[2]]) < (1 + second**2) * BOUND


def test_without_weights_one_step_is_enough():
    """Then p(h|v) is sigm(b) whatever v is, and v is drawn from sigm(c): from the model, in one step."""
    rbm = small()
    rbm.weight.data.zero_()
    weight, bias, visible_bias = got = sampled(rbm, DATA)
    assert distance(got, direction(rbm, model_law(rbm))) < BOUND
    assert (visible_bias - (DATA @ V - torch.sigmoid(rbm.visible_bias))).abs().max() < BOUND
    assert bias.abs().max() < 1e-12  # no draw is in these two
    assert (weight - torch.outer(torch.sigmoid(rbm.bias), visible_bias)).abs().max() < 1e-12
    assert visible_bias.abs().max() > 10 * BOUND  # there is something to learn


@pytest.mark.slow
@pytest.mark.parametrize("k", mostly_soak([5, 1, 2], 1))
def test_data_that_comes_from_the_model_moves_nothing(k):
    rbm = two_modes(k)
    nothing = [torch.zeros_like(p) for p in (rbm.weight, rbm.bias, rbm.visible_bias)]
    assert distance(sampled(rbm, model_law(rbm)), nothing) < BOUND
    assert distance(sampled(rbm, DATA), nothing) > 10 * BOUND  # other data do move it


def learnt_from_nothing(positive: str) -> Tensor:
    torch.manual_seed(0)
    rbm = RBM(4, 3, positive=positive).double()
    rbm.weight.data.zero_()
    optimizer = torch.optim.SGD(rbm.parameters(), lr=0.5)
    for _ in range(20):
        gradients(rbm, V[[3, 7, 12, 15]])
        optimizer.step()
    return rbm.weight.detach()


def test_from_zero_weights_only_a_sampled_statistic_makes_units_different():
    rows = learnt_from_nothing("sample")
    assert (rows[0] - rows[1]).abs().max() > 0.01
    rows = learnt_from_nothing("probability")
    assert rows.abs().max() > 0.01
    assert torch.equal(rows[0], rows[1]) and torch.equal(rows[1], rows[2])
    with pytest.raises(ValueError, match="start equal stay equal"):
        RBM(4, 3, scale=0.0)


# -- persistent chains -------------------------------------------------------------------------------


def test_persistent_chains_go_on_where_they_were_and_are_as_many_as_were_asked_for():
    rbm = small(steps=2, chains=7)
    assert rbm.fantasies.shape == (7, 4)
    begin, rows = rbm.fantasies.clone(), V[[3, 7, 12]]
    torch.manual_seed(8)
    got = gradients(rbm, rows)
    torch.manual_seed(8)
    with torch.no_grad():
        torch.bernoulli(rbm.hidden(rows))  # of the data's hidden units
        v = begin
        for _ in range(2):
            v = torch.bernoulli(rbm.visible(torch.bernoulli(rbm.hidden(v))))
        p0, pk = rbm.hidden(rows), rbm.hidden(v)
    by_hand = [p0.T @ rows / 3 - pk.T @ v / 7, p0.mean(0) - pk.mean(0), rows.mean(0) - v.mean(0)]
    assert distance(got, [-g for g in by_hand]) < 1e-14
    assert torch.equal(rbm.fantasies, v)


def test_two_steps_with_persistent_chains_may_be_differentiated_together():
    rbm = small(chains=5)
    (rbm(V).mean() + rbm(V).mean()).backward()  # the second must not write over what the first needs
    assert rbm.weight.grad.isfinite().all()


def test_persistent_chains_come_to_the_law_of_the_model():
    rbm = small(chains=20_000)
    rbm.gibbs(rbm.fantasies, 1)
    v = rbm.gibbs(rbm.fantasies, 40)
    seen = torch.bincount((v @ torch.tensor([8.0, 4.0, 2.0, 1.0], dtype=v.dtype)).long(), minlength=16)
    assert (seen / len(v) - model_law(rbm)).abs().max() < 5 * 0.5 / math.sqrt(20_000)


# -- Gaussian visible units --------------------------------------------------------------------------

SIGMA = torch.tensor([0.5, 1.0, 2.0, 3.0])


def test_the_gaussian_energy_and_its_conditionals():
    rbm = small(units="gaussian", sigma=SIGMA)
    sigma = SIGMA.double()
    v = torch.randn(6, 4, dtype=torch.float64)
    for h in H:
        rest = -(H @ rbm.bias)[H.eq(h).all(1)] - h @ rbm.weight @ (v / sigma).T
        by_hand = ((v - rbm.visible_bias).square() / (2 * sigma**2)).sum(1) + rest
        assert torch.allclose(rbm.energy(v, h.expand(6, 3)), by_hand, atol=1e-12)
    energies = torch.stack([rbm.energy(v, h.expand(6, 3)) for h in H])
    assert torch.allclose(rbm.free_energy(v), -torch.logsumexp(-energies, dim=0), atol=1e-12)
    assert torch.allclose(rbm.hidden(v), torch.sigmoid(rbm.bias + (v / sigma) @ rbm.weight.T), atol=1e-12)
    draws = rbm.draw_visible(H[5].expand(40_000, 3)).detach()
    mean = rbm.visible_bias + sigma * (H[5] @ rbm.weight)
    assert ((draws.mean(0) - mean).abs() < 5 * sigma / 200).all()  # 200 = sqrt(40,000)
    assert ((draws.std(0) / sigma - 1).abs() < 5 / math.sqrt(2 * 40_000)).all()


def test_gaussian_statistics_are_those_of_v_over_sigma():
    rbm = small(units="gaussian", sigma=SIGMA)
    sigma, rows = SIGMA.double(), torch.randn(6, 4, dtype=torch.float64)
    torch.manual_seed(8)
    got = gradients(rbm, rows)
    torch.manual_seed(8)
    with torch.no_grad():
        p0 = rbm.hidden(rows)
        v = rbm.visible(torch.bernoulli(p0)) + sigma * torch.randn(6, 4, dtype=torch.float64)
        pk, c = rbm.hidden(v), rbm.visible_bias
    weight = (p0.T @ (rows / sigma) - pk.T @ (v / sigma)) / 6
    by_hand = [weight, (p0 - pk).mean(0), ((rows - c) / sigma**2 - (v - c) / sigma**2).mean(0)]
    assert distance(got, [-g for g in by_hand]) < 1e-12


def test_with_unit_sigma_only_the_visible_conditional_is_another():
    binary, gaussian = small(), small(units="gaussian")
    assert torch.equal(binary.hidden(V), gaussian.hidden(V))
    assert torch.allclose(binary.visible(H), torch.sigmoid(gaussian.visible(H)), atol=1e-12)


# -- monitors ----------------------------------------------------------------------------------------


def test_pseudo_likelihood_asks_each_row_about_the_next_unit():
    rbm = small().eval()
    log_p = torch.log(model_law(rbm))
    for row, told in enumerate(rbm(V)[:, 2].tolist()):
        j = row % 4
        flipped = row ^ (8 >> j)  # the row of V that differs in unit j alone
        both = torch.logsumexp(log_p[[row, flipped]], dim=0)
        assert told == pytest.approx(4 * (log_p[row] - both).item(), abs=1e-10)


def test_reconstruction_error_and_free_energy_of_a_row():
    rbm = small().eval()
    mean = rbm.visible(rbm.hidden(V)).detach()
    entropy = -(V * mean.log() + (1 - V) * (1 - mean).log()).sum(1)
    assert torch.allclose(rbm(V)[:, 0], entropy, atol=1e-12)
    assert torch.allclose(rbm(V)[:, 1], rbm.free_energy(V), atol=1e-12)
    gaussian = small(units="gaussian", sigma=SIGMA).eval()
    away = (V - gaussian.visible(gaussian.hidden(V))) / SIGMA
    assert torch.allclose(gaussian(V)[:, 0], away.square().sum(1) / 2, atol=1e-12)
    assert gaussian(V).shape == (16, 2)


def test_measuring_draws_nothing_and_leaves_the_chains_alone():
    rbm = small(chains=3).eval()
    state, chains = torch.get_rng_state(), rbm.fantasies.clone()
    rbm(V.view(8, 2, 4))
    assert torch.equal(state, torch.get_rng_state()) and torch.equal(chains, rbm.fantasies)


# -- momentum and decay ------------------------------------------------------------------------------


def test_momentum_and_decay_by_hand():
    """Rate 0.1, gradient 2 for ever, momentum 0.5 for two steps and 0.9 then, decay 0.1 of matrices."""
    w, b = torch.nn.Parameter(torch.tensor([[1.0]])), torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = Momentum(momentum=0.9, first=0.5, first_steps=2, decay=0.1)([w, b], lr=0.1)

    def step() -> tuple[float, float]:
        w.grad, b.grad = torch.tensor([[2.0]]), torch.tensor([2.0])
        optimizer.step()
        return w.item(), b.item()

    assert step() == (pytest.approx(1 - 0.1 * 2.1), pytest.approx(1 - 0.1 * 2))  # 2.1 = 2 + 0.1 * 1
    speed = 0.5 * 2.1 + (2 + 0.1 * 0.79)
    assert step() == (pytest.approx(0.79 - 0.1 * speed), pytest.approx(0.8 - 0.1 * (0.5 * 2 + 2)))
    at = 0.79 - 0.1 * speed
    speed = 0.9 * speed + (2 + 0.1 * at)
    by_hand = (at - 0.1 * speed, 0.5 - 0.1 * (0.9 * 3 + 2))
    assert step() == pytest.approx(by_hand, abs=1e-6)  # float32


def test_the_change_of_momentum_survives_a_checkpoint():
    plan, w = Momentum(first_steps=1), torch.nn.Parameter(torch.ones(1, 1))
    before, after = plan([w], lr=0.1), plan([w], lr=0.1)
    w.grad = torch.ones(1, 1)
    before.step()
    after.load_state_dict(before.state_dict())
    after.step()
    assert after.param_groups[0]["momentum"] == 0.9


# -- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"units": "poisson"}, "binary, gaussian"),
        ({"positive": "mean"}, "probability, sample"),
        ({"sigma": 2.0}, "units='gaussian'"),
        ({"units": "gaussian", "sigma": 0.0}, "positive"),
        ({"steps": 0}, "at least 1 step"),
        ({"chains": -1}, "take 0"),
    ],
)
def test_what_makes_no_machine_is_refused(options, told):
    with pytest.raises(ValueError, match=told):
        RBM(4, 3, **options)
    with pytest.raises(ValueError, match="at least 1"):
        RBM(0, 3)


@pytest.mark.parametrize(
    "options", [{"momentum": 1.0}, {"first": -0.1}, {"decay": -1.0}, {"first_steps": -1}]
)
def test_momentum_out_of_range_is_refused(options):
    with pytest.raises(ValueError, match=r"momentum must be|neither may be negative"):
        Momentum(**options)
