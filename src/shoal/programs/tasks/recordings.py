"""The Free Spoken Digit Dataset: ten digits, spoken fifty times by each of six people; 8 kHz.

Zohar Jackson and others, "Free Spoken Digit Dataset"; CC BY-SA 4.0. Shoal reads it from the file
fsdd/fsdd.npz, or from the wav files in a clone of its repository called fsdd.
"""

from __future__ import annotations

import hashlib
import io
import wave
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import DataMissing
from shoal.programs.tasks.data import Dataset, is_file, places, read

FSDD = Dataset(
    name="fsdd",
    files={"fsdd.npz": "ad6131df4cfc5f9e8e8cee93b35b00f5f25a5ba0fec0d127d6918dd1c1208b98"},
)
ORIGIN = "https://github.com/Jakobovski/free-spoken-digit-dataset at commit 26eb9aaf76e81b69"
SAMPLES_SHA256 = "4e0317650d9c876eeda8788b4d4132af747e323d495a3da12c9bce9bc456a45f"
"""SHA-256 of all samples in ORDER as 16-bit little-endian integers, whatever file format holds them."""

SPEAKERS = ("george", "jackson", "lucas", "nicolas", "theo", "yweweler")
ORDER = tuple(product(range(len(SPEAKERS)), range(10), range(50)))  # speaker, digit, take
TEST_TAKES = 5  # the official test set is the first takes of every digit and speaker


@dataclass(frozen=True)
class Recording:
    """One digit, spoken once; samples lie between -1 and 1."""

    samples: Tensor
    speaker: int
    digit: int
    take: int

    @property
    def is_test(self) -> bool:
        """Whether it belongs to the official test set."""
        return self.take < TEST_TAKES


def recordings() -> list[Recording]:
    """All 3,000 recordings in ORDER; raises DataMissing if they are missing or not the published ones."""
    folders = [place / "recordings" for place in places(FSDD)]
    in_one_file = any(is_file(place / file) for place in places(FSDD) for file in FSDD.files)
    cloned = [folder for folder in folders if is_file(wav_path(folder, *ORDER[0]))]
    if cloned and not in_one_file:
        return list(from_wav(cloned[0]))
    try:
        (contents,) = read(FSDD).values()
    except DataMissing as error:
        raise DataMissing(f"{error} Or clone {ORIGIN} as {places(FSDD)[0]}.") from error
    with np.load(io.BytesIO(contents)) as arrays:
        samples, offsets = arrays["samples"], arrays["offsets"].tolist()
    return list(in_order([samples[a:b] for a, b in pairwise(offsets)]))


def from_wav(folder: Path) -> Iterator[Recording]:
    """Read a clone's wav files; raises DataMissing unless every sample equals the published one."""
    digest, clips = hashlib.sha256(), []
    for which in ORDER:
        path = wav_path(folder, *which)
        try:
            with wave.open(str(path), "rb") as sound:
                contents = sound.readframes(sound.getnframes())
        except (OSError, EOFError, wave.Error) as error:
            raise DataMissing(f"{path} cannot be read: {error}. Take the file of {ORIGIN}.") from error
        digest.update(contents)
        clips.append(np.frombuffer(contents, "<i2"))
    if digest.hexdigest() != SAMPLES_SHA256:
        raise DataMissing(
            f"the samples in {folder} have SHA-256 {digest.hexdigest()}, expected {SAMPLES_SHA256}. "
            f"Take the files of {ORIGIN}."
        )
    return in_order(clips)


def wav_path(folder: Path, speaker: int, digit: int, take: int) -> Path:
    """The path of a recording in a clone of the repository."""
    return folder / f"{digit}_{SPEAKERS[speaker]}_{take}.wav"


def in_order(clips: Sequence[np.typing.NDArray[np.int16]]) -> Iterator[Recording]:
    """Recordings from clips given in ORDER."""
    for clip, which in zip(clips, ORDER, strict=True):
        yield Recording(torch.from_numpy(clip.astype(np.float32) / 32768), *which)
