"""Shoal on Ray: `ShoalConfig` for Ray Train, and the agents that `shoal run --on ray` starts as actors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.ray.train_backend import ShoalConfig

__all__ = ["ShoalConfig"]


def __getattr__(name: str) -> Any:
    """Import Ray Train only when it is asked for: `shoal run --on ray` does without."""
    if name != "ShoalConfig":
        raise AttributeError(f"module 'shoal.ray' has no attribute {name!r}")
    try:
        from shoal.ray import train_backend
    except ModuleNotFoundError as missing:
        if missing.name != "ray":
            raise
        raise ImportError("shoal.ray needs Ray Train. Install it with: pip install 'shoal[ray]'") from None
    return train_backend.ShoalConfig
