"""Orders of work: as torch.distributed.pipelining runs them, action by action."""

from types import SimpleNamespace

import pytest

from shoal.pipelines.schedules import BACKWARD, FORWARD, GPIPE, INTERLEAVED, ONE_F_ONE_B, SCHEDULES


def text(actions):
    return " ".join(f"{a.stage}{a.kind[0].upper()}{a.microbatch}" for a in actions)


def test_1f1b_alternates_once_the_first_gradient_can_come():
    assert text(ONE_F_ONE_B.order(0, 2, 3)) == "0F0 0F1 0B0 0F2 0B1 0B2"
    assert text(ONE_F_ONE_B.order(1, 2, 3)) == "1F0 1B0 1F1 1B1 1F2 1B2"


def test_gpipe_makes_all_forward_passes_first():
    assert text(GPIPE.order(1, 2, 3)) == "1F0 1F1 1F2 1B0 1B1 1B2"


def test_interleaved_runs_a_round_of_microbatches_through_each_of_its_stages():
    assert text(INTERLEAVED.order(1, 2, 4, chunks=2)) == (
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"
    )


class RecordingStage:
    """A stage as torch's single-stage schedules call it, which computes and sends nothing."""

    def __init__(self, index, stages):
        self.stage_index, self.num_stages = index, stages
        self.is_first, self.is_last, self.has_backward = index == 0, index == stages - 1, True
        self.actions = []

    def forward_one_chunk(self, microbatch, *args, **extra):
        self.actions.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch, **extra):
        self.actions.append(f"{self.stage_index}B{microbatch}")

    def __getattr__(self, name):
        return lambda *args, **extra: []


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (2, 5), (3, 4), (4, 4), (4, 9)])
@pytest.mark.parametrize("word", ["gpipe", "1f1b"])
def test_torch_runs_the_same_actions(word, stages, microbatches, monkeypatch):
    from torch.distributed.pipelining.schedules import get_schedule_class

    chosen = SCHEDULES[word]
    for rank in range(stages):
        stage = RecordingStage(rank, stages)
        theirs = get_schedule_class(chosen.torch_name)(stage, microbatches)
        monkeypatch.setattr(theirs, "_initialize_stage", lambda *args: None)
        theirs._step_microbatches()
        assert " ".join(stage.actions) == text(chosen.order(rank, stages, microbatches))


@pytest.mark.parametrize(
    ("devices", "microbatches", "chunks"), [(2, 4, 2), (2, 6, 3), (4, 8, 2), (4, 3, 2), (4, 10, 2)]
)
def test_interleaved_is_the_list_that_torch_makes(devices, microbatches, chunks):
    from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

    stages = [
        SimpleNamespace(num_stages=devices * chunks, group_size=devices, group_rank=0, submod=None)
        for _ in range(chunks)
    ]
    theirs = ScheduleInterleaved1F1B(stages, microbatches).pipeline_order
    for rank in range(devices):
        actions = [str(action) for action in theirs[rank] if action is not None]
        assert " ".join(actions) == text(INTERLEAVED.order(rank, devices, microbatches, chunks))


def test_torch_refuses_what_we_say_it_refuses():
    from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleInterleaved1F1B

    assert ONE_F_ONE_B.refusal(4, 4) is None
    assert "at least as many microbatches as stages, 4" in ONE_F_ONE_B.refusal(4, 3)
    with pytest.raises(ValueError, match="Number of microbatches"):
        Schedule1F1B(RecordingStage(0, 4), 3)
    assert INTERLEAVED.refusal(4, 8) is None
    assert "4 divides" in INTERLEAVED.refusal(4, 9)
    stages = [SimpleNamespace(num_stages=8, group_size=4, group_rank=0, submod=None)] * 2
    with pytest.raises(ValueError, match="number of microbatches"):
        ScheduleInterleaved1F1B(stages, 9)
    assert GPIPE.refusal(4, 1) is None


@pytest.mark.parametrize("word", SCHEDULES)
def test_every_microbatch_goes_forward_and_back_once_in_every_stage(word):
    chunks = 3 if SCHEDULES[word].chunked else 1
    for rank in range(4):
        seen = [(a.stage, a.kind, a.microbatch) for a in SCHEDULES[word].order(rank, 4, 8, chunks)]
        stages = range(rank, 4 * chunks, 4)
        assert sorted(seen) == sorted(
            (s, k, m) for s in stages for k in (FORWARD, BACKWARD) for m in range(8)
        )
