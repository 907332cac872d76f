"""MuLoCo: worked out on paper, against torch's own Muon and SGD, and its identities."""

from dataclasses import dataclass

import pytest
import torch

from shoal.core.vector import Layout
from shoal.strategies import DiLoCo, MuLoCo
from shoal.strategies.muloco import hidden_matrices
from shoal.testing.problems import Problem, Slope, simulate
from slopes import Slopes

pytestmark = pytest.mark.slow  # torch imports its compiler with the first optimizer


def layout_of(**shapes):
    return Layout(tuple(shapes), tuple(torch.Size(shape) for shape in shapes.values()))


SQUARE = layout_of(hidden=[2, 2], head=[1, 2])
NET = layout_of(first=[4, 3], bias=[4], second=[2, 4], head=[3, 2])
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of torch's Newton-Schulz iteration
BF16 = 0.02  # it iterates in eight bits


@dataclass(frozen=True)
class Rough(Problem):
    """Gradients with no short binary form, another one for each worker and step."""

    def gradient(self, rank, step, x):
        return torch.sin(torch.arange(len(x), dtype=x.dtype) * (1.7 + rank) + step) + 0.1 * x


def trained(strategy, problem, layout, workers=1, steps=2):
    start = torch.linspace(-1, 1, layout.numel, dtype=torch.float64).tolist()
    return simulate(strategy, problem, workers=workers, steps=steps, start=start, layout=layout).worker(0).x


def test_a_round_by_hand():
    # The gradient of the hidden matrix is 3 times the identity: divided by its norm, 1/sqrt(2) times it. So
    # Newton-Schulz iterates one number, s <- a s + b s^3 + c s^5, and a step of rate 1/2 takes s/2 off the
    # diagonal. Two steps displace it by s; the outer step goes 0.9 (1 + 0.8) as far. The head takes two
    # steps of SGD, of 1/2 each.
    s, (a, b, c) = 2**-0.5, COEFFICIENTS
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    gradient = (3.0, 0.0, 0.0, 3.0, 1.0, 1.0)
    strategy = MuLoCo(period=2, weight_decay=0.0)
    start = torch.linspace(-1, 1, 6, dtype=torch.float64)
    moved = trained(strategy, Slopes(lr=0.5, gradients=(gradient,)), SQUARE) - start
    expected = [-0.9 * 1.8 * s, 0.0, 0.0, -0.9 * 1.8 * s, -0.9 * 1.8, -0.9 * 1.8]
    assert moved.tolist() == pytest.approx(expected, rel=BF16, abs=1e-12)
    assert 0.7 < s < 1.2  # near a matrix with singular values of 1


def plainly(problem, layout, rounds, period, rate, momentum, decay, nesterov):
    """The algorithm with torch's own Muon, SGD and outer SGD, one worker."""
    x = torch.linspace(-1, 1, layout.numel, dtype=torch.float64)
    parts, shadow = layout.split(x), x.clone()
    outer = torch.optim.SGD([shadow], lr=rate, momentum=momentum, nesterov=True)
    muons = {}
    for name in ("first", "second"):
        rows, columns = parts[name].shape
        shorter = (
            min(1, rows / columns) ** 0.5
        )  # torch lengthens a step by sqrt(max(1, rows / columns)) alone
        options = {"momentum": 0.95, "nesterov": nesterov, "weight_decay": decay / shorter}
        muons[name] = torch.optim.Muon([parts[name]], lr=problem.lr * shorter, **options)
    for step in range(rounds * period):
        gradients = layout.split(problem.gradient(0, step, x))
        for name, part in parts.items():
            if name in muons:
                part.grad = gradients[name]
                muons[name].step()
            else:
                part -= problem.lr * gradients[name]
        if (step + 1) % period == 0:
            shadow.grad = shadow - x
            outer.step()
            x.copy_(shadow)
    return x


@pytest.mark.parametrize(("decay", "nesterov"), [(0.0, False), (0.1, False), (0.1, True)])
def test_it_is_torch_s_muon_inside_torch_s_nesterov_sgd(decay, nesterov):
    problem = Rough(lr=0.05)
    strategy = MuLoCo(period=3, weight_decay=decay, nesterov=nesterov)
    expected = plainly(problem, NET, 4, 3, 0.9, 0.8, decay, nesterov)
    torch.testing.assert_close(trained(strategy, problem, NET, steps=12), expected, rtol=0, atol=1e-12)


def test_the_size_of_a_gradient_does_not_matter_to_hidden_matrices():
    one, thousand = (
        trained(MuLoCo(period=2), Slopes(lr=0.1, gradients=(gradient,)), SQUARE)[:4]
        for gradient in ((1.0, 2.0, -1.0, 0.5, 0.0, 0.0), (1e3, 2e3, -1e3, 5e2, 0.0, 0.0))
    )
    torch.testing.assert_close(one, thousand, rtol=BF16, atol=BF16)


def test_with_rate_one_and_no_momentum_it_averages_the_models_of_muon_workers():
    gradients = ((1.0, 2.0, -1.0, 0.5, 1.0, 0.0), (-3.0, 1.0, 1.0, 2.0, 0.0, 2.0))
    averaging = MuLoCo(period=3, rate=1.0, momentum=0.0)
    alone = [trained(averaging, Slopes(lr=0.1, gradients=(g,)), SQUARE, steps=3) for g in gradients]
    together = trained(averaging, Slopes(lr=0.1, gradients=gradients), SQUARE, workers=2, steps=3)
    torch.testing.assert_close(together, (alone[0] + alone[1]) / 2, rtol=0, atol=1e-12)


def test_steps_may_be_as_long_as_those_of_adamw():
    gradient = (3.0, 0.0, 0.0, 3.0, 0.0, 0.0)
    options = {"period": 2, "weight_decay": 0.0}
    spectral, rms = (
        trained(MuLoCo(**options, scale=scale), Slopes(lr=0.5, gradients=(gradient,)), SQUARE)[0] + 1
        for scale in ("spectral", "rms")
    )
    assert rms == pytest.approx(0.2 * 2**0.5 * spectral)  # 0.2 sqrt(max(rows, columns)) instead of 1


def test_without_hidden_matrices_it_is_diloco():
    muloco = simulate(MuLoCo(period=2), Slope(gradients=(1.0, 3.0)), workers=2, steps=6)
    diloco = simulate(DiLoCo(2, 0.9, 0.8), Slope(gradients=(1.0, 3.0)), workers=2, steps=6)
    assert torch.equal(muloco.worker(0).x, diloco.worker(0).x)


@pytest.mark.parametrize(
    ("shapes", "hidden"),
    [
        (
            {
                "embedding.weight": [9, 4],
                "blocks.0.weight": [4, 4],
                "blocks.0.bias": [4],
                "out.weight": [9, 4],
            },
            ["blocks.0.weight"],
        ),
        (
            {
                "model.embed_tokens.weight": [9, 4],
                "pos_emb": [9, 4],
                "a.compose.weight": [4, 4],
                "head": [9, 4],
            },
            ["a.compose.weight"],
        ),
        (
            {
                "layer.0.multihead_attn.in_proj_weight": [4, 4],
                "multi_head.q": [4, 4],
                "output.weight": [9, 4],
            },
            ["layer.0.multihead_attn.in_proj_weight", "multi_head.q"],
        ),
        (
            {"layer.0.attention.output.dense.weight": [4, 4], "classifier.weight": [2, 4]},
            ["layer.0.attention.output.dense.weight"],
        ),
        ({"0.weight": [8, 4], "2.weight": [8, 8], "4.weight": [2, 8]}, ["0.weight", "2.weight"]),
        ({"conv.weight": [4, 3, 3, 3], "a": [3, 3], "lm_head": [3, 3]}, ["a"]),
        ({"weight": [3, 4], "bias": [3]}, []),
    ],
)
def test_embeddings_and_the_output_layer_are_known_by_name_or_the_last_is_the_output_layer(shapes, hidden):
    layout = layout_of(**shapes)
    assert [piece.name for piece in hidden_matrices(layout.pieces(0, layout.numel))] == hidden


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"inner_momentum": 1.0}, "inner_momentum=1.0"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"scale": "large"}, "scale='large' must be one of"),
        ({"period": 0}, "period"),
    ],
)
def test_options_that_cannot_work_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        MuLoCo(**options)
