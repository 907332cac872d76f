"""A model as a chain of layers: places where one tensor, and nothing else, passes from before to after."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

REMEDY = "Write it as an nn.Sequential, or as modules called one after another in forward()"


class _Outline(fx.Tracer):
    """Traces forward() of the model itself; submodules are opaque, but for plain nn.Sequential."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m).forward is not nn.Sequential.forward


@dataclass(frozen=True)
class Layer:
    """A part of the traced graph, and the one tensor that it passes on."""

    nodes: Sequence[fx.Node]
    output: fx.Node

    @property
    def name(self) -> str:
        """The submodule that it calls, the first and the last of several; or the function that it is."""
        modules = [str(node.target) for node in self.nodes if node.op == "call_module"]
        if modules:
            return modules[0] if len(modules) == 1 else f"{modules[0]}…{modules[-1]}"
        return self.output.name


@dataclass(frozen=True)
class Chain:
    """A model and its layers, in the order in which they run."""

    model: nn.Module
    layers: Sequence[Layer]

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def names(self) -> list[str]:
        """The names of the layers."""
        return [layer.name for layer in self.layers]

    def module(self, first: int, after: int) -> nn.Module:
        """Layers `first` up to, not including, `after`. Parameters are the model's own, with their names."""
        graph = fx.Graph()
        copied: dict[fx.Node, fx.Node] = {}

        def copy_of(node: fx.Node) -> fx.Node:
            if node not in copied:  # a parameter that forward() reads: every stage reads it itself
                copied[node] = graph.node_copy(node, copy_of)
            return copied[node]

        if first > 0:
            copied[self.layers[first - 1].output] = graph.placeholder("x")
        for node in (node for layer in self.layers[first:after] for node in layer.nodes):
            copy_of(node)
        graph.output(copied[self.layers[after - 1].output])
        return fx.GraphModule(self.model, graph)

    def modules(self, bounds: Sequence[int]) -> list[nn.Module]:
        """The stages between these bounds as modules. They share the model's parameters, and their names."""
        return [self.module(first, after) for first, after in pairwise(bounds)]

    def uses(self, bounds: Sequence[int]) -> Iterator[tuple[str, list[int]]]:
        """Each parameter's name and the stages between these bounds that use it."""
        held = [{id(p) for p in module.parameters()} for module in self.modules(bounds)]
        for name, parameter in self.model.named_parameters():
            yield name, [stage for stage, ids in enumerate(held) if id(parameter) in ids]


def trace(model: nn.Module, example: Tensor) -> Chain:
    """The layers of a model. Raises ValueError for one that torch.fx cannot trace, or that is no chain.

    The model is run with the example; its buffers and the random state stay as they were.
    """
    try:
        flipped = _traced_in_the_other_mode(model)
        graph = _Outline().trace(model)
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:
        why = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(
            f"forward() of {_name(model)} cannot be traced ({why}), so it cannot be cut into stages. {REMEDY}"
        ) from error
    nodes = [node for node in graph.nodes if node.op not in ("output", "get_attr")]
    inputs = [node for node in nodes if node.op == "placeholder"]
    (output,) = (node for node in graph.nodes if node.op == "output")
    if len(inputs) != 1 or not isinstance(output.args[0], fx.Node):
        raise ValueError(
            f"{_name(model)} has {len(inputs)} inputs and returns {_shape(output.args[0])}; a pipeline takes "
            "a model from one tensor to one tensor"
        )
    tensors = _tensors(model, graph, example)
    if _text_of(graph) != flipped:  # a trace keeps the value that it read
        raise ValueError(
            f"forward() of {_name(model)} reads self.training itself; make that a module, such as nn.Dropout"
        )
    return Chain(model, list(_layers(model, nodes, output.args[0], tensors)))


def _traced_in_the_other_mode(model: nn.Module) -> str:
    """What is traced where train() and eval() are exchanged; the model stays as it was."""
    modules, before = list(model.modules()), set(vars(model))
    try:
        for module in modules:
            module.training = not module.training
        return _text_of(_Outline().trace(model))
    finally:
        for module in modules:
            module.training = not module.training
        for constant in set(vars(model)) - before:
            delattr(model, constant)


def _text_of(graph: fx.Graph) -> str:
    """Its nodes; constants, which every trace numbers anew, are all alike."""
    return re.sub(r"_constant\d+", "_constant", str(graph))


@contextmanager
def untouched(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put buffers (running statistics) and random generators back at the end."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


class _Tensors(fx.Interpreter):
    """Runs a graph and notes which of its nodes are tensors."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: set[str] = set()

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor):
            self.found.add(n.name)
        return value


def _tensors(model: nn.Module, graph: fx.Graph, example: Tensor) -> set[str]:
    """The names of the nodes that are tensors. Raises ValueError if the graph computes something else."""
    traced = _Tensors(fx.GraphModule(model, graph))
    with torch.no_grad(), untouched(model, example.device):
        torch.manual_seed(0)
        try:
            whole = model(example.clone())
        except (RuntimeError, TypeError, ValueError, LookupError) as error:
            raise ValueError(
                f"{_name(model)} cannot compute a batch of shape {_text(example)}: {_first_line(error)}. "
                "Give the example, or --input, the shape that it takes"
            ) from error
    with torch.no_grad(), untouched(model, example.device):
        torch.manual_seed(0)
        parts = traced.run(example.clone())
    if not isinstance(whole, Tensor) or not torch.allclose(whole, parts, rtol=1e-3, equal_nan=True):
        raise ValueError(
            f"{_name(model)} computes something else when its layers run one after another, so it cannot be "
            f"cut into stages. {REMEDY}"
        )
    return traced.found


def _layers(
    model: nn.Module, nodes: Sequence[fx.Node], output: fx.Node, tensors: set[str]
) -> Iterator[Layer]:
    """Cut where one tensor is alive, and where the next operation does not overwrite it."""
    place = {node: index for index, node in enumerate(nodes)}
    last_use = {node: max((place.get(user, len(nodes)) for user in node.users), default=-1) for node in nodes}
    layer: list[fx.Node] = []
    alive: set[fx.Node] = set()
    for index, node in enumerate(nodes[:-1]):
        layer.append(node)
        alive = {n for n in alive | {node} if last_use[n] > index}
        passed = next(iter(alive)) if len(alive) == 1 else None
        is_tensor = passed in layer and passed.op != "placeholder" and passed.name in tensors
        if passed is not None and is_tensor and not _is_overwritten(model, passed):
            yield Layer(layer, passed)
            layer = []
    yield Layer([*layer, nodes[-1]], output)


def _is_overwritten(model: nn.Module, node: fx.Node) -> bool:
    """Whether an operation works in place on the output of a node: a received tensor does not allow it."""
    for user in node.users:
        if user.op == "call_module" and getattr(model.get_submodule(str(user.target)), "inplace", False):
            return True
        name = user.target if user.op == "call_method" else getattr(user.target, "__name__", "")
        if user.kwargs.get("inplace") or str(name).endswith("_") or user.target in _IN_PLACE:
            return True
    return False


_IN_PLACE = {operator.iadd, operator.isub, operator.imul, operator.itruediv}


def _name(model: nn.Module) -> str:
    return type(model).__name__


def _text(example: Tensor) -> str:
    return "x".join(map(str, example.shape))


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def _shape(output: object) -> str:
    return "one tensor" if isinstance(output, fx.Node) else f"a {type(output).__name__}"
