"""LocalShards: what this process holds of a model whose parameters are DTensors, as plain parameters.

Inside a group of processes, FSDP and tensor parallelism cut parameters; between groups Shoal keeps the
shards together as it keeps whole models together, and knows nothing of the mesh. DTensor is imported only
where a script has imported it: that takes a second.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch import distributed as dist

from shoal.core.vector import REPLICATED

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_distributed(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The shard of a DTensor that this process holds, without a gradient; any other tensor is itself."""
    if not is_distributed(tensor):
        return tensor
    with torch.no_grad():
        shard: Tensor = tensor.to_local()
    return shard


class LocalShards:
    """A plain parameter for every DTensor among the parameters: its local shard, copied.

    FSDP keeps shards in padded storage of its own, so a flat vector cannot be their storage. `read` and
    `write` copy values between the two, `read_gradients` and `write_gradients` hand gradients over.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[Tensor]) -> None:
        sharded = {id(p): p for p in parameters if is_distributed(p)}
        self._pairs = [(p, nn.Parameter(local(p).detach().clone())) for p in sharded.values()]
        self.by_id = {id(p): shard for p, shard in self._pairs}
        self._units = _fsdp_units(model)

    @torch.no_grad()
    def read(self) -> None:
        """Take the values of the model's parameters, which an optimizer or the loop may have changed."""
        for p, shard in self._pairs:
            shard.copy_(local(p))

    @torch.no_grad()
    def write(self) -> None:
        """Give the model's parameters these values."""
        for unit in self._units:
            unit.reshard()  # after a forward pass alone FSDP still holds the whole parameters, now outdated
        for p, shard in self._pairs:
            local(p).copy_(shard)

    @torch.no_grad()
    def read_gradients(self) -> None:
        """Take the gradients that back-propagation has left. A partial sum is added up in the group."""
        for p, shard in self._pairs:
            shard.grad = None if p.grad is None else local(_placed(p.grad, p))

    @torch.no_grad()
    def write_gradients(self) -> None:
        """Give the model's parameters these gradients, for its optimizer to see."""
        for p, shard in self._pairs:
            p.grad = None if shard.grad is None else sharded(shard.grad, p)


class Replicated:
    """What a mesh replicates: parameters, and parts of them, that several processes of a group hold.

    A parameter is replicated along those dimensions of the model's meshes that do not cut it; a plain one
    beside DTensors along all. Every process keeps its copy together with other copies than its neighbour
    does, and lossy codecs, or messages that come in another order, would let them drift apart. `tensors` are
    what is trained, in this process.
    """

    def __init__(self, parameters: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        placements = [_placements(p) for p in parameters]
        groups = {name: group for placed in placements for name, (group, _) in placed.items()}
        cut = [{name for name, (_, is_cut) in placed.items() if is_cut} for placed in placements]
        self._held = [
            (group, held)
            for name, group in groups.items()  # in the order of the parameters, which all processes have
            if (held := [t for t, names in zip(tensors, cut, strict=True) if name not in names])
        ]

    @torch.no_grad()
    def agree(self) -> None:
        """Take over the values of the first process that holds them."""
        for group, tensors in self._held:
            joined = torch.cat([tensor.reshape(-1) for tensor in tensors])
            dist.broadcast(joined, group=group, group_src=0)
            for tensor, part in zip(tensors, torch.split(joined, [t.numel() for t in tensors]), strict=True):
                tensor.copy_(part.view(tensor.shape))


def _placements(p: Tensor) -> dict[str, tuple[Any, bool]]:
    """By the name of each group of processes over which it lies: the group, and whether that cuts it."""
    if not is_distributed(p):
        group = getattr(p, REPLICATED, None)
        return {} if group is None else {group.group_name: (group, False)}
    pairs = zip(p.device_mesh.get_all_groups(), p.placements, strict=True)
    return {group.group_name: (group, not placed.is_replicate()) for group, placed in pairs}


def _placed(grad: Tensor, p: DTensor) -> Tensor:
    """The gradient, laid out over the mesh as its parameter is."""
    if is_distributed(grad) and grad.placements != p.placements:
        return grad.redistribute(p.device_mesh, p.placements)
    return grad


def sharded(shard: Tensor, p: Tensor) -> Tensor:
    """A DTensor like `p` that has this shard here; the shard itself if `p` is none, or has another shape."""
    if not is_distributed(p) or shard.shape != local(p).shape:
        return shard
    mesh, placements = p.device_mesh, p.placements
    kind: type[DTensor] = sys.modules["torch.distributed.tensor"].DTensor
    return kind.from_local(shard, mesh, placements, run_check=False, shape=p.shape, stride=p.stride())


def _fsdp_units(model: nn.Module) -> list[Any]:
    """The modules that FSDP gathers and frees as one."""
    module = sys.modules.get("torch.distributed.fsdp")
    return [] if module is None else [m for m in model.modules() if isinstance(m, module.FSDPModule)]
