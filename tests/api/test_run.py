"""run() on real processes: the same answer as virtual time, and a clear end whatever happens."""

import os
import signal
from dataclasses import replace
from time import monotonic

import pytest
import torch

import sabotage
import shoal
from sampling import mostly_soak
from shoal.codecs.wire import HEADER
from shoal.core.errors import WorkerFailed
from shoal.strategies import (
    STRATEGIES,
    DecoupledMomentum,
    MuLoCo,
    PostLocal,
    SlowMo,
    SparseLoCo,
    StreamingDiLoCo,
)
from shoal.testing import blobs

SYNCHRONOUS = {
    "sync": shoal.Sync(),
    "local": shoal.Local(period=4),
    "post_local": PostLocal(switch=5, period=4),
    "bmuf": shoal.BMUF(period=4, warmup=2),
    "slowmo": SlowMo(period=4),
    "diloco": shoal.DiLoCo(period=4),
    "streaming_diloco": StreamingDiLoCo(period=6, fragments=2, overlap=2),
    "muloco": MuLoCo(period=4),
    "demo": DecoupledMomentum(kept=8),
    "sparse_loco": SparseLoCo(period=4, density=0.25),
    "easgd": shoal.EASGD(period=4, synchronous=True),
}


def weights(result: shoal.Result) -> torch.Tensor:
    assert result.model is not None
    return torch.cat([p.detach().reshape(-1) for p in result.model.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_soak(list(SYNCHRONOUS), few=2))
def test_a_synchronous_strategy_is_bit_equal_in_virtual_time_on_sockets_and_on_gloo_point_to_point(name):
    results = [
        shoal.run(blobs(), SYNCHRONOUS[name], workers=3, epochs=2, transport=transport, collective="stripes")
        for transport in ("sim", "processes", "gloo")
    ]
    virtual, sockets, gloo = (weights(result) for result in results)
    assert torch.equal(virtual, sockets)
    assert torch.equal(virtual, gloo)
    assert len({result.test_accuracy for result in results}) == 1
    assert len({result.bytes_sent for result in results}) == 1  # virtual traffic is counted like real traffic


IN_FOUR_EPOCHS = {"halos": {"period": 4, "exchange": 2, "rate": 0.5}}  # where the default is for thousands


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_soak([n for n in STRATEGIES if n != "single"], few=3))
def test_every_strategy_learns_on_real_processes(name):
    strategy = STRATEGIES.make(name, **IN_FOUR_EPOCHS.get(name, {}))
    result = shoal.run(blobs(dropout=0.0 if name == "sandblaster" else 0.1), strategy, workers=2, epochs=4)
    assert result.test_accuracy > 75
    assert result.samples == 4 * 300
    assert result.workers == 2
    assert (result.bytes_sent > 0) == (name != "ensemble")
    assert (result.staleness_mean is not None) == bool(STRATEGIES.make(name).servers)
    assert [node["role"] for node in result.nodes].count("worker") == 2
    assert result.curve[0]["samples"] == 0
    assert result.curve[-1]["samples"] == 4 * 300


def test_a_strategy_and_a_task_may_have_their_options_in_their_words():
    settings = {"workers": 2, "transport": "sim"}
    words = shoal.run(blobs(), "local:period=3", **settings)
    assert words.digest == shoal.run(blobs(), shoal.Local(period=3), **settings).digest
    assert words.config["strategy.period"] == 3
    with pytest.raises(ValueError, match=r"strategy 'local' has no option 'perod'\. Did you mean 'period'"):
        shoal.run(blobs(), "local:perod=3", **settings)
    with pytest.raises(ValueError, match=r"task 'shakespeare' has no option 'layer'\. Did you mean 'layers'"):
        shoal.run("shakespeare:layer=1", "sync", **settings)


def test_a_network_and_a_speed_may_be_words():
    settings = {"workers": 2, "epochs": 1, "transport": "sim"}
    words = shoal.run(blobs(), network="1Gbit,100us", compute="20ms,10%", **settings)
    network, compute = shoal.Network.parse("1Gbit,100us"), shoal.Compute.parse("20ms,10%")
    assert words.digest == shoal.run(blobs(), network=network, compute=compute, **settings).digest
    with pytest.raises(ValueError, match="20 parsecs"):
        shoal.run(blobs(), compute="20 parsecs", **settings)
    with pytest.raises(ValueError, match="for transport='sim'"):
        shoal.run(blobs(), compute="20ms")


def test_without_a_codec_nothing_is_said_of_compression():
    told = []
    result = shoal.run(blobs(), workers=2, epochs=1, transport="sim", on_progress=told.append)
    assert result.saved_seconds is None
    assert {event["saved_seconds"] for event in told} == {None}


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["sim", "processes"])
def test_ctrl_c_while_the_copies_are_tested_is_reported_like_any_other(transport):
    def press_ctrl_c(event):
        if "tested" in event:
            raise KeyboardInterrupt

    with pytest.raises(shoal.Interrupted, match="stopped by Ctrl-C"):
        shoal.run(blobs(), workers=2, transport=transport, on_progress=press_ctrl_c)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["sim", "processes"])
def test_progress_goes_on_while_the_copies_are_tested(transport):
    told = []
    settings = {"workers": 2, "epochs": 2, "transport": transport}
    result = shoal.run(blobs(), "downpour", on_progress=told.append, **settings)
    tested = [event for event in told if "tested" in event]
    assert [event["tested"] for event in tested] == list(range(len(result.curve)))
    assert {event["copies"] for event in tested} == {len(result.curve)}
    assert told[-len(tested) :] == tested
    assert all(event.keys() >= told[0].keys() for event in tested)  # whoever hears them knows no others


@pytest.mark.slow
def test_a_lost_worker_is_told_once_in_virtual_time():
    heard = []
    shoal.run(
        blobs(),
        "asgd",
        workers=4,
        epochs=2,
        transport="sim",
        faults=shoal.Faults(noticed_after=0.01).crash(rank=1, step=2),
        on_progress=heard.append,
    )
    (lost,) = [event for event in heard if event.get("fault")]
    assert (lost["rank"], lost["role"], lost["state"], lost["lost"]) == (1, "worker", "dead", True)
    assert lost["fault"] == "worker 1 was lost" and lost["seconds"] > 0
    assert {event["state"] for event in heard if event["role"] == "server"} >= {"computing"}


def test_in_virtual_time_as_on_processes_workers_that_average_are_killed_and_come_back():
    settings = {"workers": 3, "epochs": 4, "transport": "sim", "compute": shoal.Compute(1.0)}
    faults = shoal.Faults(noticed_after=0.1, restart_after=1.0).kill(0, 3.5).kill(2, 8.5)
    plain = shoal.run(blobs(), shoal.Local(period=2), **settings)
    result = shoal.run(blobs(), shoal.Local(period=2), faults=faults, **settings)
    assert result.samples == plain.samples
    assert result.seconds > plain.seconds
    assert {fault for node in result.nodes for fault in node["faults"]} >= {"worker 2 was lost"}
    assert [point["samples"] for point in result.curve] == sorted(p["samples"] for p in result.curve)
    assert result.curve[-1]["samples"] == plain.samples


def test_a_run_in_virtual_time_whose_workers_are_all_killed_has_no_result():
    faults = shoal.Faults(noticed_after=0.1).kill(0, 3.5).kill(1, 3.6)
    settings = {"workers": 2, "epochs": 4, "transport": "sim", "compute": shoal.Compute(1.0)}
    with pytest.raises(WorkerFailed, match="every worker that had the model was killed"):
        shoal.run(blobs(), shoal.Local(period=2), faults=faults, **settings)


@pytest.mark.slow
def test_an_ensemble_does_without_a_member_that_is_killed(crews):
    killed = []

    def kill(event):
        if event["step"] > 20 and not killed:
            killed.append(event)
            os.kill(crews[0].members[1].process.pid, signal.SIGKILL)

    result = shoal.run("digits", "ensemble", workers=3, epochs=20, on_progress=kill)
    assert killed, "the run was over before the kill"
    assert (result.workers, len(result.model.members)) == (2, 2)
    assert result.test_accuracy > 85


@pytest.mark.slow
def test_fp16_halves_the_traffic_and_still_learns():
    exact = shoal.run(blobs(), "sync", workers=2, epochs=2)
    half = shoal.run(blobs(), "sync", workers=2, epochs=2, codec="fp16")
    payload = exact.bytes_sent - half.bytes_sent
    steps = 2 * exact.nodes[0]["steps"]
    # a stripe up and one down at both workers: m elements, 2 bytes less, and two headers more
    assert payload == steps * (exact.parameters * 2 - 2 * HEADER.size)
    assert half.test_accuracy > 75


def test_one_worker_needs_no_company_in_virtual_time():
    result = shoal.run(blobs(), "single", epochs=2, transport="sim")
    assert result.bytes_sent == 0
    assert result.wait_fraction == 0


@pytest.mark.slow
def test_a_worker_that_raises_is_named_with_its_traceback_and_the_others_stop():
    began = monotonic()
    with pytest.raises(shoal.WorkerFailed, match="worker 1 failed: RuntimeError: the cat") as caught:
        shoal.run(blobs(), sabotage.Raises(), workers=3, epochs=50)
    assert caught.value.details.count("Traceback") == 1
    assert "sabotage.py" in caught.value.details
    assert monotonic() - began < 10


@pytest.mark.slow
def test_a_killed_worker_is_named():
    with pytest.raises(shoal.WorkerFailed, match="worker 1 failed: it was ended by SIGKILL"):
        shoal.run(blobs(), sabotage.Dies(), workers=3, epochs=50, balance=True)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["processes", pytest.param("gloo", marks=pytest.mark.soak)])
def test_a_worker_that_stands_still_is_named_after_the_timeout(transport):
    with pytest.raises(shoal.WorkerFailed, match=r"worker 1|node 1"):
        shoal.run(blobs(), sabotage.Sleeps(), workers=2, epochs=50, timeout=1.0, transport=transport)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        (sabotage.without_data(), "'unicorns' is in none of these places"),
        (sabotage.without_parameters(), "has no trainable parameters"),
        (sabotage.on_two_devices(), "are on several devices .cpu, meta."),
        (sabotage.with_nan(), r"worker [01]: the loss became nan at step \d+. Try a smaller learning rate"),
    ],
    ids=["no data", "no parameters", "two devices", "nan"],
)
def test_what_cannot_be_trained_gets_one_sentence(task, sentence):
    with pytest.raises(shoal.WorkerFailed, match=sentence) as caught:
        shoal.run(task, "sync", workers=2)
    assert caught.value.details == ""  # the sentence says it all


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"workers": 0}, "workers=0: a run needs at least 1 worker"),
        ({"epochs": 0}, "epochs=0"),
        ({"strategy": "bmfu"}, "unknown strategy 'bmfu'. Did you mean 'bmuf'?"),
        ({"codec": "fp17"}, "unknown codec 'fp17'. Did you mean 'fp16'?"),
        ({"transport": "process"}, "unknown transport 'process'. Did you mean 'processes'?"),
        ({"collective": "strips"}, "unknown collective 'strips'. Did you mean 'stripes'?"),
        ({"batch": 0}, "batch=0"),
        ({"threads": 0}, "threads=0"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"every": 5}, "say where with checkpoint=DIR"),
        ({"every": 0, "checkpoint": "nowhere"}, "every=0: checkpoints are at least 1 step apart"),
        ({"timeout": -1}, "timeout=-1 must be above 0"),
        ({"patience": 0}, "patience=0 must be above 0"),
        ({"min_workers": 3, "workers": 2}, "min_workers=3: take 1 to 2, the number of workers"),
        ({"min_workers": 2, "workers": 2, "strategy": "asgd"}, "nobody waits for others to join in this run"),
        ({"spares": -1}, "spares=-1"),
        ({"spares": 1, "workers": 2, "balance": True}, "nobody takes the place of a worker"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"durability": "journal", "transport": "sim"}, "'sim' keeps no journal here; take 'processes'"),
        ({"strategy": "single", "workers": 2}, "Single runs on 1 worker, not on 2"),
        ({"workers": 301, "transport": "sim"}, "300 samples cannot be shared among 301 workers"),
        ({"collective": "native", "transport": "sim"}, "collective 'native' needs transport 'gloo'"),
        ({"collective": "ring", "codec": "fp16"}, "FP16() is not exact; take 'stripes'"),
        (
            {"compute": shoal.Compute(1.0, slow={7: 5.0}), "transport": "sim", "workers": 2},
            "there is no worker 7 to slow down",
        ),
        ({"compute": shoal.Compute(1.0)}, "network, compute, profile and faults are for transport='sim'"),
    ],
)
def test_wrong_arguments_get_one_sentence_before_anything_starts(options, sentence):
    with pytest.raises(ValueError, match=r".*") as caught:
        shoal.run(blobs(), **{"strategy": "sync", **options})
    assert sentence in str(caught.value)


def test_a_task_that_cannot_travel_is_refused_before_anything_starts():
    with pytest.raises(ValueError, match="cannot be handed to worker processes"):
        shoal.run(replace(blobs(), model=lambda: torch.nn.Linear(8, 3)), "sync", workers=2)


@pytest.mark.parametrize("name", mostly_soak(SYNCHRONOUS, few=2))
def test_batch_norm_is_tested_with_the_statistics_that_were_learnt(name):
    result = shoal.run(sabotage.with_batch_norm(), SYNCHRONOUS[name], workers=2, epochs=3, transport="sim")
    assert result.model is not None
    assert result.model[1].num_batches_tracked > 0
    assert result.test_accuracy > 75


def test_a_task_without_test_data_trains_all_the_same():
    result = shoal.run(sabotage.without_test_data(), "sync", workers=2, transport="sim")
    assert result.test_accuracy is None
    assert result.model is not None
