"""A run goes on with other numbers of workers and servers than wrote its checkpoint."""

import logging
import shutil
from functools import partial
from itertools import product

import pytest
import torch

import shoal
from marks import SAMPLES as MARKS
from marks import tallies
from sampling import mostly_soak
from shoal.core.identity import NodeIdentity
from shoal.core.vector import Flat, trainable
from shoal.launch.between_steps import BetweenSteps
from shoal.launch.control import Control
from shoal.replicas.module import build_model, build_replica
from shoal.replicas.served import ServedReplica
from shoal.sim import Compute, Faults, Simulation
from shoal.storage.checkpoint import Checkpoints
from shoal.storage.step_folders import aside_folder, step_folder, steps_in
from shoal.strategies import (
    ASGD,
    CHOCO,
    DCASGD,
    DPSGD,
    SGP,
    SSP,
    AsyncDiLoCo,
    DecoupledDiLoCo,
    DecoupledMomentum,
    Ensemble,
    GossipGraD,
    Hierarchical,
    Hogwild,
    MuLoCo,
    NoLoCo,
    SlowMo,
    SoftSync,
    SparseLoCo,
    StreamingDiLoCo,
    SyncServer,
)
from shoal.testing import blobs
from shoal.vocabulary.node import Node

AMONG_WORKERS = [
    shoal.Sync(),
    shoal.Local(period=4),
    shoal.BMUF(period=4, warmup=2),
    SlowMo(period=4),
    shoal.DiLoCo(period=4),
    shoal.EASGD(period=4, synchronous=True),
    GossipGraD(),
    DPSGD(),
    CHOCO(),
    SGP(),
    MuLoCo(period=4),
    SparseLoCo(period=4, density=0.25),
    DecoupledMomentum(kept=8),
    NoLoCo(period=4),
    shoal.Local(period=4, penalty=1.0),
]
WITH_A_SERVER = [
    ASGD(),
    SyncServer(),
    SyncServer(backup=1),
    SoftSync(collect=2),
    SSP(bound=1),
    DCASGD(),
    AsyncDiLoCo(period=4),
    Hogwild(),
    shoal.EASGD(period=4),
    shoal.Downpour(n_push=2, n_fetch=2, fixed_shares=False),
]
SAMPLES = 300


def stopped(folder, strategy, every, **settings):
    """A run of which the newest checkpoint but that of the end is left."""
    shoal.run(blobs(), strategy, transport="sim", epochs=2, checkpoint=folder, every=every, **settings)
    shutil.rmtree(step_folder(folder, max(steps_in(folder))))
    return max(steps_in(folder))


@pytest.mark.parametrize(
    ("strategy", "numbers"), mostly_soak([*product(AMONG_WORKERS, [(2, 3), (4, 2), (3, 1)])], few=5)
)
def test_workers_that_average_among_themselves_may_become_more_or_fewer(strategy, numbers, tmp_path):
    before, after = numbers
    assert stopped(tmp_path, strategy, 3, workers=before) % 3 == 0  # in mid-block
    resumed = shoal.run(blobs(), strategy, workers=after, transport="sim", epochs=4, checkpoint=tmp_path)
    assert resumed.samples == 4 * SAMPLES
    assert resumed.test_accuracy > 75


@pytest.mark.parametrize(
    ("strategy", "numbers"),
    mostly_soak([*product(WITH_A_SERVER, [((2, 1), (3, 1)), ((3, 1), (2, 2)), ((3, 1), (3, 3))])], few=4),
)
def test_with_a_server_workers_and_servers_may_become_more_or_fewer(strategy, numbers, tmp_path):
    (workers, servers), (now, servers_now) = numbers
    compute = Compute(mean=1.0, jitter=0.1)
    stopped(tmp_path, strategy, 5, workers=workers, servers=servers, compute=compute)
    settings = {"workers": now, "servers": servers_now, "transport": "sim", "compute": compute}
    resumed = shoal.run(blobs(), strategy, epochs=4, checkpoint=tmp_path, **settings)
    assert resumed.samples == 4 * SAMPLES
    assert resumed.test_accuracy > 75


def test_the_user_reads_one_line(tmp_path, caplog):
    stopped(tmp_path, "asgd", 5, workers=2)
    with caplog.at_level(logging.WARNING, logger="shoal"):
        shoal.run(blobs(), "asgd", workers=3, servers=2, transport="sim", epochs=2, checkpoint=tmp_path)
    assert [r.getMessage() for r in caplog.records] == [
        "resuming step 15 of a run with 2 workers and 1 server with 3 and 2: "
        "the data left is dealt again, the model is cut anew"
    ]


@pytest.mark.parametrize(
    ("strategy", "options", "why"),
    [
        (Ensemble(), {}, "train models of their own"),
        (shoal.BMUF(blocks=2), {}, "blocks=2 cuts the data up for one number of workers"),
        (Hierarchical(), {}, "send updates on to each other"),
        (shoal.Sync(), {"balance": True}, "balance divides the data by the speeds"),
    ],
    ids=str,
)
def test_what_cannot_go_on_with_other_numbers_says_why(strategy, options, why, tmp_path):
    shoal.run(blobs(), strategy, workers=2, transport="sim", checkpoint=tmp_path, **options)
    with pytest.raises(shoal.CheckpointError, match=rf"workers=2 \(now 3\), and .*{why}"):
        shoal.run(blobs(), strategy, workers=3, transport="sim", checkpoint=tmp_path, **options)


def test_what_was_saved_after_the_step_that_all_go_on_from_is_set_aside(tmp_path):
    """Four workers have saved the end, and one file is damaged; three go on from the step before."""
    settings = {"transport": "sim", "checkpoint": tmp_path, "every": 5}
    shoal.run(blobs(), "sync", workers=4, epochs=3, **settings)
    newest = max(steps_in(tmp_path))
    (step_folder(tmp_path, newest) / "worker-3.safetensors").write_bytes(b"")
    saved = Checkpoints(tmp_path, {}, 0, bound=None)
    saved._check_config = lambda config: None
    before = saved.newest(NodeIdentity(0, 3))
    assert before < newest
    left = lambda: {path.stem for path in step_folder(tmp_path, newest).glob("*.json")}  # noqa: E731
    (aside,) = saved.set_aside_after(before, NodeIdentity(1, 3))
    assert aside == aside_folder(tmp_path, before, str(saved.attempt))
    assert left() == {"worker-0", "worker-2", "worker-3"}
    saved.set_aside_after(before, NodeIdentity(0, 3))  # also for worker 3, of which there is none now
    assert left() == {"worker-2"}
    assert shoal.run(blobs(), "sync", workers=3, epochs=3, **settings).samples == 3 * SAMPLES


def test_where_the_data_cannot_be_dealt_anew_the_numbers_stay(tmp_path):
    Checkpoints(tmp_path, {"workers": 2}, 2).write(3, NodeIdentity(0, 2), {})
    with pytest.raises(shoal.CheckpointError, match=r"workers=2 \(now 3\), and with this strategy your own"):
        Checkpoints(tmp_path, {"workers": 3}, 3).check()


def test_other_settings_are_refused_whatever_the_numbers_are(tmp_path):
    shoal.run(blobs(), "sync", workers=2, transport="sim", checkpoint=tmp_path, every=5)
    with pytest.raises(shoal.CheckpointError, match=r"another run: lr=0.1 \(now 0.2\)\. Use"):
        shoal.run(blobs(), "sync", workers=3, lr=0.2, transport="sim", checkpoint=tmp_path)


def test_the_learning_rate_follows_the_number_of_workers(tmp_path):
    stopped(tmp_path, "sync", 5, workers=2, scale_lr="linear")
    resumed = shoal.run(
        blobs(), "sync", workers=3, scale_lr="linear", transport="sim", epochs=2, checkpoint=tmp_path
    )
    assert resumed.config["lr_factor"] == 3
    again = Checkpoints(tmp_path, {}, 0, bound=None)
    again._check_config = lambda saved: None
    state = again.read(max(steps_in(tmp_path)), NodeIdentity(0, 3))
    (group,) = state["replica"]["optimizer"]["param_groups"]
    assert group["lr"] == pytest.approx(3 * blobs().lr)


def test_nobody_joins_an_average_that_is_under_way(tmp_path):
    """Fragments are handed over after 3, 6 and 9 steps, and taken in two steps later."""
    strategy = StreamingDiLoCo(period=6, fragments=2, overlap=2)
    settings = {"transport": "sim", "checkpoint": tmp_path}
    shoal.run(blobs(), strategy, workers=2, every=4, **settings)
    assert sorted(steps_in(tmp_path)) == [8, 10]
    shutil.rmtree(step_folder(tmp_path, 8))
    with pytest.raises(shoal.CheckpointError, match="an average was under way at step 10"):
        shoal.run(blobs(), strategy, workers=3, **settings)


def test_a_step_before_is_taken_if_nobody_could_join_at_the_newest(tmp_path, caplog):
    strategy = StreamingDiLoCo(period=6, fragments=2, overlap=2)
    settings = {"transport": "sim", "checkpoint": tmp_path}
    shoal.run(blobs(), strategy, workers=2, every=4, **settings)
    with caplog.at_level(logging.WARNING, logger="shoal"):
        shoal.run(blobs(), strategy, workers=3, epochs=2, **settings)
    aside, resumes = caplog.messages
    assert aside.startswith("resuming step 8; what was saved after it cannot be resumed, and is now in")
    assert resumes.startswith("resuming step 8 of a run with 2 workers with 3")


def test_a_server_s_optimizer_is_cut_with_the_model():
    """Adam's moments of 3 x 2 weights and 2 biases: slices of 1 x 8, 2 x 4 and 3 servers."""

    def served(shard, shards):
        torch.manual_seed(0)
        flat = Flat(torch.nn.Linear(3, 2))
        optimizer = torch.optim.Adam(flat.parameters, lr=0.1)
        return ServedReplica(NodeIdentity(1 + shard, 1, 1, shards), flat, optimizer)

    g = torch.arange(1.0, 9.0)
    for before, after in [(1, 2), (2, 1), (2, 3), (3, 2)]:
        old = [served(k, before) for k in range(before)]
        new = [served(k, after) for k in range(after)]
        for k, replica in enumerate(old):
            replica.apply(g[NodeIdentity(1 + k, 1, 1, before).own_slice(8)], 0.1, None, 1.0)
        for k, replica in enumerate(new):
            own = NodeIdentity(1 + k, 1, 1, after).own_slice(8)
            replica.load_state_dict(replica.cut([each.state_dict() for each in old]))
            replica.x.copy_(torch.cat([each.x for each in old])[own])
            replica.apply(g[own], 0.1, None, 1.0)
        straight = served(0, 1)
        straight.apply(g, 0.1, None, 1.0)
        straight.apply(g, 0.1, None, 1.0)
        torch.testing.assert_close(torch.cat([each.x for each in new]), straight.x)


# -- workers that come and go, with a model that learns -----------------------------------------------


def coming_and_going(folder, strategy, workers=3, faults=None, resume=False):
    """A run in virtual time with a keeper, which writes a checkpoint before every other step."""
    task = blobs()
    data, model = task.data(), build_model(task, 0)
    saved = Checkpoints(folder, {}, 0, keep=1000, bound=None)
    between = BetweenSteps(Control(), saved, 2, solution=lambda engine: strategy.solution(Node(engine)))
    place = {"workers": workers, "seed": 0}
    run = Simulation(
        strategy,
        partial(build_replica, task, model, data, strategy, **place),
        **place,
        steps=1,
        passes=4,
        compute=Compute(mean=1.0, jitter=0.1),
        faults=faults,
        layout=trainable(model)[1],
        between_steps=between,
        elastic=True,
    )
    for node in run.nodes:
        node.work.last_step = node.replica.end_of(4)
    if resume:
        between.resume_all(run.nodes)
    return run.run()


def took_part(folder, step):
    """Who took part in a step that is whole; nobody if it is not."""
    files = Checkpoints(folder, {}, 0, bound=None)
    return files.crew_at(step, NodeIdentity(0, 1)).members if files._is_complete(step) else ()


@pytest.mark.parametrize(
    "strategy", mostly_soak([shoal.DiLoCo(period=3), shoal.BMUF(period=5), shoal.Sync()], few=1), ids=repr
)
def test_resumed_after_a_worker_came_back_is_bit_equal_to_straight(strategy, tmp_path):
    faults = Faults(noticed_after=0.1, restart_after=7.0).kill(1, 5.5)
    straight = coming_and_going(tmp_path / "one", strategy, faults=faults)
    assert straight.worker(1).incarnation == 1
    steps = {s: took_part(tmp_path / "one", s) for s in steps_in(tmp_path / "one")}
    last_away = max(s for s, members in steps.items() if members == (0, 2))
    back = sorted(s for s in steps if s > last_away)
    assert len(back) > 2
    for step in back[:2]:
        shutil.copytree(step_folder(tmp_path / "one", step), step_folder(tmp_path / str(step), step))
        resumed = coming_and_going(tmp_path / str(step), strategy, resume=True)
        for k in range(3):
            assert torch.equal(resumed.worker(k).x, straight.worker(k).x)


def test_resumed_without_a_worker_that_never_came_back_is_bit_equal_to_straight(tmp_path):
    strategy = shoal.BMUF(period=5, warmup=0)
    straight = coming_and_going(tmp_path / "one", strategy, faults=Faults(noticed_after=0.1).kill(2, 5.5))
    step = min(s for s in steps_in(tmp_path / "one") if took_part(tmp_path / "one", s) == (0, 1))
    shutil.copytree(step_folder(tmp_path / "one", step), step_folder(tmp_path / "two", step))
    resumed = coming_and_going(tmp_path / "two", strategy, workers=2, resume=True)
    for k in range(2):
        assert torch.equal(resumed.worker(k).x, straight.worker(k).x)


# -- on processes -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "strategy", "before", "after"),
    mostly_soak(
        [
            ("processes", "asgd", {"workers": 2}, {"workers": 3, "servers": 2}),
            ("processes", "sync", {"workers": 2}, {"workers": 3}),
            ("grpc", "asgd", {"workers": 2}, {"workers": 3, "servers": 2}),
            ("grpc", "sync", {"workers": 2}, {"workers": 3}),
            ("gloo", "bmuf", {"workers": 3}, {"workers": 2}),
        ],
        few=1,
    ),
)
def test_on_processes_other_numbers_go_on(transport, strategy, before, after, tmp_path):
    settings = {"transport": transport, "checkpoint": tmp_path, "every": 4}
    shoal.run(blobs(), strategy, epochs=1, **before, **settings)
    resumed = shoal.run(blobs(), strategy, epochs=3, **after, **settings)
    assert resumed.samples == 3 * SAMPLES
    assert resumed.test_accuracy > 75


@pytest.mark.slow
@pytest.mark.soak  # tests/sim/test_resuming_servers.py has it in virtual time
def test_on_processes_every_batch_is_in_a_server_s_model_once_an_epoch(tmp_path):
    settings = {"checkpoint": tmp_path, "every": 10}
    shoal.run(tallies(), "asgd", workers=3, epochs=1, **settings)
    for step in steps_in(tmp_path):
        if step % 10:  # the end
            shutil.rmtree(step_folder(tmp_path, step))
    resumed = shoal.run(tallies(), "asgd", workers=2, epochs=2, **settings)
    assert torch.equal(resumed.model.marks, torch.full((MARKS,), -2.0, dtype=torch.float64))


@pytest.mark.parametrize("numbers", [(2, 3), (3, 1)])
def test_learners_beside_one_syncer_may_become_more_or_fewer(numbers, tmp_path):
    before, after = numbers
    strategy, compute = DecoupledDiLoCo(period=8, fragments=2, overlap=2), Compute(mean=1.0, jitter=0.1)
    stopped(tmp_path, strategy, 5, workers=before, compute=compute)
    settings = {"workers": after, "transport": "sim", "compute": compute}
    resumed = shoal.run(blobs(), strategy, epochs=4, checkpoint=tmp_path, **settings)
    assert resumed.samples == 4 * SAMPLES
    assert resumed.test_accuracy > 75
