"""Looking for what is rare; only `make soak` runs this."""

import contextlib
import os
import random
import signal

import pytest

import sabotage
import shoal
from shoal.core.codec import Identity
from shoal.runs.plan import Plan
from shoal.storage.checkpoint import NO_STEP
from shoal.testing import blobs

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("strategy", [sabotage.Slow(), shoal.BMUF(period=7), shoal.Downpour()], ids=repr)
def test_ctrl_c_at_any_moment_leaves_a_whole_checkpoint_or_a_finished_run(strategy, seed, tmp_path):
    """Workers may be anywhere in a step when it comes: none may wait for one that has paused."""
    moment, heard = random.Random(seed).randrange(1, 60), []

    def press_ctrl_c(event):
        heard.append(event)
        if len(heard) == moment:
            os.kill(os.getpid(), signal.SIGINT)

    settings = {"workers": 3, "epochs": 60, "checkpoint": tmp_path}
    with contextlib.suppress(shoal.Interrupted):
        shoal.run(blobs(), strategy, on_progress=press_ctrl_c, **settings)
    plan = Plan(blobs(), strategy, Identity(), workers=3, checkpoint=str(tmp_path))
    saved = plan.checkpoints(blobs().data())
    assert saved.latest(map(plan.identity, range(plan.nodes))) != NO_STEP


@pytest.mark.parametrize("name", ["sync", "local", "bmuf", "diloco", "downpour", "easgd", "eamsgd"])
def test_two_hundred_seeds_repeat_bit_for_bit_on_a_rough_network(name):
    for seed in range(200):
        first, again = (
            shoal.run(
                blobs(),
                name,
                workers=4,
                seed=seed,
                transport="sim",
                network=shoal.Network.parse("10Mbit,5ms,2%"),
                compute=shoal.Compute.parse("10ms,30%,1:3x"),
            ).digest
            for _ in range(2)
        )
        assert first == again
