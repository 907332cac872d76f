"""Named random streams: what one thing draws never shifts what another draws."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def derive(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the stream of that name; different names give unrelated seeds."""
    text = "/".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def stream(seed: int, *names: str | int) -> torch.Generator:
    """A generator of its own for that name, e.g. `stream(0, "data", epoch)`."""
    import torch  # here: checking the arguments of a run needs `derive`, and no torch

    return torch.Generator().manual_seed(derive(seed, *names))
