"""Work decides which batch comes next: the own share, then what a slower worker gives away."""

from parts import play
from shoal.engine.work import HELP, Work


class Averaging:
    under_way = ()

    async def progress(self):
        return


def work_of(p, steps):
    return Work(p.me, p.channel, p.progress, p.replica, p.client, p.rounds, Averaging(), steps)


async def done(work, p):
    steps = []
    while await work.next():
        steps.append(p.progress.t)
        await p.gradients.next(p.rounds.answers or None)
        work.finish_step()
    return steps


def test_the_own_share_is_done_in_order():
    async def body(p):
        work = work_of(p, 3)
        assert [work.is_last(t) for t in range(3)] == [False, False, True]
        return await done(work, p), p.channel.meter.steps

    assert play(body)[0] == ([0, 1, 2], 3)


def test_what_happens_between_steps_happens_before_each_and_at_the_end():
    async def body(p):
        work, seen = work_of(p, 2), []

        async def between():
            seen.append(p.progress.t)

        work.between_steps = between
        await done(work, p)
        return seen

    assert play(body)[0] == [0, 1, 2]


def test_a_worker_that_is_done_takes_the_later_half_of_what_is_left():
    async def slow(p):
        work = work_of(p, 8)
        p.rounds.answers = {HELP: work.give_away}
        work.begin_helping()
        p.gradients.duration = lambda samples: 10.0
        steps = await done(work, p)
        await p.rounds.part({})
        return len(steps)

    async def fast(p):
        work = work_of(p, 1)
        p.rounds.answers = {HELP: work.give_away}
        work.begin_helping()
        p.gradients.duration = lambda samples: 1.0
        steps = await done(work, p)
        await p.rounds.part({})
        return len(steps)

    said = play(slow, fast)
    assert said[0] + said[1] == 9
    assert said[1] > 4
