"""Averages weigh by samples, can be begun, and tell when nobody has data."""

import pytest

from parts import play, vector
from shoal.collectives import stripes
from shoal.core.replica import NoMoreSteps
from shoal.engine.averages import Averages


def averages_of(p, ends_known=True):
    return Averages(stripes, p.group, p.mailbox, p.progress, p.gradients, p.replica, ends_known=ends_known)


def test_an_average_is_weighted_by_the_samples_behind_it():
    async def work(p):
        p.progress.count_gradient(1 + 2 * p.me.rank)
        mean = await averages_of(p).mean(vector(4.0 * p.me.rank, 1.0), None)
        return mean.tolist(), p.progress.merged, p.progress.unmerged

    assert play(work, work) == {0: ([3.0, 1.0], 4, 0.0), 1: ([3.0, 1.0], 4, 0.0)}


def test_one_that_was_begun_travels_meanwhile():
    async def work(p):
        averages = averages_of(p)
        complete = await averages.start(vector(2.0 * p.me.rank, 0.0), 1.0, "")
        await p.channel.transport.sleep(1.0)
        await averages.progress()
        await p.channel.transport.sleep(1.0)
        began = p.channel.now()
        return (await complete()).tolist(), p.channel.now() - began

    assert play(work, work) == {0: ([1.0, 0.0], 0.0), 1: ([1.0, 0.0], 0.0)}


def test_it_ends_when_nobody_has_data_any_more():
    async def work(p):
        p.progress.end_data()
        with pytest.raises(NoMoreSteps):
            await averages_of(p, ends_known=False).mean(vector(1.0, 1.0), None)
        return True

    assert play(work, work) == {0: True, 1: True}
