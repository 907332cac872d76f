"""What Numba loads before its first kernel is loaded once, by the fork server, where a codec may need it."""

from multiprocessing.context import ForkServerContext

import pytest

import shoal
from shoal.runs.processes import KERNELS
from shoal.testing import blobs

pytest.importorskip("numba", reason="needs numba: pip install 'shoal[fast]'")


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "wanted"), [("top_k", True), ("none", False)])
def test_the_fork_server_loads_it_for_lossy_codecs_alone(codec, wanted, monkeypatch):
    asked = []
    monkeypatch.setattr(ForkServerContext, "set_forkserver_preload", lambda self, names: asked.extend(names))
    shoal.run(blobs(), "sync", codec=codec, workers=2, epochs=1)
    assert (KERNELS in asked) == wanted
