"""Tensors on a GPU between processes: through its memory where both see it, else through that of the host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch

from shoal.core.errors import WireError
from shoal.transports.shared_memory import gpu_memory, memory
from shoal.transports.shared_memory.gpu_memory import CARD_BYTES, MappedGpuMemory
from shoal.transports.shared_memory.memory import SharedMemory

PAIR = Path(__file__).with_name("gpu_pair.py")

pytestmark = pytest.mark.skipif(not memory.is_supported(), reason="this system shares no memory")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")


def exchanged(tmp_path: Path, how: str = "lives", **environment: str) -> list[list[dict[str, bool]]]:
    """What each of two processes on one GPU says about the messages that it got."""
    started = [
        subprocess.Popen(
            [sys.executable, str(PAIR), str(tmp_path / "store"), str(rank), how],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=100)[0] for process in started]
    reports = [json.loads(lines) for lines in said if lines]
    assert len(reports) == (1 if how == "dies" else 2)
    return reports


@needs_gpu
def test_from_the_second_message_on_no_byte_passes_through_the_host(tmp_path):
    for got in exchanged(tmp_path):
        assert all(one["right"] for one in got)
        assert not got[0]["cuda"]
        assert all(one["cuda"] for one in got[2:])  # the second may have left before the first arrived


@needs_gpu
def test_the_switch_leaves_all_of_it_to_host_memory(tmp_path):
    for got in exchanged(tmp_path, SHOAL_GPU_MEMORY="0"):
        assert all(one["right"] and not one["cuda"] for one in got)


@needs_gpu
def test_what_a_dead_sender_left_can_still_be_read(tmp_path):
    (got,) = exchanged(tmp_path, "dies")
    assert got[-1] == {"right": True, "cuda": True}


@needs_gpu
def test_pinned_memory_stays_so_while_a_tensor_views_it():
    """A sender that leaves has its receiver forget the memory, from which a copy may be under way."""
    torch.zeros(1, device="cuda")
    shared = SharedMemory.create(1 << 20)
    gpu_memory.pin(shared, 0)
    (view,) = shared.tensors([(torch.float32, 1 << 18)])
    assert view.is_pinned()
    shared.retire()
    del shared
    assert view.is_pinned()


def test_a_receiver_names_the_gpu_that_it_is_on(monkeypatch):
    gpus = [uuid.UUID(int=k).bytes for k in (7, 2**100)]
    monkeypatch.setattr(gpu_memory, "is_supported", lambda: True)
    monkeypatch.setattr(gpu_memory, "uuid_of", lambda k: gpus[k])
    shared = SharedMemory.create(100)
    assert gpu_memory.announced(shared) is None
    gpu_memory.announce(shared, 1)
    assert gpu_memory.announced(shared) == gpus[1]
    shared.retire()


def test_memory_is_kept_until_its_receiver_has_unmapped_it_or_has_ended(monkeypatch):
    monkeypatch.setattr(gpu_memory, "_given_up", [])
    first, second = SharedMemory.create(8), SharedMemory.create(8)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gpu_memory.give_up(object(), first.words, os.getpid())
    assert len(gpu_memory._given_up) == 1
    gone.wait()
    gpu_memory.give_up(object(), second.words, gone.pid)
    assert len(gpu_memory._given_up) == 1
    first.words[memory.UNMAPPED] = 1
    gpu_memory.give_up(object(), second.words, gone.pid)
    assert gpu_memory._given_up == []
    first.retire()
    second.retire()


def test_a_process_without_cuda_names_none_and_maps_none():
    shared = SharedMemory.create(CARD_BYTES)
    if not gpu_memory.uses_gpu():
        assert gpu_memory.own_gpu() is None
        gpu_memory.announce(shared, 0)
        assert gpu_memory.announced(shared) is None
        with pytest.raises(WireError, match="a GPU that this process does not see"):
            MappedGpuMemory(shared)
    shared.retire()
