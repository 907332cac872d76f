"""What `make dist` packs: the package with its data files and nothing else, ready to be installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import pytest

import shoal

ROOT = Path(__file__).parents[1]
PARTS = (
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "LICENSE",
    "src",
    "tests",
)
BUILD = "import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution, built from a copy of the repository."""
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("packages")
    for name in PARTS:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source / name)
    for kind in ("sdist", "wheel"):
        run([sys.executable, "-c", BUILD.format(kind=kind), str(made)], source)
    return made


def run(line: list[str], folder: Path, **variables: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | variables
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(packages: Path) -> Iterator[zipfile.ZipFile]:
    with zipfile.ZipFile(next(packages.glob("*.whl"))) as archive:
        yield archive


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: zipfile.ZipFile):
    sources = (path for path in (ROOT / "src" / "shoal").rglob("*") if path.is_file())
    wanted = {path.relative_to(ROOT / "src") for path in sources if path.suffix != ".proto"}
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == {path.as_posix() for path in wanted if "__pycache__" not in path.parts}
    assert "shoal/py.typed" in packed


def test_the_wheel_says_what_it_is(wheel: zipfile.ZipFile):
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    said = Parser().parsestr(wheel.read(name).decode())
    assert said["License-Expression"] == "Apache-2.0"
    assert not [
        line for line in said.get_all("Classifier") if line.startswith("License")
    ]  # the SPDX name alone
    assert "Shoal trains one PyTorch model" in said.get_payload()
    assert said["Version"] == shoal.__version__


def test_the_source_distribution_has_no_tests(packages: Path):
    with tarfile.open(next(packages.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CITATION.cff", "src/shoal/py.typed"} <= names
    assert not [name for name in names if name.startswith("tests")]


def test_the_citation_has_the_version_of_the_package():
    version = re.search(r'^version = "(.*?)"', (ROOT / "pyproject.toml").read_text(), re.M)
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert version and cited and version[1] == cited[1]


@pytest.mark.soak
def test_the_wheel_works_in_an_empty_environment(packages: Path, tmp_path: Path):
    """What it depends on is lent by this environment: torch alone would take minutes to install again."""
    run([sys.executable, "-m", "venv", "--without-pip", "env"], tmp_path)
    python, (site,) = tmp_path / "env" / "bin" / "python", tmp_path.glob("env/lib/*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index"]
    run([*pip, str(next(packages.glob("*.whl")))], tmp_path)
    lent = run([sys.executable, "-c", "import torch; print(torch.__path__[0])"], tmp_path).strip()
    (site / "lent.pth").write_text(f"{Path(lent).parent}\n")  # after its own, so the new shoal is found first

    command = str(tmp_path / "env" / "bin" / "shoal")
    assert "Train one PyTorch model" in run([command, "--help"], tmp_path)
    assert "bmuf" in run([command, "list"], tmp_path)
    code = (
        "import shoal; print(shoal.__file__)\n"
        "if __name__ == '__main__':\n"
        "    result = shoal.run('digits', 'bmuf', workers=2, epochs=2, transport='sim')\n"
        "    print(f'{result.test_accuracy:.0f} %')\n"
    )
    place, accuracy = run([str(python), "-c", code], tmp_path).splitlines()
    assert Path(place).is_relative_to(site)
    assert float(accuracy.removesuffix(" %")) > 50
    report = [command, "compare", "--strategies", "single", "--epochs", "1", "--report", "page.html"]
    run(report, tmp_path, OMP_NUM_THREADS="1")
    assert "<style" in (tmp_path / "page.html").read_text()
