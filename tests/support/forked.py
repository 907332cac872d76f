"""Processes made by the fork server, which has imported torch and shoal: a start takes no seconds."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
import types
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing import forkserver, reduction, spawn
from pathlib import Path
from typing import Any

import pytest

import shoal
from interpreter import COLD_PYTHON, be_as_if_cold, run_python
from shoal.api import script
from shoal.launch import script_process
from shoal.launch.environment import Place
from shoal.launch.stop_signals import ctrl_c_ignored
from shoal.strategies import STRATEGIES

PRELOADED = [
    "shoal.launch.fork_server",  # first: it keeps signals from the server
    *("pytest", "forked", "harness", "shoal.transports.grpc"),
    *("shoal.runs.processes", "shoal.api.script", "torch._dynamo"),  # whole runs use the same fork server
    *("shoal.cli.run", "shoal.cli.compare", "torch.distributed.run", "warm_server"),
    *("torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.tensor.parallel"),
    *("shoal.codecs.kernel_preload", "PIL.Image", "rich.live", "encodings.idna", "numpy.ctypeslib"),
    *(
        "shoal.api.run",
        "shoal.api.attach",
        "shoal.api.shard",
        "shoal.strategies.single",
        "shoal.sim.simulation",
    ),
    *("lightning", "transformers.trainer", "accelerate"),
    "light_forks",
]
"""What the fork server imports before it forks; a name that is not there is passed over."""

CONTEXT = multiprocessing.get_context("forkserver")


def ensure_fork_server() -> None:
    """Start it, unless it runs: with the code under test, whatever is installed."""
    CONTEXT.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch, ctrl_c_ignored():
        patch.setenv("PYTHONPATH", folders())
        forkserver.ensure_running()


def folders() -> str:
    tests = Path(__file__).parents[1]
    found = (Path(shoal.__file__).parents[1], tests / "transports", tests / "support")
    return os.pathsep.join(map(str, found))


class Ends:
    """File descriptors that travel to the new process; there, `fds` are their numbers."""

    def __init__(self, *fds: int) -> None:
        self.fds = list(fds)

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, tuple(map(reduction.DupFd, self.fds))


def _received(*passed: Any) -> Ends:
    return Ends(*(end.detach() for end in passed))


class ForkedPython:
    """A Popen of `python -m module …`, `-c code` or `script …` without the seconds that imports take.

    Its command line is that of the fork server: look for what is left of it among our descendants.
    """

    def __init__(
        self,
        line: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        pass_fds: Sequence[int] = (),
        stderr: int = subprocess.PIPE,
        **_: Any,
    ) -> None:
        assert line[0] == sys.executable
        ensure_fork_server()
        reading, writing = os.pipe()
        self.stdout = os.fdopen(reading, errors="replace")
        self._errors = os.fdopen(os.memfd_create("stderr"), "w+") if stderr == subprocess.PIPE else None
        errors = writing if self._errors is None else self._errors.fileno()
        arguments = (list(line[1:]), dict(os.environ if env is None else env), cwd or Path.cwd())
        ends = Ends(writing, errors, *pass_fds)
        self._process = CONTEXT.Process(target=_run_python, args=(*arguments, ends))
        try:
            self._process.start()
        finally:
            os.close(writing)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("forked Python", timeout or 0.0)
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that it prints, once it has ended; nothing when asked again."""
        if self.stdout.closed:
            return "", ""
        with self.stdout:
            out = self.stdout.read()
        self.wait(timeout)
        if self._errors is None:
            return out, ""
        with self._errors:
            self._errors.seek(0)
            return out, self._errors.read()


def run_forked(
    line: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run` would say of the same line."""
    process = ForkedPython(line, env=env, cwd=cwd)
    out, err = process.communicate()
    return subprocess.CompletedProcess(list(line), process.wait(), out, err)


def _run_python(line: list[str], env: dict[str, str], folder: Path, ends: Ends) -> None:
    """In the new process: do what `python *line` would, exit handlers included."""
    output, errors, *control = ends.fds
    be_as_if_cold()
    spawn.set_executable(COLD_PYTHON)
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which the fork server ignores
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    if control:
        os.environ.update(replace(Place.find(), control=control[0]).to_environment())
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.close(output)
    os.close(errors)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1) for fd in (1, 2))
    try:
        run_python(line)
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None
    finally:
        atexit._run_exitfuncs()


def run_warm(path: Path, *arguments: str, workers: int, strategy: str, transport: str) -> list[str]:
    """The lines that the workers of a script print, in a test that asks for `warm_scripts`."""
    lines: list[str] = []
    script.run_script(
        path,
        arguments,
        workers=workers,
        strategy=STRATEGIES.make(strategy),
        place=Place(strategy=strategy, transport=transport),
        on_progress=lambda event: None,
        on_output=lambda name, line: lines.append(line),
    )
    return lines


@pytest.fixture
def warm_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `run_script` take its processes from the fork server."""
    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "PIPE", "STDOUT", "TimeoutExpired")}
    monkeypatch.setattr(script_process, "subprocess", types.SimpleNamespace(Popen=ForkedPython, **names))


def run_two_ranks(script: Path, folder: Path, *options: str) -> list[Any]:
    """What each of two processes over gloo left in the folder, `script FOLDER RANK 2`, as JSON."""
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}  # which has what tests share
    environment = {**os.environ, **path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *options, str(script), str(folder)]
    ranks = [ForkedPython([*command, str(k), "2"], env=environment) for k in (0, 1)]
    try:
        errors = [rank.communicate(timeout=100)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(errors)
    return [json.loads((folder / f"{k}.json").read_text()) for k in (0, 1)]
