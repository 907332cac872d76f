"""Loops of one's own that end at different steps, under the strategies that average."""

from pathlib import Path

import pytest

from shoal.launch.environment import Place
from shoal.script import run_script
from shoal.strategies import STRATEGIES

LOOP = Path(__file__).with_name("uneven_loop.py")

AVERAGING = {
    "sync": {},
    "local": {"period": "4"},
    "post_local": {"switch": "12", "period": "3"},
    "bmuf": {"period": "4", "warmup": "2"},
    "slowmo": {"period": "4"},
    "diloco": {"period": "4"},
    "streaming_diloco": {"period": "8", "fragments": "2", "overlap": "2"},
}


@pytest.mark.slow
@pytest.mark.parametrize("word", AVERAGING)
def test_all_workers_end_with_the_same_model(word):
    lines: dict[str, str] = {}
    result = run_script(
        LOOP,
        (),
        workers=2,
        strategy=STRATEGIES.make(word, **AVERAGING[word]),
        place=Place(strategy=word, strategy_options=AVERAGING[word]),
        on_progress=lambda event: None,
        on_output=lambda name, line: lines.update({name: line}),
    )
    assert len(lines) == 2
    assert len(set(lines.values())) == 1
    assert result.samples == 10 + 17
