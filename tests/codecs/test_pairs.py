"""Every pair of strategy and codec works or is refused in one sentence; the docs say which."""

from pathlib import Path

import pytest
import torch
from pairs import refusal, table

from periodic import PERIODIC
from shoal.codecs import CODECS
from shoal.sim import Compute, Network
from shoal.strategies import STRATEGIES
from shoal.testing import Quadratic, simulate

DOCS = Path(__file__).parents[2] / "docs" / "codecs.md"
OPTIONS = {
    **{word: {"period": 2} for word in PERIODIC},
    "streaming_diloco": {"period": 4, "fragments": 2, "overlap": 1},
    "sparse_loco": {"period": 2, "density": 0.25},
    "decoupled_diloco": {"period": 4, "fragments": 2, "overlap": 1},
    "halos": {"period": 2, "exchange": 2},
}
WORDS = [word for word in CODECS if word != "none"]


def taken():
    """Every pair that works. By default each strategy runs one codec, and each codec runs; in soak, all."""
    works = {strategy: [word for word in WORDS if not refusal(strategy, word)] for strategy in STRATEGIES}
    first = {(next(s for s in STRATEGIES if word in works[s]), word) for word in WORDS}
    for number, (strategy, codecs) in enumerate(works.items()):
        for place, codec in enumerate(codecs):
            runs = (place - number) % len(codecs) == 0 or (strategy, codec) in first
            yield pytest.param(strategy, codec, marks=() if runs else (pytest.mark.soak,))


TAKEN = list(taken())


def test_the_table_in_the_docs_is_what_the_code_says():
    assert table() in DOCS.read_text()


def test_every_codec_runs_by_default():
    assert {case.values[1] for case in TAKEN if not case.marks} == set(WORDS)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_refusal_is_one_sentence_that_says_why_and_what_to_take(strategy):
    for codec in WORDS:
        if said := refusal(strategy, codec):
            assert type(CODECS.make(codec)).__name__ in said
            assert "\n" not in said and len(said) < 250
            assert any(word in said for word in ("take ", "would do nothing"))


@pytest.mark.parametrize(("strategy", "codec"), TAKEN)
def test_a_run_is_repeated_bit_for_bit_and_stays_finite(strategy, codec):
    def run():
        made = STRATEGIES.make(strategy, **OPTIONS.get(strategy, {}))
        return simulate(
            made,
            Quadratic(lr=0.05, targets=(1.0, 3.0)),
            workers=1 if strategy == "single" else 3,
            steps=8,
            start=[4.0 + k / 7 for k in range(40)],
            codec=CODECS.make(codec),
            compute=Compute(1.0, jitter=0.3),
            network=Network(latency=0.05),
        )

    first, second = run(), run()
    assert all(node.x.isfinite().all() for node in first.nodes)
    assert all(torch.equal(a.x, b.x) for a, b in zip(first.nodes, second.nodes, strict=True))
    assert first.digest() == second.digest()
