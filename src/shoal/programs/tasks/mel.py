"""Log-mel features: how strong each of a number of bands is in a short piece of sound.

Davis & Mermelstein, "Comparison of Parametric Representations for Monosyllabic Word Recognition in
Continuously Spoken Sentences", 1980; without the cosine transform, which networks do not need.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

FLOOR = 1e-10  # of a power, below the smallest of 16 bits: the logarithm of digital silence is finite


@dataclass(frozen=True)
class Mel:
    """Sound of `rate` samples a second as frames of so many seconds, one every `hop`, in `bands`."""

    rate: int = 8000
    window: float = 0.025
    hop: float = 0.010
    bands: int = 40

    @property
    def window_samples(self) -> int:
        """Samples of a frame."""
        return round(self.window * self.rate)

    @property
    def hop_samples(self) -> int:
        """Samples from the beginning of a frame to that of the next."""
        return round(self.hop * self.rate)

    @property
    def bins(self) -> int:
        """Samples of the Fourier transform: the power of two that holds a frame."""
        return int(2 ** math.ceil(math.log2(self.window_samples)))

    def frames(self, samples: Tensor) -> Tensor:
        """Samples as (frames, samples of a frame); what is left behind the last whole frame is dropped."""
        return samples.unfold(0, self.window_samples, self.hop_samples)

    @cache  # noqa: B019  # few, and all alike
    def filters(self) -> Tensor:
        """The weight of each frequency of the Fourier transform in each band: (bands, bins / 2 + 1).

        Triangles on the mel scale from 0 to half the rate, each from its neighbours' centre to centre. So
        between the centres of the first and of the last band the weights of a frequency add up to 1.
        """
        top = mel(torch.tensor(self.rate / 2.0))
        place = mel(torch.arange(self.bins // 2 + 1) * (self.rate / self.bins)) / top * (self.bands + 1)
        centres = torch.arange(1, self.bands + 1)
        return (1 - (place - centres[:, None]).abs()).clamp(min=0)

    def features(self, samples: Tensor) -> Tensor:
        """The logarithm of the power in each band, as (frames, bands)."""
        window = torch.hann_window(self.window_samples, periodic=False)
        spectrum = torch.fft.rfft(self.frames(samples) * window, n=self.bins)
        power = torch.view_as_real(spectrum).square().sum(dim=-1)
        return (power @ self.filters().T).clamp(min=FLOOR).log()

    def decibels(self, samples: Tensor) -> Tensor:
        """The mean power of each frame; 0 is that of a square wave at full scale."""
        return 10 * self.frames(samples).square().mean(dim=1).clamp(min=FLOOR).log10()


def mel(hertz: Tensor) -> Tensor:
    """The mel scale: 1,000 Hz is 1,000 mel, and what sounds equally far apart is equally far."""
    return 2595 * (1 + hertz / 700).log10()
