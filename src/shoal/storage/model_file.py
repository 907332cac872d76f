"""model.safetensors: the weights of a model under its own names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from shoal.core.errors import CheckpointError
from shoal.storage.whole_files import write_whole


def save_model(path: str | Path, model: Mapping[str, Tensor]) -> None:
    """Write weights as safetensors, all or nothing."""
    write_whole(Path(path), model_bytes(model))


def model_bytes(model: Mapping[str, Tensor]) -> bytes:
    """The weights as safetensors."""
    content: bytes = save_tensors({name: t.detach().cpu().contiguous().clone() for name, t in model.items()})
    return content


def load_model(path: str | Path) -> dict[str, Tensor]:
    """The weights in a `model.safetensors`, by the model's own names."""
    try:
        return load_tensors(Path(path).read_bytes())
    except (OSError, SafetensorError) as problem:
        raise CheckpointError(f"{path} cannot be read as safetensors: {problem}") from None
