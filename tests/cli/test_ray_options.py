"""What --on refuses, before anything starts."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--on rya", "'ray'"),
        ("--on ray --hosts a:2", "--on and --hosts both say where the workers are started"),
        ("--on ray --transport processes", "transport 'processes' is one host; with --on take 'grpc'"),
        ("--on ray --listen 10.0.0.1", "--on makes the certificates and the token of each run"),
    ],
)
def test_options_that_do_not_go_together_are_refused(shoal, tmp_path, options, sentence):
    script = tmp_path / "train.py"
    script.touch()
    result = shoal(f"run {options}", script)
    assert result.exit_code == 2
    assert sentence in result.stderr.replace("\n", " ")


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed here")
def test_without_ray_it_says_how_to_install_it(shoal, tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    result = shoal("run --on ray -n 2", script)
    assert result.exit_code == 1
    assert "pip install 'shoal[ray]'" in result.stderr
