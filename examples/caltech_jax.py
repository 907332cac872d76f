"""Caltech-101 with JAX: python examples/caltech_jax.py --machines 2 --strategy downpour

A convolutional network on colour pictures of 64 x 64 pixels.
Shoal gets a function for its outputs and one for its gradients.
"""

import argparse
import io
import os
from itertools import pairwise
from pathlib import Path

# Before JAX is imported, here and in every worker process: one core each, and no competition for a GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

import shoal

SIDE, COLOURS, CLASSES = 64, 3, 102
LAYOUT = ("NHWC", "HWIO", "NHWC")  # of pictures, kernels and outputs: channels last
MEAN, SPREAD = 135.0, 79.0  # of the bytes


def caltech(folder, most=None):
    """Training pictures, each also mirrored, and test pictures, as bytes; and their classes."""
    arrays = np.load(folder / "caltech101_64.npz")
    packed, ends = arrays["jpeg"].tobytes(), [*pairwise(arrays["offsets"])]
    labels = arrays["labels"].astype(np.int64)

    def part(number):
        chosen = np.random.default_rng(0).permutation(np.flatnonzero(arrays["split"] == number))[:most]
        files = (io.BytesIO(packed[slice(*ends[i])]) for i in chosen)
        return np.stack([np.asarray(Image.open(file)) for file in files]), labels[chosen]

    (x, y), test = part(0), part(1)
    return (np.concatenate([x, x[:, :, ::-1]]), np.concatenate([y, y])), test


def start(channels, seed):
    """Weights and biases: a convolution of 3 x 3 to each number of channels, and a dense layer."""
    draw = np.random.default_rng(seed)
    side = SIDE // 2 ** len(channels)
    shapes = [(3, 3, *both) for both in pairwise([COLOURS, *channels])]
    shapes.append((side * side * channels[-1], CLASSES))
    return [
        (
            (draw.normal(size=shape) * np.sqrt(2 / np.prod(shape[:-1]))).astype(np.float32),
            np.zeros(shape[-1], np.float32),
        )
        for shape in shapes
    ]


@jax.jit
def scores(p, x):
    *convolutions, (weight, bias) = p
    x = (x - MEAN) / SPREAD
    for kernel, shift in convolutions:
        x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=LAYOUT)
        x = halved(jax.nn.relu(x + shift))
    return x.reshape(len(x), -1) @ weight + bias


def halved(x):
    """The largest of every 2 x 2 pixels."""
    x = jnp.maximum(x[:, ::2], x[:, 1::2])
    return jnp.maximum(x[:, :, ::2], x[:, :, 1::2])


@jax.jit
@jax.grad
def slopes(p, x, y):
    return loss(scores(p, x), y)


# -- what Shoal calls: functions that worker processes import by name -------------------------------


def outputs(p, x):
    return scores(p, x)


def gradients(p, x, y):
    return slopes(p, x, y)


def loss(out, y):
    return -jax.nn.log_softmax(out)[jnp.arange(len(y)), y].mean()


if __name__ == "__main__":  # worker processes import this file for its functions
    folder = Path(os.environ.get("SHOAL_DATA", ".")) / "caltech101_64"
    parser = argparse.ArgumentParser()
    parser.add_argument("--machines", type=int, default=2)
    parser.add_argument("--strategy", default="downpour")
    parser.add_argument("--transport", default="processes")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--grow-batch", help="4@8: four times the batch after 8 epochs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--channels", default="16-32-64-128", help="of the convolutions, at most six")
    parser.add_argument("--pictures", type=int, help="at most this many to train on, and to test on")
    parser.add_argument("--data", type=Path, default=folder)
    args = parser.parse_args()
    data, test = caltech(args.data, args.pictures)
    result = shoal.minimize(
        outputs,
        gradients,
        start([int(number) for number in args.channels.split("-")], args.seed),
        data,
        machines=args.machines,
        strategy=args.strategy,
        transport=args.transport,
        epochs=args.epochs,
        batch=args.batch,
        lr=args.lr,
        grow_batch=args.grow_batch,
        seed=args.seed,
        test=test,
        loss=loss,
    ).result
    print(f"{result.samples_per_second:,.0f} samples/s on {args.machines} machines, {result.seconds:.0f} s")
    print(f"test accuracy {result.test_accuracy:.2f} %, loss {result.test_loss:.3f}")
