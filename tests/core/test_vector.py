"""A module's parameters as one vector: views that stay bound, and errors where they cannot be."""

import pytest
import torch
from torch import nn

from shoal.core.vector import Flat, Layout, trainable


def small():
    return nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1, bias=False))


def test_the_vector_holds_the_parameters_in_the_module_s_own_order():
    module = small()
    before = torch.cat([p.detach().clone().reshape(-1) for p in module.parameters()])
    flat = Flat(module)
    assert torch.equal(flat.x, before)
    assert flat.layout.names == ("0.weight", "0.bias", "2.weight")
    assert flat.layout.sizes == [6, 2, 2]
    assert flat.layout.numel == 10 == flat.x.numel()


def test_changing_the_vector_changes_the_module_and_the_other_way_round():
    module = small()
    flat = Flat(module)
    flat.x.zero_()
    assert module(torch.ones(1, 3)).item() == 0.0
    with torch.no_grad():
        module[0].bias.fill_(7.0)
    assert flat.x.tolist() == [0.0] * 6 + [7.0] * 2 + [0.0] * 2


@pytest.mark.slow  # torch imports its compiler with the first optimizer
def test_an_optimizer_made_before_still_moves_the_vector():
    module = small()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    flat = Flat(module)
    flat.x.zero_()
    flat.set_gradient(torch.arange(10.0))
    optimizer.step()
    assert flat.x.tolist() == [-float(k) for k in range(10)]


def test_gradients_come_out_flat_and_a_missing_one_counts_as_zero():
    module = small()
    flat = Flat(module)
    module[0].weight.grad = torch.arange(6.0).reshape(2, 3)
    module[2].weight.grad = torch.full((1, 2), 9.0)
    out = torch.full((10,), float("nan"))
    assert flat.gradient(out) is out
    assert out.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 0.0, 9.0, 9.0]


def test_a_gradient_that_is_set_is_seen_in_place():
    module = small()
    flat, g = Flat(module), torch.zeros(10)
    flat.set_gradient(g)
    g[6:8] = 5.0
    assert module[0].bias.grad.tolist() == [5.0, 5.0]


def test_frozen_parameters_take_no_part():
    module = small()
    module[0].weight.requires_grad_(False)
    kept = module[0].weight.detach().clone()
    flat = Flat(module)
    assert flat.layout.names == ("0.bias", "2.weight")
    flat.x.zero_()
    assert torch.equal(module[0].weight, kept)


def test_a_parameter_that_two_layers_share_is_there_once():
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    module[1].weight = module[0].weight
    flat = Flat(module)
    assert flat.layout.numel == 9
    flat.x.fill_(2.0)
    assert module[1].weight.unique().tolist() == [2.0]


def test_scalars_and_transposed_storage_fit_too():
    module = nn.Module()
    module.scale = nn.Parameter(torch.tensor(3.0))
    module.turned = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
    flat = Flat(module)
    assert flat.x.tolist() == [3.0, 0.0, 3.0, 1.0, 4.0, 2.0, 5.0]
    assert module.scale.item() == 3.0
    assert module.turned.shape == (3, 2)


def test_a_layout_splits_any_vector_into_named_views():
    layout = Layout(("a", "b"), (torch.Size((2, 2)), torch.Size(())))
    vector = torch.arange(5.0)
    pieces = layout.split(vector)
    assert pieces["a"].tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert pieces["b"].item() == 4.0
    pieces["a"][1, 1] = -1.0
    assert vector[3] == -1.0


def test_a_module_without_parameters_is_refused():
    with pytest.raises(ValueError, match="Tanh has no trainable parameters: there is nothing to train"):
        Flat(nn.Tanh())


def test_a_module_whose_parameters_are_all_frozen_is_refused():
    with pytest.raises(ValueError, match="Linear has no trainable parameters"):
        Flat(nn.Linear(2, 2).requires_grad_(False))


def test_several_dtypes_are_refused_and_named():
    with pytest.raises(ValueError, match=r"Sequential are on several dtypes \(float16, float32\)"):
        trainable(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).half()))


def test_several_devices_are_refused_and_named():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device=torch.device("meta")))
    with pytest.raises(
        ValueError, match=r"Sequential are on several devices \(cpu, meta\); move them all to one"
    ):
        trainable(module)


def test_the_vector_has_the_dtype_of_the_module():
    assert Flat(small().double()).x.dtype == torch.float64


@pytest.mark.parametrize("move", [nn.Module.double, nn.Module.half])
def test_a_module_that_was_moved_afterwards_is_noticed(move):
    module = small()
    flat = Flat(module)
    flat.check_still_bound()
    module.to("cpu")  # changes nothing
    flat.check_still_bound()
    move(module)
    with pytest.raises(ValueError, match="moved after Shoal took hold"):
        flat.check_still_bound()


def test_a_single_layer_that_was_moved_afterwards_is_noticed():
    module = small()
    flat = Flat(module)
    module[2].double()
    with pytest.raises(ValueError, match="moved after Shoal took hold"):
        flat.check_still_bound()


@pytest.mark.parametrize("turned", [False, True])
def test_parameters_tied_by_their_memory_are_refused(turned):
    module = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    weight = module["a"].weight.data
    module["b"].weight.data = weight.t() if turned else weight
    with pytest.raises(ValueError, match=r"'a\.weight' and 'b\.weight' share memory, and would come apart"):
        Flat(module)


def test_a_buffer_that_is_a_view_of_a_parameter_is_refused():
    module = nn.Linear(3, 3)
    module.register_buffer("row", module.weight.data[1])
    with pytest.raises(ValueError, match="'weight' and 'row' share memory"):
        Flat(module)


def test_neighbours_in_one_memory_share_nothing():
    module, memory = nn.Module(), torch.arange(12.0)
    module.first, module.second = nn.Parameter(memory[:6].view(2, 3)), nn.Parameter(memory[6:9])
    module.register_buffer("third", memory[9:])
    columns = torch.arange(8.0).view(2, 4)
    module.left, module.right = nn.Parameter(columns[:, ::2]), nn.Parameter(columns[:, 1::2])
    module.frozen = nn.Parameter(module.third, requires_grad=False)  # nobody trains either
    assert Flat(module).x.tolist() == [*range(9), 0, 2, 4, 6, 1, 3, 5, 7]
    Flat(module)  # they are in one vector now


def test_tensors_that_an_optimizer_gives_to_parameters_are_taken_in():
    module = small()
    flat = Flat(module)
    for p in module.parameters():
        p.data = p.data + 1.0
    before = flat.x.clone()
    flat.take_in()
    assert torch.equal(flat.x, before + 1.0)
    flat.check_still_bound()
    flat.x.zero_()
    assert not any(p.any() for p in module.parameters())
