"""Tunnel: the page of a run on another host, through a forwarded port of the ssh client."""

from __future__ import annotations

import http.client
import re
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass

from shoal.core.errors import ShoalError, Unavailable
from shoal.watch.page_server import HOST

START_SECONDS = 60.0  # somebody may have to type a password
LOOK_SECONDS = 0.2
END_SECONDS = 1.0


@dataclass(frozen=True)
class PageElsewhere:
    """A page that another host serves to itself: "alice@gpu1:43211/TOKEN"."""

    host: str
    port: int
    token: str

    @classmethod
    def parse(cls, text: str) -> PageElsewhere | None:
        """The page that a text names, if it names one."""
        found = re.fullmatch(r"(\w[\w.-]*@?[\w.-]*):(\d{1,5})/([\w-]+)/?", text)
        return cls(found[1], int(found[2]), found[3]) if found else None

    def command(self, port: int) -> list[str]:
        """The ssh command that brings the page to a port of this host."""
        forward = f"{HOST}:{port}:{HOST}:{self.port}"
        return ["ssh", "-N", "-o", "ExitOnForwardFailure=yes", "-L", forward, "--", self.host]


class Tunnel:
    """Runs the ssh client until `close`. Raises ShoalError if the page does not answer through it."""

    def __init__(self, page: PageElsewhere, port: int = 0) -> None:
        if shutil.which("ssh") is None:
            raise Unavailable("a page on another host comes through ssh, and there is no ssh client here")
        self._page = page
        self.port = port or _free_port(page.port)
        self._client = subprocess.Popen(page.command(self.port), stdin=None)
        try:
            self._await_page()
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """Where to point a browser on this host."""
        return f"http://{HOST}:{self.port}/{self._page.token}/"

    def wait(self) -> int:
        """Wait until the ssh client ends, and return its exit code."""
        return self._client.wait()

    def close(self) -> None:
        """End the ssh client."""
        self._client.terminate()
        try:
            self._client.wait(END_SECONDS)
        except subprocess.TimeoutExpired:  # some clients miss a signal that comes as a channel closes
            self._client.kill()
            self._client.wait()

    def _await_page(self) -> None:
        where = f"port {self._page.port} of {self._page.host}"
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._client.poll() is not None:
                raise ShoalError(f"ssh to {self._page.host} ended with exit code {self._client.returncode}")
            try:
                status = self._ask()
            except ConnectionRefusedError:  # the client is not that far yet
                time.sleep(LOOK_SECONDS)
                continue
            except (OSError, http.client.HTTPException):
                raise ShoalError(f"nothing answers at {where}: has the run ended?") from None
            if status == 403:
                raise ShoalError(f"the page at {where} does not accept this token")
            if status != 200:
                raise ShoalError(f"what answers at {where} is not the page of a run")
            return
        raise ShoalError(f"ssh to {self._page.host} did not connect within {START_SECONDS:g} s")

    def _ask(self) -> int:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=10)
        try:
            connection.request("GET", f"/{self._page.token}/")
            return connection.getresponse().status
        finally:
            connection.close()


def _free_port(wanted: int) -> int:
    """That port if it is free here, else another."""
    for port in (wanted, 0):
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind((HOST, port))
            except OSError:
                continue
            return int(trial.getsockname()[1])
    raise ShoalError("this host has no free port")
