"""Fleet: the hosts of one run. Starts an agent on each, hands out certificates and settings, starts nodes."""

from __future__ import annotations

import secrets
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from shoal.core.errors import Unavailable
from shoal.core.limits import PATIENCE_SECONDS
from shoal.launch.host_link import HELLO_SECONDS, HostLink, Printer, ssh_command, start_command
from shoal.launch.hosts import HostList
from shoal.launch.member import Member
from shoal.launch.relayed_store import StoreValues
from shoal.launch.versions import digest_of, version
from shoal.storage.step_folders import KEPT

PREPARE_SECONDS = 30.0


class Fleet:
    """A context manager: inside it an agent runs on every host; afterwards nothing of the run is left there.

    `nodes` counts workers and servers. Over `grpc` every host gets a certificate and a token. Raises
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
    ) -> None:
        self.hosts = hosts.resolve()
        self._secrets = self._credentials() if transport == "grpc" else [{} for _ in self.hosts.hosts]
        self._homes = self.hosts.place_nodes(nodes)
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
                    command,
                    answer=self._values.answer,
                    on_saved=self._note_saved,
                    on_output=self._on_output,
                    start=partial(self.hosts.start, host) if self.hosts.start else start_command,
                )
                self._stack.callback(link.close)
                self._links.append(link)
            own = version()
            for link in self._links:
                theirs = link.await_reply(HELLO_SECONDS)["version"]
                if theirs != own:
                    raise Unavailable(
                        f"host {link.host.name!r} has another Shoal ({theirs}) than this one ({own}); "
                        "install the same one there"
                    )
            self._stack = self._stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def prepare(self, script: str | Path, arguments: Sequence[str], place: dict[str, Any]) -> None:
        """Hand every host the script's name, the settings that all nodes share, and its secrets.

        Raises Unavailable if a host does not have the script.
        """
        run = secrets.token_hex(8)  # by which hosts that see the same folder of checkpoints know each other
        for number, (link, files) in enumerate(zip(self._links, self._secrets, strict=True)):
            link.send(
                do="prepare",
                folder=self.hosts.folder or str(Path.cwd()),
                script=str(script),
                digest=digest_of(Path(script)),
                arguments=list(arguments),
                place={**place, "on_host": self._homes.count(number), "access": {"mutual": bool(files)}},
                files=files,
                variables=self.hosts.variables,
                run=run,
            )
        for link in self._links:
            link.await_reply(PREPARE_SECONDS)

    def start(self, rank: int, incarnation: int, name: str, first_server: int) -> Member:
        """Start a node on its host. Nodes from rank `first_server` on are servers."""
        link = self._links[self._homes[rank]]
        hub = max(0, rank - first_server)
        port = 0 if self.hosts.port is None else self.hosts.port + hub
        address = link.host.address
        listen = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        return link.start(rank, name, {"incarnation": incarnation, "access": {"listen": listen}})

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
