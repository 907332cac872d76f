"""Branches on a mesh: a network with several inputs and one shared encoder, one process for each input."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shoal.core.vector import replicate
from shoal.programs.models.hybrid import sum_gradients


class MeshBranches(nn.Module):
    """A branch for each process of a mesh, which encodes its input; every one of them has all codes.

    All processes call it with all inputs and get the same output. Back-propagation leaves each with the whole
    gradient: that of the encoder is summed over the processes.
    """

    def __init__(self, encoder: nn.Module, head: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head
        self._mesh = mesh
        sum_gradients(encoder, mesh)
        replicate(self, mesh.get_group())

    def forward(self, *inputs: Tensor) -> Tensor:
        """One input for each process, batch dimension first -> the output of the head."""
        if len(inputs) != self._mesh.size():
            raise ValueError(f"{len(inputs)} inputs for {self._mesh.size()} processes; pass one for each")
        code = self.encoder(inputs[self._mesh.get_local_rank()])
        codes = DTensor.from_local(code, self._mesh, [Shard(-1)], run_check=False)
        return cast(Tensor, self.head(codes.full_tensor()))
