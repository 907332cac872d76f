"""How a model is cut into stages, as words. Torch-free, so that the command line can check them early."""

from __future__ import annotations

AUTO, EVEN = "auto", "even"


def layers_of_stages(split: str) -> list[int] | None:
    """The layers of each stage in "5-4-4-5"; None for `auto` and `even`.

    Raises ValueError for anything else.
    """
    if split in (AUTO, EVEN):
        return None
    words = split.split("-")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(
            f"split={split!r} should be auto (by measured times), even (as many layers each), or the layers "
            "of every stage, as 5-4-4-5"
        )
    return [int(word) for word in words]


def check_split(split: str) -> None:
    """Raise ValueError unless it says how a model is cut."""
    layers_of_stages(split)
