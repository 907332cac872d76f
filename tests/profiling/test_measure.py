"""What is measured on this machine, and what a probe's figures come to."""

import pytest

from sampling import mostly_soak
from shoal.codecs import CODECS
from shoal.profiling import fitting, measure


def test_what_neither_end_is_busy_with_is_the_way():
    assert measure.latency_of({"round_trip": 100e-6, "message": 10e-6}) == pytest.approx(30e-6)
    assert measure.latency_of({"round_trip": 30e-6, "message": 10e-6}) == 0.0


def test_between_sizes_that_were_measured_a_crowd_is_in_between():
    steps = {1: 1.0, 2: 1.1, 4: 1.5}
    assert [measure._between(steps, size) for size in (1, 2, 3, 4)] == pytest.approx([1.0, 1.1, 1.3, 1.5])


def test_every_codec_that_compresses_alone_is_measured(monkeypatch):
    monkeypatch.setattr(measure, "ELEMENTS", 4096)
    speeds = measure.measure_codecs()
    assert {"int8", "top_k", "one_bit"} <= set(speeds) <= set(CODECS)
    assert all(one.encode > 0 and one.decode > 0 for one in speeds.values())
    assert "none" not in speeds


NARROW = ("processes",), 1, {24: 20, 96: 4}, (("each", 24), ("byte", 96), ("large", 96))
WIDE = (
    measure.MODELLED,
    fitting.ROUNDS,
    {fitting.SHORT: 20, fitting.MIDDLE: 10, fitting.LONG: 4},
    fitting.FITS,
)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_programs")
@pytest.mark.parametrize(
    ("transports", "rounds", "steps", "fits"),
    mostly_soak([NARROW, WIDE], few=1),
    ids=["narrow nets", "wide nets"],
)
def test_a_profile_of_this_machine_can_be_run_in(transports, rounds, steps, fits, tmp_path, monkeypatch):
    import shoal
    from shoal.sim.hardware import Profile

    monkeypatch.setattr(measure, "ELEMENTS", 1 << 16)
    monkeypatch.setattr(measure, "MODELLED", transports)
    monkeypatch.setattr(fitting, "ROUNDS", rounds)
    monkeypatch.setattr(fitting, "STEPS", steps)
    monkeypatch.setattr(fitting, "FITS", fits)
    said = []
    measure.measure_profile(said.append).save(tmp_path / "here.json")
    assert said[-1] == f"messages between processes, round {rounds} of {rounds}"
    profile = Profile.load(tmp_path / "here.json")
    assert {*transports} == set(profile.transports) == set(profile.servers)
    assert profile.slowdown[0] == 1.0
    assert len(profile.slowdown) == profile.cores
    setting = {"workers": 2, "transport": "sim", "tests": 0}
    result = shoal.run("digits", "sync", **setting, profile=profile, compute="1ms")
    free = shoal.run("digits", "sync", **setting, compute="1ms")
    assert result.seconds > free.seconds
    assert result.test_accuracy == free.test_accuracy
    assert result.config["machine"]["per_host"] == 2
