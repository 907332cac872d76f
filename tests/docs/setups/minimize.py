"""The fragment has no `if __name__ == "__main__":`, so workers import the functions, not the script."""

import sys
from pathlib import Path

Path("linear.py").write_text(
    """
def outputs(p, x):
    return x @ p


def gradients(p, x, y):
    return x.T @ (outputs(p, x) - y) / len(x)
"""
)
sys.path.insert(0, str(Path.cwd()))
del sys.modules["__main__"].__file__

import numpy as np  # noqa: E402
from linear import gradients, outputs  # noqa: E402

import shoal  # noqa: E402

x = np.random.default_rng(0).normal(size=(400, 3))
y, parameters = x @ [[1.0], [-2.0], [0.5]], np.zeros((3, 1))
