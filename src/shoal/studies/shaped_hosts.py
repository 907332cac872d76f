"""ShapedHosts: network namespaces as hosts on one machine, joined by links of a given rate. Linux, root only.

Every host has one interface, connected to a bridge in another namespace. A token bucket shapes both ends of
that link, so that it has the same rate in both directions. Nothing outside these namespaces changes.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

INTERFACE = "eth0"
PREFIX = "shoal-lab"
COMMAND_SECONDS = 20.0  # limit for a single `ip` or `tc`
ENDING_SECONDS = 5.0  # limit for a killed process to end
QUEUE = "50ms"  # the longest delay in a link's queue before it drops packets
BURST_SECONDS = 0.002  # how far a link may run ahead of its rate
LEAST_BURST = 1 << 16  # bytes; a bucket must hold the largest packet


def obstacle() -> str | None:
    """Why no lab can be made here, in one line; None if one can."""
    if sys.platform != "linux":
        return "network namespaces exist on Linux only"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"the program {program!r} is missing; install iproute2"
    return None


class ShapedHosts:
    """A context manager that makes the hosts, and removes them in the end.

    A killed run leaves its namespaces behind; the next lab removes them.
    """

    def __init__(self, hosts: int, bytes_per_second: float) -> None:
        self._hosts = hosts
        self._rate = bytes_per_second
        self._name = f"{PREFIX}-{os.getpid()}-{started(os.getpid())}"
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> ShapedHosts:
        try:
            remove_leftovers()
            self._build()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def address(self, host: int) -> str:
        """The IP address of a host."""
        return f"10.77.{host // 200}.{host % 200 + 1}"

    def start(
        self, host: int, command: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> subprocess.Popen[str]:
        """Start a process on a host, with pipes to its standard input and output."""
        with log.open("w") as errors:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self._host(host), *command],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # Ctrl-C goes to the maker of the lab alone, which ends the others
            )
        self._processes.append(process)
        return process

    def pids(self, host: int) -> list[int]:
        """The processes on a host."""
        return [int(pid) for pid in ip("netns", "pids", self._host(host)).split()]

    def counted(self, host: int) -> int:
        """The bytes that the kernel has counted at a host's interface so far, in both directions."""
        told = json.loads(ip("-json", "-stats", "-n", self._host(host), "link", "show", INTERFACE))
        return sum(int(told[0]["stats64"][way]["bytes"]) for way in ("rx", "tx"))

    def end_processes(self) -> None:
        """Kill the processes that still run."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait(ENDING_SECONDS)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._processes.clear()

    def _build(self) -> None:
        hub = f"{self._name}-hub"
        ip("netns", "add", hub)
        ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", hub, "link", "set", "bridge", "addrgenmode", "none", "up")
        for number in range(self._hosts):
            host, port = self._host(number), f"port{number}"
            ip("netns", "add", host)
            ip("-n", host, "link", "set", "lo", "up")
            link = ("type", "veth", "peer", "name", INTERFACE, "netns", host)
            ip("-n", hub, "link", "add", port, *link)
            ip("-n", host, "addr", "add", f"{self.address(number)}/16", "dev", INTERFACE)
            for namespace, device in ((hub, port), (host, INTERFACE)):
                # no IPv6, so that only the experiment sends packets; no segmentation offload, so that the
                # counters see every header
                ip("-n", namespace, "link", "set", device, "addrgenmode", "none", "gso_max_segs", "1")
                self._slow_down(namespace, device)
                ip("-n", namespace, "link", "set", device, "up")
            ip("-n", hub, "link", "set", port, "master", "bridge")

    def _slow_down(self, namespace: str, device: str) -> None:
        burst = max(LEAST_BURST, round(self._rate * BURST_SECONDS))
        bucket = ("tbf", "rate", f"{round(8 * self._rate)}bit", "burst", f"{burst}b", "latency", QUEUE)
        call("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *bucket)

    def _host(self, number: int) -> str:
        return f"{self._name}-{number}"

    def _close(self) -> None:
        with undisturbed():
            self.end_processes()
            for namespace in namespaces():
                if namespace.startswith(f"{self._name}-"):
                    remove(namespace)


def ip(*words: str) -> str:
    """Run `ip` and return its output."""
    return call("ip", *words)


def call(*words: str) -> str:
    """Run a command and return its output. Raises RuntimeError with its error message in one line."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=True)
    except subprocess.CalledProcessError as failed:
        complaint = " ".join(failed.stderr.split()) or f"exit status {failed.returncode}"
        raise RuntimeError(f"`{' '.join(words)}` failed: {complaint}") from None
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"`{' '.join(words)}` took longer than {COMMAND_SECONDS:g} s") from None
    return done.stdout


def namespaces() -> list[str]:
    """The namespaces of all labs."""
    listed = json.loads(call("ip", "-json", "netns", "list") or "[]")
    return [each["name"] for each in listed if each["name"].startswith(f"{PREFIX}-")]


def remove_leftovers() -> None:
    """Remove the namespaces of labs whose process has ended."""
    for namespace in namespaces():
        pid, moment = namespace.removeprefix(f"{PREFIX}-").split("-")[:2]
        if started(int(pid)) != moment:
            remove(namespace)


def remove(namespace: str) -> None:
    """Kill the processes in a namespace, and delete it."""
    for pid in ip("netns", "pids", namespace).split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue
    ip("netns", "del", namespace)


def started(pid: int) -> str:
    """The start time of a process, which distinguishes it from a later one with the same id."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM inside the context."""
    kept = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
