"""Two runs never write their checkpoints into one folder."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from shoal.core.errors import CheckpointError
from shoal.storage.folder_lock import NAME, folder_lock
from shoal.testing import blobs


def test_a_second_run_is_told_which_one_is_there(tmp_path):
    told = (
        f"another run uses the checkpoints in {tmp_path}: process {os.getpid()} on {socket.gethostname()}, "
    )
    with folder_lock(tmp_path), pytest.raises(CheckpointError, match=re.escape(told)):
        shoal.run(blobs(), "sync", workers=2, transport="sim", checkpoint=tmp_path)
    assert list(tmp_path.iterdir()) == []
    shoal.run(blobs(), "sync", workers=2, transport="sim", checkpoint=tmp_path)
    assert not (tmp_path / NAME).exists()


def test_a_second_run_changes_nothing_in_the_folder(tmp_path):
    with folder_lock(tmp_path):
        (tmp_path / "step-00000004").mkdir()
        part = tmp_path / "step-00000004" / "worker-0.json.part"
        part.touch()
        with pytest.raises(CheckpointError), folder_lock(tmp_path):
            pytest.fail("two are inside")
        assert part.exists() and (tmp_path / NAME).exists()


HOLDS = """
import sys
from shoal.storage.folder_lock import folder_lock
with folder_lock(sys.argv[1]):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_the_lock_of_a_killed_run_is_nobody_s(tmp_path):
    variables = {**os.environ, "PYTHONPATH": str(Path(shoal.__file__).parents[1])}
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)],
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None and run.stdout.readline() == "locked\n"
        with pytest.raises(CheckpointError, match=f"process {run.pid} on"), folder_lock(tmp_path):
            pytest.fail("two are inside")
        run.kill()
        run.wait()
    assert (tmp_path / NAME).exists()
    with folder_lock(tmp_path):
        assert f"process {os.getpid()} on" in (tmp_path / NAME).read_text()


def test_what_was_half_written_is_removed_and_nothing_else(tmp_path):
    kept = [tmp_path / "film.part", tmp_path / "leg-1" / "edge.part", tmp_path / "step-00000004" / "x.json"]
    parts = [
        tmp_path / "step-00000004" / "worker-0.safetensors.part",
        tmp_path / "leg-1" / "step-00000008" / "worker-0.json.part",
        tmp_path / "leg-1" / "edge.part" / "worker-0.json.part",
        tmp_path / "model.safetensors.part",
    ]
    (tmp_path / "leg-1" / "edge.part").mkdir(parents=True)
    for path in (*parts, kept[0], kept[2]):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    with folder_lock(tmp_path):
        assert not any(path.exists() for path in parts)
        parts[0].touch()
    assert not parts[0].exists()
    assert all(path.exists() for path in kept)


def test_a_run_that_saves_nothing_leaves_no_folder(tmp_path):
    with folder_lock(tmp_path / "saved" / "sync"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_hosts_of_one_run_that_reach_the_same_folder_share_its_lock(tmp_path):
    with folder_lock(tmp_path, others_write=True, run="a run's secret name"):
        with folder_lock(tmp_path, others_write=True, run="a run's secret name"):
            assert (tmp_path / "run.lock").exists()
        assert (tmp_path / "run.lock").exists()  # it is the first one's to remove
        with pytest.raises(CheckpointError) as refused, folder_lock(tmp_path, run="another"):
            pass
    assert "another run uses the checkpoints" in str(refused.value) and "secret" not in str(refused.value)
    assert not (tmp_path / "run.lock").exists()
