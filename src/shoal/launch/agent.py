"""Agent: starts and watches the nodes of one host for a launcher elsewhere, `python -m shoal.launch.agent`.

The launcher starts it through ssh and speaks to it on standard input and output (message_lines.py). When
that conversation ends, for whatever reason, the agent kills its nodes and removes its folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from shoal.core.errors import CheckpointError
from shoal.launch.message_lines import MessageLines
from shoal.launch.script_process import KEEPER, SCRIPT, ScriptProcess
from shoal.launch.versions import digest_of, version
from shoal.storage.folder_lock import folder_lock
from shoal.storage.step_folders import remove_before

LOOK_SECONDS = 0.1

PULSE_SECONDS = 5.0
"""How often the launcher sends a sign of life."""

SILENCE_SECONDS = 60.0
"""How long a launcher may be silent, at least: as long as the run's patience. Then it, or the way to it, is
gone, although no connection broke."""

LINGER_SECONDS = 1.0
"""How long the output of a process that has ended is read: its children may hold the pipe open.

Shorter than a crew waits to hear how a node has ended.
"""


class HostRefused(Exception):
    """This host cannot run what the launcher asks for; the text says why, for people."""


@dataclass
class RunningNode:
    """One node on this host."""

    process: ScriptProcess
    control: Connection | None
    store: Connection | None
    ended_at: float | None = None


class Agent:
    """The nodes of this host. `tell` sends a message to the launcher; `folder` is private to this run."""

    def __init__(self, tell: Callable[..., None], folder: Path) -> None:
        self.patience = 0.0  # of the run
        self._tell = tell
        self._folder = folder
        self._nodes: dict[int, RunningNode] = {}
        self._settings: dict[str, Any] = {}
        self._locks = contextlib.ExitStack()
        self._inherited: list[int] = []  # file descriptors that every node gets

    def obey(self, message: dict[str, Any]) -> None:
        """Do what a message of the launcher says."""
        do = message.pop("do")
        if do == "prepare":
            try:
                self._prepare(**message)
            except HostRefused as refusal:
                self._tell(said="refused", why=str(refusal))
            else:
                self._tell(said="prepared")
        elif do == "start":
            self._start(**message)
        elif do == "forget":
            remove_before(Path(self._settings["place"]["checkpoint"]), message["before"])
        elif do != "pulse" and (node := self._nodes.get(message["rank"])) is not None:
            if do == "order":
                _pass_on(node.control, message["order"])
            elif do == "answer":
                _pass_on(node.store, message["answer"])
            elif do == "signal" and node.process.is_alive():
                os.kill(node.process.pid, message["signal"])

    def look(self, seconds: float, lines: MessageLines) -> bool:
        """Wait up to `seconds`, and pass on what the nodes say. Returns whether the launcher has spoken."""
        pipes = {
            pipe: (rank, said)
            for rank, node in self._nodes.items()
            for pipe, said in ((node.control, "event"), (node.store, "ask"))
            if pipe is not None
        }
        ready = wait([lines.fileno(), *pipes], seconds)
        for pipe in ready:
            if isinstance(pipe, Connection):
                self._hear(pipe, *pipes[pipe])
        for rank in list(self._nodes):
            self._look_at(rank)
        return lines.fileno() in ready

    def end(self) -> None:
        """Kill all nodes."""
        for node in self._nodes.values():
            if node.process.is_alive():
                node.process.kill()
        for node in self._nodes.values():
            node.process.join(LINGER_SECONDS)
        self._locks.close()

    def _lock(self, folder: str | None, run: str, *, again: bool) -> None:
        try:
            self._locks.enter_context(folder_lock(folder, others_write=True, run=run, is_new=not again))
        except CheckpointError as error:
            raise HostRefused(str(error)) from None

    def _prepare(
        self,
        *,
        folder: str,
        script: str,
        digest: str,
        arguments: list[str],
        place: dict[str, Any],
        files: dict[str, str],
        variables: dict[str, str],
        run: str,
        again: bool,
    ) -> None:
        try:
            os.chdir(folder)
        except OSError as error:
            raise HostRefused(
                f"it has no folder {folder} ({error.strerror}); name the one to work in with --remote-folder"
            ) from None
        if not Path(script).is_file():
            raise HostRefused(
                f"there is no script {script!r} in {folder}; copy it there, or name --remote-folder"
            )
        if digest_of(Path(script)) != digest:
            raise HostRefused(f"{script} in {folder} is not the same as the launcher's; copy it there")
        if place.get("checkpoint") is not None:
            _check_writing(Path(place["checkpoint"]))
        self._lock(place.get("checkpoint"), run, again=again)
        os.environ.update(variables)
        access = dict(place["access"])
        for name, content in files.items():
            access[name] = self._keep_secret(name, content)
        place = {**place, "store": str(self._folder), "access": access}
        self._settings = {"script": script, "arguments": arguments, "place": place}
        self.patience = place.get("patience", 0.0)

    def _keep_secret(self, name: str, content: str) -> str:
        """Keep a secret in a file that nodes can open. Returns its path, as they see it."""
        if hasattr(os, "memfd_create"):  # in no folder: nothing is left of it when the processes end
            descriptor = os.memfd_create(f"shoal-{name}")
            os.fchmod(descriptor, 0o600)
            self._inherited.append(descriptor)
            path = f"/proc/self/fd/{descriptor}"
        else:
            path = str(self._folder / name)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", closefd=descriptor not in self._inherited) as file:
            file.write(content)
        return path

    def _start(self, *, rank: int, place: dict[str, Any], keeps: bool) -> None:
        """Start a node of the run, or its keeper, which has a place of another kind."""
        settings = self._settings["place"]
        access = {**settings["access"], **place["access"]}
        if keeps:
            words, place = [KEEPER], {**place, "folder": settings["store"], "access": access}
        else:
            words = [SCRIPT, self._settings["script"], *self._settings["arguments"]]
            place = {**settings, **place, "rank": rank, "access": access}
        process, (control, store) = ScriptProcess.start(
            words,
            place,
            lambda line: self._print(rank, line),
            ("control", "store_connection"),
            self._inherited,
        )
        self._nodes[rank] = RunningNode(process, control, store)

    def _print(self, rank: int, line: str) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more, which the main thread notices
            self._tell(said="line", rank=rank, line=line)

    def _hear(self, pipe: Connection, rank: int, said: str) -> None:
        try:
            message = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            pipe.close()
            node = self._nodes[rank]
            if said == "event":
                node.control = None
                self._tell(said="hung up", rank=rank)
            else:
                node.store = None
            return
        self._tell(said=said, rank=rank, **{said: message})

    def _look_at(self, rank: int) -> None:
        """Report a node that has ended, after all that it said."""
        node = self._nodes[rank]
        code = node.process.exitcode
        if code is None:
            return
        if node.ended_at is None:
            node.ended_at = time.monotonic()
        late = time.monotonic() > node.ended_at + LINGER_SECONDS
        if late or (node.process.is_read and node.control is None):
            for pipe in (node.control, node.store):
                if pipe is not None:
                    pipe.close()
            del self._nodes[rank]
            self._tell(said="ended", rank=rank, code=code)


def _check_writing(folder: Path) -> None:
    """Raise HostRefused unless checkpoints can be written in that folder. Creates it if it is missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise HostRefused(f"--checkpoint: cannot write in {folder} ({error.strerror})") from None


def _pass_on(pipe: Connection | None, message: dict[str, Any]) -> None:
    if pipe is not None:
        try:
            pipe.send_bytes(json.dumps(message).encode())
        except OSError:  # the process is gone, which `look` reports
            return


class Watchdog:
    """Ends this process when the launcher has been silent for too long, even while the agent blocks."""

    def __init__(self, end: Callable[[], object], seconds: float = SILENCE_SECONDS) -> None:
        self._end = end
        self._seconds = seconds
        self._heard = time.monotonic()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def heard(self, patience: float) -> None:
        """The launcher has spoken, and may be silent for so long, if that is longer than before."""
        self._heard = time.monotonic()
        self._seconds = max(self._seconds, patience)

    def _watch(self) -> NoReturn:
        while (left := self._heard + self._seconds - time.monotonic()) > 0:
            time.sleep(left)
        print(f"the launcher was silent for {self._seconds:g} s", file=sys.stderr)
        self._end()
        os._exit(1)


def serve(lines: MessageLines, agent: Agent, watchdog: Watchdog) -> None:
    """Obey the launcher until its end of the conversation is closed."""
    lines.send(said="hello", version=version(), host=os.uname().nodename)
    try:
        while True:
            if agent.look(LOOK_SECONDS, lines):
                for message in lines.receive():
                    watchdog.heard(agent.patience)
                    agent.obey(message)
    except (EOFError, OSError):  # the launcher has ended, or ssh has
        return


def main() -> None:
    """Serve the launcher at the other end of standard input and output."""
    lines = MessageLines(os.dup(0), os.dup(1))
    os.dup2(2, 1)  # whatever a library prints is no message
    with open(os.devnull) as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = Path(tempfile.mkdtemp(prefix="shoal-agent-"))  # mode 0700
    agent = Agent(lines.send, folder)

    def end() -> None:
        agent.end()
        shutil.rmtree(folder, ignore_errors=True)

    try:
        serve(lines, agent, Watchdog(end))
    finally:
        end()


if __name__ == "__main__":
    main()
