"""Times and memory of each layer of a chain, measured with one microbatch on the device of the model."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from shoal.pipelines.chain import Chain, untouched
from shoal.pipelines.virtual_step import StageCost

ROUNDS, LEAST_ROUNDS, SECONDS = 12, 3, 3.0  # after the least of them, measuring takes so long at most

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class LinearShape:
    """A fully-connected layer in a layer of the chain, and the samples it gets from a microbatch."""

    name: str
    inputs: int
    outputs: int
    samples: int
    parameter_bytes: int
    element_bytes: int
    shared: bool = False  # its weights are used elsewhere, too, or once more


@dataclass(frozen=True)
class LayerCost:
    """What one microbatch costs a layer, and what the layer holds in memory."""

    name: str
    forward: float  # seconds
    backward: float
    input_bytes: int = 0
    output_bytes: int = 0
    activation_bytes: int = 0  # saved for the backward pass, but for what layers before it have saved
    saves_input: bool = False  # its activations contain its own input
    saves_output: bool = False
    parameters: int = 0
    parameter_bytes: int = 0
    repeated_bytes: int = 0  # of parameters that an earlier layer has, too
    state_bytes: int = 0  # parameters, gradients, optimizer
    linears: Sequence[LinearShape] = ()

    @property
    def seconds(self) -> float:
        """Forward and backward pass."""
        return self.forward + self.backward


def stage_cost(layers: Sequence[LayerCost], is_first: bool, is_last: bool) -> StageCost:
    """What consecutive layers cost as a stage.

    A stage keeps the activation that it received and the one that it sent until their backward pass.
    """
    first, last = layers[0], layers[-1]
    kept = sum(layer.activation_bytes for layer in layers)
    kept += 0 if is_first or first.saves_input else first.input_bytes
    kept += 0 if is_last or last.saves_output else last.output_bytes
    return StageCost(
        sum(layer.forward for layer in layers),
        sum(layer.backward for layer in layers),
        0 if is_last else last.output_bytes,
        kept,
        sum(layer.state_bytes for layer in layers),
    )


def measure_layers(chain: Chain, microbatch: Tensor, optimizer: MakeOptimizer) -> list[LayerCost]:
    """Measure every layer in turn: the shortest of several rounds counts, since other load only adds time.

    Leaves parameters, gradients, buffers and random state as they were.
    """
    modules = [chain.module(index, index + 1) for index in range(len(chain))]
    with untouched(chain.model, microbatch.device), torch.enable_grad():
        saved = _saved_bytes(modules, microbatch)
        linears = _linear_shapes(modules, microbatch)
        times = _time_rounds(modules, microbatch)
    costs = []
    earlier: set[nn.Parameter] = set()
    for index, module in enumerate(modules):
        forward, backward = (min(one[index][kind] for one in times) for kind in (0, 1))
        own = list(module.parameters())
        costs.append(
            LayerCost(
                chain.names[index],
                forward,
                backward,
                parameters=sum(p.numel() for p in own),
                parameter_bytes=sum(p.nbytes for p in own),
                repeated_bytes=sum(p.nbytes for p in own if p in earlier),
                state_bytes=_state_bytes(own, optimizer),
                linears=linears[index],
                **saved[index],
            )
        )
        earlier.update(own)
    return costs


def _input(x: Tensor, index: int) -> Tensor:
    """A layer's input as a stage receives it: a leaf whose gradient is wanted, unless it is the batch."""
    return x.detach().requires_grad_(index > 0 and x.is_floating_point())


def _time_rounds(modules: Sequence[nn.Module], x: Tensor) -> list[list[tuple[float, float]]]:
    _time_round(modules, x)  # warms up
    began = time.perf_counter()
    rounds: list[list[tuple[float, float]]] = []
    while len(rounds) < LEAST_ROUNDS or (len(rounds) < ROUNDS and time.perf_counter() - began < SECONDS):
        rounds.append(_time_round(modules, x))
    return rounds


def _time_round(modules: Sequence[nn.Module], x: Tensor) -> list[tuple[float, float]]:
    """(forward, backward) seconds of each layer, once."""
    times = []
    for index, module in enumerate(modules):
        x = _input(x, index)
        wanted = [p for p in module.parameters() if p.requires_grad] + ([x] if x.requires_grad else [])
        began = _now(x)
        out = module(x)
        middle = _now(x)
        if wanted and out.requires_grad:
            torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True)
        times.append((middle - began, _now(x) - middle))
        x = out
    return times


def _now(x: Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter()


def _saved_bytes(modules: Sequence[nn.Module], x: Tensor) -> list[dict[str, Any]]:
    """The bytes that autograd keeps for each layer, and the sizes of its input and output.

    A storage that several layers save counts for the first of them.
    """
    kept: list[Tensor] = [x]  # alive to the end, so that no address is used twice
    seen: set[int] = set()
    found = []
    for index, module in enumerate(modules):
        x = _input(x, index)
        out, saved = _saved_by(module, x)
        kept += [x, out, *saved]
        own = {_place(tensor) for tensor in (*module.parameters(), *module.buffers())}
        new = {_place(t): t.untyped_storage().nbytes() for t in saved if _place(t) not in own | seen}
        seen |= new.keys()
        found.append(
            {
                "input_bytes": x.nbytes,
                "output_bytes": out.nbytes,
                "activation_bytes": sum(new.values()),
                "saves_input": _place(x) in new,
                "saves_output": _place(out) in new,
            }
        )
        x = out
    return found


def _saved_by(module: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The output of a module, and the tensors that it saves for its backward pass."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return module(x), saved


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _linear_shapes(modules: Sequence[nn.Module], x: Tensor) -> list[list[LinearShape]]:
    """The fully-connected layers inside each layer, with the samples that they see."""
    called: list[list[_Call]] = []
    uses: Counter[nn.Parameter] = Counter()
    for module in modules:
        calls: list[_Call] = []
        hooks = [
            inner.register_forward_pre_hook(partial(_note_call, calls, name))
            for name, inner in module.named_modules()
            if inner is not module and any(True for _ in inner.parameters(recurse=False))
        ]
        try:
            x = module(x.detach())
        finally:
            for hook in hooks:
                hook.remove()
        called.append(calls)
        uses.update(_read_by_forward(module))
        uses.update(p for _, inner, _ in calls for p in inner.parameters(recurse=False))
    return [
        [_shape(name, m, numbers, uses) for name, m, numbers in calls if isinstance(m, nn.Linear)]
        for calls in called
    ]


_Call = tuple[str, nn.Module, int]  # its name, the module, and the numbers in its input


def _note_call(calls: list[_Call], name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
    calls.append((name, module, args[0].numel() if args and isinstance(args[0], Tensor) else 0))


def _read_by_forward(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that the traced forward() itself reads, as in x @ self.embedding.weight.T."""
    graph = module.graph if isinstance(module, fx.GraphModule) else fx.Graph()
    read = [attrgetter(str(node.target))(module) for node in graph.nodes if node.op == "get_attr"]
    return [value for value in read if isinstance(value, nn.Parameter)]


def _shape(name: str, linear: nn.Linear, numbers: int, uses: Counter[nn.Parameter]) -> LinearShape:
    inputs, own = linear.in_features, list(linear.parameters())
    return LinearShape(
        name,
        inputs,
        linear.out_features,
        numbers // inputs,
        sum(p.nbytes for p in own),
        linear.weight.element_size(),
        shared=any(uses[p] > 1 for p in own),
    )


def _state_bytes(parameters: Sequence[nn.Parameter], optimizer: MakeOptimizer) -> int:
    """Parameters, their gradients, and what the optimizer keeps after a step (made with copies)."""
    total = sum(p.nbytes for p in parameters)
    copies = [nn.Parameter(p.detach().clone()) for p in parameters if p.requires_grad]
    if not copies:
        return total
    for copy in copies:
        copy.grad = torch.zeros_like(copy)
    made = optimizer(copies)
    made.step()
    state = sum(v.nbytes for kept in made.state.values() for v in kept.values() if isinstance(v, Tensor))
    return total + sum(copy.nbytes for copy in copies) + state
