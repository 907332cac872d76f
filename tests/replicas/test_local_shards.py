"""The local shards of a model's DTensors as plain parameters in one flat vector.

Processes are played by PyTorch's fake backend: this one is the first of two, whose collectives do nothing.
"""

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from shoal.api.attach import _check_group
from shoal.core.codec import Identity
from shoal.launch.environment import Place
from shoal.programs.models.hybrid import Hybrid
from shoal.programs.models.mesh_branches import MeshBranches
from shoal.replicas.attached import AttachedReplica
from shoal.replicas.local_shards import LocalShards, Replicated, is_distributed, local
from shoal.replicas.optimizer import load_state, saved_state, steps_each_element

ROWS = torch.arange(10.0).view(5, 2)  # three of them here, two elsewhere


@pytest.fixture
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


@pytest.fixture
def model(mesh):
    """A cut matrix, a replicated bias, and a plain parameter."""
    module = nn.Module()
    module.weight = nn.Parameter(distribute_tensor(ROWS, mesh, [Shard(0)]))
    module.bias = nn.Parameter(distribute_tensor(torch.ones(2), mesh, [Replicate()]))
    module.plain = nn.Parameter(torch.zeros(1))
    return module


def test_a_plain_tensor_is_its_own_shard(mesh):
    plain = torch.ones(3)
    assert local(plain) is plain and not is_distributed(plain)


def test_shards_are_read_and_written(model):
    shards = LocalShards(model, list(model.parameters()))
    shard = shards.by_id[id(model.weight)]
    assert shard.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert id(model.plain) not in shards.by_id
    with torch.no_grad():
        local(model.weight)[0, 0] = 7
        assert shard[0, 0] == 0
        shards.read()
        assert shard[0, 0] == 7
        shard.fill_(2)
    shards.write()
    assert local(model.weight).tolist() == [[2, 2]] * 3


def test_gradients_are_handed_over_in_both_directions(model):
    shards = LocalShards(model, list(model.parameters()))
    shard = shards.by_id[id(model.weight)]
    shards.read_gradients()
    assert shard.grad is None
    shard.grad = torch.full((3, 2), 5.0)
    shards.write_gradients()
    grad = model.weight.grad
    assert isinstance(grad, DTensor) and grad.placements == (Shard(0),) and grad.shape == (5, 2)
    shard.grad = None
    shards.read_gradients()
    assert shard.grad.tolist() == [[5, 5]] * 3


def test_the_vector_holds_what_this_process_has_and_the_optimizer_steps_it(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    replica = AttachedReplica(model, optimizer)
    assert replica.is_sharded and replica.x.numel() == 6 + 2 + 1
    assert [tuple(shape) for shape in replica.layout.shapes] == [(3, 2), (2,), (1,)]
    replica.enter()
    replica.x.add_(10)
    replica.descend(torch.full_like(replica.x, 4.0))
    assert replica.x.tolist() == [8, 9, 10, 11, 12, 13, 9, 9, 8]  # + 10 - 0.5 * 4
    assert local(model.weight).tolist() == [[8, 9], [10, 11], [12, 13]]
    assert model.plain.item() == 8


def test_the_state_of_an_optimizer_is_saved_as_shards_and_restored_as_dtensors(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    AttachedReplica(model, optimizer).descend(torch.ones(9))
    saved = saved_state(optimizer)
    assert not any(is_distributed(value) for values in saved.values() for value in values.values())
    assert saved[0]["exp_avg"].shape == (3, 2)
    again = torch.optim.Adam(model.parameters(), lr=0.1)
    load_state(again, saved)
    average = again.state[model.weight]["exp_avg"]
    assert is_distributed(average) and average.placements == (Shard(0),)
    assert torch.equal(local(average), saved[0]["exp_avg"])
    assert again.state[model.weight]["step"] == 1


def test_optimizers_are_tried_out_on_shards(model):
    assert steps_each_element(torch.optim.AdamW(model.parameters(), lr=0.1))


def test_a_scaler_in_a_group_is_refused(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = AttachedReplica(model, optimizer)
    replica.in_group = True
    optimizer.found_inf = torch.zeros(1)
    with pytest.raises(ValueError, match="take bfloat16"):
        replica.collect()


def test_copies_that_are_no_dtensors_are_kept_alike_where_a_model_says_so(mesh):
    branches = MeshBranches(nn.Linear(2, 3), nn.Linear(6, 1), mesh)
    parameters = list(branches.parameters())
    ((group, held),) = Replicated(parameters, parameters)._held
    assert group.group_name == mesh.get_group().group_name and held == parameters
    assert not Replicated(list(nn.Linear(2, 3).parameters()), [])._held


def test_a_model_that_is_cut_over_several_workers_is_refused(mesh):
    both = init_device_mesh("cpu", (2, 1), mesh_dim_names=("workers", "inside"))
    whole = nn.Module()
    whole.weight = nn.Parameter(distribute_tensor(ROWS, both["workers"], [Shard(0)]))
    with pytest.raises(ValueError, match="cut over processes of several workers"):
        _check_group(whole, both, Place(group=2), Identity())
    whole.weight = nn.Parameter(distribute_tensor(ROWS, both["inside"], [Shard(0)]))
    _check_group(whole, both, Place(group=2), Identity())


def test_batch_norm_in_a_hybrid_is_refused(mesh):
    with pytest.raises(ValueError, match="take GroupNorm"):
        Hybrid(nn.Sequential(nn.BatchNorm2d(3)), nn.Sequential(nn.Linear(2, 2)), mesh)
