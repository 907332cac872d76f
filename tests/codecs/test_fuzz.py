"""Tampered payloads for every codec: refused, or of the right length; `make soak` has 20,000 for each."""

import subprocess
import sys
from pathlib import Path

import pytest

from shoal.codecs import CODECS

FUZZ = Path(__file__).with_name("fuzz.py")


@pytest.mark.slow
@pytest.mark.parametrize("number", [150, pytest.param(20_000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("word", [word for word in CODECS if word != "none"])
def test_no_payload_crashes_a_decoder_or_makes_it_grow(word, number):
    command = [sys.executable, str(FUZZ), word, str(number)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:] or f"ended by signal {-done.returncode}"
    refused = int(done.stdout.split()[-2])
    assert refused > number / 4
