"""Data sets kept as files: where Shoal looks for them, how it downloads them, and the idx format.

Files whose names end in .gz are decompressed. Checksums are of the decompressed contents, because
distributors compress the same data in different ways.

Downloads go through urllib rather than pooch. pooch checks the file as it was downloaded, takes one address
for each file, writes without a limit, resumes nothing either, and needs six more packages (tqdm too, to
show progress); the lines it would save here are fewer than those that would adapt it.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import math
import os
import tempfile
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Protocol

import torch
from torch import Tensor

from shoal.core.errors import DataMissing

DEBIAN = Path("/usr/share/datasets")
TIMEOUT_SECONDS = 30.0
CHUNK_BYTES = 1 << 18
LARGEST_BYTES = 1 << 28  # decompressed; protects memory and disk from an endless stream

# Raised by a gzip stream when the file, the connection or the compressed data is broken.
BROKEN = (OSError, EOFError, zlib.error, http.client.HTTPException)


@dataclass(frozen=True)
class Dataset:
    """A named set of files with their checksums and download addresses."""

    name: str  # also the name of its folder
    files: Mapping[str, str]  # file name -> SHA-256 of its decompressed contents
    urls: tuple[str, ...] = ()  # mirrors that serve `<url>/<file>`, tried in order
    debian: str = ""  # the Debian package that installs it


def find(dataset: Dataset) -> dict[str, Path]:
    """The path of each file, with verified contents; downloads files that are not on this machine.

    Raises DataMissing if a file is damaged, or is missing and cannot be downloaded. Call it once before
    worker processes start, so that they do not all download the same files.
    """
    paths = locate(dataset)
    for file, sha256 in dataset.files.items():
        for _ in verified(paths[file], sha256):
            pass
    return paths


def read(dataset: Dataset) -> dict[str, bytearray]:
    """The contents of each file, decompressed and verified in one pass; downloads like `find`."""
    paths = locate(dataset)
    return {file: bytearray().join(verified(paths[file], sha256)) for file, sha256 in dataset.files.items()}


def locate(dataset: Dataset) -> dict[str, Path]:
    """The path of each file in the first folder that has it; downloads it if none has. Verifies nothing."""
    paths = {}
    for file in dataset.files:
        there = [folder / file for folder in places(dataset) if is_file(folder / file)]
        paths[file] = there[0] if there else download(dataset, file)
    return paths


def is_file(path: Path) -> bool:
    """Whether a file exists; False if its folder may not be entered."""
    try:
        return path.is_file()
    except OSError:
        return False


def places(dataset: Dataset) -> list[Path]:
    """The folders that are searched for a data set, in order."""
    own = os.environ.get("SHOAL_DATA")
    first = [Path(own).expanduser()] if own else []
    return [place / dataset.name for place in (*first, cache(), DEBIAN)]


def cache() -> Path:
    """The folder of downloads: in the user's cache, or in the temporary folder for a user without a home."""
    told = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if told.is_absolute():  # the XDG specification says to ignore relative paths
        return told / "shoal"
    try:
        return Path.home() / ".cache" / "shoal"
    except RuntimeError:  # no HOME, and no entry for this user
        return Path(tempfile.gettempdir(), "shoal")


def verified(path: Path, sha256: str) -> Iterator[bytes]:
    """Yield the contents of a local file in pieces; raises DataMissing at the end if they are wrong."""
    try:
        with path.open("rb") as packed:
            yield from unpack(packed, sha256, path.name)
    except BROKEN as error:
        raise DataMissing(
            f"{path} is damaged or cannot be read: {reason(error)}. "
            f"Replace it with a good copy, or remove it: Shoal then searches elsewhere or downloads it again."
        ) from error


class Readable(Protocol):
    """A stream that can be read."""

    def read(self, size: int, /) -> bytes: ...


def unpack(packed: Readable, sha256: str, file: str) -> Iterator[bytes]:
    """Yield the contents of a stream in pieces; raises one of BROKEN at the end if they are wrong."""
    total, digest = 0, hashlib.sha256()
    contents = packed
    if file.endswith(".gz"):
        contents = gzip.GzipFile(fileobj=packed, mode="rb")  # type: ignore[call-overload]  # needs only read()
    while piece := contents.read(CHUNK_BYTES):
        total += len(piece)
        if total > LARGEST_BYTES:
            raise OSError(f"it decompresses to more than {LARGEST_BYTES} bytes")
        digest.update(piece)
        yield piece
    if digest.hexdigest() != sha256:
        raise OSError(f"its decompressed contents have SHA-256 {digest.hexdigest()}, expected {sha256}")


def download(dataset: Dataset, file: str) -> Path:
    """Download one file into the cache; raises DataMissing with every failed attempt if none succeeds."""
    if os.environ.get("SHOAL_OFFLINE", "0") not in ("", "0"):
        raise missing(dataset, file, ["SHOAL_OFFLINE is set, so nothing was downloaded"])
    failures = []
    for base in dataset.urls:
        url = f"{base.rstrip('/')}/{file}"
        try:
            return fetch(url, cache() / dataset.name / file, dataset.files[file])
        except BROKEN as error:
            failures.append(f"downloading {url} failed: {reason(error)}")
    raise missing(dataset, file, failures or ["it has no download address"])


def fetch(url: str, path: Path, sha256: str) -> Path:
    """Download `url` to `path`, which appears complete and verified or not at all; raises one of BROKEN."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    part = Path(name)
    try:
        with (
            os.fdopen(descriptor, "wb") as copy,
            urllib.request.urlopen(url, timeout=TIMEOUT_SECONDS) as answer,
            progress_bar(path.name, answer.headers.get("Content-Length", "")) as advance,
        ):
            for _ in unpack(Tee(answer, copy, advance), sha256, path.name):
                pass
        part.replace(path)  # if several processes download at once, the last one wins with equal contents
    finally:
        part.unlink(missing_ok=True)
    return path


class Tee:
    """Copies whatever is read from `source` to `copy`, so that the checksum is taken while bytes arrive."""

    def __init__(self, source: Readable, copy: IO[bytes], advance: Callable[[int], object]) -> None:
        self.source = source
        self.copy = copy
        self.advance = advance

    def read(self, size: int, /) -> bytes:
        piece = self.source.read(size)
        self.copy.write(piece)
        self.advance(len(piece))
        return piece


@contextmanager
def progress_bar(file: str, length: str) -> Iterator[Callable[[int], object]]:
    """Draw the progress of a download if stderr is a terminal; yields a function that counts bytes."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield partial(
            progress.advance, progress.add_task(file, total=int(length) if length.isdigit() else None)
        )


def missing(dataset: Dataset, file: str, failures: list[str]) -> DataMissing:
    """The error for a missing file: where it was searched for, why no download succeeded, what to do."""
    looked = ", ".join(str(place) for place in places(dataset))
    advice = f"set SHOAL_DATA to the folder that holds {dataset.name}/{file}"
    if dataset.debian:
        advice += f", or on Debian: apt install {dataset.debian}"
    return DataMissing(
        f"data set '{dataset.name}': {file} is in none of {looked}; {'; '.join(failures)}. "
        f"{advice[0].upper()}{advice[1:]}."
    )


def reason(error: BaseException) -> str:
    """The message of an exception, or its type if it has none."""
    return str(error).rstrip(".") or type(error).__name__


def idx(contents: bytes | bytearray) -> Tensor:
    """The array of bytes in an idx file (the format of MNIST), as a uint8 tensor.

    Zero-copy for a bytearray: the tensor shares its memory. Raises ValueError if the header is not that of
    an idx file of bytes, or if the number of bytes does not match it.
    """
    if len(contents) < 4 or contents[:3] != b"\0\0\x08" or contents[3] == 0:
        raise ValueError(
            f"not an idx file of bytes: it begins with {bytes(contents[:4]).hex(' ') or 'nothing'}, "
            f"expected 00 00 08 and the number of dimensions"
        )
    start = 4 + 4 * contents[3]
    if len(contents) < start:
        raise ValueError(
            f"truncated idx header: {contents[3]} dimensions need {start} bytes, there are {len(contents)}"
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
