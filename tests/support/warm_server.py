"""The server of warm programs: forks a process for each, which is ready to run what it was asked to."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import importlib
import marshal
import multiprocessing
import os
import selectors
import signal
import socket
import sys
import threading
import traceback
import types
from dataclasses import dataclass
from multiprocessing import forkserver, process, resource_tracker, spawn, util
from pathlib import Path
from struct import Struct
from typing import Any, NoReturn

import torch

import interpreter
from interpreter import run_python
from warm_client import LENGTH_BYTES, exactly

COMMANDS = {"shoal": "shoal.cli", "torchrun": "torch.distributed.run"}
"""Programs beside `python`, and the modules whose `main` they call."""

MOST_FILES = 64
ABOVE = 512  # files of a request are numbered above this until the others are closed
TESTS = Path(__file__).parents[1]
CREDENTIALS = Struct("3i")  # process, user and group of a socket's other end
CLONE_NEWNET = 0x40000000


@dataclass
class Request:
    """What a program passes on."""

    program: str
    arguments: list[str]
    folder: str
    environment: dict[str, str]
    files: list[int]
    """The numbers that its open files have there."""
    takes_ctrl_c: bool
    opened: list[int]
    """The same files, as they are numbered here."""
    client: int
    """The program's process id."""

    @classmethod
    def read(cls, client: socket.socket) -> Request:
        """What a client sends first."""
        length, opened, *_ = socket.recv_fds(client, LENGTH_BYTES, MOST_FILES)
        fields = marshal.loads(exactly(client, int.from_bytes(length, "big")))
        peer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        return cls(*fields, opened, CREDENTIALS.unpack(peer)[0])


def serve(listener: socket.socket, python: str) -> None:
    """Answer requests until the process is gone that asked for this."""
    with contextlib.suppress(OSError):
        os.setsid()
    parent = multiprocessing.parent_process()
    assert parent is not None
    running: dict[int, tuple[int, socket.socket]] = {}  # process id -> its file descriptor, its client
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(parent.sentinel, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj == parent.sentinel:
                    for pid in running:
                        _end(pid)
                    return
                if key.fileobj is listener:
                    client, _ = listener.accept()
                    pid = _fork(client, python)
                    handle = os.pidfd_open(pid)
                    running[pid] = handle, client
                    selector.register(handle, selectors.EVENT_READ, pid)
                    selector.register(client, selectors.EVENT_READ, pid)
                elif key.data in running and key.fileobj == running[key.data][0]:
                    handle, client = running.pop(key.data)
                    _tell(client, os.waitstatus_to_exitcode(os.waitpid(key.data, 0)[1]))
                    for gone in (handle, client):
                        with contextlib.suppress(KeyError):
                            selector.unregister(gone)
                    os.close(handle)
                    client.close()
                elif key.data in running:  # the program was killed
                    selector.unregister(running[key.data][1])
                    _end(key.data)


def _fork(client: socket.socket, python: str) -> int:
    request = Request.read(client)
    pid = os.fork()
    if pid == 0:
        _become(request, python)
    for fd in request.opened:
        os.close(fd)
    _tell(client, pid)
    return pid


def _end(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _tell(client: socket.socket, number: int) -> None:
    """Send a program its process id, or how it ended, unless somebody has killed it meanwhile."""
    with contextlib.suppress(OSError):
        client.sendall(number.to_bytes(LENGTH_BYTES, "big", signed=True))


# -- in the new process ------------------------------------------------------------------------------


def _become(request: Request, python: str) -> NoReturn:
    """Be the process that was asked for, to its end."""
    status = 1
    try:
        _join_network(request.client)
        _take_files(request)
        _forget_the_server(python)
        _settle(request)
        status = _run_to_the_end(request)
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        _leave_mpi(status)
        os._exit(status)  # the server's frames lie below this one: nothing of it may be unwound


def _leave_mpi(status: int) -> None:
    """Exit as a rank of a job does, which says good-bye to mpiexec after all of Python."""
    if (mpi := sys.modules.get("mpi4py.MPI")) is not None and mpi.Is_initialized():
        if not mpi.Is_finalized():
            mpi.Finalize()
        ctypes.CDLL(None).exit(status)


def _join_network(client: int) -> None:
    """Be on the same host as the program, where hosts are network namespaces."""
    theirs = Path(f"/proc/{client}/ns/net")
    if theirs.readlink() != Path("/proc/self/ns/net").readlink():
        with theirs.open() as network:
            if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "cannot join the network of the program")


def _take_files(request: Request) -> None:
    """Have exactly the files of the program open, under the same numbers."""
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, ABOVE) for fd in request.opened]
    os.closerange(0, ABOVE)
    for fd, number in zip(moved, request.files, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def _forget_the_server(python: str) -> None:
    """Be nobody's child to multiprocessing: it starts helpers of its own, and they are warm too."""
    me: Any = process.current_process()
    me._name, me._identity, me._parent_pid = "MainProcess", (), None
    me._config["daemon"] = False
    multiprocessing.set_start_method(None, force=True)  # the system's own, not that of the server
    process._parent_process = None  # type: ignore[attr-defined]
    process._children.clear()  # type: ignore[attr-defined]
    util._finalizer_registry.clear()
    forkserver._forkserver.__init__()  # type: ignore[misc]
    resource_tracker._resource_tracker.__init__()  # type: ignore[misc]
    sys.executable = sys._base_executable = python  # type: ignore[attr-defined]
    spawn.set_executable(python)


def _settle(request: Request) -> None:
    """Folder, environment, signals and streams of the program."""
    os.setsid()
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    signal.signal(signal.SIGINT, signal.default_int_handler if request.takes_ctrl_c else signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    if threads := request.environment.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    named = [folder for folder in request.environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
    found = [folder for folder in sys.path if folder and not Path(folder).is_relative_to(TESTS)]
    sys.path[:] = [*named, *(folder for folder in found if folder not in named)]
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115


def _run_to_the_end(request: Request) -> int:
    """Run the program with all that Python does at its end; the exit code."""
    status = 0
    try:
        _run(request.program, request.arguments)
    except SystemExit as end:
        status = _code(end)
    except BaseException as error:
        shown = sys.last_value = error.with_traceback(_below(error))
        sys.excepthook(type(shown), shown, shown.__traceback__)
        status = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return status


def _code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _below(error: BaseException) -> types.TracebackType | None:
    """The part of a traceback that is the program's."""
    here, trace = {__file__, interpreter.__file__, "<frozen runpy>"}, error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in here:
        trace = trace.tb_next
    return trace


def _run(program: str, arguments: list[str]) -> None:
    """What `program *arguments` does."""
    if program not in COMMANDS:
        run_python(arguments)
        return
    sys.argv = [program, *arguments]
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.exit(importlib.import_module(COMMANDS[program]).main())
