"""A codec as a user of Shoal writes one, which workers add up on the way. docs/extending.md shows it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal import Codec
from shoal.core.averaging import Reductions
from shoal.core.codec import REST, Payload, State, expect


@dataclass(frozen=True)
class Steps(Codec):
    """A byte for each element: a whole number of steps, of which the largest element has 127."""

    feedback: str = "residual"
    in_flight = True  # see `average`

    def encode(self, v: Tensor, state: State) -> tuple[Payload, State]:
        step = step_of(largest(v), 127)
        return ((v / step).round().to(torch.int8), step), state

    def decode(self, payload: Payload, out: Tensor) -> Tensor:
        numbers, step = expect(payload, (torch.int8, out.numel()), (out.dtype, 1))
        return out.copy_(numbers).mul_(step)

    async def average(self, v: Tensor, state: State, workers: Reductions) -> tuple[Tensor, State]:
        u = v + state[REST] if workers.gives and REST in state else v
        given = u * workers.weight
        step = step_of(await workers.largest(largest(given)), 127 // workers.size)
        numbers = (given / step).round().to(torch.int8)
        average = await workers.sum(numbers) * step / workers.total
        if workers.gives and step.isfinite():
            state = {REST: u - numbers * step / workers.weight}
        return average, state


def largest(v: Tensor) -> Tensor:
    return v.abs().max().reshape(1) if v.numel() else v.new_zeros(1)


def step_of(most: Tensor, numbers: int) -> Tensor:
    return (most / numbers).clamp(min=torch.finfo(most.dtype).tiny)  # zeros have nothing to divide by
