"""Codecs as hooks of torch's DDP: what two ranks over gloo learn with each."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shoal
from forked import run_two_ranks
from shoal.api.ddp import group_of, pieces_of, places
from shoal.codecs import CODECS, FP16

RANKS = Path(__file__).with_name("ddp_ranks.py")
WORDS = [word for word in CODECS if word != "factors"]  # which needs more than gradients
PATH = {"PYTHONPATH": os.pathsep.join(sys.path)}  # which has what tests share
SLOW_LEARNERS = ("random_k", "threshold")  # which send little with the options that they have by themselves


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What each of two ranks tells, by rank and by what was run."""
    folder = tmp_path_factory.mktemp("ddp")
    return run_two_ranks(RANKS, folder, "-W", "error::RuntimeWarning")


@pytest.mark.slow
def test_without_compression_it_has_the_bits_of_plain_ddp(told):
    assert told[0]["none"]["weights"] == told[0]["plain"]["weights"]
    assert told[0]["none"]["losses"] == told[0]["plain"]["losses"]


@pytest.mark.slow
@pytest.mark.parametrize(("word", "near"), [("fp16", 2e-3), ("bf16", 2e-2)])
def test_half_precision_is_near_it(told, word, near):
    got, plain = (torch.tensor(told[0][name]["weights"]) for name in (word, "plain"))
    assert 0 < float((got - plain).abs().max()) < near


@pytest.mark.slow
@pytest.mark.parametrize("word", [*WORDS, "rank 1", "own", "shared"])
def test_it_learns_and_all_ranks_hold_the_same_weights(told, word):
    assert told[0][word]["weights"] == told[1][word]["weights"]
    losses = told[0][word]["losses"]
    assert sum(losses[-5:]) < (0.95 if word in SLOW_LEARNERS else 0.6) * sum(losses[:5])


@pytest.mark.slow
@pytest.mark.parametrize("word", [*WORDS, "own", "shared"])
def test_a_gradient_that_is_not_finite_is_seen_by_all_and_leaves_no_trace(told, word):
    assert told[0][word]["refused"] == told[1][word]["refused"] == [5]


@pytest.mark.slow
def test_what_is_lacking_is_given_with_the_next_gradient_by_hand(told):
    # the mean of 8 and -16 is -4: half of it arrives first, then half of 1.5 times it, half of 1.75 times it
    assert told[0]["by hand"] == [[2.0] * 3, [5.0] * 3, [8.5] * 3]
    assert told[1]["by hand"] == told[0]["by hand"]


@pytest.mark.slow
def test_a_codec_of_ones_own_is_added_up_by_hand(told):
    # the largest is 126, of 63 steps, so a step is 2. The mean of (126, 3, -60) and (42, 3, -2) has 4 in the
    # middle, for 1.5 is rounded to 2; both lack -1 there, and the next time it is 2
    assert told[0]["added up"] == [[-84.0, -4.0, 31.0], [-168.0, -6.0, 62.0]]
    assert told[1]["added up"] == told[0]["added up"]


@pytest.mark.slow
def test_what_ranks_give_is_taken_by_all(told):
    # the largest of 8 and -16, and the mean of 4 and -8: 8 - 2
    assert told[0]["gathered"] == told[1]["gathered"] == [[-6.0] * 3]


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_one_rank_on_a_gpu_goes_through_nccl(tmp_path):
    command = [sys.executable, str(RANKS), str(tmp_path), "0", "1", "cuda"]
    done = subprocess.run(
        command, env={**os.environ, **PATH}, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "0.json").read_text())
    assert told["none"]["weights"] == told["plain"]["weights"]
    for word in WORDS:
        losses = told[word]["losses"]
        assert sum(losses[-5:]) < (0.95 if word in SLOW_LEARNERS else 0.6) * sum(losses[:5])


# -- without processes -----------------------------------------------------------------------------


def test_an_unknown_word_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"unknown codec 'fp61'. Did you mean 'fp16'\?"):
        shoal.comm_hook("fp61")
    with pytest.raises(ValueError, match=r"codec 'low_rank' has no option 'rang'. Did you mean 'rank'"):
        shoal.comm_hook("low_rank", rang=1)


def test_options_belong_to_words():
    with pytest.raises(
        TypeError, match=r"FP16\(\) has its options already; pass rank only with the name of a codec"
    ):
        shoal.comm_hook(FP16(), rank=1)


def test_the_state_is_a_process_group_or_nothing():
    assert group_of(None) is None
    with pytest.raises(TypeError, match="takes None or a process group"):
        group_of({})


def test_the_parameters_of_a_bucket_lie_one_behind_the_other():
    pieces = pieces_of([torch.zeros(3, 4), torch.zeros(3), torch.zeros(2, 3, 2, 2)])
    assert [(p.begin, p.end, p.kind) for p in pieces] == [
        (0, 12, "matrix"),
        (12, 15, "vector"),
        (15, 39, "kernel"),
    ]
    assert all(p.whole for p in pieces)


def test_the_parts_of_a_parcel_begin_where_they_can_be_read():
    table = [(torch.uint8, 32), (torch.float16, 3), (torch.float32, 0), (torch.int64, 1)]
    assert places(table) == [slice(0, 32), slice(32, 38), slice(40, 40), slice(40, 48)]
