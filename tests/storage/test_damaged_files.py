"""Whatever happens to a checkpoint on disk, a run goes on from a whole one or says what is wrong."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from shoal.core.codec import Identity
from shoal.core.errors import CheckpointError
from shoal.core.identity import NodeIdentity
from shoal.runs.plan import Plan
from shoal.storage.checkpoint import NO_STEP, Checkpoints
from shoal.storage.whole_files import digest, seal, unseal
from shoal.strategies import ASGD
from shoal.testing import blobs

RUN = f"{sys.executable} -m shoal"


def saved(folder: Path) -> tuple[Checkpoints, list[NodeIdentity]]:
    """The checkpoints of a short run, of which the last two, at steps 8 and 10, are kept."""
    shoal.run(blobs(), "asgd", workers=2, epochs=1, transport="sim", checkpoint=folder, every=4)
    return of_a_short_run(folder)


def of_a_short_run(folder: Path) -> tuple[Checkpoints, list[NodeIdentity]]:
    plan = Plan(blobs(), ASGD(), Identity(), workers=2, checkpoint=str(folder))
    return plan.checkpoints(blobs().data()), [plan.identity(rank) for rank in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("flips", [400, pytest.param(2000, marks=pytest.mark.soak)])
def test_a_flipped_bit_anywhere_sends_the_run_to_the_step_before(tmp_path, flips):
    checkpoints, nodes = saved(tmp_path)
    assert checkpoints.latest(nodes) == 10
    files = sorted((tmp_path / "step-00000010").iterdir())
    assert len(files) == 7  # of two workers, of the server, and the model
    whole = {path: path.read_bytes() for path in files}
    owner = {"worker-0": nodes[0], "worker-1": nodes[1], "server-0": nodes[2], "model": nodes[2]}
    draw = random.Random(0)
    for _ in range(flips):
        path = draw.choice(files)
        content = bytearray(whole[path])
        place, bit = draw.randrange(len(content)), draw.randrange(8)
        content[place] ^= 1 << bit
        path.write_bytes(content)
        checkpoints.check()
        assert checkpoints.newest(owner[path.stem]) == 8, f"bit {bit} of byte {place} of {path.name}"
        path.write_bytes(whole[path])
    assert checkpoints.latest(nodes) == 10


@pytest.mark.parametrize("name", ["/dev/zero", "../../../../../../../dev/zero", "link.safetensors"])
def test_a_record_leads_to_no_file_outside_its_folder(tmp_path, name):
    checkpoints, nodes = saved(tmp_path)
    folder = tmp_path / "step-00000010"
    record = unseal((folder / "worker-0.json").read_bytes())
    assert record is not None
    (folder / "link.safetensors").symlink_to("/dev/zero")
    (folder / "worker-0.json").write_bytes(seal({**record, "files": {**record["files"], name: digest(b"")}}))
    assert checkpoints.latest(nodes) == 8


def test_a_checkpoint_of_an_earlier_format_is_named(tmp_path):
    checkpoints, _ = saved(tmp_path)
    earlier = {"format": 2, "config": {}, "files": {}, "state": {}}
    (tmp_path / "step-00000010" / "worker-0.json").write_text(json.dumps(earlier))
    with pytest.raises(CheckpointError, match="has format 2, and this version of Shoal reads format 10"):
        checkpoints.check()


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_leaves_the_step_before_whole(tmp_path, monkeypatch):
    sync, synced, found = os.fsync, 0, [NO_STEP]
    full_from = float("inf")

    def fsync(file: int) -> None:
        nonlocal synced
        if synced >= full_from:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        synced += 1
        sync(file)

    monkeypatch.setattr(os, "fsync", fsync)
    saved(tmp_path / "enough")
    for full_from in range(0, synced, 3):
        folder, synced = tmp_path / f"full-{full_from}", 0
        with pytest.raises(CheckpointError, match=rf"^cannot write {folder}.*: No space left on device$"):
            saved(folder)
        assert not list(folder.rglob("*.part"))
        found.append(of_a_short_run(folder)[0].latest(of_a_short_run(folder)[1]))
        assert found[-1] >= found[-2]  # what was whole stays so
    assert set(found) >= {NO_STEP, 4, 8}


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounts a small disk")
def test_a_run_on_a_disk_that_fills_up_ends_in_one_sentence(tmp_path):
    line = "compare --strategies asgd -n 2 --epochs 500 --checkpoint disk --every 20 --quiet"
    (tmp_path / "disk").mkdir()
    run = subprocess.run(
        ["unshare", "-m", "sh", "-c", f"mount -t tmpfs -o size=400k none disk; {RUN} {line}; find disk"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(shoal.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert re.fullmatch(
        r"shoal: asgd: .* failed: cannot write disk/asgd/step-.*: No space left on device\n", run.stderr
    )
    assert "step-00000020/server-0.json" in run.stdout and ".part" not in run.stdout
