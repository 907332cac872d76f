"""What must be alike where a strategy trains on a GPU and on a processor: the way that the weights go."""

import torch

from shoal.strategies import STRATEGIES

IN_TURN = ("sync_server", "hierarchical")  # servers that take the workers' gradients in order
ROUGH = ("demo", "muloco")  # signs, and products in bfloat16: a rounding error changes a whole step
NOBODY_WAITS = ("gossip", "adpsgd", "strom", "noloco")


def rate(word: str) -> float:
    """A learning rate at which rounding errors do not grow."""
    return 0.001 if word in ROUGH else 0.1


def check_way(word: str, way: torch.Tensor, expected: torch.Tensor) -> None:
    """A GPU rounds otherwise; updates come in another order every time where nobody waits."""
    if waits(word):
        assert (way - expected).norm() < (0.2 if word in ROUGH else 1e-3) * expected.norm()
    else:  # every run differs: softsync goes further where no gradient is stale
        assert torch.cosine_similarity(way, expected, dim=0) > 0.9
        assert 0.5 < way.norm() / expected.norm() < 2.0


def waits(word: str) -> bool:
    """Whether what it trains does not depend on who is faster."""
    return (word in IN_TURN or not STRATEGIES.make(word).servers) and word not in NOBODY_WAITS
