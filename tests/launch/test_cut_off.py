"""Two hosts whose link goes down: a short outage is ridden out, a long one ends as a death that is named.

A link that was down for 5 s once cost the worker for good. Over gloo a process waited for ever.
"""

from __future__ import annotations

import pytest

from cut_off import CutOff

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500), pytest.mark.usefixtures("warm_programs")]

GRPC = "--transport grpc --insecure --strategy asgd"
GLOO = "--transport gloo --strategy sync"
BUSY = 60.0  # seconds more, for a machine that is busy

soaks = pytest.mark.soak


@pytest.mark.parametrize(
    ("options", "nodes", "seconds"),
    [
        pytest.param(GRPC, 3, 5.0, id="grpc, 5 s"),
        pytest.param(GRPC, 3, 30.0, id="grpc, 30 s", marks=soaks),
        pytest.param(GRPC, 3, 55.0, id="grpc, 55 s", marks=soaks),  # TCP itself would try again after 102 s
        pytest.param(GLOO, 2, 5.0, id="gloo, 5 s", marks=soaks),
        pytest.param(GLOO, 2, 30.0, id="gloo, 30 s", marks=soaks),
    ],
)
def test_an_outage_is_ridden_out(tmp_path, options, nodes, seconds):
    with CutOff(tmp_path, options, nodes, steps=300) as run:
        run.await_training()
        run.cut(seconds)
        assert run.ends(3 * seconds + 2 * BUSY) == [0] * nodes, (run.errors(0), run.errors(1))
        assert all("done" in run.printed[rank] for rank in (0, 1))


@pytest.mark.soak
@pytest.mark.parametrize("how", ["cut", "vanish"])
def test_over_grpc_a_host_that_stays_away_is_a_dead_worker(tmp_path, how):
    with CutOff(tmp_path, f"{GRPC} --patience 10", 3, steps=3000) as run:
        run.await_training()
        getattr(run, how)()
        assert run.ends(10 + 30 + 2 * BUSY)[::2] == [0, 0], run.errors(0)  # they finish without it
        if how == "cut":
            assert run.processes[1].poll() == 1
            assert (
                "the server was lost (it gave no sign of life for 15 s: is it frozen, or the network down?)"
                in run.errors(1)
            )


@pytest.mark.soak
@pytest.mark.parametrize("how", ["cut", "vanish"])
def test_over_gloo_nobody_waits_for_ever(tmp_path, how):
    with CutOff(tmp_path, f"{GLOO} --patience 10", 2, steps=100_000) as run:
        run.await_training()
        getattr(run, how)()
        ends = run.ends(10 + BUSY)
        assert ends[0] == 1 and ends[1] is not None, (ends, run.errors(1))
        assert "(I am worker 0): worker 1 is gone" in run.errors(0)
        if how == "cut":
            assert "the store that could tell who is missing does not answer" in run.errors(1)
