"""Fleet: the hosts of one run. Starts an agent on each, hands out certificates and settings, starts nodes."""

from __future__ import annotations

import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from shoal.core.errors import Interrupted
from shoal.core.limits import PATIENCE_SECONDS
from shoal.launch.agent_call import ssh_command, start_command
from shoal.launch.environment import Place
from shoal.launch.host_link import HostLink, Printer
from shoal.launch.hosts import HostList
from shoal.launch.keeper_process import KeeperPlace
from shoal.launch.member import Member
from shoal.launch.relayed_store import StoreValues
from shoal.launch.stop_signals import number_of, stopped_by
from shoal.launch.versions import digest_of
from shoal.storage.step_folders import KEPT


class Fleet:
    """A context manager: inside it an agent runs on every host; afterwards nothing of the run is left there.

    `nodes` counts workers and servers, and there may be a keeper behind them. Over `grpc` every host gets a
    certificate and a token. A host that is lost is called again where workers of it `return`. Raises
    ValueError for hosts without an address, and Unavailable for one that cannot be reached or has another
    Shoal.
    """

    def __init__(
        self,
        hosts: HostList,
        nodes: int,
        transport: str,
        on_output: Printer,
        patience: float = PATIENCE_SECONDS,
        returns: bool = False,
    ) -> None:
        self.hosts = hosts.resolve()
        self._returns = returns and hosts.start is None  # else whoever starts the agents does so once
        self._secrets = self._credentials() if transport == "grpc" else [{} for _ in self.hosts.hosts]
        self._homes = self.hosts.place_nodes(nodes + 1)  # the last is the keeper's, which computes nothing
        self._on_output = on_output
        self._patience = patience
        self._values = StoreValues()
        self._saved: list[set[int]] = [set() for _ in range(nodes)]
        self._oldest = -1  # the oldest step that the hosts keep
        self._saved_lock = threading.Lock()
        self._links: list[HostLink] = []
        self._stack = ExitStack()

    def __enter__(self) -> Fleet:
        python = self.hosts.python or sys.executable
        with self._stack:
            for host in self.hosts.hosts:
                command = ssh_command(self.hosts.ssh, host.name, python, self._patience)
                link = HostLink(
                    host,
                    partial(self.hosts.start, host, command)
                    if self.hosts.start
                    else partial(start_command, command),
                    answer=self._values.answer,
                    on_saved=self._note_saved,
                    on_output=self._on_output,
                    calls_again=self._returns,
                )
                self._stack.callback(link.close)
                self._links.append(link)
            for link in self._links:
                link.await_hello()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for link in self._links:
            link.begin_to_close()
        self._stack.close()

    def prepare(self, script: str | Path, arguments: Sequence[str], place: dict[str, Any]) -> None:
        """Hand every host the script's name, the settings that all nodes share, and its secrets.

        Raises Unavailable if a host does not have the script.
        """
        run = secrets.token_hex(8)  # by which hosts that see the same folder of checkpoints know each other
        *homes, _ = self._homes
        for number, (link, files) in enumerate(zip(self._links, self._secrets, strict=True)):
            settings = {
                "folder": self.hosts.folder or str(Path.cwd()),
                "script": str(script),
                "digest": digest_of(Path(script)),
                "arguments": list(arguments),
                "place": {
                    **place,
                    "on_host": homes.count(number),
                    "access": {"mutual": bool(files)},
                },
                "files": files,
                "variables": self.hosts.variables,
                "run": run,
            }
            link.begin_to_prepare(settings)
        for link in self._links:
            link.await_prepared()

    def start(self, rank: int, incarnation: int, name: str, first_server: int) -> Member:
        """Start a node on its host. Nodes from rank `first_server` on are servers."""
        waits = self._returns and rank < first_server
        return self._start(rank, name, {"incarnation": incarnation}, waits=waits)

    def start_keeper(self, rank: int, name: str, place: dict[str, Any], incarnation: int) -> Member:
        """Start the keeper, on the host that holds the servers of other runs."""
        return self._start(rank, name, {**place, "incarnation": incarnation}, keeps=True)

    def _start(
        self,
        rank: int,
        name: str,
        place: dict[str, Any],
        *,
        waits: bool = False,
        keeps: bool = False,
    ) -> Member:
        link = self._links[self._homes[rank]]
        port = self.hosts.port or 0
        address = link.host.address
        listen = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        return link.start(rank, name, waits, place={**place, "access": {"listen": listen}}, keeps=keeps)

    @property
    def has_checkpoint(self) -> bool:
        """Whether all nodes have saved the same step, so that the run can be resumed."""
        return bool(set.intersection(*self._saved))

    def _note_saved(self, rank: int, step: int) -> None:
        """Have the hosts remove checkpoints that are older than those kept.

        A host sees only its own files, and cannot tell which steps are complete at all nodes.
        """
        with self._saved_lock:
            self._saved[rank].add(step)
            complete = sorted(set.intersection(*self._saved))
            if len(complete) < KEPT:
                return
            oldest = complete[-KEPT]
            for saved in self._saved:
                saved -= {step for step in saved if step < oldest}
            if oldest == self._oldest:  # they have been told
                return
            self._oldest = oldest
        for link in self._links:
            link.send(do="forget", before=oldest)

    def _credentials(self) -> list[dict[str, str]]:
        """For each host the files that Access names: its certificate and key, the authority, the token."""
        from shoal.launch.certificates import CertificateAuthority

        authority, token = CertificateAuthority(), secrets.token_hex(32)
        issued = [authority.issue(host.address) for host in self.hosts.hosts]
        return [
            {
                "certificate": certificate,
                "key": key,
                "authority": authority.certificate,
                "token_file": token,
            }
            for certificate, key in issued
        ]


@contextmanager
def on_hosts(
    hosts: HostList,
    script: str | Path,
    arguments: Sequence[str],
    shared: Place,
    names: Sequence[str],
    on_output: Printer,
    least: int,
) -> Iterator[Callable[[int, int], Member]]:
    """Yields a function that starts a node, or the keeper of so many workers at `least`, on its host."""
    limits = shared.transport, shared.timeout, shared.patience
    keeper = KeeperPlace(shared.nodes, "", *limits, least, relayed=shared.relayed)  # its agent has a folder

    def start(rank: int, incarnation: int) -> Member:
        if rank == shared.nodes:
            name = keeper.identity(incarnation).name
            return fleet.start_keeper(rank, name, asdict(keeper), incarnation)
        return fleet.start(rank, incarnation, names[rank], hosts.workers)

    patience, returns = shared.patience, shared.returns
    with Fleet(hosts, shared.nodes, shared.transport, on_output, patience, returns=returns) as fleet:
        fleet.prepare(script, arguments, asdict(shared))
        try:
            yield start
        except (Interrupted, KeyboardInterrupt) as stop:
            stopped = stopped_by(number_of(stop))
            stopped.saved = fleet.has_checkpoint
            raise stopped from None
