"""Programs that start warm do what cold ones do, from their arguments to the code that they end with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_programs")]

SLEEPS = """
import os, time
print(os.getpid(), flush=True)
for _ in range(600):
    time.sleep(0.1)  # a signal on the way into sleep() is handled when sleep() comes back
"""
STARTS_OTHERS = """
import multiprocessing, sys

def look(queue):
    queue.put("torch" in sys.modules)

if __name__ == "__main__":
    for way in ("spawn", "forkserver", "fork"):
        context = multiprocessing.get_context(way)
        queue = context.Queue()
        process = context.Process(target=look, args=(queue,))
        process.start()
        print(way, queue.get())
        process.join()
"""


def run(*line: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(line, capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload]


def test_torch_is_there_and_the_line_is_obeyed(tmp_path: Path):
    code = "import os, sys; print(sys.argv, 'torch' in sys.modules, os.getcwd(), input()); sys.exit(3)"
    done = run(sys.executable, "-c", code, "a b", cwd=tmp_path, input="typed\n")
    expected = f"['-c', 'a b'] True {tmp_path} typed\n"
    assert (done.returncode, done.stdout, done.stderr) == (3, expected, "")


def test_an_exception_is_shown_as_python_shows_it(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text("import atexit\natexit.register(print, 'last')\n1 / 0\n")
    cold = run(sys._base_executable, str(script))  # type: ignore[attr-defined]
    warm = run(sys.executable, str(script))
    assert warm.returncode == cold.returncode == 1
    assert (warm.stdout, warm.stderr) == (cold.stdout, cold.stderr)


@pytest.mark.parametrize(
    ("code", "status"), [("import sys; sys.exit('why')", 1), ("import os; os.abort()", -6)]
)
def test_the_end_of_the_program_is_that_of_the_process(code: str, status: int):
    assert run(sys.executable, "-c", code).returncode == status


def test_files_keep_their_numbers():
    reading, writing = os.pipe()
    with os.fdopen(reading) as pipe:
        assert run(sys.executable, "-c", f"import os; os.write({writing}, b'through')", pass_fds=[writing])
        os.close(writing)
        assert pipe.read() == "through"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_program(number: signal.Signals):
    with subprocess.Popen([sys.executable, "-c", SLEEPS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(60) == (130 if number == signal.SIGINT else -number)
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()


def test_what_it_starts_is_warm_too(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(STARTS_OTHERS)
    assert run("python", str(script)).stdout == "spawn True\nforkserver True\nfork True\n"


def test_commands_have_their_names():
    assert "fp16" in run("shoal", "list", "codecs").stdout
    assert run("torchrun", "--help").stdout.startswith("usage: torchrun ")
