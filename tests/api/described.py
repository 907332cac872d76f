"""Models that are nothing but functions, at the top level of a module so that worker processes find them."""

import numpy as np


def line(parameters, x):
    return x @ parameters


def line_gradients(parameters, x, y):
    """Of half the mean squared error."""
    return x.T @ (x @ parameters - y) / len(x)


def half_squares(out, y):
    return 0.5 * np.mean((out - y) ** 2)


def probabilities(scores):
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def scores(parameters, x):
    return x @ parameters["weight"].T + parameters["bias"]


def cross_entropy(out, y):
    return -np.log(probabilities(out)[np.arange(len(y)), y]).mean()


def scores_gradients(parameters, x, y):
    """Of the mean cross-entropy; in another order than the parameters."""
    error = probabilities(scores(parameters, x))
    error[np.arange(len(y)), y] -= 1
    return {"bias": error.mean(axis=0), "weight": error.T @ x / len(x)}


def without_bias(parameters, x, y):
    return {"weight": scores_gradients(parameters, x, y)["weight"]}


def endless(parameters, x, y):
    found = scores_gradients(parameters, x, y)
    found["weight"][1, 2] = np.inf
    return found


def turned_round(parameters, x, y):
    found = scores_gradients(parameters, x, y)
    return {**found, "weight": found["weight"].T}


def clouds(samples=390, dtype=np.float64):
    """Three noisy clouds of points in eight dimensions."""
    draw = np.random.default_rng(0)
    y = np.arange(samples) % 3
    x = (draw.normal(size=(3, 8))[y] + 0.7 * draw.normal(size=(samples, 8))).astype(dtype)
    return (x[90:], y[90:]), (x[:90], y[:90])


def zeros(dtype=np.float64):
    return {"weight": np.zeros((3, 8), dtype), "bias": np.zeros(3, dtype)}
