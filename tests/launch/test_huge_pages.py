"""Processes that train get huge pages, unless the user says otherwise."""

import os
import subprocess
import sys

from shoal.launch.huge_pages import with_huge_pages


def test_what_the_user_has_set_stays():
    assert with_huge_pages({"HOME": "/"}) == {"HOME": "/", "THP_MEM_ALLOC_ENABLE": "1"}
    assert with_huge_pages({"THP_MEM_ALLOC_ENABLE": "0"}) == {"THP_MEM_ALLOC_ENABLE": "0"}


def test_the_fork_server_has_them_before_it_imports_torch():
    """In an interpreter of its own: tests have a fork server that started warm."""
    code = (
        "import os, sys; sys.orig_argv = ['from multiprocessing.forkserver import main']; "
        "import shoal.launch.fork_server; print(os.environ['THP_MEM_ALLOC_ENABLE'], 'torch' in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1", "False"]
