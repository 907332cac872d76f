"""A page of another host, through the real ssh client and a real sshd on this one."""

from __future__ import annotations

import getpass
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from ports import free_port
from shoal.core.errors import ShoalError
from shoal.watch import LivePage
from shoal.watch.tunnel import PageElsewhere, Tunnel

SSHD = Path("/usr/sbin/sshd")
SERVER = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/user_key.pub
PasswordAuthentication no
StrictModes no
UsePAM no
"""
CLIENT = """
Host elsewhere
    HostName 127.0.0.1
    Port {port}
    User {user}
    IdentityFile {folder}/user_key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    StrictHostKeyChecking accept-new
    LogLevel ERROR
Host nobody
    HostName 127.0.0.1
    Port 1
"""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a host that ssh reaches: this one, through an sshd of the test."""
    if not SSHD.exists() or shutil.which("ssh") is None:
        pytest.skip("no sshd; install it with: apt-get install openssh-server")
    if getpass.getuser() == "root":
        Path("/run/sshd").mkdir(exist_ok=True)
    for key in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-qt", "ed25519", "-N", "", "-f", tmp_path / key], check=True)
    port = free_port()
    place = {"port": port, "folder": tmp_path, "user": getpass.getuser()}
    (tmp_path / "sshd_config").write_text(SERVER.format(**place))
    (tmp_path / "ssh_config").write_text(CLIENT.format(**place))
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {tmp_path}/ssh_config "$@"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(ssh.parent), prepend=":")
    daemon = subprocess.Popen([str(SSHD), "-D", "-f", str(tmp_path / "sshd_config")])
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with socket.socket() as trial:
                if trial.connect_ex(("127.0.0.1", port)) == 0:
                    break
        yield "elsewhere"
    finally:
        daemon.terminate()
        daemon.wait()


@pytest.mark.slow
def test_a_page_comes_through_ssh(elsewhere):
    with LivePage() as page:
        here = PageElsewhere.parse(page.address.removeprefix("http://"))
        assert here is not None
        tunnel = Tunnel(PageElsewhere(elsewhere, here.port, here.token))
        try:
            assert tunnel.port != here.port  # that one is taken here
            with urllib.request.urlopen(tunnel.address) as answer:
                assert b'<h1 id="name">' in answer.read()
        finally:
            tunnel.close()


@pytest.mark.slow
def test_what_does_not_answer_is_told_in_a_sentence(elsewhere):
    with LivePage() as page:
        port = int(page.address.split(":")[2].split("/")[0])
        with pytest.raises(ShoalError, match=f"port {port} of elsewhere does not accept this token"):
            Tunnel(PageElsewhere(elsewhere, port, "wrong"))
    with pytest.raises(ShoalError, match=f"nothing answers at port {port} of elsewhere: has the run ended?"):
        Tunnel(PageElsewhere(elsewhere, port, "any"), free_port())  # at the same one, ssh would call itself
    with pytest.raises(ShoalError, match="ssh to nobody ended with exit code 255"):
        Tunnel(PageElsewhere("nobody", port, "any"))


@pytest.mark.parametrize(
    ("text", "page"),
    [
        ("alice@gpu1:43211/Abc-_9", PageElsewhere("alice@gpu1", 43211, "Abc-_9")),
        ("gpu1.example.org:80/x/", PageElsewhere("gpu1.example.org", 80, "x")),
        ("gpu1:80", None),
        ("-oProxyCommand=x:80/x", None),
        ("shoal-runs/bmuf-1117-0742", None),
        ("gpu1:80/x y", None),
    ],
)
def test_a_page_elsewhere_is_told_from_a_folder(text, page):
    assert PageElsewhere.parse(text) == page


def test_the_command_forwards_the_loopback_port_alone():
    assert PageElsewhere("alice@gpu1", 80, "x").command(8080)[4:] == [
        "-L", "127.0.0.1:8080:127.0.0.1:80", "--", "alice@gpu1"
    ]  # fmt: skip
