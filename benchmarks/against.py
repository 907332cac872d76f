"""Benchmarks of this code against those of another commit, in turns, so that load affects both alike.

    python benchmarks/against.py ce87300 [--rounds 5] [--benchmarks simulator,step_time] [--json FILE]

The other code is a commit, which is checked out to a temporary folder, or a folder that holds a checkout.
Every round runs each benchmark of both, and every second round begins with the other one. A figure is the
median over the rounds of how many times faster this code is, in brackets the quartiles: 1.03 is 3 % faster,
0.97 is 3 % slower. Of codecs and of the parameter server the rates in GB/s are compared, as their tables have
them: a share of a copy would show that the copy has become faster. Two processes of the same code differ by
up to a fifth in how fast they move large vectors, so compare the parameter server in 12 rounds or more.

The last line is JSON: for each benchmark, these medians by the names of its own figures.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

ROOT = Path(__file__).parent.parent
SECONDS = 600  # that one benchmark may take

OPTIONS = {  # enough for a stable ratio, not for a figure by itself
    "simulator": ["--repeats", "1", "--events", "200000"],
    "step_time": ["--models", "mlp,cnn", "--blocks", "8"],
    "parameter_server": ["--rounds", "9", "--parameters", "20_000_000"],
    "codec_speed": ["--rounds", "5", "--elements", "10_000_000", "--lines", "500_000"],
}
FORMERLY = {"codec_speed": "codecs"}  # benchmarks that had another name
LESS_IS_FASTER = ("seconds", "memory")  # parts of the names of such figures; step_time's all are

CODECS = re.compile(r"^  (\w+) +([\d.]+) +([\d.]+) +[\d.]+ ", re.MULTILINE)
"""A codec, what it encodes and what it decodes in GB/s, before the size of its payload."""

VISITS = re.compile(r"^  ([\w ]+?) +([\d.]+) GB/s", re.MULTILINE)
"""What the benchmark of the parameter server visits, and its GB/s: copies and bare connections too."""

Figures = dict[str, float]


@contextmanager
def checkout(other: str) -> Iterator[Path]:
    """The folder of the other code."""
    if Path(other, "benchmarks").is_dir():
        yield Path(other).resolve()
        return
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "other")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", str(place), other], check=True, capture_output=True)
        try:
            yield place
        finally:
            subprocess.run([*git, "remove", "--force", str(place)], check=True)


def script(folder: Path, name: str) -> Path:
    """The benchmark in this checkout, where it may have its old name."""
    own, old = (folder / "benchmarks" / f"{word}.py" for word in (name, FORMERLY.get(name, name)))
    return own if own.exists() else old


def run(folder: Path, name: str) -> Figures:
    """The figures that a benchmark of this checkout prints."""
    command = [sys.executable, str(script(folder, name)), *OPTIONS[name]]
    environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    if name == "codec_speed":
        return codec_rates(done.stdout)
    if name == "parameter_server":
        return {visit: float(rate) for visit, rate in VISITS.findall(done.stdout)}
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {key: float(value) for key, value in figures.items()}


def codec_rates(table: str) -> Figures:
    """How fast each codec encodes and decodes, from the table that codec_speed has always printed."""
    return {
        f"{codec} {way}": float(rate)
        for codec, *both in CODECS.findall(table)
        for way, rate in zip(("encodes", "decodes"), both, strict=True)
    }


def times_faster(name: str, key: str, this: float, other: float) -> float:
    """How many times faster this code is by that figure."""
    less = name == "step_time" or any(word in key for word in LESS_IS_FASTER)
    return other / this if less else this / other


def compare(other: Path, names: list[str], rounds: int) -> dict[str, dict[str, list[float]]]:
    """For each benchmark and figure, how many times faster this code was in each round."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=2 * rounds * len(names))
        for number in range(rounds):
            for name in names:
                seen = {}
                for folder in (ROOT, other) if number % 2 == 0 else (other, ROOT):
                    progress.update(bar, description=f"{name}, round {number + 1} of {rounds}")
                    seen[folder] = run(folder, name)
                    progress.advance(bar)
                for key in seen[ROOT].keys() & seen[other].keys():
                    ratio = times_faster(name, key, seen[ROOT][key], seen[other][key])
                    found[name].setdefault(key, []).append(ratio)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("other", help="a commit, or a folder with a checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--benchmarks", default=",".join(OPTIONS), help="names separated by commas")
    parser.add_argument("--json", type=Path, help="write all ratios to this file")
    options = parser.parse_args()
    names = options.benchmarks.split(",")
    if unknown := [name for name in names if name not in OPTIONS]:
        parser.error(f"there is no {', '.join(unknown)}; take some of {', '.join(OPTIONS)}")
    with checkout(options.other) as other:
        found = compare(other, names, options.rounds)

    table = Table(title=f"This code against {options.other}", caption=f"Medians of {options.rounds} rounds.")
    for column in ("benchmark", "figure", "times faster"):
        table.add_column(column)
    for name, figures in found.items():
        for key, ratios in sorted(figures.items()):
            low, _, high = quantiles(ratios, method="inclusive") if len(ratios) > 1 else 3 * ratios
            table.add_row(name, key, f"{median(ratios):.2f} [{low:.2f}-{high:.2f}]")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps({n: {k: round(median(r), 3) for k, r in f.items()} for n, f in found.items()}))


if __name__ == "__main__":
    main()
