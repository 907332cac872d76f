"""The kernel of virtual time: events in order, and an explanation where none is left."""

import pytest

from shoal.core.errors import Deadlock
from shoal.sim import Kernel
from shoal.sim.kernel import suspended


def never_asked():
    return "should not be asked"


def test_events_happen_in_order_of_time_whatever_the_order_of_planning():
    kernel, seen = Kernel(), []
    for seconds in (3.0, 1.0, 2.0):
        kernel.after(seconds, lambda s=seconds: seen.append((s, kernel.now)))
    kernel.spawn(sleeper(kernel, 4.0, seen), never_asked)
    kernel.run()
    assert seen == [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0), "woke"]


async def sleeper(kernel, seconds, seen):
    process = kernel._running[-1]
    kernel.after(seconds, process.resume)
    await suspended()
    seen.append("woke")


def test_events_of_one_instant_happen_in_the_order_they_were_planned():
    kernel, seen = Kernel(), []
    for name in "abcde":
        kernel.after(1.0, lambda n=name: seen.append(n))
    kernel.after(0.0, lambda: kernel.after(1.0, lambda: seen.append("planned later for then")))
    kernel.spawn(sleeper(kernel, 2.0, []), never_asked)
    kernel.run()
    assert seen == [*"abcde", "planned later for then"]


def test_what_is_planned_counts_from_the_present_instant():
    kernel, seen = Kernel(), []

    def first():
        kernel.after(2.5, lambda: seen.append(kernel.now))

    kernel.after(1.5, first)
    kernel.spawn(sleeper(kernel, 9.0, []), never_asked)
    kernel.run()
    assert seen == [4.0]


def test_time_jumps_over_what_nobody_does():
    kernel = Kernel()
    kernel.spawn(sleeper(kernel, 1e9, []), never_asked)
    kernel.run()
    assert kernel.now == 1e9
    assert kernel.events == 2  # the start and the end of one sleep


def test_time_stops_when_the_last_process_has_ended():
    kernel = Kernel()
    kernel.spawn(sleeper(kernel, 1.0, []), never_asked)
    kernel.after(50.0, lambda: None)  # an alarm that nobody needs any more
    kernel.run()
    assert kernel.now == 1.0


def test_when_nothing_can_happen_it_says_who_waits_for_what():
    kernel = Kernel()

    async def waits_for_ever():
        await suspended()

    kernel.after(3.0, lambda: None)
    kernel.spawn(waits_for_ever(), lambda: "worker 7 waits for spring")
    with pytest.raises(
        Deadlock, match=r"nothing can happen any more at 3 s of virtual time: worker 7 waits for spring\."
    ):
        kernel.run()
    kernel.close()


def test_a_long_list_of_the_stuck_is_cut():
    kernel = Kernel()

    async def waits_for_ever():
        await suspended()

    for k in range(11):
        kernel.spawn(waits_for_ever(), lambda k=k: f"w{k}")
    with pytest.raises(Deadlock, match="w6; w7; and 3 more"):
        kernel.run()
    kernel.close()


def test_what_a_process_raises_comes_out_and_the_others_can_be_closed():
    kernel, closed = Kernel(), []

    async def fails():
        raise RuntimeError("broken")

    async def waits_for_ever():
        try:
            await suspended()
        finally:
            closed.append(True)

    kernel.spawn(waits_for_ever(), never_asked)
    kernel.spawn(fails(), never_asked)
    with pytest.raises(RuntimeError, match="broken"):
        kernel.run()
    kernel.close()
    assert closed == [True]


def test_an_ended_process_is_not_resumed():
    kernel, seen = Kernel(), []

    async def once():
        seen.append("ran")

    process = kernel.spawn(once(), never_asked)
    kernel.run()
    process.resume()
    process.end()
    assert seen == ["ran"]
    assert process.ended
