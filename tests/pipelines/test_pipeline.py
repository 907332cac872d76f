"""A split on two real processes has the gradients of the whole model."""

from pathlib import Path

import pytest

from forked import run_two_ranks
from shoal.pipelines.schedules import SCHEDULES
from shoal.pipelines.virtual_step import StageCost, simulate_step

RANKS = Path(__file__).with_name("pipeline_ranks.py")


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What each of two ranks found."""
    return run_two_ranks(RANKS, tmp_path_factory.mktemp("pipeline"))


@pytest.mark.slow
@pytest.mark.parametrize("word", ["gpipe", "1f1b", "interleaved", "fastest"])
def test_gradients_and_loss_are_those_of_the_whole_model(told, word):
    first, last = (rank[word] for rank in told)
    assert first["difference"] < 1e-12  # float64; sums of microbatches round differently
    assert last["difference"] < 1e-12
    assert first["compared"] + last["compared"] == first["parameters"]
    assert last["loss"] == pytest.approx(last["loss alone"], abs=1e-12)
    assert first["loss"] is None
    assert first["bounds"] == last["bounds"]


@pytest.mark.slow
@pytest.mark.parametrize("word", ["gpipe", "1f1b"])
def test_real_passes_are_in_the_simulated_order_and_no_step_is_shorter(told, word):
    real = [rank[word]["passes"] for rank in told]
    shortest = [
        StageCost(
            *(
                min(end - began for k, _, began, end in passes if k == kind)
                for kind in ("forward", "backward")
            )
        )
        for passes in real
    ]
    timeline = simulate_step(SCHEDULES[word], shortest, 4)
    for device, passes in enumerate(real):
        simulated = [(e.kind, e.microbatch) for e in timeline.events if e.device == device]
        assert [(kind, microbatch) for kind, microbatch, *_ in passes] == simulated
    first, last = ({(k, m): (began, end) for k, m, began, end in passes} for passes in real)
    for m in range(4):
        assert first["forward", m][1] <= last["forward", m][0]
        assert last["backward", m][1] <= first["backward", m][0]
    moments = [moment for passes in real for *_, began, end in passes for moment in (began, end)]
    assert max(moments) - min(moments) >= timeline.seconds


@pytest.mark.slow
def test_a_weight_that_two_stages_share_has_one_gradient(told):
    first, last = (rank["tied"] for rank in told)
    assert first["difference"] < 1e-12
    assert last["difference"] < 1e-12
    assert first["compared"] + last["compared"] == first["parameters"] + 1


@pytest.mark.slow
def test_the_modules_fit_a_schedule_that_you_make_yourself(told):
    assert max(rank["by hand"] for rank in told) < 1e-12


@pytest.mark.slow
def test_a_weight_that_two_stages_of_one_process_share_has_one_gradient(told):
    first, last = (rank["twice"] for rank in told)
    assert first["bounds"] == [0, 1, 2, 3, 4]
    assert max(first["difference"], last["difference"]) < 1e-12
    assert first["compared"] == last["compared"] == 4  # the shared layer twice, the others once


@pytest.mark.slow
def test_batches_of_other_sizes_have_the_gradients_of_the_whole_model(told):
    assert max(difference for rank in told for difference in rank["sizes"]) < 1e-12


@pytest.mark.slow
def test_a_loss_that_is_no_mean_of_its_microbatches_is_refused(told):
    first, last = (rank["refusals"] for rank in told)
    for name in ("one ignored", "a microbatch ignored", "class weights", "sum"):
        assert "is not the mean of its microbatches' losses" in last[name], name
    assert last["one of each pair ignored"] is None  # every microbatch has as many labels
    assert last["no number"] is None  # Diverged says it
    assert set(first.values()) == {None}
