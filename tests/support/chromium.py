"""A headless Chromium, steered over its debugging pipe; needs no package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

PATIENCE = 60.0
AXE = Path(__file__).parent.parent.parent / "build" / "node_modules" / "axe-core" / "axe.min.js"


def chromium_or_skip() -> str:
    """The path of a Chromium."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium; install it with: apt-get install chromium")
    return found


def axe_or_skip() -> str:
    """The source of axe-core, which checks a page for accessibility."""
    if not AXE.is_file():
        pytest.skip("no axe-core; install it with: npm install --no-save --prefix build axe-core@4.14.0")
    return AXE.read_text(encoding="utf-8")


class Chromium:
    """A browser with one page. Commands are those of the DevTools protocol."""

    def __init__(self) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        self.requests: list[str] = []  # the addresses that pages asked for
        self.messages: list[str] = []  # what pages wrote to the console, and the errors of their scripts
        self._number, self._buffer = 0, b""
        self._session: str | None = None
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        flags = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run"
        flags += " --hide-scrollbars --disable-background-networking --force-color-profile=srgb"

        def take_pipes() -> None:  # Chromium reads commands from 3 and answers on 4
            os.dup2(theirs_in, 103)
            os.dup2(theirs_out, 104)
            os.dup2(103, 3)
            os.dup2(104, 4)

        self._process = subprocess.Popen(
            [
                chromium_or_skip(),
                *flags.split(),
                "--remote-debugging-pipe",
                f"--user-data-dir={self._profile.name}",
            ],
            preexec_fn=take_pipes,
            pass_fds=[3, 4],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)

    def __enter__(self) -> Chromium:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._out)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._in)
        self._profile.cleanup()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Give a command and wait for its result."""
        self._number += 1
        said: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            said["sessionId"] = self._session
        os.write(self._out, json.dumps(said).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            answer = self._next(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer.get("result", {})
        raise TimeoutError(f"Chromium did not answer {method}")

    def open(self, address: str, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Open an address in a window of that size and wait until it is loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, expression: str, seconds: float = PATIENCE) -> Any:
        """Wait until an expression is true, and return its value."""
        deadline = time.monotonic() + seconds
        while not (value := self.value(expression)):
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {expression}"
            time.sleep(0.05)
        return value

    def screenshot(self, path: Path, whole: bool = True) -> None:
        """Write a PNG of the page, or of what the window shows of it."""
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))

    def serious_findings(self) -> list[str]:
        """What axe-core finds in the page that is serious or critical."""
        self.call("Runtime.evaluate", expression=axe_or_skip())
        return self.value(
            "axe.run(document, {resultTypes: ['violations']}).then(r => r.violations"
            ".filter(v => v.impact === 'serious' || v.impact === 'critical')"
            ".map(v => `${v.id}: ${v.nodes.length}: ${v.nodes[0].html} ${v.nodes[0].failureSummary}`))"
        )

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            readable, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise TimeoutError("Chromium is silent")
            part = os.read(self._in, 1 << 20)
            if not part:
                raise EOFError("Chromium has ended")
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        said: dict[str, Any] = json.loads(text)
        if said.get("method") == "Network.requestWillBeSent":
            self.requests.append(said["params"]["request"]["url"])
        elif said.get("method") == "Runtime.exceptionThrown":
            self.messages.append(json.dumps(said["params"]["exceptionDetails"]))
        elif said.get("method") in ("Log.entryAdded", "Runtime.consoleAPICalled"):
            self.messages.append(json.dumps(said["params"]))
        return said
