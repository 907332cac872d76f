"""docs/compatibility.md says what the code does with every optimizer and loader."""

import inspect
from importlib import util
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def compatibility():
    spec = util.spec_from_file_location("compatibility", DOCS / "compatibility.py")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.blocks
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="the page has optimizers that this torch lacks")
def test_the_page_is_what_the_code_does(compatibility):
    assert compatibility.page() == (DOCS / "compatibility.md").read_text()


def test_the_page_has_every_optimizer_of_torch(compatibility):
    theirs = {name for name, _ in inspect.getmembers(torch.optim, inspect.isclass)} - {"Optimizer"}
    assert theirs <= {name for name, _ in compatibility.OPTIMIZERS.values()}
