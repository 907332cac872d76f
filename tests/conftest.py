"""Every test leaves the process as it found it: no thread, child, open file or changed setting stays."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from typer import testing

from compiled_kernels import await_compiled_kernels, begin_to_compile_kernels
from forked import ensure_fork_server, warm_scripts
from interpreter import be_as_if_cold
from one_message import send_together, take_apart
from power_cuts import expect_no_power_cut
from sampling import leave_products_to_soak
from warm import fork_server_pid, programs, warm_programs

__all__ = ["warm_programs", "warm_scripts"]

be_as_if_cold()  # a process of pytest-xdist starts warm, and so does what multiprocessing starts there
expect_no_power_cut()

gc.disable()  # until all tests are collected
torch.set_num_threads(1)  # threads that wait for each other on busy cores make small tests many times slower
for logger in logging.root.manager.loggerDict.values():
    if isinstance(logger, logging.Logger) and logger.name.startswith(("torch", "strobelight")):
        logger.propagate = True  # or pytest adds a handler to each of some forty, six times a test
testing._get_command = cache(testing._get_command)  # or every call reads all options of all commands anew
os.environ.pop("PYTHONUNBUFFERED", None)  # a line and its end are two writes then: ranks mix theirs

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # some files import grpc before the package does
os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # in new processes: or threads spin on cores that others need
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as torch's, above; NumPy's turn in circles for work
os.environ["SHOAL_RUNS"] = "none"  # or every run of a test would leave a folder here

GRACE_SECONDS = 20.0  # a thread that was told to stop may still be on its way out, on busy cores
POLL_SECONDS = 0.01

PROC = Path("/proc/self")
HAS_FDS = (PROC / "fd").is_dir() and not torch.cuda.is_available()  # CUDA opens what it likes
HANDLERS = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGQUIT: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")  # one of each serves all tests
# C libraries open these once and keep them; the map is where oneDNN tells perf which kernels it compiled
KEPT_OPEN = {"/dev/random", "/dev/urandom", f"/tmp/perf-{os.getpid()}.map"}

# pytest's own, and what scikit-learn (OpenMP), torch (its compiler), JAX and Lightning set when first used
FREE_VARIABLES = ("PYTEST_", "KMP_", "TORCHINDUCTOR_", "TRITON_", "TF_CPP_", "TPU_", "PYTORCH_NVML_")


@dataclass(frozen=True)
class Snapshot:
    """What this process holds at one moment."""

    threads: frozenset[threading.Thread]
    children: frozenset[int]
    files: frozenset[int]
    environment: dict[bytes, bytes]
    torch_threads: int

    @classmethod
    def take(cls) -> Snapshot:
        return cls(
            frozenset(threading.enumerate()),
            frozenset(descendants()),
            frozenset(open_files()),
            environment(),
            torch.get_num_threads(),
        )

    def left_behind(self, grace_seconds: float = GRACE_SECONDS) -> list[str]:
        """What is there now and was not before, once the grace is over; an empty list comes at once."""
        deadline = time.monotonic() + grace_seconds
        found = self._differences()
        if found:
            gc.collect()  # only now, for it is dear: a file held by a mere reference cycle is no leak
            found = self._differences()
        while found and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            found = self._differences()
        return found

    def _differences(self) -> list[str]:
        return [
            *(f"thread {t.name!r}" for t in threading.enumerate() if t not in self.threads and is_ours(t)),
            *(f"child {describe_process(pid)}" for pid in sorted(descendants() - self.children)),
            *(f"open file {fd} -> {target}" for fd, target in named(open_files() - self.files)),
            *self._changed_variables(),
            *self._changed_settings(),
        ]

    def _changed_variables(self) -> Iterator[str]:
        now = environment()
        if now != self.environment:
            for name in sorted(now.keys() | self.environment.keys()):
                free = os.fsdecode(name).startswith(FREE_VARIABLES)
                if now.get(name) != self.environment.get(name) and not free:
                    yield f"changed environment variable {os.fsdecode(name)}"  # its value may be secret

    def _changed_settings(self) -> Iterator[str]:
        if (now := torch.get_num_threads()) != self.torch_threads:
            yield f"torch.get_num_threads() is {now}, was {self.torch_threads}"


def environment() -> dict[bytes, bytes]:
    """The variables as the system keeps them, which every test pays for, without what pytest changes."""
    found: dict[bytes, bytes] = dict(os.environ._data)
    found.pop(b"PYTEST_CURRENT_TEST", None)
    return found


def is_ours(thread: threading.Thread) -> bool:
    """Not a thread of a C++ library that once called back into Python: those never end and have no owner."""
    return not isinstance(thread, threading._DummyThread)


def descendants() -> set[int]:
    """Children of this process and of the servers that fork, without these and other helpers."""
    mine = {p.pid for p in multiprocessing.active_children() if p.pid is not None}  # also reaps the finished
    for pid in children_of(os.getpid()) - helper_pids():
        if not any(helper in command_line(pid) for helper in HELPERS):
            mine.add(pid)
    servers = {pid for pid in (fork_server_pid(), programs().pid) if pid is not None}
    return mine.union(*map(children_of, servers)) - servers


def children_of(pid: int) -> set[int]:
    found: set[int] = set()
    try:
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208 - three times as fast, and every test pays
            with open(f"/proc/{pid}/task/{task}/children", "rb", buffering=0) as listing:  # noqa: PTH123
                found.update(map(int, listing.read().split()))
    except OSError:  # not Linux, or it has just ended
        pass
    return found


def helper_pids() -> set[int | None]:
    """This process's own helpers, whose command lines need not be read."""
    from multiprocessing import forkserver, resource_tracker

    return {
        getattr(forkserver._forkserver, "_forkserver_pid", None),
        getattr(resource_tracker._resource_tracker, "_pid", None),
    }


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def describe_process(pid: int) -> str:
    return f"{pid}: {command_line(pid)[:120] or '(ended, but nobody waited for it)'}"


def open_files() -> set[int]:
    if not HAS_FDS:
        return set()
    return {fd for fd in map(int, os.listdir("/proc/self/fd")) if is_open(fd)}  # noqa: PTH208


def is_open(fd: int) -> bool:
    """False for the descriptor that listed the folder, which is closed by now."""
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def named(files: set[int]) -> Iterator[tuple[int, str]]:
    """Each descriptor with what it is open on, without those that serve multiprocessing's helpers."""
    for fd in sorted(files - helper_files()):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
        except OSError:
            continue
        if target not in KEPT_OPEN:
            yield fd, target


def helper_files() -> set[int]:
    """Our ends of the pipes to the servers that fork and to the resource tracker."""
    from multiprocessing import forkserver, resource_tracker

    return programs().files | {
        fd
        for fd in (
            getattr(forkserver._forkserver, "_forkserver_alive_fd", None),
            getattr(resource_tracker._resource_tracker, "_fd", None),
        )
        if fd is not None
    }


def pytest_configure(config: pytest.Config) -> None:
    send_together(config)
    hear_signals()


def hear_signals() -> None:
    """Tests send these. Whoever runs pytest in the background, or under nohup, has it ignore some of them."""
    for number, handler in HANDLERS.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    take_apart(node)


@pytest.hookimpl(tryfirst=True)  # before -m is obeyed
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    leave_products_to_soak(items)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)  # first: or cores are idle while the last one ends


def pytest_collection_finish() -> None:
    """All that was imported stays to the end: collections of garbage need not visit it again and again.

    Nor need they come every few hundred objects: in virtual time they would take a tenth of all.
    """
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Two more than there are cores, for `-n auto`: tests with processes wait a third of their time."""
    return (os.cpu_count() or 1) + 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    """Processes of pytest-xdist, and their servers that fork, start warm: torch is imported once for all."""
    begin_to_compile_kernels()
    programs().start()
    for spec in specs:
        spec.python = programs().python


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished() -> None:
    """Kernels are compiled while torch is imported and tests are collected. No test begins before."""
    await_compiled_kernels()


@pytest.fixture(scope="session", autouse=True)
def fork_server(request: pytest.FixtureRequest) -> None:
    """Start it before the first slow test, with all that any of them needs: it imports meanwhile."""
    if any(item.get_closest_marker("slow") for item in request.session.items):
        ensure_fork_server()


@pytest.fixture
def crews(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The crews of the runs that are started, so that a test can find their processes."""
    from shoal.api import script
    from shoal.launch.crew import Crew
    from shoal.runs import processes

    made: list[Any] = []

    class Seen(Crew):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    for starts in (processes, script):
        monkeypatch.setattr(starts, "Crew", Seen)
    return made


@pytest.fixture
def snapshot() -> Callable[[], Snapshot]:
    """Take stock of this process, to be compared with later."""
    return Snapshot.take


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fail a test that leaves something behind. Fixtures of modules and sessions come before, so they may."""
    before = Snapshot.take()
    yield
    if found := before.left_behind():
        for child in multiprocessing.active_children():
            if child.pid not in before.children:
                child.kill()  # or the whole run would wait for it at exit
                child.join(GRACE_SECONDS)
        pytest.fail("this test left behind:\n  " + "\n  ".join(found), pytrace=False)
