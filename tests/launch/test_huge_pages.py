"""Processes that train get huge pages, unless the user says otherwise."""

import os
from dataclasses import replace
from functools import partial

import pytest

import shoal
from shoal.launch.huge_pages import with_huge_pages
from shoal.testing import blobs


def test_what_the_user_has_set_stays():
    assert with_huge_pages({"HOME": "/"}) == {"HOME": "/", "THP_MEM_ALLOC_ENABLE": "1"}
    assert with_huge_pages({"THP_MEM_ALLOC_ENABLE": "0"}) == {"THP_MEM_ALLOC_ENABLE": "0"}


def noting(build, folder):
    """The model, and a file with what its process was told."""
    (folder / str(os.getpid())).write_text(os.environ.get("THP_MEM_ALLOC_ENABLE", "nothing"))
    return build()


@pytest.mark.slow
def test_a_worker_has_them(tmp_path):
    task = blobs()
    noted = replace(task, model=partial(noting, task.model, tmp_path))
    shoal.run(noted, "local", workers=2, epochs=1)
    workers = [path for path in tmp_path.iterdir() if path.name != str(os.getpid())]
    assert [path.read_text() for path in workers] == [with_huge_pages(os.environ)["THP_MEM_ALLOC_ENABLE"]] * 2
