"""A model as a chain of layers: places where one tensor, and nothing else, passes from before to after."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

REMEDY = "Write it as an nn.Sequential, or as modules called one after another in forward()"


class _Outline(fx.Tracer):
    """Traces forward() of the model itself; submodules are opaque, but for plain nn.Sequential."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m).forward is not nn.Sequential.forward


@dataclass(frozen=True)
class Chain:
    """A model and its layers, in the order in which they run; each is several nodes of the traced graph."""

    model: nn.Module
    names: Sequence[str]
    nodes: Sequence[Sequence[fx.Node]]

    def __len__(self) -> int:
        return len(self.names)

    def module(self, first: int, after: int) -> nn.Module:
        """Layers `first` up to, not including, `after`. Parameters are the model's own, with their names."""
        graph = fx.Graph()
        copied: dict[fx.Node, fx.Node] = {}

        def copy_of(node: fx.Node) -> fx.Node:
            if node not in copied:  # a parameter that forward() reads: every stage reads it itself
                copied[node] = graph.node_copy(node, copy_of)
            return copied[node]

        if first > 0:
            copied[self.nodes[first - 1][-1]] = graph.placeholder("x")
        for node in (node for layer in self.nodes[first:after] for node in layer):
            copy_of(node)
        graph.output(copied[self.nodes[after - 1][-1]])
        return fx.GraphModule(self.model, graph)

    def check(self, example: Tensor) -> None:
        """Raise ValueError unless the layers, one after another, compute what the model computes."""
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            whole = self.model(example)
            torch.manual_seed(0)
            parts = example
            for index in range(len(self)):
                parts = self.module(index, index + 1)(parts)
        if not isinstance(whole, Tensor) or not torch.equal(whole, parts):
            raise ValueError(
                f"{_name(self.model)} computes something else when its layers run one after another, so it "
                f"cannot be cut into stages. {REMEDY}"
            )


def trace(model: nn.Module) -> Chain:
    """The layers of a model. Raises ValueError for one that torch.fx cannot trace, or that is no chain."""
    try:
        graph = _Outline().trace(model)
    except (fx.proxy.TraceError, TypeError, ValueError, NotImplementedError) as error:
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
    layers = _layers(model, nodes)
    return Chain(model, [_layer_name(layer) for layer in layers], layers)


def _layers(model: nn.Module, nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Cut where one tensor is alive, and where the next operation does not overwrite it."""
    place = {node: index for index, node in enumerate(nodes)}
    last_use = {node: max((place.get(user, len(nodes)) for user in node.users), default=-1) for node in nodes}
    layers: list[list[fx.Node]] = [[]]
    alive: set[fx.Node] = set()
    for index, node in enumerate(nodes):
        layers[-1].append(node)
        alive = {n for n in alive | {node} if last_use[n] > index}
        if alive == {node} and _computes(node) and not _is_overwritten(model, node):
            layers.append([])
    return [layer for layer in layers if layer]


def _computes(node: fx.Node) -> bool:
    return node.op in ("call_module", "call_function", "call_method") and node.target is not getattr


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


def _layer_name(layer: Sequence[fx.Node]) -> str:
    """The submodule that a layer calls, the first of several; or the function that it is."""
    modules = [str(node.target) for node in layer if node.op == "call_module"]
    if modules:
        return modules[0] if len(modules) == 1 else f"{modules[0]}…{modules[-1]}"
    return next(node.name for node in reversed(layer))


def _name(model: nn.Module) -> str:
    return type(model).__name__


def _shape(output: object) -> str:
    return "one tensor" if isinstance(output, fx.Node) else f"a {type(output).__name__}"
