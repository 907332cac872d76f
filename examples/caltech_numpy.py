"""Caltech-101 with NumPy alone: python examples/caltech_numpy.py --machines 4 --strategy downpour

A network with one hidden layer.
Shoal gets a function for its outputs and one for its gradients, both written by hand.
"""

import argparse
import io
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
from PIL import Image

import shoal

SIDE, HIDDEN, CLASSES = 16, 256, 102


def caltech(folder):
    """Training and test pictures of 16 x 16 pixels as rows, and their classes."""
    arrays = np.load(folder / "caltech101_64.npz")
    packed, ends = arrays["jpeg"].tobytes(), arrays["offsets"]
    pictures = [Image.open(io.BytesIO(packed[i:j])) for i, j in pairwise(ends)]
    pixels = np.stack([np.asarray(picture.resize((SIDE, SIDE))) for picture in pictures])
    x, y = pixels.reshape(len(pixels), -1).astype(np.float32), arrays["labels"].astype(np.int64)
    train, test = arrays["split"] == 0, arrays["split"] == 1
    x = (x - x[train].mean(axis=0)) / x[train].std(axis=0)
    return (x[train], y[train]), (x[test], y[test])


def start(seed):
    draw = np.random.default_rng(seed)
    inputs = 3 * SIDE * SIDE
    return {
        "w1": (draw.normal(size=(inputs, HIDDEN)) * np.sqrt(2 / inputs)).astype(np.float32),
        "b1": np.zeros(HIDDEN, np.float32),
        "w2": np.zeros((HIDDEN, CLASSES), np.float32),
        "b2": np.zeros(CLASSES, np.float32),
    }


def outputs(p, x):
    return np.maximum(x @ p["w1"] + p["b1"], 0) @ p["w2"] + p["b2"]


def gradients(p, x, y):
    hidden = np.maximum(x @ p["w1"] + p["b1"], 0)
    error = softmax(hidden @ p["w2"] + p["b2"])
    error[np.arange(len(y)), y] -= 1
    error /= len(y)
    back = (error @ p["w2"].T) * (hidden > 0)
    return {"w1": x.T @ back, "b1": back.sum(axis=0), "w2": hidden.T @ error, "b2": error.sum(axis=0)}


def loss(out, y):
    out = out - out.max(axis=1, keepdims=True)
    return (np.log(np.exp(out).sum(axis=1)) - out[np.arange(len(y)), y]).mean()


def softmax(scores):
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


if __name__ == "__main__":  # worker processes import this file for its functions
    folder = Path(os.environ.get("SHOAL_DATA", ".")) / "caltech101_64"
    parser = argparse.ArgumentParser()
    parser.add_argument("--machines", type=int, default=4)
    parser.add_argument("--strategy", default="downpour")
    parser.add_argument("--transport", default="processes")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--data", type=Path, default=folder)
    args = parser.parse_args()
    data, test = caltech(args.data)
    found = shoal.minimize(
        outputs,
        gradients,
        start(seed=0),
        data,
        machines=args.machines,
        strategy=args.strategy,
        transport=args.transport,
        epochs=args.epochs,
        batch=32,
        lr=args.lr,
        test=test,
        loss=loss,
    )
    guessed = outputs(found.parameters, test[0]).argmax(axis=1)
    print(f"{found.result.samples_per_second:,.0f} samples/s on {args.machines} machines")
    print(f"test accuracy {100 * (guessed == test[1]).mean():.2f} %, loss {found.result.test_loss:.3f}")
