"""minimize(): functions in, arrays out, under every strategy and on every transport."""

from typing import NamedTuple

import described
import numpy as np
import pytest
import torch
from torch import nn

import shoal
from sampling import mostly_soak
from shoal.api import minimize as minimizing
from shoal.core.task import Data, Task
from shoal.replicas.module import build_model
from shoal.sim import Compute, Network
from shoal.strategies import STRATEGIES, SparseLoCo
from shoal.strategies.sandblaster import Sandblaster

X, Y = np.array([[1.0], [2.0]]), np.array([[2.0], [4.0]])
DATA, TEST = described.clouds()


def fit_line(parameters, machines=1, strategy="single", epochs=2, **settings):
    return shoal.minimize(
        described.line,
        described.line_gradients,
        parameters,
        (X, Y),
        machines=machines,
        strategy=strategy,
        lr=0.1,
        batch=2 // machines,
        epochs=epochs,
        **{"transport": "sim", **settings},
    )


def classify(strategy="sync", gradients=described.scores_gradients, parameters=None, **settings):
    """Softmax regression on three clouds."""
    return shoal.minimize(
        described.scores,
        gradients,
        parameters or described.zeros(),
        DATA,
        strategy=strategy,
        **{"machines": 2, "test": TEST, "batch": 16, "lr": 0.1, "transport": "sim", **settings},
    )


def flat(minimum):
    return np.concatenate([minimum.parameters["weight"].ravel(), minimum.parameters["bias"]])


# -- arithmetic ------------------------------------------------------------------------------------


def test_two_steps_are_gradient_descent():
    # The gradient is mean(x (x w - y)). At 0: (1 (0 - 2) + 2 (0 - 4)) / 2 = -5, so w = 0.5.
    # There: (1 (0.5 - 2) + 2 (1 - 4)) / 2 = -3.75, so w = 0.875.
    assert fit_line(np.zeros((1, 1)), epochs=1).parameters == [[0.5]]
    assert fit_line(np.zeros((1, 1))).parameters == [[0.875]]


@pytest.mark.parametrize("strategy", ["sync", "sync_server", "local"])
def test_two_machines_with_a_row_each_make_the_same_steps(strategy):
    chosen = shoal.Local(period=1) if strategy == "local" else strategy
    assert fit_line(np.zeros((1, 1)), machines=2, strategy=chosen).parameters == [[0.875]]


def test_the_start_is_left_alone():
    start = np.zeros((1, 1))
    found = fit_line(start)
    assert start == 0 and found.parameters is not start
    found.parameters[0, 0] = 7.0  # ours to change


def linear() -> nn.Module:
    return nn.Linear(8, 3).double()


def clouds() -> Data:
    return Data(*(torch.from_numpy(part) for part in (*DATA, *TEST)))


def test_a_torch_model_learns_the_same():
    task = Task("linear", linear, clouds, lr=0.1, batch=16)
    settings = {"epochs": 3, "seed": 4, "transport": "sim"}
    by_torch = shoal.run(task, "sync", workers=2, **settings)
    start = {name: p.detach().numpy() for name, p in build_model(task, 4).named_parameters()}
    by_hand = classify(parameters=start, loss=described.cross_entropy, **settings)
    expected = {name: p.detach().numpy() for name, p in by_torch.model.named_parameters()}
    for name in ("weight", "bias"):
        # the same sums in another order: a few units of the sixteenth digit
        np.testing.assert_allclose(by_hand.parameters[name], expected[name], rtol=1e-12, atol=1e-14)
    assert by_hand.result.test_accuracy == by_torch.test_accuracy > 90
    assert by_hand.result.test_loss == pytest.approx(by_torch.test_loss, rel=1e-6)
    assert by_hand.result.samples == by_torch.samples


# -- containers ------------------------------------------------------------------------------------


class Layer(NamedTuple):
    weight: np.ndarray
    bias: np.ndarray


def as_dictionary(tree):
    weight, bias = tree.values() if isinstance(tree, dict) else tree
    return {"weight": weight, "bias": bias}


CONTAINERS = {
    "list": list,
    "tuple": tuple,
    "named tuple": lambda parts: Layer(*parts),
    "dictionary": lambda parts: dict(zip(("kernel", "shift"), parts, strict=True)),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", CONTAINERS)
def test_parameters_come_back_as_they_went_in(name, dtype):
    packed = CONTAINERS[name]

    def outputs(parameters, x):
        assert type(parameters) is type(packed([0, 0]))
        return described.scores(as_dictionary(parameters), x)

    def gradients(parameters, x, y):
        found = described.scores_gradients(as_dictionary(parameters), x, y)
        return packed([found["weight"], found["bias"]])

    start = described.zeros(dtype)
    found = shoal.minimize(
        outputs, gradients, packed([*start.values()]), DATA, test=TEST, lr=0.1, transport="sim"
    )
    assert type(found.parameters) is type(packed([0, 0]))
    assert found.result.test_accuracy > 80
    again = as_dictionary(found.parameters)
    assert {key: (part.shape, part.dtype) for key, part in again.items()} == {
        key: (part.shape, part.dtype) for key, part in start.items()
    }


def test_containers_may_be_nested():
    def gradients(parameters, x, y):
        return {"b": [2 * np.ones(2)], "a": (np.float64(1.0), {"c": 3 * np.ones((1, 1))})}

    start = {"a": (0.0, {"c": np.zeros((1, 1))}), "b": [np.zeros(2)]}
    found = shoal.minimize(None, gradients, start, (X, Y), strategy="single", lr=1.0, transport="sim")
    (a, inner), (b,) = found.parameters["a"], found.parameters["b"]
    assert (a, inner["c"].tolist(), b.tolist()) == (-1.0, [[-3.0]], [-2.0, -2.0])
    assert list(found.parameters) == ["a", "b"]  # in the caller's order


def test_functions_see_arrays_of_numpy_that_cannot_be_changed_by_mistake():
    seen = []

    def gradients(parameters, x, y):
        seen.extend((parameters, x, y))
        return described.line_gradients(parameters, x, y)

    def outputs(parameters, x):
        seen.extend((parameters, x))
        return x @ parameters

    shoal.minimize(outputs, gradients, np.zeros((1, 1)), (X, Y), test=(X, Y), transport="sim")
    assert {type(array) for array in seen} == {np.ndarray}
    assert not any(array.flags.writeable for array in seen)


class Exported:
    """An array that is known by the DLPack protocol alone."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class ExportedOnly(Exported):
    """One of a library that cannot be asked for another device."""

    def __dlpack__(self, *, stream=None):
        return self.array.__dlpack__(stream=stream)


class Elsewhere(Exported):
    """An array on a GPU that comes to the CPU when it is asked to, and only then."""

    def __dlpack__(self, *, dl_device=None, **options):
        if dl_device != (1, 0):  # the CPU
            raise BufferError("this array is on a GPU")
        return self.array.__dlpack__(dl_device=dl_device, **options)

    def __dlpack_device__(self):
        return (2, 0)  # CUDA


class Guarded(Elsewhere):
    """One that refuses to be copied unasked, as CuPy's do."""

    def __array__(self, dtype=None, copy=None):
        raise TypeError("this array is on a GPU; copy it yourself")


class Stuck(Guarded):
    """One that cannot be asked for the CPU either."""

    def __dlpack__(self, *, stream=None):
        raise BufferError("this array is on a GPU")


class Hidden:
    """One on a GPU that knows nothing of DLPack."""

    def __array__(self, dtype=None, copy=None):
        raise TypeError("this array is on a GPU; copy it yourself")


asks = pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "2.1.0", reason="NumPy cannot ask for the CPU"
)


@pytest.mark.parametrize(
    "kind",
    [
        torch.from_numpy,
        Exported,
        ExportedOnly,
        pytest.param(Elsewhere, marks=asks),
        pytest.param(Guarded, marks=asks),
    ],
)
def test_arrays_may_come_from_other_libraries(kind):
    def outputs(parameters, x):
        return kind(described.line(parameters, x))

    def gradients(parameters, x, y):
        return kind(described.line_gradients(parameters, x, y))

    found = shoal.minimize(
        outputs, gradients, kind(np.zeros((1, 1))), (kind(X), kind(Y)), test=(X.tolist(), Y.tolist()),
        strategy="single", transport="sim",
    )  # fmt: skip
    assert found.parameters == [[0.5]]
    assert found.result.test_loss == pytest.approx((1.5**2 + 3**2) / 2)


def test_what_numpy_does_not_know_is_not_said_to_be_elsewhere():
    with pytest.raises(TypeError, match="BFloat16"):  # torch's own words
        minimizing.array_of(torch.ones(1, dtype=torch.bfloat16))


def test_an_array_that_does_not_come_to_the_cpu_is_refused():
    told = r"^NumPy cannot read this Stuck \(this array is on a GPU\): bring it to the CPU first$"
    with pytest.raises(TypeError, match=told):
        fit_line(Stuck(np.zeros((1, 1))))
    with pytest.raises(TypeError, match=told):
        shoal.minimize(described.line, lambda p, x, y: Stuck(p), np.zeros((1, 1)), (X, Y), transport="sim")
    with pytest.raises(TypeError, match=r"^this array is on a GPU; copy it yourself$"):
        minimizing.array_of(Hidden())


def test_gradients_of_another_precision_are_converted():
    def gradients(parameters, x, y):
        return np.array([[-5]])  # whole numbers

    start = np.zeros((1, 1), np.float32)
    found = shoal.minimize(
        described.line, gradients, start, (X, Y), strategy="single", lr=0.5, transport="sim"
    )
    assert found.parameters == [[2.5]] and found.parameters.dtype == np.float32


# -- the report ------------------------------------------------------------------------------------


def test_real_labels_are_scored_by_the_squared_error():
    result = fit_line(np.zeros((1, 1)), epochs=1, test=(X, Y)).result
    assert result.test_loss == pytest.approx((1.5**2 + 3**2) / 2)  # at 0.5: 2 - 0.5 and 4 - 1
    assert result.test_accuracy is None
    assert result.curve[0]["test_loss"] == pytest.approx((2**2 + 4**2) / 2)


def test_what_is_not_known_is_not_made_up():
    blind = fit_line(np.zeros((1, 1))).result
    assert np.isnan(blind.test_loss) and blind.test_accuracy is None
    assert np.isnan([node["loss"] for node in blind.nodes]).all()  # of a step: only the gradient is known
    assert np.isnan(classify().result.test_loss)  # of classes: nobody said how


# -- strategies, transports, virtual time ----------------------------------------------------------


SEVERAL_ROUNDS = {"sparse_loco": SparseLoCo(period=2, density=0.25)}  # where the default is too long for four


@pytest.mark.parametrize("name", mostly_soak([*STRATEGIES], few=3))
def test_every_strategy_minimizes(name):
    machines = 1 if name == "single" else 2
    loss = described.cross_entropy if name == "sandblaster" else None
    found = classify(SEVERAL_ROUNDS.get(name, name), machines=machines, epochs=4, lr=0.2, loss=loss)
    assert found.result.test_accuracy > 90
    assert isinstance(found.parameters, list if name == "ensemble" else dict)


@pytest.mark.soak
def test_lbfgs_finds_the_minimum_that_gradient_descent_comes_near():
    settings = {"loss": described.cross_entropy, "test": DATA, "batch": 75, "epochs": 120}
    near = classify("sync", lr=1.0, **settings)
    found = classify(Sandblaster(tolerance=1e-4), method="lbfgs", machines=3, **settings)
    assert found.result.strategy == "sandblaster"
    gradient = described.scores_gradients(found.parameters, *DATA)
    assert np.linalg.norm(np.concatenate([gradient["weight"].ravel(), gradient["bias"]])) < 1e-4
    assert found.result.test_loss < near.result.test_loss
    assert found.result.samples < near.result.samples
    server = found.result.nodes[-1]
    assert server["loss"] == pytest.approx(found.result.test_loss, rel=1e-6)  # the training loss, here


def test_the_line_search_sees_losses_as_precise_as_the_users():
    draw = np.random.default_rng(0)
    x = draw.normal(size=(40, 8))
    y = x.sum(axis=1) + 1000.0 * draw.normal(size=40)  # a loss of about 500,000
    found = shoal.minimize(
        described.line,
        described.line_gradients,
        np.zeros(8),
        (x, y),
        loss=described.half_squares,
        method="lbfgs",
        machines=2,
        batch=20,
        epochs=100,
        transport="sim",
    )
    gradient = described.line_gradients(found.parameters, x, y)
    assert np.linalg.norm(gradient) < 1e-5  # the tolerance


def test_lbfgs_needs_the_loss_and_has_a_strategy_of_its_own():
    with pytest.raises(ValueError, match=r"give loss\(outputs, y\)"):
        classify(None, method="lbfgs")
    with pytest.raises(ValueError, match="'lbfgs' is strategy 'sandblaster', not 'asgd'"):
        classify("asgd", method="lbfgs", loss=described.cross_entropy)
    with pytest.raises(ValueError, match="unknown method 'newton'"):
        classify(None, method="newton")


def test_an_ensemble_finds_parameters_for_every_machine():
    first, second = classify("ensemble", machines=2).parameters
    assert first["weight"].shape == second["weight"].shape == (3, 8)
    assert not np.array_equal(first["weight"], second["weight"])


def test_eight_machines_pour_down_in_virtual_time():
    settings = {
        "machines": 8,
        "epochs": 4,
        "batch": 8,
        "network": Network.parse("100Mbit,20ms"),
        "compute": Compute(mean=0.020, jitter=0.1),
    }
    found, again = classify("downpour", **settings), classify("downpour", **settings)
    assert found.result.test_accuracy > 90
    assert found.result.workers == 8 and found.result.strategy == "downpour"
    assert found.result.seconds > 20 * 0.020  # 5 steps in each of 4 epochs
    assert found.result.staleness_mean > 0
    assert found.result.digest == again.result.digest
    assert np.array_equal(flat(found), flat(again))


def test_another_seed_takes_another_way():
    assert not np.array_equal(flat(classify(seed=0)), flat(classify(seed=1)))


@pytest.mark.slow
def test_processes_and_gloo_find_the_same_bits_as_virtual_time():
    settings = {"machines": 2, "epochs": 2, "collective": "stripes"}
    virtual, sockets, gloo = (
        flat(classify(transport=transport, **settings)) for transport in ("sim", "processes", "gloo")
    )
    assert np.array_equal(virtual, sockets)
    assert np.array_equal(virtual, gloo)


@pytest.mark.slow
@pytest.mark.soak
def test_downpour_on_processes_with_a_codec(monkeypatch):
    monkeypatch.setattr(minimizing, "LARGE_BYTES", 100)  # so that data and weights go by a file
    found = classify("downpour", transport="processes", codec="fp16", machines=2, epochs=6)
    assert found.result.test_accuracy > 90
    assert (found.result.codec, found.result.workers) == ("fp16", 2)


def test_large_arrays_lie_in_a_file_that_all_share(tmp_path):
    large, small = np.arange(200_000.0), np.arange(3)
    file, array = minimizing.placed([large, small], tmp_path, "data")
    assert file == tmp_path / "data-0.npy" and array is small
    opened = minimizing.opened(file)
    opened[0] = -1  # a copy of that page, for this process
    assert torch.equal(minimizing.opened(file), torch.from_numpy(large))
    assert minimizing.placed([large], None, "data") == (large,)


@pytest.mark.parametrize("strategy", mostly_soak(["bmuf", "sync"], few=1))
def test_resuming_is_bit_equal(strategy, tmp_path):
    chosen = shoal.BMUF(period=4) if strategy == "bmuf" else strategy
    classify(chosen, epochs=1, checkpoint=tmp_path)
    resumed = classify(chosen, epochs=3, checkpoint=tmp_path)
    assert np.array_equal(flat(resumed), flat(classify(chosen, epochs=3)))
    assert resumed.result.samples == 3 * 300


@pytest.mark.slow
@pytest.mark.soak  # tests/storage/test_resume.py has a task of torch
def test_resuming_on_processes_is_bit_equal(tmp_path):
    settings = {"machines": 2, "checkpoint": tmp_path}
    classify(shoal.BMUF(period=4), transport="processes", epochs=1, **settings)
    resumed = classify(shoal.BMUF(period=4), transport="processes", epochs=3, **settings)
    assert np.array_equal(flat(resumed), flat(classify(shoal.BMUF(period=4), epochs=3)))


# -- JAX -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.soak  # importing JAX takes seconds; the arrays above come as its own do
@pytest.mark.parametrize("transport", ["sim", "processes"])
def test_gradients_of_jax(transport):
    jax = pytest.importorskip("jax")
    import described_jax

    data, test = described.clouds(dtype=np.float32)
    found = shoal.minimize(
        described_jax.scores,
        described_jax.gradients,
        described_jax.start(),
        data,
        machines=2,
        strategy="sync",
        test=test,
        batch=16,
        lr=0.3,
        epochs=3,
        transport=transport,
    )
    assert found.result.test_accuracy > 90
    (weight, bias), _ = found.parameters
    assert isinstance(weight, np.ndarray) and weight.shape == (8, 16) and weight.dtype == np.float32
    assert jax.numpy.isfinite(bias).all()


# -- errors ----------------------------------------------------------------------------------------


WRONG = {
    "turned_round": r"shape \(8, 3\) for parameters\['weight'\], which has shape \(3, 8\)",
    "without_bias": "a dictionary of 'weight' for parameters, which is a dictionary of 'weight', 'bias'",
}


@pytest.mark.parametrize("name", WRONG)
def test_gradients_of_another_shape_are_named(name):
    with pytest.raises(ValueError, match=rf"^gradients\(\) returned {WRONG[name]}$"):
        classify(gradients=getattr(described, name))


@pytest.mark.parametrize("strategy", ["sync", "downpour"])
def test_a_gradient_that_is_not_finite_is_named(strategy):
    with pytest.raises(shoal.Diverged, match=r"returned inf at \(1, 2\) of parameters\['weight'\]; try a"):
        classify(strategy, gradients=described.endless)


def test_large_finite_gradients_are_let_through():
    # their sum is too large for a float32
    gradient = minimizing.gradient_for("w", np.full(4, 3e38, np.float32), torch.zeros(4))
    assert gradient.tolist() == [float(np.float32(3e38))] * 4


@pytest.mark.slow
def test_an_error_in_a_worker_process_names_worker_and_array():
    with pytest.raises(
        shoal.WorkerFailed, match=r"worker [01] failed: .*returned inf at \(1, 2\) of parameters\['weight'\]"
    ):
        classify(gradients=described.endless, transport="processes")


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ([np.ones((1, 1))], r"a list of 1 for parameters, which is a tuple of 2"),
        (np.ones((1, 1)), r"a single ndarray for parameters, which is a tuple of 2"),
        ((np.ones((1, 1)), None), r"NoneType of object for parameters\[1\]"),
        ((np.ones((1, 1)), np.ones(())), r"shape \(\) for parameters\[1\], which has shape \(1,\)"),
    ],
)
def test_other_containers_are_refused(answer, told):
    start = (np.zeros((1, 1)), np.zeros(1))
    with pytest.raises(ValueError, match=rf"^gradients\(\) returned {told}$"):
        shoal.minimize(None, lambda p, x, y: answer, start, (X, Y), transport="sim")


def test_outputs_of_another_length_are_refused():
    with pytest.raises(ValueError, match=r"^outputs\(\) returned shape \(\) for 2 inputs; give one each$"):
        shoal.minimize(
            lambda p, x: (x @ p).sum(), described.line_gradients, np.zeros((1, 1)), (X, Y),
            test=(X, Y), transport="sim",
        )  # fmt: skip


@pytest.mark.parametrize("transport", ["processes", "gloo"])
def test_functions_without_a_name_are_refused_before_processes_start(transport):
    told = r"^gradients=<function .*<lambda> at .*> cannot be imported by worker processes: define it at"
    with pytest.raises(ValueError, match=told):
        classify(gradients=lambda p, x, y: p, transport=transport)

    def inner(parameters, x, y):
        return parameters

    with pytest.raises(ValueError, match=r"^gradients=<function .*inner at"):
        classify(gradients=inner, transport=transport)
    with pytest.raises(ValueError, match=r"^loss=<function"):
        classify(loss=lambda out, y: 0.0, transport=transport)


def test_functions_typed_in_at_a_prompt_are_refused(monkeypatch):
    monkeypatch.delattr("__main__.__file__", raising=False)
    monkeypatch.setattr(described.scores_gradients, "__module__", "__main__")
    assert not minimizing.is_importable(described.scores_gradients)
    assert minimizing.is_importable(described.scores)
    assert minimizing.is_importable(None)


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ([], "parameters holds no array: there is nothing to train"),
        ({"w": np.zeros(2, int)}, r"parameters\['w'\] has dtype int64; take float32 or float64"),
        (np.zeros(2, np.float16), "parameters has dtype float16; take float32 or float64"),
        (
            [np.zeros(2), np.zeros(2, np.float32)],
            r"parameters\[0\] has dtype float64 and parameters\[1\] float32; take one for all",
        ),
    ],
)
def test_parameters_that_cannot_be_trained_are_refused(parameters, told):
    with pytest.raises(ValueError, match=f"^{told}$"):
        shoal.minimize(described.line, described.line_gradients, parameters, (X, Y))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"data": X}, "data is a single ndarray; give a pair of arrays, inputs and labels"),
        ({"data": (X, Y), "test": (X,)}, "test is a tuple of 1; give a pair"),
        ({"data": (X, np.array(["a", "b"]))}, r"the labels of data are not a numeric array: <U1, \(2,\)"),
        ({"data": (X, 3.0)}, r"the labels of data are not a numeric array: float64, \(\)"),
        ({"data": (X, Y[:1])}, "training data has 2 inputs but 1 labels"),
        ({"data": (X, Y), "machines": 0}, "workers=0"),
    ],
)
def test_data_that_is_none_is_refused(settings, told):
    with pytest.raises(ValueError, match=f"^{told}"):
        shoal.minimize(
            described.line, described.line_gradients, np.zeros((1, 1)), **settings, transport="sim"
        )
