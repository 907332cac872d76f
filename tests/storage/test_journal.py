"""The journal on disk: what was synced comes back whole, what is damaged never does."""

from __future__ import annotations

import os
import random
import resource
import signal
import stat
from contextlib import closing
from pathlib import Path

import pytest
import torch

from shoal.core.errors import CheckpointError
from shoal.core.transport import DTYPES, Message
from shoal.sim import Simulation
from shoal.storage import journal as module
from shoal.storage.journal import Journal
from shoal.strategies import ASGD
from shoal.testing import Slope

LIMIT = 1 << 20


def push(seq: int, elements: int = 50) -> Message:
    parts = (torch.full((elements,), float(seq)), torch.tensor([seq], dtype=torch.int64))
    return Message(
        "push", parts, src=seq % 3, seq=seq, count=2.0, version=seq, rate=0.5, clock=seq, incarnation=1
    )


def state(value: float) -> dict[str, object]:
    return {"x": torch.full((4,), value), "numbers": {"version": int(value)}}


def opened(folder: Path, durability: str = "journal") -> Journal:
    return Journal(folder, durability, LIMIT)


def written(folder: Path, messages: int = 6) -> Path:
    """A journal with one snapshot and some messages, closed; the file with the messages."""
    log = opened(folder)
    log.recover()
    log.snapshot(state(1.0))
    for seq in range(messages):
        log.append(push(seq))
    log.sync()
    log.close()
    (file,) = folder.glob("journal-*.log")
    return file


def read(folder: Path) -> tuple[float | None, list[int]]:
    """The value in the snapshot and the numbers of the messages after it, each checked to be whole."""
    with closing(opened(folder)) as log:
        found, messages = log.recover()
        seqs = []
        for m in messages:
            same = push(m.seq)
            assert all(torch.equal(a, b) for a, b in zip(m.parts, same.parts, strict=True))
            fields = ("tag", "src", "count", "version", "rate", "clock", "incarnation")
            assert all(getattr(m, name) == getattr(same, name) for name in fields)
            seqs.append(m.seq)
    return None if found is None else float(found["x"][0]), seqs


def test_an_empty_folder_has_nothing_to_recover(tmp_path):
    assert read(tmp_path) == (None, [])


def test_everything_synced_comes_back_in_order(tmp_path):
    written(tmp_path)
    assert read(tmp_path) == (1.0, [0, 1, 2, 3, 4, 5])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_empty_parts_come_back(tmp_path, dtype):
    log = opened(tmp_path)
    log.snapshot(state(0.0))
    parts = (torch.arange(5).to(dtype), torch.empty(0, dtype=dtype))
    log.append(Message("push", parts, src=0))
    log.close()
    again = opened(tmp_path)
    (m,) = again.recover()[1]
    again.close()
    assert [(p.dtype, p.tolist()) for p in m.parts] == [(dtype, p.tolist()) for p in parts]


def test_a_journal_that_was_recovered_is_gone_on_with(tmp_path):
    written(tmp_path, messages=2)
    log = opened(tmp_path)
    _, messages = log.recover()
    assert len(list(messages)) == 2
    log.append(push(2))
    log.sync()
    log.close()
    assert read(tmp_path) == (1.0, [0, 1, 2])


def test_what_was_cut_short_is_dropped_whole_and_later_records_are_read_again(tmp_path):
    file = written(tmp_path)
    whole = file.read_bytes()
    record = len(whole) // 6
    for cut in [
        *range(0, 40),
        *range(len(whole) - 40, len(whole)),
        *(record * k + d for k in (2, 4) for d in (-1, 0, 1)),
    ]:
        file.write_bytes(whole[:cut])
        kept = cut // record
        assert read(tmp_path) == (1.0, list(range(kept))), f"cut at byte {cut}"
        assert file.stat().st_size == kept * record, "the torn end is cut off, so that records may follow"


def test_no_damaged_byte_is_ever_believed_and_nothing_acknowledged_is_dropped_in_silence(tmp_path):
    file = written(tmp_path)
    whole = file.read_bytes()
    record = len(whole) // 6
    dice = random.Random(0)
    for _ in range(300):
        damaged = bytearray(whole)
        place = dice.randrange(len(whole))
        damaged[place] ^= 1 << dice.randrange(8)
        file.write_bytes(damaged)
        number = place // record
        if number == 5:  # as if it had never been written to its end
            assert read(tmp_path) == (1.0, list(range(number))), f"byte {place}"
            continue
        with pytest.raises(CheckpointError) as problem:
            read(tmp_path)
        assert f"record {number + 1} of {file} is damaged" in str(problem.value), f"byte {place}"
        assert file.read_bytes() == damaged, "nothing is cut off"


def test_damage_at_the_end_of_an_older_journal_is_no_torn_end(tmp_path):
    log = opened(tmp_path)
    for value in range(2):
        log.snapshot(state(float(value)))
        log.append(push(value))
    log.close()
    max(tmp_path.glob("snapshot-*.json")).unlink()  # so that both journals are needed
    older = min(tmp_path.glob("journal-*.log"))
    older.write_bytes(older.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"record 1 of {older} is damaged"):
        read(tmp_path)
    older.unlink()
    with pytest.raises(CheckpointError, match=rf"{older} is missing"):
        read(tmp_path)


def test_nothing_is_synced_since_only_a_process_of_this_host_reads_it(tmp_path, monkeypatch):
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda file: pytest.fail("this costs a server its time, for nothing"))
    written(tmp_path)
    assert read(tmp_path) == (1.0, [0, 1, 2, 3, 4, 5])


def test_zeros_where_a_record_should_be_end_the_journal(tmp_path):
    file = written(tmp_path)
    file.write_bytes(file.read_bytes() + bytes(4096))
    assert read(tmp_path)[1] == [0, 1, 2, 3, 4, 5]


def test_a_length_beyond_the_limit_allocates_nothing(tmp_path):
    file = written(tmp_path, messages=1)
    with file.open("ab") as end:
        end.write(module._RECORD.pack(module._MAGIC, 0, 1 << 62))
    assert read(tmp_path) == (1.0, [0])


def test_the_two_newest_snapshots_are_kept_with_what_follows_them(tmp_path):
    log = opened(tmp_path)
    for value in range(4):
        log.snapshot(state(float(value)))
        log.append(push(value))
    log.close()
    kinds = sorted(path.name for path in tmp_path.iterdir())
    assert len(kinds) == 2 * 3
    assert read(tmp_path) == (3.0, [3])


@pytest.mark.parametrize("suffix", ["json", "safetensors"])
@pytest.mark.parametrize("how", ["cut", "flipped", "gone", "empty"])
def test_a_damaged_snapshot_is_passed_over_and_nothing_is_missing(tmp_path, suffix, how):
    log = opened(tmp_path)
    for value in range(2):
        log.snapshot(state(float(value)))
        log.append(push(value))
    log.close()
    newest = max(tmp_path.glob(f"snapshot-*.{suffix}"))
    content = bytearray(newest.read_bytes())
    if how == "cut":
        newest.write_bytes(content[: len(content) // 2])
    elif how == "flipped":
        content[len(content) // 2] ^= 1
        newest.write_bytes(content)
    elif how == "empty":
        newest.write_bytes(b"")
    else:
        newest.unlink()
    assert read(tmp_path) == (0.0, [0, 1])  # the older one, and both journals


def test_no_whole_snapshot_is_an_error_and_not_a_fresh_start(tmp_path):
    written(tmp_path)
    (only,) = tmp_path.glob("snapshot-*.safetensors")
    only.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no snapshot in .* is whole"):
        opened(tmp_path).recover()


def test_a_half_written_snapshot_of_a_killed_server_does_no_harm(tmp_path):
    written(tmp_path)
    (tmp_path / "snapshot-00000002.safetensors.part").write_bytes(b"half")
    (tmp_path / "snapshot-00000002.safetensors").write_bytes(b"whole, but nobody vouches for it")
    assert read(tmp_path) == (1.0, [0, 1, 2, 3, 4, 5])


def test_a_full_disk_is_said_and_leaves_what_was_there(tmp_path):
    written(tmp_path, messages=2)
    log = opened(tmp_path)
    list(log.recover()[1])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write .*/journal-00000001\.log: File too large"):
            log.append(push(2, elements=10_000))
        with pytest.raises(
            CheckpointError, match=r"cannot write .*/snapshot-00000002\.saf.*: File too large"
        ):
            log.snapshot({"x": torch.zeros(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    log.close()
    assert not list(tmp_path.glob("*.part"))
    assert read(tmp_path)[0] == 1.0
    assert read(tmp_path)[1] == [0, 1]


def test_without_a_journal_only_snapshots_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(module, "SNAPSHOT_SHARE", 1e9)
    log = opened(tmp_path, "memory")
    log.snapshot(state(1.0))
    assert not log.snapshot_is_due()  # nothing has happened since
    log.append(push(0))
    assert log.snapshot_is_due()
    log.close()
    assert read(tmp_path) == (1.0, [])


def test_files_are_private(tmp_path):
    folder = tmp_path / "server-0"
    written(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_a_link_is_not_followed(tmp_path):
    elsewhere = tmp_path / "precious"
    elsewhere.write_text("precious")
    folder = tmp_path / "server-0"
    folder.mkdir()
    (folder / "journal-00000001.log").symlink_to(elsewhere)
    with pytest.raises(OSError, match="symbolic link"):
        opened(folder).snapshot(state(1.0))
    assert elsewhere.read_text() == "precious"


def test_a_server_that_is_done_lets_go_of_its_journal(tmp_path):
    log = opened(tmp_path)
    Simulation(
        ASGD(),
        lambda rank: Slope().replica(rank, torch.zeros(1)),
        workers=1,
        steps=2,
        disk=lambda rank: log,
    ).run()
    assert log._file is None
    with closing(opened(tmp_path)) as again:
        assert [m.tag for m in again.recover()[1]].count("push") == 2
