"""A machine in virtual time: who shares processors, and what takes time beside gradients and wires."""

import json
from dataclasses import replace

import pytest

from shoal import BMUF, Compute, Downpour, Faults, Local, Network, Sync
from shoal.sim import Kernel
from shoal.sim.hardware import FORMAT, LARGE_BYTES, Handling, Machine, Profile, Speeds, Wiring
from shoal.sim.processors import Processors
from shoal.testing.problems import Quadratic, simulate

PROBLEM = Quadratic(lr=0.1, targets=(1.0, -1.0))


def ends_of(machine, *jobs):
    """When jobs end that begin at given times and take given seconds of one processor."""
    kernel, ends = Kernel(), {}
    host = Processors(kernel, replace(machine, per_host=len(jobs)))

    def begin(name, seconds):
        host.run(seconds, lambda: ends.__setitem__(name, kernel.now))

    for name, (at, seconds) in enumerate(jobs):
        kernel.expect(100.0, lambda: None)  # keeps the clock running
        kernel.at(at, lambda name=name, seconds=seconds: begin(name, seconds))
    kernel.run()
    return [ends[name] for name in range(len(jobs))]


def test_jobs_that_have_a_processor_each_do_not_wait_for_each_other():
    assert ends_of(Machine(cores=2), (0.0, 1.0), (0.5, 2.0)) == [1.0, 2.5]


def test_more_jobs_than_processors_share_them_evenly():
    # alone for 1 s, then half as fast beside the other until it has done its second second of work at 3 s
    assert ends_of(Machine(cores=1), (0.0, 2.0), (1.0, 3.0)) == [3.0, 5.0]


def test_jobs_slow_each_other_down_where_they_share_memory():
    machine = Machine(cores=2, slowdown=(1.0, 1.25))
    # together at 0.8 for the first 5 s: both have done 4 s; the second then does its last second alone
    assert ends_of(machine, (0.0, 4.0), (0.0, 5.0)) == pytest.approx([5.0, 6.0])


def test_two_processors_among_three_jobs():
    assert ends_of(Machine(cores=2), (0.0, 2.0), (0.0, 2.0), (0.0, 2.0)) == pytest.approx([3.0, 3.0, 3.0])


def test_the_last_known_factor_holds_for_more():
    machine = Machine(cores=8, slowdown=(1.0, 1.25))
    assert machine.speed(2) == machine.speed(8) == 0.8
    assert machine.speed(16) == 0.4


def run(strategy, machine=None, workers=2, steps=8, **options):
    return simulate(
        strategy, PROBLEM, workers=workers, steps=steps, start=[0.0] * 1000, machine=machine, **options
    )


def test_a_machine_on_which_all_is_free_changes_nothing():
    link = {"network": Network.parse("1Gbit,1ms"), "compute": Compute.parse("10ms,10%")}
    plain = run(Sync(), **link)
    free = run(Sync(), Machine(cores=1, per_host=1), **link)
    assert (free.seconds, free.digest()) == (plain.seconds, plain.digest())


def test_workers_on_one_processor_take_turns():
    compute = Compute(mean=0.01)
    alone = run(Local(period=100), Machine(cores=2, per_host=2), compute=compute)
    shared = run(Local(period=100), Machine(cores=1, per_host=2), compute=compute)
    assert alone.seconds == pytest.approx(0.08)
    assert shared.seconds == pytest.approx(0.16)


def test_an_average_of_two_workers_costs_what_its_messages_cost():
    machine = Machine(send=Handling(0.001), receive=Handling(0.002))
    done = run(Sync(), machine, steps=1)
    # both send their stripe (1 ms), receive the other's (2), send the average (1), and receive the other (2)
    assert done.seconds == pytest.approx(0.006)


def test_bytes_cost_too():
    stripe = 500 * 8 + 104
    done = run(Sync(), Machine(send=Handling(byte=1e-6)), steps=1)
    assert done.seconds == pytest.approx(2 * stripe * 1e-6, rel=1e-6)


def test_a_large_message_costs_more_than_its_bytes():
    assert Handling(1.0, 0.5, 10.0).of(4) == 3.0
    assert Handling(0.0, 0.0, 10.0).of(LARGE_BYTES) == 10.0


def test_a_server_does_one_push_after_the_other():
    compute = Compute(mean=0.01)
    machine = Machine(vectors=Handling(byte=1e-6))
    alone = run(Downpour(), machine, workers=1, steps=5, compute=compute)
    four = run(Downpour(), machine, workers=4, steps=5, compute=compute)
    assert alone.seconds > 5 * 0.01 + 5 * 3 * 8000 * 1e-6  # the model, the push, and the model once more
    assert four.seconds > alone.seconds + 5 * 3 * 2 * 8000 * 1e-6  # each push of the others, read and added


def test_what_a_strategy_does_with_vectors_takes_time():
    machine = Machine(vectors=Handling(byte=1e-6))
    plain, block = (run(strategy, machine, steps=4) for strategy in (Local(period=4), BMUF(period=4)))
    assert block.seconds >= plain.seconds + 3 * 8000 * 1e-6  # one operation on two vectors at least
    few, many = (run(Local(period=100), machine, steps=steps) for steps in (4, 8))
    assert few.seconds == many.seconds  # gradients and updates have their own time, which is 0 here


class Twice(Local):
    """Adds a vector to another, which is two read and one written, and looks at one, which is nothing."""

    async def live(self, w):
        w.x.view(-1)
        w.x + w.x.clone()


def test_an_operation_costs_what_it_reads_and_writes():
    done = run(Twice(), Machine(vectors=Handling(each=0.5, byte=1e-6)), workers=1, steps=1)
    assert done.seconds == pytest.approx(2 * 0.5 + 5 * 8000 * 1e-6)


def test_nothing_computed_depends_on_the_machine():
    slow = run(Sync(), Machine(cores=1, per_host=2, vectors=Handling(1e-6, 1e-6), send=Handling(1e-3)))
    assert (slow.worker(0).x == run(Sync()).worker(0).x).all()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"cores": 0}, "at least 1"),
        ({"slowdown": (0.5,)}, "1 or more"),
        ({"slowdown": ()}, "1 or more"),
        ({"encode": -1.0}, "negative"),
    ],
)
def test_what_no_machine_is(wrong, said):
    with pytest.raises(ValueError, match=said):
        Machine(**wrong)


PROFILE = Profile(
    "here",
    2,
    (1.0, 1.3),
    Handling(1e-6, 1e-9),
    {"processes": Wiring(Handling(1e-5, 1e-10), Handling(2e-5, 2e-10), 3e-5)},
    {"processes": Wiring(Handling(3e-5, 3e-10), Handling(3e-5, 3e-10), 3e-5)},
    {"int8": Speeds(1e-9, 2e-9)},
)


def test_a_profile_can_be_carried(tmp_path):
    PROFILE.save(tmp_path / "p.json")
    read = Profile.load(tmp_path / "p.json")
    assert read.machine("processes", "int8", per_host=3) == Machine(
        2, 3, [1.0, 1.3], Handling(1e-5, 1e-10), Handling(2e-5, 2e-10), Handling(1e-6, 1e-9), 1e-9, 2e-9, True
    )
    assert read.machine("processes", has_server=True).send == Handling(3e-5, 3e-10)
    assert read.wiring("processes").bandwidth == float("inf")


def test_what_was_not_measured_is_said():
    with pytest.raises(ValueError, match="transport 'grpc' was not measured on here: it knows processes"):
        PROFILE.machine("grpc")
    with pytest.raises(ValueError, match="codec 'top_k' was not measured on here: it knows int8"):
        PROFILE.machine("processes", "top_k")


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"format": FORMAT, "host": "x"})])
def test_what_is_no_profile_is_said(tmp_path, text):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ValueError, match=r"p\.json is no profile of this `shoal calibrate`"):
        Profile.load(tmp_path / "p.json")


def test_a_profile_of_another_format_is_refused(tmp_path):
    (tmp_path / "p.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match=r"p\.json is no profile.*measure again"):
        Profile.load(tmp_path / "p.json")
    with pytest.raises(ValueError, match="cannot be read"):
        Profile.load(tmp_path / "none.json")


def test_a_node_with_several_threads_takes_as_many_cores():
    profile = replace(PROFILE, cores=8, slowdown=[1.0, 1.1, 1.2, 1.2, 1.5, 1.5, 1.5, 1.8])
    machine = profile.machine("processes", per_host=2, threads=4)
    assert (machine.cores, machine.slowdown) == (2, [1.0, pytest.approx(1.5)])
    assert profile.machine("processes", threads=16).cores == 1


def test_what_a_node_owed_dies_with_it():
    machine = Machine(vectors=Handling(byte=0.2 / 8000))  # most of a second for each push at the server
    faults = Faults(restart_after=0.5).kill(2, 0.3)
    done = run(Downpour(), machine, steps=2, compute=Compute(mean=0.01), faults=faults, retry=10.0)
    assert done.seconds < 10.0
