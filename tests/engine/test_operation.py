"""An operation is done at once when it is awaited, or in two halves."""

import asyncio

from shoal.engine.operation import Operation


def halves(log, whole=None):
    async def start():
        log.append("start")

        async def complete():
            log.append("complete")
            return 7

        return complete

    return Operation(start, whole)


def test_awaiting_it_does_both_halves():
    async def body():
        return await halves(log)

    log = []
    assert (asyncio.run(body()), log) == (7, ["start", "complete"])


def test_what_was_begun_is_completed_when_it_is_awaited():
    async def body():
        operation = halves(log)
        await operation.begin()
        log.append("between")
        return await operation

    log = []
    assert (asyncio.run(body()), log) == (7, ["start", "between", "complete"])


def test_a_cheaper_way_to_do_all_of_it_is_taken_only_if_it_was_not_begun():
    async def whole():
        log.append("whole")
        return 8

    async def body():
        begun = halves(log, whole)
        await begun.begin()
        return await halves(log, whole), await begun

    log = []
    assert (asyncio.run(body()), log) == ((8, 7), ["start", "whole", "complete"])
