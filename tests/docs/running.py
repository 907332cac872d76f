"""How a block of the documentation is run, and how what it prints is compared with what the page shows."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

from pages import ROOT, Block, chain, page_at
from shoal.core.errors import DataMissing
from shoal.programs.tasks import TASKS

SETUPS = Path(__file__).with_name("setups")
BESIDE = ("benchmarks", "docs", "examples")  # folders of the repository that commands name
LAUNCHER_VARIABLES = ("SHOAL_PLACE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
MODULES = ("accelerate", "jax", "keras", "lightning", "mlflow", "ray", "tensorboard", "transformers", "wandb")
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?!\w)")
NUMBERS_DIFFER_BY = 0.15  # another processor rounds otherwise, and a short training ends elsewhere


def data_of(task: str) -> Callable[[], str | None]:
    def missing() -> str | None:
        try:
            TASKS.make(task).data()
        except (DataMissing, ImportError) as error:
            return str(error)
        return None

    return missing


def program(name: str, install: str) -> Callable[[], str | None]:
    def missing() -> str | None:
        found = shutil.which(name, path=environment()["PATH"])
        return None if found else f"there is no {name}: {install}"

    return missing


def module(name: str) -> Callable[[], str | None]:
    return lambda: None if find_spec(name) else f"there is no module {name}: pip install {name}"


def gpus(number: int) -> Callable[[], str | None]:
    return lambda: (
        None if torch.cuda.device_count() >= number else f"needs {number} GPU(s) that torch can use"
    )


NEEDS: dict[str, Callable[[], str | None]] = {
    "caltech": data_of("caltech"),
    "gpu": gpus(1),
    "mnist": data_of("mnist"),
    "mpi": program("mpiexec", "pip install 'shoal[mpi]'"),
    "openssl": program("openssl", "apt-get install openssl"),
    "shakespeare": data_of("shakespeare"),
    "speech": data_of("speech"),
    "two_gpus": gpus(2),
    **{name: module(name) for name in MODULES},
}
"""What a block may need, each with a function that says what is missing here."""


def environment() -> dict[str, str]:
    """That of a user who has activated the environment: one thread a process, no launcher around."""
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    programs = [str(Path(sys.executable).parent), f"{sys.prefix}/bin", kept.get("PATH", "")]
    imports = [str(ROOT / "src"), kept.get("PYTHONPATH", "")]
    return {
        **kept,
        "COLUMNS": "80",
        "OMP_NUM_THREADS": "1",
        "PATH": os.pathsep.join(filter(None, programs)),
        "PET_STANDALONE": "1",  # torchrun: a free port, since several tests may use it at a time
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, imports)),
    }


def furnish(folder: Path, page: Path, *, to_read: bool = False) -> None:
    """Put into a folder what the blocks of a page find around them: the files that it shows, and train.py.

    Where they are only read, the repository's own folders are enough.
    """
    for name in BESIDE:
        if to_read:
            (folder / name).symlink_to(ROOT / name)
        else:
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for block in (*page_at(ROOT / "docs" / "guide.md").blocks, *page_at(page).blocks):
        name = block.names.get("file")
        if name == "train.py" or (name and block.page == page):
            (folder / name).write_text(code(block))


def code(block: Block) -> str:
    """What a Python block stands for: its setup, the blocks that it continues, itself, its own tests."""
    blocks = chain(block)
    setup = blocks[0].names.get("after")
    parts = [(SETUPS / f"{setup}.py").read_text()] if setup else []
    parts += [each.text for each in blocks]
    tests = [name for part in parts for name in re.findall(r"^def (test_\w+)\(\)", part, flags=re.M)]
    return "\n\n".join([*parts, *(f"{name}()" for name in tests)])


def run_block(block: Block, folder: Path, seconds: float) -> subprocess.CompletedProcess[str]:
    if block.language != "python":
        lines = [each.text if each.language == "bash" else "\n".join(each.commands) for each in chain(block)]
        return run_line(["bash", "-euo", "pipefail", "-c", "\n".join(lines)], folder, seconds)
    script = folder / block.names.get("file", "block.py")
    script.write_text(code(block))
    return run_line([sys.executable, str(script)], folder, seconds)


def run_line(line: list[str], folder: Path, seconds: float) -> subprocess.CompletedProcess[str]:
    """As subprocess.run, with an end to all that the line has started."""
    process = subprocess.Popen(
        line,
        cwd=folder,
        env=environment(),
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=seconds)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return subprocess.CompletedProcess(line, process.returncode, out, err)


def fault(block: Block, folder: Path, seconds: float) -> str | None:
    """Run a block in its folder and say what went otherwise than the page promises."""
    done = run_block(block, folder, seconds)
    code = int(block.names.get("exits", 0))
    if done.returncode != code:
        return f"{block} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    if "prints" in block.words and (
        wrong := difference(expected(block), done.stderr if code else done.stdout)
    ):
        return f"{block} prints something else:\n{wrong}\n{done.stderr}"
    return None


def expected(block: Block) -> str:
    """What a block that `prints` shows: the output in a console, else the block of text that follows."""
    if block.language == "console":
        return block.output
    after = next((other for other in page_at(block.page).blocks if other.line > block.line), None)
    if after is None or after.language != "text":
        raise ValueError(f"{block} prints, but no block of text follows")
    return after.text


def difference(shown: str, printed: str) -> str | None:
    """How what was printed differs from what is shown, but for spaces, line ends and nearly equal numbers.

    A line of `…` alone stands for anything. Without one, what is shown is the end of what was printed, before
    which the blocks that this one continues may have printed, too.
    """
    parts = [part.split() for part in re.split(r"^…$", shown, flags=re.M)]
    words = printed.split()
    if (len(parts) == 1 and ends_with(words, parts[0])) or (len(parts) > 1 and matches(words, parts)):
        return None
    want, have = (text.strip().splitlines() for text in (shown, printed))
    return "\n".join(difflib.unified_diff(want, have, "the page", "the run", lineterm=""))


def ends_with(words: list[str], part: list[str]) -> bool:
    return len(words) >= len(part) and all(map(alike, part, words[len(words) - len(part) :]))


def matches(words: list[str], parts: list[list[str]]) -> bool:
    """Whether the words begin with the first part, end with the last, and have the others between."""
    first, *between, last = parts
    if len(words) < len(first) or not all(map(alike, first, words)):
        return False
    words = words[len(first) :]
    for part in between:
        starts = range(len(words) - len(part) + 1)
        found = next((k for k in starts if all(map(alike, part, words[k:]))), None)
        if found is None:
            return False
        words = words[found + len(part) :]
    return ends_with(words, last)


def alike(shown: str, printed: str) -> bool:
    if NUMBER.sub("#", shown) != NUMBER.sub("#", printed):
        return False
    numbers = ([float(n.replace(",", "")) for n in NUMBER.findall(word)] for word in (shown, printed))
    return all(abs(a - b) <= NUMBERS_DIFFER_BY * max(abs(a), abs(b)) for a, b in zip(*numbers, strict=True))
