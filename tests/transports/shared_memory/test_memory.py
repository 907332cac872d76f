"""Memory that is shared: what is mapped is what was made, and it goes when nobody looks at it any more."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from harness import in_process, open_files

from shoal.core.errors import Unavailable, WireError
from shoal.transports.shared_memory import memory
from shoal.transports.shared_memory.large_messages import SMALLEST_SHARED, capacity
from shoal.transports.shared_memory.memory import (
    HEAD_BYTES,
    NO_PROBE,
    MemoryProbe,
    SharedMemory,
    fence,
    layout,
)

pytestmark = pytest.mark.skipif(not memory.is_supported(), reason="this system shares no memory")

ME = os.getpid()
LIMIT = 1 << 20


@contextlib.contextmanager
def memory_of(nbytes: int) -> Iterator[SharedMemory]:
    made = SharedMemory.create(nbytes)
    try:
        yield made
    finally:
        made.close()


def test_both_ends_see_the_same_bytes() -> None:
    with memory_of(4096) as made:
        there = SharedMemory.attach(ME, made.fd, made.serial, LIMIT)
        there.close()
        (mine,), (theirs,) = (m.tensors([(torch.float32, 8)], offset=64) for m in (made, there))
        mine.copy_(torch.arange(8.0))
        assert theirs.tolist() == [*range(8)]
        made.words[20] = 2**63
        assert there.words[20] == 2**63


def test_fresh_memory_is_zero_and_has_a_number_of_its_own() -> None:
    with memory_of(4096) as made:
        other = SharedMemory.create(16)
        other.close()
        assert other.serial != made.serial
        assert other.tensors([(torch.uint8, 16)])[0].sum() == 0


def test_parts_are_aligned_and_may_be_empty() -> None:
    with memory_of(4096) as made:
        shapes = [(torch.uint8, 3), (torch.float64, 0), (torch.float64, 2), (torch.bfloat16, 5)]
        assert layout(shapes) == ([0, 64, 64, 128], 138)
        parts = made.tensors(shapes)
        assert [(p.dtype, p.numel()) for p in parts] == shapes
        assert all(p.data_ptr() % 64 == 0 for p in parts)


def test_what_does_not_fit_is_refused() -> None:
    with memory_of(4096) as made:
        made.tensors([(torch.uint8, 4096)])
        for shapes, offset in (
            ([(torch.uint8, 4097)], 0),
            ([(torch.uint8, 1)], 4096),
            ([(torch.uint8, 1)], 2**63),
        ):
            with pytest.raises(WireError, match="do not fit"):
                made.tensors(shapes, offset)
        with pytest.raises(WireError, match="cannot begin at"):
            made.tensors([(torch.float32, 1)], offset=2)


def test_the_last_view_tells_that_it_is_gone() -> None:
    with memory_of(4096) as made:
        told = threading.Event()
        a, b = made.tensors([(torch.float32, 8), (torch.float32, 8)], then=told.set)
        kept = b[2:4]
        del a, b
        assert not told.is_set()
        del kept
        assert told.is_set()


def test_who_watches_the_mapping_hears_of_its_end_from_the_last_view() -> None:
    """A GPU may be copying from it: it must not be unpinned before, whatever becomes of the object."""
    shared, ended = SharedMemory.create(256), []
    weakref.finalize(shared.mapping, ended.append, True)
    first, second = shared.tensors([(torch.float32, 4), (torch.float32, 4)])
    (third,) = shared.tensors([(torch.float32, 4)], then=lambda: None)
    shared.retire()
    del shared, first, second
    assert not ended
    del third
    assert ended


def test_a_forked_child_frees_nothing_of_its_parent_s() -> None:
    """As the workers of a DataLoader, which inherit all tensors and let go of them."""
    with memory_of(4096) as made:
        (view,) = made.tensors([(torch.float32, 8)], then=lambda: made.words.__setitem__(9, 1))
        child = os.fork()
        if child == 0:
            del view
            os._exit(0)
        os.waitpid(child, 0)
        assert made.words[9] == 0
        del view
        assert made.words[9] == 1


def test_memory_goes_with_its_last_view() -> None:
    files = open_files()
    gone = SharedMemory.create(1 << 16)
    (view,) = gone.tensors([(torch.uint8, 8)])
    gone.retire()
    gone.retire()  # harmless
    assert gone.retired
    del gone
    assert view.sum() == 0
    del view
    assert open_files() == files


@pytest.mark.parametrize(
    "what", ["socket", "file", "memfd", "unsealed", "closed", "serial", "large", "nobody"]
)
def test_nothing_else_is_mapped(what: str, tmp_path: Path) -> None:
    """A peer may name any file of its own; only sealed memory that Shoal made is ever mapped."""
    with memory_of(4096) as made:
        files = open_files()
        pid, fd, serial, most, complaint = ME, made.fd, made.serial, LIMIT, ""
        mine = -1
        if what == "socket":
            mine, other = os.pipe()
            os.close(other)
            complaint = "which is pipe"
        elif what == "file":
            mine = os.open(tmp_path / "shoal", os.O_RDWR | os.O_CREAT)
            complaint = "which is /"
        elif what == "memfd":
            mine = os.memfd_create("shoals")
            complaint = "which is /memfd:shoals"
        elif what == "unsealed":
            mine = os.memfd_create("shoal")
            os.truncate(mine, HEAD_BYTES)
            complaint = "may shrink"
        elif what == "closed":
            fd, complaint = 1 << 20, "cannot be opened"
        elif what == "serial":
            serial, complaint = serial + 1, "has serial number"
        elif what == "large":
            most, complaint = 4095, "the limit is 4,095"
        else:
            pid, complaint = 2**22 + 1, "cannot be opened"
        try:
            with pytest.raises(WireError, match=complaint):
                SharedMemory.attach(pid, fd if mine < 0 else mine, serial, most)
        finally:
            if mine >= 0:
                os.close(mine)
        assert open_files() == files


def test_memory_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with memory_of(4096) as made:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(WireError, match="belongs to another user"):
            SharedMemory.attach(ME, made.fd, made.serial, LIMIT)


class Said(NamedTuple):
    pid: int
    fd: int
    serial: int


def test_a_probe_finds_out_whose_memory_can_be_mapped() -> None:
    files = open_files()
    mine, theirs, none = MemoryProbe(True), MemoryProbe(True), MemoryProbe(False)
    where = Said(*theirs.location)
    assert mine.shares and mine.sharing_pid(where) == ME
    assert mine.sharing_pid(where._replace(serial=where.serial + 1)) == 0
    assert mine.sharing_pid(where._replace(pid=-1)) == 0
    assert mine.sharing_pid(Said(*none.location)) == 0 and none.location == NO_PROBE
    assert not none.shares and none.sharing_pid(where) == 0, "who shares nothing tries nothing"
    for probe in (mine, theirs, none):
        probe.retire()
    assert mine.sharing_pid(where) == 0
    assert open_files() == files


def test_too_little_memory_is_an_error_and_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, start: int, length: int) -> None:
        raise OSError("no memory")

    files = open_files()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="no memory"):
        SharedMemory.create(100)
    assert open_files() == files


def test_a_fence_never_waits() -> None:
    fence()
    fence()


@pytest.mark.parametrize(
    ("wanted", "word", "there", "expected"),
    [
        (None, "", True, True),
        (None, "", False, False),
        (None, "0", True, False),
        (None, "1", True, True),
        (False, "1", True, False),
        (True, "0", True, True),
        (False, "", False, False),
    ],
)
def test_the_switch(
    wanted: bool | None, word: str, there: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(memory.SWITCH, word)
    monkeypatch.setattr(memory, "is_supported", lambda: there)
    assert memory.choose(wanted) is expected


def test_insisting_where_it_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "is_supported", lambda: False)
    with pytest.raises(Unavailable, match="memfd_create"):
        memory.choose(True)
    monkeypatch.setenv(memory.SWITCH, "yes")
    with pytest.raises(ValueError, match="SHOAL_SHARED_MEMORY='yes'"):
        memory.choose(None)


@pytest.mark.parametrize(
    "nbytes", [1, SMALLEST_SHARED, SMALLEST_SHARED + 1, 10**6, 2**24, 2**24 + 1, 3 * 10**8]
)
def test_a_buffer_is_hardly_larger_than_it_must_be(nbytes: int) -> None:
    assert nbytes <= capacity(nbytes) <= max(2 * SMALLEST_SHARED, nbytes + nbytes // 8)
    assert capacity(capacity(nbytes)) == capacity(nbytes)


@pytest.mark.slow
def test_nothing_is_left_of_a_killed_process() -> None:
    """There is no name in any folder; the kernel frees the memory with the last process."""
    script = """
        from shoal.transports.shared_memory.memory import SharedMemory
        m = SharedMemory.create(1 << 20)
        m.words[9] = 7
        print(os.getpid(), m.fd, m.serial, flush=True)
        time.sleep(60)
    """
    with in_process(script) as child:
        pid, fd, serial = map(int, child.stdout.readline().split())
        assert str(Path(f"/proc/{pid}/fd/{fd}").readlink()).startswith("/memfd:")
        there = SharedMemory.attach(pid, fd, serial, LIMIT)
        there.close()
        child.kill()
        child.wait()
        assert there.words[9] == 7, "who has mapped it keeps it"
        with pytest.raises(WireError, match="cannot be opened"):
            SharedMemory.attach(pid, fd, serial, LIMIT)
