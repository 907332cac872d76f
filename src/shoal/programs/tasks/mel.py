"""Log-mel features: the power in each frequency band of a short frame of sound.

Davis & Mermelstein, "Comparison of Parametric Representations for Monosyllabic Word Recognition in
Continuously Spoken Sentences", 1980; without the cosine transform, which neural networks do not need.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

FLOOR = 1e-10  # least power, below that of one 16-bit step: the logarithm of digital silence stays finite


@dataclass(frozen=True)
class Mel:
    """How sound becomes features: `rate` samples/s, frames of `window` seconds every `hop` seconds."""

    rate: int = 8000
    window: float = 0.025
    hop: float = 0.010
    bands: int = 40

    @property
    def window_samples(self) -> int:
        """Samples in a frame."""
        return round(self.window * self.rate)

    @property
    def hop_samples(self) -> int:
        """Samples from the start of one frame to the start of the next."""
        return round(self.hop * self.rate)

    @property
    def bins(self) -> int:
        """Length of the Fourier transform: the least power of two that holds a frame."""
        return int(2 ** math.ceil(math.log2(self.window_samples)))

    def frames(self, samples: Tensor) -> Tensor:
        """Samples as (frames, samples in a frame); samples after the last whole frame are dropped."""
        return samples.unfold(0, self.window_samples, self.hop_samples)

    @cache  # noqa: B019  # few instances, all equal
    def filters(self) -> Tensor:
        """The weight of each Fourier frequency in each band: (bands, bins / 2 + 1).

        Triangles on the mel scale from 0 to half the sampling rate; each reaches from the centre of the band
        below to the centre of the band above. Between the first and the last centre, the weights of a
        frequency add up to 1.
        """
        top = mel(torch.tensor(self.rate / 2.0))
        place = mel(torch.arange(self.bins // 2 + 1) * (self.rate / self.bins)) / top * (self.bands + 1)
        centres = torch.arange(1, self.bands + 1)
        return (1 - (place - centres[:, None]).abs()).clamp(min=0)

    def features(self, samples: Tensor) -> Tensor:
        """Log power in each band: (frames, bands)."""
        window = torch.hann_window(self.window_samples, periodic=False)
        spectrum = torch.fft.rfft(self.frames(samples) * window, n=self.bins)
        power = torch.view_as_real(spectrum).square().sum(dim=-1)
        return (power @ self.filters().T).clamp(min=FLOOR).log()

    def decibels(self, samples: Tensor) -> Tensor:
        """Mean power of each frame in decibels; 0 dB is a square wave at full scale."""
        return 10 * self.frames(samples).square().mean(dim=1).clamp(min=FLOOR).log10()


def mel(hertz: Tensor) -> Tensor:
    """The mel scale, on which equal distances sound equal; 1,000 Hz is 1,000 mel."""
    return 2595 * (1 + hertz / 700).log10()
