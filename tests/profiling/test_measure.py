"""What is measured on this machine, and what a probe's figures come to."""

import pytest

from shoal.codecs import CODECS
from shoal.profiling import measure
from shoal.profiling.probe import BULK_BYTES


def found(**figures):
    known = {"message": 10e-6, "send_byte": 1e-10, "receive_byte": 2e-10}
    one_way = BULK_BYTES * 3e-10 + 20e-6
    return {**known, "round_trip": 40e-6, "bandwidth": BULK_BYTES / (one_way + 20e-6), **figures}


def test_on_one_machine_a_message_costs_the_processors_and_no_way():
    wiring = measure.wiring_of(found())
    assert wiring.send.of(1000) == pytest.approx(10e-6 + 1000e-10)
    assert wiring.receive.of(1000) == pytest.approx(10e-6 + 2000e-10)
    assert wiring.latency == pytest.approx(0.0, abs=1e-12)
    assert wiring.bandwidth > 1e13  # nothing is left for the way


def test_what_the_processors_do_not_take_is_the_link():
    one_way = BULK_BYTES * 3e-10 + 20e-6 + 5e-3 + BULK_BYTES / 1e8
    wiring = measure.wiring_of(found(round_trip=10.04e-3, bandwidth=BULK_BYTES / (one_way + 5.02e-3)))
    assert wiring.latency == pytest.approx(5e-3)
    assert wiring.bandwidth == pytest.approx(1e8, rel=1e-6)


def test_between_sizes_that_were_measured_a_crowd_is_in_between():
    steps = {1: 1.0, 2: 1.1, 4: 1.5}
    assert [measure._between(steps, size) for size in (1, 2, 3, 4)] == pytest.approx([1.0, 1.1, 1.3, 1.5])


def test_every_codec_that_compresses_alone_is_measured(monkeypatch):
    monkeypatch.setattr(measure, "ELEMENTS", 4096)
    speeds = measure.measure_codecs()
    assert {"int8", "top_k", "one_bit"} <= set(speeds) <= set(CODECS)
    assert all(one.encode > 0 and one.decode > 0 for one in speeds.values())
    assert "none" not in speeds


@pytest.mark.slow
@pytest.mark.usefixtures("warm_programs")
def test_a_profile_of_this_machine_can_be_run_in(tmp_path, monkeypatch):
    import shoal
    from shoal.sim.hardware import Profile

    monkeypatch.setattr(measure, "ELEMENTS", 1 << 16)
    monkeypatch.setattr(measure, "TRAINING_SECONDS", 0.2)
    said = []
    measure.measure_profile(said.append).save(tmp_path / "here.json")
    assert len(said) == 3
    profile = Profile.load(tmp_path / "here.json")
    assert {"processes", "grpc"} <= set(profile.transports)
    assert profile.slowdown[0] == 1.0
    assert len(profile.slowdown) == profile.cores
    setting = {"workers": 2, "transport": "sim", "tests": 0}
    result = shoal.run("digits", "sync", **setting, profile=profile, compute="1ms")
    free = shoal.run("digits", "sync", **setting, compute="1ms")
    assert result.seconds > free.seconds
    assert result.test_accuracy == free.test_accuracy
    assert result.config["machine"]["per_host"] == 2
