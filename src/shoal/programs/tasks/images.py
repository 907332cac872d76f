"""MNIST and Fashion-MNIST: 28 x 28 grey pixels, 10 classes, 60,000 training and 10,000 test examples.

LeCun, Bottou, Bengio & Haffner 1998 (handwritten digits); Xiao, Rasul & Vollgraf 2017 (clothes).
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from shoal.core.task import Data, Task
from shoal.programs.models.convolutional import digit_cnn
from shoal.programs.tasks.data import Dataset, idx, read
from shoal.programs.tasks.f1 import macro_f1

MNIST = Dataset(
    name="mnist",
    files={
        "train-images-idx3-ubyte.gz": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels-idx1-ubyte.gz": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "t10k-images-idx3-ubyte.gz": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels-idx1-ubyte.gz": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
    urls=("https://ossci-datasets.s3.amazonaws.com/mnist/",),
)

FASHION_MNIST = Dataset(
    name="fashion-mnist",
    files={
        "train-images-idx3-ubyte.gz": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "train-labels-idx1-ubyte.gz": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "t10k-images-idx3-ubyte.gz": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "t10k-labels-idx1-ubyte.gz": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
    urls=("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
    debian="dataset-fashion-mnist",
)


def mnist() -> Task:
    """A multilayer perceptron on MNIST."""
    return Task(
        name="mnist",
        model=mlp,
        data=mnist_data,
        lr=0.12,
        batch=64,
        about="handwritten digits, 28 x 28 (MNIST); MLP 784-256-256-10",
    )


def mnist_cnn() -> Task:
    """A convolutional network with a million parameters on MNIST."""
    return Task(
        name="mnist-cnn",
        model=digit_cnn,
        data=mnist_images,
        optimizer=torch.optim.Adam,
        lr=0.001,
        batch=100,
        metrics={"F1 %": macro_f1},
        about="handwritten digits, 28 x 28 (MNIST); two convolutions, 1,024 units; Adam; also the F1 score",
    )


def mnist_deep() -> Task:
    """A deep residual MLP on MNIST, to be cut into stages: shoal split mnist-deep --stages 4."""
    return Task(
        name="mnist-deep",
        model=deep_mlp,
        data=mnist_data,
        lr=0.01,
        batch=64,
        about="handwritten digits, 28 x 28 (MNIST); 16 residual layers of 512 units, to be cut into stages",
    )


def fashion_mnist() -> Task:
    """A small convolutional network on Fashion-MNIST."""
    return Task(
        name="fashion-mnist",
        model=image_cnn,
        data=fashion_mnist_data,
        lr=0.1,
        batch=64,
        about="pictures of clothes, 28 x 28 (Fashion-MNIST); two convolutions and a linear layer",
    )


def mlp() -> nn.Module:
    """784-256-256-10 with ReLU; 269,322 parameters."""
    return nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def deep_mlp(depth: int = 16, width: int = 512) -> nn.Module:
    """784-width, `depth` residual layers, 10 classes; 4,625,930 parameters with the defaults."""
    layers = [ResidualLayer(width) for _ in range(depth)]
    return nn.Sequential(nn.Linear(784, width), *layers, nn.Linear(width, 10))


class ResidualLayer(nn.Module):
    """x + linear(relu(norm(x))): plain layers would lose the signal at this depth."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width) -> the same shape."""
        return x + cast(Tensor, self.linear(self.norm(x).relu()))


def image_cnn() -> nn.Module:
    """Two 3 x 3 convolutions, then a linear layer; 20,490 parameters.

    Strides instead of pooling: an epoch takes a third of the time on one core.
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    )


def mnist_data() -> Data:
    """MNIST as normalised vectors of 784."""
    return load(MNIST, shape=(784,), mean=0.1307, std=0.3081)


def mnist_images() -> Data:
    """MNIST as images of 1 x 28 x 28, pixels in [0, 1]."""
    return load(MNIST, shape=(1, 28, 28), mean=0.0, std=1.0)


def fashion_mnist_data() -> Data:
    """Fashion-MNIST as normalised images of 1 x 28 x 28."""
    return load(FASHION_MNIST, shape=(1, 28, 28), mean=0.2860, std=0.3530)


def load(dataset: Dataset, shape: tuple[int, ...], mean: float, std: float) -> Data:
    """Load an image set in idx format: pixels scaled to [0, 1], then normalised by `mean` and `std`."""
    files = read(dataset)

    def images(part: str) -> Tensor:
        pixels = idx(files.pop(f"{part}-images-idx3-ubyte.gz")).float()  # popped: the bytes are freed here
        return pixels.div_(255.0).sub_(mean).div_(std).view(-1, *shape)

    def labels(part: str) -> Tensor:
        return idx(files.pop(f"{part}-labels-idx1-ubyte.gz")).long()

    return Data(images("train"), labels("train"), images("t10k"), labels("t10k"))
