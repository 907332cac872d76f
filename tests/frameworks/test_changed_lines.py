"""How many lines of a script change for Shoal: computed from two examples, and shown in the docs."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAIRS = {  # the two examples, and how many lines change beside imports
    "lightning": ("digits_lightning.py", "digits_lightning_shoal.py", 1),
    "fabric": ("digits_fabric.py", "digits_fabric_shoal.py", 2),
    "huggingface": ("words_huggingface.py", "words_huggingface_shoal.py", 2),
    "accelerate": ("digits_accelerate.py", "digits_accelerate_shoal.py", 2),
    "plain": ("mnist_torch.py", "mnist_shoal.py", 2),
}


def difference(before: str, after: str) -> list[str]:
    """The lines that differ, with a sign each; without docstrings and empty lines."""
    old, new = ((ROOT / "examples" / name).read_text().splitlines() for name in (before, after))
    lines = difflib.unified_diff(old, new, lineterm="", n=0)
    signed = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    return [line for line in signed if line[1:].strip() and not line[1:].startswith('"""')]


def diffs_of(page: str) -> list[list[str]]:
    blocks = re.findall(r"^```diff\n(.*?)^```", (ROOT / page).read_text(), flags=re.M | re.S)
    return [[line for line in block.splitlines() if line[1:].strip()] for block in blocks]


@pytest.mark.parametrize("name", PAIRS)
def test_the_docs_show_what_changes_in_a_script(name):
    before, after, changed = PAIRS[name]
    lines = difference(before, after)
    added = [line for line in lines if line[0] == "+" and not re.match(r"\+(from|import) ", line)]
    assert len(added) == changed
    page = "README.md" if name == "plain" else "docs/frameworks.md"
    assert sorted(lines) in [sorted(block) for block in diffs_of(page)]
