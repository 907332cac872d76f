"""Which processes a mesh makes one worker, and what does not fit how they were started."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist

from shoal.launch.environment import Place
from shoal.launch.worker_group import join_group, torch_variables


def mesh(*ranks):
    return SimpleNamespace(mesh_dim_names=("inside",), mesh=torch.tensor(ranks))


def test_without_a_mesh_nothing_changes():
    place = Place(1, 3, launched="shoal")
    assert join_group(place, None) is place
    assert join_group(place, mesh(1)) is place  # a group of one


def test_a_group_needs_a_mesh():
    with pytest.raises(ValueError, match="--group 2 started 2 processes for each worker; say which"):
        join_group(Place(0, 2, group=2, launched="shoal"), None)


def test_shoal_run_s_groups_are_processes_of_following_ranks():
    place = Place(1, 2, group=2, position=1, launched="shoal")
    assert join_group(place, mesh(2, 3)) is place
    with pytest.raises(ValueError, match="has processes 1, 3 in this worker"):
        join_group(place, mesh(1, 3))
    with pytest.raises(ValueError, match="start with --group 1"):
        join_group(place, mesh(3))
    with pytest.raises(ValueError, match="start with --group 4"):
        join_group(place, mesh(0, 1, 2, 3))


def joined(monkeypatch, rank, *groups):
    """The place of a process that torchrun started, once the others have said who is in their group."""
    store = dist.HashStore()
    for group in groups:
        for member in group:
            store.set(f"group/{member}", json.dumps(group))
    place = Place(rank, sum(map(len, groups)), launched="torchrun", timeout=0.1)
    monkeypatch.setattr(Place, "open_common_store", lambda self: store)
    own = next(group for group in groups if rank in group)
    return join_group(place, mesh(*own)), store


def test_torchrun_s_processes_are_counted_by_group_and_position(monkeypatch):
    place, store = joined(monkeypatch, 2, (1, 3), (0, 2))
    assert (place.rank, place.nodes, place.group, place.position) == (0, 2, 2, 1)
    place.open_store().set("met", "here")
    assert store.get("position/1/met") == b"here"  # where the processes in position 0 do not look
    other, _ = joined(monkeypatch, 1, (1, 3), (0, 2))
    assert (other.rank, other.position) == (1, 0)


def test_groups_of_different_sizes_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="all workers of the same size; they say: 0; 1, 2"):
        joined(monkeypatch, 1, (0,), (1, 2))


def test_processes_get_the_variables_of_torchrun():
    said = torch_variables(3, 4, ("127.0.0.1", 1234))
    assert {name: said[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")} == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "3",
        "LOCAL_WORLD_SIZE": "4",
    }
    assert (said["MASTER_ADDR"], said["MASTER_PORT"]) == ("127.0.0.1", "1234")
