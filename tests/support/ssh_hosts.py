"""SshLab: hosts in network namespaces, each with a real sshd and processes of its own. Linux, root only.

Every host also has its own process ids, name, /run and /dev/shm, and an empty folder `private` that is on
every host at the same path, but not the same folder. So nothing can pass between two hosts except over their
link. What else lies on the disk is common to all, as the installed packages would be.
"""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from shoal.studies import shaped_hosts
from shoal.studies.shaped_hosts import ShapedHosts

SSHD = "/usr/sbin/sshd"
START_SECONDS = 60.0  # limit for a daemon to answer, on a busy machine
SETUP = """
mount -t tmpfs none /run && mkdir /run/sshd
mount -t tmpfs none /dev/shm
mount -t tmpfs none "$3"
hostname "$1"
exec "$2" -D -e -f "$4"
"""
SERVER_CONFIG = """
ListenAddress {address}
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/user_key.pub
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
"""
CLIENT_CONFIG = """
Host host*
    User {user}
    IdentityFile {folder}/user_key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    StrictHostKeyChecking yes
"""


def obstacle() -> str | None:
    """Why no such hosts can be made here, in one line; None if they can."""
    if (why := shaped_hosts.obstacle()) is not None:
        return why
    if not Path(SSHD).exists() or shutil.which("ssh") is None:
        return "there is no sshd; install it with: apt-get install openssh-server"
    if shutil.which("unshare") is None:
        return "the program 'unshare' is missing; install util-linux"
    return None


class SshLab(ShapedHosts):
    """Hosts host0, host1, … with an sshd each, and one more, without, from which to call them.

    `command` is an ssh that knows them; `python` an interpreter that finds this Shoal on any of them.
    """

    def __init__(
        self, hosts: int, bytes_per_second: float, folder: Path, variables: Mapping[str, str]
    ) -> None:
        super().__init__(hosts + 1, bytes_per_second)
        self.hosts = hosts
        self.folder = folder
        self.private = folder / "private"
        self.command = f"ssh -F {folder}/ssh_config"
        self.python = folder / "python"
        self._variables = variables

    def __enter__(self) -> SshLab:
        super().__enter__()
        try:
            self._write_files()
            self._start_daemons()
        except BaseException:
            self._close()
            raise
        return self

    def call(self, command: Sequence[str], log: Path, **more: str) -> subprocess.Popen[str]:
        """Start a process on the host that calls the others."""
        return self.start(self.hosts, command, {**os.environ, **self._variables, **more}, log)

    def on_host(self, host: int, line: str) -> str:
        """The output of a shell command on a host."""
        words = ["ip", "netns", "exec", self._host(self.hosts), *self.command.split(), f"host{host}", line]
        done = subprocess.run(words, capture_output=True, text=True, timeout=START_SECONDS, check=False)
        return done.stdout

    def _write_files(self) -> None:
        self.private.mkdir(exist_ok=True)
        for name in ("host_key", "user_key"):
            shaped_hosts.call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name))
        public = " ".join((self.folder / "host_key.pub").read_text().split()[:2])
        addresses = [self.address(number) for number in range(self.hosts)]
        known = [f"host{n},{address} {public}\n" for n, address in enumerate(addresses)]
        (self.folder / "known_hosts").write_text("".join(known))
        entries = [f"Host host{n}\n    HostName {address}\n" for n, address in enumerate(addresses)]
        user = CLIENT_CONFIG.format(user=getpass.getuser(), folder=self.folder)
        (self.folder / "ssh_config").write_text("".join(entries) + user)
        settings = " ".join(f"{name}={value}" for name, value in self._variables.items())
        self.python.write_text(f'#!/bin/sh\nexec env {settings} {sys.executable} "$@"\n')
        self.python.chmod(0o755)

    def _start_daemons(self) -> None:
        for number in range(self.hosts):
            config = self.folder / f"sshd_config{number}"
            config.write_text(SERVER_CONFIG.format(address=self.address(number), folder=self.folder))
            own = ["unshare", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"]
            setup = ["sh", "-ec", SETUP, "sh", f"host{number}", SSHD, str(self.private), str(config)]
            self.start(number, [*own, *setup], {**os.environ}, self.folder / f"sshd{number}.log")
        deadline = time.monotonic() + START_SECONDS
        for number in range(self.hosts):
            while self.on_host(number, "hostname").strip() != f"host{number}":
                if time.monotonic() > deadline:
                    raise RuntimeError((self.folder / f"sshd{number}.log").read_text())
                time.sleep(0.05)
