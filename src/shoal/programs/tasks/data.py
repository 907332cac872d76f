"""Data sets kept as files: where they lie, how they are fetched, and the idx format.

A file whose name ends in .gz is unpacked. Sums are taken over the unpacked contents: the same data is packed
differently by different distributors, and only what is inside matters.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import math
import os
import sys
import tempfile
import urllib.request
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import torch
from torch import Tensor

from shoal.core.errors import DataMissing

DEBIAN = Path("/usr/share/datasets")
TIMEOUT_SECONDS = 30.0
CHUNK_BYTES = 1 << 18
LARGEST_BYTES = 1 << 28  # unpacked; a stream that goes on for longer is none of ours

# What reading a gzip stream raises when the file, the line or the packing is broken.
BROKEN = (OSError, EOFError, zlib.error, http.client.HTTPException)


@dataclass(frozen=True)
class Dataset:
    """A named set of files: their sums, and who has them."""

    name: str  # also the folder's name, wherever it lies
    files: Mapping[str, str]  # file name -> SHA-256 of its unpacked contents
    urls: tuple[str, ...] = ()  # where `<url>/<file>` can be fetched, tried in order
    debian: str = ""  # the Debian package that installs it


def find(dataset: Dataset) -> dict[str, Path]:
    """Each file's path, its contents verified; what is nowhere on this machine is downloaded.

    Raises DataMissing if a file is damaged, or is nowhere and cannot be fetched. Called once before
    worker processes start, it spares each of them the download.
    """
    paths = locate(dataset)
    for file, sha256 in dataset.files.items():
        for _ in verified(paths[file], sha256):
            pass
    return paths


def read(dataset: Dataset) -> dict[str, bytearray]:
    """Each file's contents, unpacked and verified in one pass; found and fetched as by `find`."""
    paths = locate(dataset)
    return {file: bytearray().join(verified(paths[file], sha256)) for file, sha256 in dataset.files.items()}


def locate(dataset: Dataset) -> dict[str, Path]:
    """Each file's path, in the first of the places that has it, downloaded if none has; not verified."""
    paths = {}
    for file in dataset.files:
        there = [folder / file for folder in places(dataset) if is_file(folder / file)]
        paths[file] = there[0] if there else download(dataset, file)
    return paths


def is_file(path: Path) -> bool:
    """Whether a file is there; what lies in a folder that may not be entered is not."""
    try:
        return path.is_file()
    except OSError:
        return False


def places(dataset: Dataset) -> list[Path]:
    """The folders a data set may lie in, in the order they are looked at."""
    own = os.environ.get("SHOAL_DATA")
    first = [Path(own).expanduser()] if own else []
    return [place / dataset.name for place in (*first, cache(), DEBIAN)]


def cache() -> Path:
    """Where downloads are kept: in the user's cache, or among temporary files for a user without a home."""
    told = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if told.is_absolute():  # the XDG specification: a relative one is to be ignored
        return told / "shoal"
    try:
        return Path.home() / ".cache" / "shoal"
    except RuntimeError:  # no HOME, and no entry for this user
        return Path(tempfile.gettempdir(), "shoal")


def verified(path: Path, sha256: str) -> Iterator[bytes]:
    """A local file's contents, piece by piece; raises DataMissing at the end if they are wrong."""
    try:
        with path.open("rb") as packed:
            yield from unpack(packed, sha256, path.name)
    except BROKEN as error:
        raise DataMissing(
            f"{path} is damaged or cannot be read: {reason(error)}. "
            f"Remove it to have it looked for elsewhere or downloaded again, or put a good copy in its place."
        ) from error


class Readable(Protocol):
    """All that is asked of a stream."""

    def read(self, size: int, /) -> bytes: ...


def unpack(packed: Readable, sha256: str, file: str) -> Iterator[bytes]:
    """The contents of a stream, piece by piece; raises one of BROKEN at the end if they are wrong."""
    total, digest = 0, hashlib.sha256()
    contents = packed
    if file.endswith(".gz"):
        contents = gzip.GzipFile(fileobj=packed, mode="rb")  # type: ignore[call-overload]  # needs only read()
    while piece := contents.read(CHUNK_BYTES):
        total += len(piece)
        if total > LARGEST_BYTES:
            raise OSError(f"it unpacks to more than {LARGEST_BYTES} bytes")
        digest.update(piece)
        yield piece
    if digest.hexdigest() != sha256:
        raise OSError(f"its unpacked contents have SHA-256 {digest.hexdigest()}, expected {sha256}")


def download(dataset: Dataset, file: str) -> Path:
    """Fetch one file into the cache; raises DataMissing, with all that was tried, if that cannot be done."""
    if os.environ.get("SHOAL_OFFLINE", "0") not in ("", "0"):
        raise missing(dataset, file, ["SHOAL_OFFLINE is set, so nothing was downloaded"])
    failures = []
    for base in dataset.urls:
        url = f"{base.rstrip('/')}/{file}"
        try:
            return fetch(url, cache() / dataset.name / file, dataset.files[file])
        except BROKEN as error:
            failures.append(f"downloading {url} failed: {reason(error)}")
    raise missing(dataset, file, failures or ["no download address is known for it"])


def fetch(url: str, path: Path, sha256: str) -> Path:
    """Download `url` to `path`, which appears whole and verified or not at all; raises one of BROKEN."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    part = Path(name)
    try:
        with (
            os.fdopen(descriptor, "wb") as copy,
            urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer,
            Progress(url, answer.headers.get("Content-Length", "")) as progress,
        ):
            for _ in unpack(Tee(answer, copy, progress), sha256, path.name):
                pass
        part.replace(path)  # of several processes at once the last one wins, with equal contents
    finally:
        part.unlink(missing_ok=True)
    return path


class Tee:
    """What is read from `source` is also written to `copy`: sums are checked while the bytes arrive."""

    def __init__(self, source: Readable, copy: IO[bytes], progress: Progress) -> None:
        self.source = source
        self.copy = copy
        self.progress = progress

    def read(self, size: int, /) -> bytes:
        piece = self.source.read(size)
        self.copy.write(piece)
        self.progress.advance(len(piece))
        return piece


class Progress:
    """One line on a terminal that counts the bytes of a download; silent where stderr is not a terminal."""

    def __init__(self, url: str, length: str) -> None:
        self.url = url
        self.of = f" of {int(length) / 1e6:.1f}" if length.isdigit() else ""
        self.done = 0
        self.silent = sys.stderr is None or not sys.stderr.isatty()

    def __enter__(self) -> Progress:
        return self

    def advance(self, count: int) -> None:
        """Count more bytes, and show it now and then."""
        before, self.done = self.done, self.done + count
        if not self.silent and before // CHUNK_BYTES < self.done // CHUNK_BYTES:
            self.show()

    def show(self, end: str = "") -> None:
        """Write the line over what it was."""
        print(f"\r{self.url}: {self.done / 1e6:.1f}{self.of} MB", end=end, file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if not self.silent:
            self.show(end="\n")


def missing(dataset: Dataset, file: str, failures: list[str]) -> DataMissing:
    """The one message for a file that is nowhere: the places, why it was not fetched, what to do."""
    looked = ", ".join(str(place) for place in places(dataset))
    advice = f"set SHOAL_DATA to the folder that holds {dataset.name}/{file}"
    if dataset.debian:
        advice += f", or on Debian: apt install {dataset.debian}"
    return DataMissing(
        f"data set '{dataset.name}': {file} is in none of {looked}; {'; '.join(failures)}. "
        f"What to do: {advice}."
    )


def reason(error: BaseException) -> str:
    """An exception in a few words, also for those that have none of their own."""
    return str(error).rstrip(".") or type(error).__name__


def idx(contents: bytes | bytearray) -> Tensor:
    """The array of bytes in an idx file (the format of MNIST), as a uint8 tensor.

    A bytearray is not copied: the tensor shares its memory. Raises ValueError if the header is not
    that of an idx file of bytes, or promises another number of bytes than there are.
    """
    if len(contents) < 4 or contents[:3] != b"\0\0\x08" or contents[3] == 0:
        raise ValueError(
            f"not an idx file of bytes: it begins with {bytes(contents[:4]).hex(' ') or 'nothing'}, "
            f"expected 00 00 08 and the number of dimensions"
        )
    start = 4 + 4 * contents[3]
    if len(contents) < start:
        raise ValueError(
            f"idx header cut off: {contents[3]} dimensions need {start} bytes, there are {len(contents)}"
        )
    shape = [int.from_bytes(contents[at : at + 4], "big") for at in range(4, start, 4)]
    if math.prod(shape) != len(contents) - start:
        raise ValueError(
            f"idx header promises {' x '.join(map(str, shape))} = {math.prod(shape)} bytes, "
            f"but {len(contents) - start} follow it"
        )
    if 0 in shape:
        return torch.empty(shape, dtype=torch.uint8)  # frombuffer refuses to make an empty tensor
    whole = contents if isinstance(contents, bytearray) else bytearray(contents)
    return torch.frombuffer(whole, dtype=torch.uint8, offset=start).view(shape)
