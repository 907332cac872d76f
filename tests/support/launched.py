"""Commands on hosts that are network namespaces, for tests."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

import shoal
from ssh_hosts import SshLab, obstacle

SECONDS = 300.0  # limit for a whole run, on a busy machine
SCRIPT = Path(__file__).with_name("hosts_loop.py")


@contextmanager
def lab_or_skip(hosts: int, bytes_per_second: float) -> Iterator[SshLab]:
    """Hosts for tests, which are skipped with the reason where none can be made."""
    if (why := obstacle()) is not None:
        pytest.skip(why)
    with tempfile.TemporaryDirectory(prefix="lab-") as folder:
        variables = {
            "PYTHONPATH": str(Path(shoal.__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": f"{folder}/private",  # each host's own, as everything in it
        }
        try:
            lab = SshLab(hosts, bytes_per_second, Path(folder), variables).__enter__()
        except RuntimeError as refused:  # root in a container may lack the right
            pytest.skip(str(refused))
        try:
            yield lab
        finally:
            lab.__exit__(None, None, None)


class Launched:
    """A command under way on the host that calls the others, `shoal run --hosts` unless another is given."""

    def __init__(
        self,
        lab: SshLab,
        hosts: str,
        *options: str,
        arguments: Sequence[str] = (),
        command: Sequence[str] = (),
    ) -> None:
        self._log = lab.folder / "launcher.log"
        words = ["run", "--hosts", hosts, "--ssh", lab.command, "--remote-python", str(lab.python), "--quiet"]
        line = [sys.executable, "-m", "shoal", *words, *options, str(SCRIPT), *arguments]
        self.process = lab.call(command or line, self._log)
        self.lines: list[str] = []

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()

    def await_line(self, pattern: str, times: int = 1) -> None:
        """Read lines until so many match."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if re.search(pattern, line):
                times -= 1
                if not times:
                    return
        pytest.fail(f"no line {pattern!r}\n{self.printed}\n{self.errors}")

    def finish(self) -> int:
        """Read all, and return the exit code."""
        out, _ = self.process.communicate(timeout=SECONDS)
        self.lines += out.splitlines()
        return self.process.returncode

    @property
    def printed(self) -> str:
        return "\n".join(self.lines)

    @property
    def errors(self) -> str:
        return self._log.read_text()

    def of(self, name: str) -> str:
        return "\n".join(
            line.removeprefix(f"{name} | ") for line in self.lines if line.startswith(f"{name} |")
        )

    def pid(self, name: str) -> int:
        """The process id of a node on its own host."""
        found = re.search(r"^pid (\d+)", self.of(name), re.MULTILINE)
        assert found, self.printed
        return int(found[1])
