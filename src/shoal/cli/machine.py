"""The tests of `shoal doctor`: what works on this machine, and how to fix what does not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.collectives import LinkCost, cheapest
from shoal.launch.join import local_threads
from shoal.profiling.probe import KINDS
from shoal.profiling.probe_processes import hear, start_mpi_probe, start_probe
from shoal.programs.tasks.data import Dataset, is_file, places
from shoal.programs.tasks.images import FASHION_MNIST, MNIST
from shoal.report.units import bytes_text
from shoal.transports.shared_memory import gpu_memory

OLDEST_PYTHON = (3, 10)
LITTLE_BYTES = 100_000_000
OPEN = "It listens on all addresses of the host while a job runs, without a password: docs/transports.md."

EXTRAS = {"grpc": ("grpc", "grpcio"), "mpi": ("mpi4py", "mpi4py")}
"""The module and the package that an optional transport needs."""

CROWDS = (16, 64)  # workers
SIZES = (100_000, 100_000_000)  # bytes


@dataclass(frozen=True)
class Finding:
    """One sentence about this machine: True works, False is broken, None is missing and optional."""

    works: bool | None
    sentence: str


def examine() -> Iterator[Finding]:
    """Every finding, as soon as it is known."""
    yield python()
    yield from accelerators()
    yield cores()
    yield loopback()
    yield from transports()
    yield from space()
    yield from data_sets()
    yield from extras()


def python() -> Finding:
    """Whether this Python is new enough."""
    oldest = ".".join(map(str, OLDEST_PYTHON))
    found = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info >= OLDEST_PYTHON:
        return Finding(True, f"{found}.")
    return Finding(False, f"{found} is too old: install {oldest} or newer.")


def accelerators() -> Iterator[Finding]:
    """The installed torch, and the GPUs it can use."""
    yield Finding(
        True, f"torch {torch.__version__}, safetensors {importlib.metadata.version('safetensors')}."
    )
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        yield Finding(True, f"GPU: {names}.")
        yield gpu_sharing()
    else:
        yield Finding(None, "torch finds no GPU: models train on the CPU.")


def gpu_sharing() -> Finding:
    """Whether processes on one GPU can map each other's memory of it."""
    if gpu_memory.has_bindings():
        return Finding(True, "Processes on one GPU exchange tensors through its memory.")
    return Finding(
        None,
        "Processes on one GPU exchange tensors through host memory, which takes longer. "
        "For its own: pip install cuda-bindings.",
    )


def cores() -> Finding:
    """How many workers this machine has cores for."""
    count = local_threads(1)
    threads = torch.get_num_threads()
    return Finding(
        True,
        f"{count} cores, {threads} torch threads: more than {count} workers on this machine share its cores "
        "and are no faster.",
    )


def loopback() -> Finding:
    """Whether a loopback connection works."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=2.0),
        ):
            pass
    except OSError as error:
        return Finding(
            False,
            f"Loopback sockets fail ({error}): bring up interface lo, or allow 127.0.0.1 in the firewall.",
        )
    return Finding(True, "Loopback sockets connect.")


def transports() -> Iterator[Finding]:
    """A round trip between two processes over every real transport."""
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        figures, end = hear([start_probe(rank, folder) for rank in range(2)])
    for kind in KINDS:
        yield lacking(kind) or _judge(kind, figures.get(kind, {"problem": end}), "between two processes")
    yield mpi()


def mpi() -> Finding:
    """Whether mpiexec starts processes that find each other."""
    if finding := lacking("mpi"):
        return finding
    beside = str(Path(sys.executable).parent)  # the environment that has mpi4py, activated or not
    mpiexec = shutil.which("mpiexec", path=beside) or shutil.which("mpiexec")
    if mpiexec is None:
        return Finding(
            None,
            "transport mpi: mpi4py is installed, but there is no mpiexec: pip install 'shoal[mpi]', or load "
            "the MPI that mpi4py was built for.",
        )
    figures, end = hear([start_mpi_probe(mpiexec)])
    finding = _judge("mpi", figures.get("mpi", {"problem": end}), f"between two processes of {mpiexec}")
    return Finding(finding.works, f"{finding.sentence} {OPEN}") if finding.works else finding


def lacking(kind: str) -> Finding | None:
    """A finding about the package that a transport needs and that is not installed; else None."""
    if kind not in EXTRAS:
        return None
    module, package = EXTRAS[kind]
    if importlib.util.find_spec(module) is not None:
        return None
    return Finding(None, f"transport {kind} needs {package}: pip install 'shoal[{kind}]'.")


def _judge(kind: str, found: dict[str, Any], where: str) -> Finding:
    if "problem" in found:
        return Finding(False, f"transport {kind} does not work here: {str(found['problem']).rstrip('.')}.")
    trip, rate = 1e6 * found["round_trip"], bytes_text(found["bandwidth"])
    link = LinkCost(found["round_trip"] / 2, 1 / found["bandwidth"])
    return Finding(True, f"transport {kind}: round trip {trip:.0f} us, {rate}/s {where}; {advice(link)}.")


def advice(link: LinkCost) -> str:
    """The cheapest collective over such a link, for two numbers of workers and two sizes."""
    words = (
        f"{' / '.join(cheapest(workers, nbytes, link) for workers in CROWDS)} for {bytes_text(nbytes)}"
        for nbytes in SIZES
    )
    return f"cheapest collective for {' / '.join(map(str, CROWDS))} workers: {', '.join(words)}"


def space() -> Iterator[Finding]:
    """Free space for temporary files and shared memory."""
    shared = Path("/dev/shm")
    for name, folder in (("temporary files", Path(tempfile.gettempdir())), ("shared memory", shared)):
        if not folder.is_dir():
            yield Finding(None, f"No folder {folder} for {name}; data loaders with workers may need it.")
            continue
        free = shutil.disk_usage(folder).free
        enough = free >= LITTLE_BYTES
        advice = "" if enough else "; less than 100 MB may be too little: free some, or set TMPDIR"
        works = enough or (None if folder == shared else False)
        yield Finding(works, f"{bytes_text(free)} free for {name} in {folder}{advice}.")


def data_sets() -> Iterator[Finding]:
    """Where the data sets of the built-in tasks are."""
    if importlib.util.find_spec("sklearn"):
        yield Finding(True, "Data of task digits: part of scikit-learn.")
    else:
        yield Finding(None, "Data of task digits is part of scikit-learn: pip install 'shoal[digits]'.")
    for dataset in (MNIST, FASHION_MNIST):
        yield _find(dataset)


def _find(dataset: Dataset) -> Finding:
    found = {
        file: next((place for place in places(dataset) if is_file(place / file)), None)
        for file in dataset.files
    }
    folders = sorted({str(folder) for folder in found.values() if folder is not None})
    if None not in found.values():
        return Finding(True, f"Data of task {dataset.name}: found in {', '.join(folders)}.")
    debian = f" (Debian: apt install {dataset.debian})" if dataset.debian else ""
    return Finding(
        None,
        f"Data of task {dataset.name} is not on this machine: Shoal downloads it on first use, or set "
        f"SHOAL_DATA to the folder that holds {dataset.name}/{debian}.",
    )


def extras() -> Iterator[Finding]:
    """Optional packages: their version, or the command that installs them."""
    for line in importlib.metadata.requires("shoal") or []:
        match = re.match(r"([\w.-]+).*;.*extra == ['\"]([\w-]+)['\"]", line)
        if match is None or match[2] == "dev":
            continue
        try:
            yield Finding(True, f"Optional {match[1]} {importlib.metadata.version(match[1])}.")
        except importlib.metadata.PackageNotFoundError:
            yield Finding(None, f"Optional {match[1]} is missing: pip install 'shoal[{match[2]}]'.")
