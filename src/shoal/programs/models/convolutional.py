"""The convolutional network for handwritten digits: two wide convolutions and a large layer (after LeNet-5).

LeCun, Bottou, Bengio & Haffner 1998 have the plan; the sizes are those of tutorials since.
"""

from __future__ import annotations

from torch import nn


def digit_cnn() -> nn.Module:
    """5 x 5 convolutions of 32 and 64 channels, each halved by pooling, 1,024 units, 10 classes.

    1,111,946 parameters. Of 28 x 28 pixels remain 24 x 24, 12 x 12, 8 x 8 and 4 x 4: nothing is padded. Only
    the layer of 1,024 units has an activation (ReLU), besides what pooling does; there is no dropout.
    """
    return nn.Sequential(
        nn.Conv2d(1, 32, 5),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 1024),
        nn.ReLU(),
        nn.Linear(1024, 10),
    )
