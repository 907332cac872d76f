"""Tampered payloads for every codec: refused, or of the right length; `make soak` has 20,000 for each."""

import sys
from pathlib import Path

import pytest

from forked import run_forked
from shoal.codecs import CODECS

FUZZ = Path(__file__).with_name("fuzz.py")
WORDS = [word for word in CODECS if word != "none"]


def fuzz(words, number):
    """In one process for all, which takes longer to start than to go through a few payloads."""
    command = [sys.executable, str(FUZZ), ",".join(words), str(number)]
    done = run_forked(command)
    why = done.stderr[-2000:] or f"ended by signal {-done.returncode}"
    assert done.returncode == 0, f"{done.stdout}{why}"
    for word, line in zip(words, done.stdout.splitlines(), strict=True):
        assert line.startswith(f"{word}: ") and int(line.split()[-2]) > number / 4, line


@pytest.mark.slow
def test_no_payload_crashes_a_decoder_or_makes_it_grow():
    fuzz(WORDS, 60)


@pytest.mark.soak
@pytest.mark.parametrize("word", WORDS)
def test_nor_does_any_of_twenty_thousand(word):
    fuzz([word], 20_000)
