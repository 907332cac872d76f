"""huge_pages: torch gets the memory of large tensors in pages of 2 MB, in the processes that Shoal starts.

Every step gets the memory of its gradients from the system and gives it back; in pages of 4 KB that is a
large part of a large model's step on a CPU. Where the system has no such pages, nothing changes.
"""

from __future__ import annotations

from collections.abc import Mapping

ENVIRONMENT = {"THP_MEM_ALLOC_ENABLE": "1"}
"""torch reads this before its first tensor. Set to 0, it stays so."""


def with_huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that trains."""
    return {**ENVIRONMENT, **environment}
