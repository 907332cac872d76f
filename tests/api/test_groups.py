"""Workers that are groups of processes train what whole workers train, and end together.

Tolerance of all identities: float32 sums in another order, some dozen steps; weights are of size 0.1 to 1.
"""

import os
import shutil
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from forked import ForkedPython
from ports import free_port
from scripts import final_weights
from shoal.api.script import run_script
from shoal.core.errors import WorkerFailed
from shoal.launch.environment import Place
from shoal.strategies import STRATEGIES

LOOP = Path(__file__).with_name("groups_loop.py")

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_scripts")]


def run(*arguments, strategy, group=None, checkpoint=None, **options):
    """What each process printed, by its name, and the result."""
    lines = {}
    result = run_script(
        LOOP,
        arguments,
        workers=2,
        strategy=STRATEGIES.make(strategy, **options),
        place=Place(
            strategy=strategy,
            strategy_options=options,
            checkpoint=None if checkpoint is None else str(checkpoint),
            every=4,
        ),
        on_progress=lambda event: None,
        on_output=lambda name, line: lines.setdefault(name, []).append(line),
        group=group,
    )
    return {name: "\n".join(said) for name, said in lines.items()}, result


@cache
def twin(strategy, *arguments, **options):
    """The weights that whole workers end with."""
    printed, _ = run("whole", *arguments, strategy=strategy, **options)
    first, second = (final_weights(text) for _, text in sorted(printed.items()))
    assert torch.equal(first, second)
    return first


def assert_like_twin(found, strategy, *arguments, **options):
    torch.testing.assert_close(found, twin(strategy, *arguments, **options), rtol=0, atol=1e-6)


@pytest.mark.soak
def test_fsdp_inside_and_diloco_outside_train_what_whole_workers_train():
    printed, result = run("fsdp", strategy="diloco", group=2, period="4")
    for text in printed.values():
        assert_like_twin(final_weights(text), "diloco", period="4")
    assert sorted(printed) == [f"worker {w}, process {g}" for w in range(2) for g in range(2)]
    assert "worker 1 of 2 position 0" in printed["worker 1, process 0"]
    assert result.workers == 2 and len(result.nodes) == 2
    assert result.parameters == twin("diloco", period="4").numel()  # of both processes of a worker together


def test_tensor_parallel_inside_and_bmuf_outside_train_what_whole_workers_train():
    printed, _ = run("tp", strategy="bmuf", group=2, period="4")
    for text in printed.values():
        assert_like_twin(final_weights(text), "bmuf", period="4")


@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.soak), 4])
def test_a_pipeline_inside_and_sync_outside_train_what_whole_workers_train(microbatches):
    printed, _ = run("pp", "--microbatches", str(microbatches), strategy="sync", group=2)
    for worker in range(2):
        stages = [final_weights(printed[f"worker {worker}, process {g}"]) for g in range(2)]
        assert_like_twin(torch.cat(stages), "sync")


@pytest.mark.soak
def test_fsdp_and_tensor_parallel_inside_and_sync_outside_train_what_whole_workers_train():
    printed, _ = run("fsdp_tp", "--even", "--group", "4", strategy="sync", group=4)
    assert len(printed) == 8
    for text in printed.values():
        assert_like_twin(final_weights(text), "sync", "--even")


@pytest.mark.soak
def test_a_hybrid_inside_and_bmuf_outside_train_what_whole_workers_train():
    printed, _ = run("hybrid", strategy="bmuf", group=2, period="4")
    for text in printed.values():
        assert_like_twin(final_weights(text), "bmuf", period="4")


@pytest.mark.soak
def test_gradients_are_clipped_by_the_norm_of_the_whole_group():
    clipped = ("--optimizer", "SGD", "--clip", "0.02")
    printed, _ = run("fsdp", *clipped, strategy="sync", group=2)
    assert_like_twin(final_weights(printed["worker 1, process 1"]), "sync", *clipped)
    plain = twin("sync", "--optimizer", "SGD")
    assert not torch.allclose(plain, twin("sync", *clipped), rtol=0, atol=1e-4)  # the control: it matters


@pytest.mark.soak
def test_an_optimizer_that_looks_at_whole_tensors_is_refused_at_a_server():
    with pytest.raises(WorkerFailed, match="Adafactor looks at whole tensors, and a server of ASGD"):
        run("fsdp", "--optimizer", "Adafactor", strategy="asgd", group=2)


@pytest.mark.soak
def test_servers_are_groups_too():
    printed, _ = run("fsdp", "--look", strategy="sync_server", group=2)
    assert_like_twin(final_weights(printed["worker 0, process 1"]), "sync_server")


@pytest.mark.soak
def test_torchrun_s_processes_become_workers_as_their_mesh_says():
    shared = {"WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    line = [sys.executable, str(LOOP), "fsdp", "--strided"]
    ranks = [
        ForkedPython(line, env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(4)
    ]
    said = [rank.communicate() for rank in ranks]
    assert [rank.wait() for rank in ranks] == [0] * 4, said
    for rank, (out, _) in enumerate(said):
        assert f"worker {rank % 2} of 2 position {rank // 2}" in out
        assert_like_twin(final_weights(out), "sync")


@pytest.mark.soak
@pytest.mark.parametrize(("how", "strategy"), [("fsdp", "diloco"), ("tp", "sync_server")])
def test_a_group_resumes_from_its_checkpoint(tmp_path, how, strategy):
    options = {"period": "3"} if strategy == "diloco" else {}  # the checkpoint is in the midst of a period
    run(how, "--epochs", "1", strategy=strategy, group=2, checkpoint=tmp_path, **options)
    (tmp_path / "step-00000004" / "worker-0-1.json").stat()
    shutil.rmtree(tmp_path / "step-00000006", ignore_errors=True)
    printed, _ = run(how, strategy=strategy, group=2, checkpoint=tmp_path, **options)
    assert "resumed from 4" in printed["worker 1, process 1"]
    assert_like_twin(final_weights(printed["worker 0, process 1"]), strategy, **options)


@pytest.mark.soak
def test_processes_resume_from_a_step_that_all_of_them_have(tmp_path):
    run("fsdp", "--epochs", "2", strategy="sync", group=2, checkpoint=tmp_path)
    (tmp_path / "step-00000012" / "worker-1-0.json").unlink()
    printed, _ = run("fsdp", strategy="sync", group=2, checkpoint=tmp_path)
    assert all("resumed from 8" in text for text in printed.values())
    assert_like_twin(final_weights(printed["worker 0, process 0"]), "sync")


@pytest.mark.soak
def test_a_codec_of_single_elements_works_on_shards():
    printed, _ = run("tp", "--codec", "top_k:density=0.2", strategy="diloco", group=2, period="4")
    first, *others = map(final_weights, printed.values())
    assert all(torch.equal(first, other) for other in others)
    assert not torch.allclose(
        first, twin("diloco", period="4"), rtol=0, atol=1e-4
    )  # the control: it is lossy


@pytest.mark.soak
def test_a_codec_of_whole_matrices_is_refused_on_shards():
    with pytest.raises(WorkerFailed, match="looks at whole matrices, and each process holds a shard"):
        run("fsdp", "--codec", "low_rank", strategy="sync", group=2)


@pytest.mark.soak
def test_a_strategy_of_whole_matrices_is_refused_on_shards():
    with pytest.raises(WorkerFailed, match="looks at all matrices of a model, and each process of a group"):
        run("fsdp", strategy="muloco", group=2, period="4")


@pytest.mark.soak
def test_a_killed_process_ends_its_group_and_the_run():
    said = "worker 1, process 0 failed: it was ended by SIGKILL; its group of 2 processes ends with it"
    with pytest.raises(WorkerFailed, match=said):
        run("fsdp", "--die", "2", strategy="sync", group=2)


def test_the_other_groups_go_on_where_the_strategy_does(caplog):
    printed, result = run("fsdp", "--die", "3", strategy="gossip", group=2)
    assert (
        "worker 1, process 1 was ended by SIGKILL; its group of 2 processes ends with it; the other 1 go on"
        in caplog.text
    )
    assert caplog.text.count("SIGKILL") == 1
    assert [r["rank"] for r in result.nodes] == [0]
    first, second = (final_weights(printed[f"worker 0, process {g}"]) for g in range(2))
    assert torch.equal(first, second)
