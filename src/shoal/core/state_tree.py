"""State trees: the state of a node as JSON and a dictionary of tensors, for a file or for a peer."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shoal.core.errors import CheckpointError


def plant(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """The value as JSON, with its tensors moved to `tensors`; dictionaries keep the type of their keys."""
    if isinstance(value, Tensor):
        tensors[path] = value.detach().cpu().contiguous().clone()
        return {"tensor": path}
    if isinstance(value, dict):
        return {"dict": [[k, plant(v, tensors, f"{path}.{k}")] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"list": [plant(v, tensors, f"{path}.{i}") for i, v in enumerate(value)]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise CheckpointError(f"{path} is a {type(value).__name__}, which a checkpoint cannot hold")


def harvest(tree: Any, tensors: dict[str, Tensor]) -> Any:
    """The value that `plant` wrote down."""
    if not isinstance(tree, dict):
        return tree
    if "tensor" in tree:
        return tensors[tree["tensor"]]
    if "dict" in tree:
        return {key: harvest(value, tensors) for key, value in tree["dict"]}
    return [harvest(value, tensors) for value in tree["list"]]
