"""check_transport: what every Transport must do, as checks its author can run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import torch

from shoal.core.errors import PeerLost, Unavailable
from shoal.core.transport import DTYPES, LEFT, AllReduces, Message, Overlaps, Transport, Windows

PATIENCE_SECONDS = 20.0
"""How long a check waits for what must come before it fails."""

MEGABYTE = 1 << 20

Body = Callable[[Transport], Coroutine[Any, Any, Any]]


class World(Protocol):
    """Runs `body` once for each rank below `size`, on connected transports, all at the same time.

    Returns what the bodies return, in rank order, or raises what one of them raised. Closes every
    transport when its body is done.
    """

    def __call__(self, size: int, body: Body) -> list[Any]:
        """What the bodies return, in rank order."""
        ...


def check_transport(world: World) -> None:
    """Raise AssertionError, saying what is wrong, unless the transports of `world` keep the contract."""
    for check in CHECKS:
        check(world)


def messages_of_a_peer_keep_their_order(world: World) -> None:
    """Two senders at once, small and large messages in turn: each arrives in the order it was sent."""

    async def body(t: Transport) -> None:
        if t.rank == 0:
            await t.sleep(0.02)  # some have arrived before the first is taken
            order: dict[int, list[int]] = {1: [], 2: []}
            for _ in range(200):
                m = await next_message(t)
                order[m.src].append(m.seq)
            assert order == {1: [*range(100)], 2: [*range(100)]}, f"messages overtook each other: {order}"
        else:
            for seq in range(100):
                await t.send(0, Message("count", (torch.zeros(1 + seq % 2 * 50_000),), seq=seq))

    world(3, body)


def a_sender_may_overwrite_what_it_sent(world: World) -> None:
    """Once `send` has returned, the tensor belongs to the sender again."""

    async def body(t: Transport) -> None:
        if t.rank == 0:
            x = torch.empty(MEGABYTE // 4)
            for value in range(8):
                await t.send(1, Message("state", (x.fill_(value),)))
            x.fill_(-1.0)
        else:
            got = [await next_message(t) for _ in range(8)]
            seen = [(m.body.min().item(), m.body.max().item()) for m in got]
            assert seen == [(v, v) for v in range(8)], f"a later write of the sender shows: {seen}"

    world(2, body)


def all_header_fields_arrive(world: World) -> None:
    """Also numbers that a float would round, and a tag of the full length."""
    sent = Message("sixteen-letters!", (), seq=2**53 + 1, count=2.5, version=-7, rate=1e-300)

    async def body(t: Transport) -> None:
        if t.rank == 1:
            await t.send(0, sent)
        elif t.rank == 0:
            m = await next_message(t)
            for name in ("tag", "seq", "count", "version", "rate"):
                got, expected = getattr(m, name), getattr(sent, name)
                assert got == expected, f"header field {name} was sent as {expected!r} and arrived as {got!r}"
            assert m.src == 1, f"a message of node 1 arrived with src={m.src}"
            assert m.parts == (), f"a message without parts arrived with {len(m.parts)}"

    world(2, body)


def every_dtype_and_empty_parts_arrive(world: World) -> None:
    """Bit for bit, with none, one and many elements."""
    bodies = [torch.arange(n).to(dtype) for dtype in DTYPES for n in (0, 1, 1000)]

    async def body(t: Transport) -> None:
        for x in bodies:
            if t.rank == 0:
                await t.send(1, Message("part", (x,)))
            else:
                got = (await next_message(t)).body
                assert got.dtype == x.dtype, f"{x.dtype} arrived as {got.dtype}"
                assert torch.equal(got, x), f"{x.numel()} elements of {x.dtype} arrived changed: {got}"

    world(2, body)


def several_parts_stay_apart(world: World) -> None:
    """Four parts of different dtypes and lengths, one of them empty; and a part that is not contiguous."""
    parts = (
        torch.arange(5),
        torch.empty(0),
        torch.full((300_000,), 2.0),
        torch.tensor([7], dtype=torch.uint8),
    )

    async def body(t: Transport) -> None:
        if t.rank == 0:
            await t.send(1, Message("parts", parts))
            await t.send(1, Message("strided", (torch.arange(10.0)[::2],)))
        else:
            got = (await next_message(t)).parts
            assert len(got) == len(parts), f"{len(parts)} parts were sent, {len(got)} arrived"
            for i, (a, b) in enumerate(zip(got, parts, strict=True)):
                assert a.dtype == b.dtype, f"part {i} was {b.dtype} and arrived as {a.dtype}"
                assert torch.equal(a, b), f"part {i} arrived changed"
            strided = (await next_message(t)).body.tolist()
            assert strided == [0, 2, 4, 6, 8], f"every second element was sent, {strided} arrived"

    world(2, body)


def large_messages_cross_without_deadlock(world: World) -> None:
    """Both nodes send 8 MB before either receives."""

    async def body(t: Transport) -> None:
        await t.send(1 - t.rank, Message("large", (torch.full((2 * MEGABYTE,), float(t.rank)),)))
        got = (await next_message(t)).body
        assert got.numel() == 2 * MEGABYTE, f"2 Mi elements were sent, {got.numel()} arrived"
        assert bool((got == 1 - t.rank).all()), "8 MB each way at once: the contents arrived changed"

    world(2, body)


def recv_gives_up_after_its_timeout(world: World) -> None:
    """TimeoutError, not before its time, and also for a timeout of zero."""

    async def body(t: Transport) -> None:
        if t.rank == 1:
            await next_message(t)
            return
        for seconds in (0.0, 0.02):
            began = t.now()
            try:
                m = await t.recv(timeout=seconds)
            except TimeoutError:
                waited = t.now() - began
                # a clock may tick more finely than the wait is timed
                assert waited >= 0.99 * seconds, f"recv(timeout={seconds}) gave up after {waited:.6f} s"
            else:
                raise AssertionError(f"nobody sent anything, but '{m.tag}' arrived")
        await t.send(1, Message("done"))

    world(2, body)


def drain_takes_what_is_there_and_never_waits(world: World) -> None:
    """Nothing from an empty network; later everything, in order."""

    async def body(t: Transport) -> None:
        if t.rank == 0:
            assert list(t.drain()) == [], "drain found a message before any was sent"
            await t.send(1, Message("go"))
            seqs: list[int] = []
            deadline = t.now() + PATIENCE_SECONDS
            while len(seqs) < 3 and t.now() < deadline:
                seqs += [m.seq for m in t.drain() if m.tag != LEFT]
                await t.sleep(0.005)
            assert seqs == [0, 1, 2], f"three messages were sent, drain gave {seqs}"
        else:
            await next_message(t)
            for seq in range(3):
                await t.send(0, Message("three", seq=seq))

    world(2, body)


def close_flushes_and_left_comes_last(world: World) -> None:
    """A node sends and closes at once; its peer, who looks late, misses nothing."""

    async def body(t: Transport) -> None:
        if t.rank == 0:
            for seq in range(8):
                await t.send(1, Message("last words", (torch.full((MEGABYTE // 4,), float(seq)),), seq=seq))
            await t.close()
            await t.close()  # harmless
        else:
            await t.sleep(0.1)
            got = [await any_message(t) for _ in range(9)]
            assert [m.tag for m in got] == ["last words"] * 8 + [LEFT], (
                f"node 0 sent 8 messages and closed; arrived: {[m.tag for m in got]}"
            )
            assert got[-1].src == 0, f"the notice that node 0 left says src={got[-1].src}"
            assert [float(m.body[-1]) for m in got[:8]] == list(range(8)), "the last words arrived changed"

    world(2, body)


def sending_to_a_peer_that_left_is_harmless(world: World) -> None:
    """It does nothing, and the way to the others stays open."""

    async def body(t: Transport) -> None:
        if t.rank == 0:
            await t.send(1, Message("hello"))
            await t.close()
        elif t.rank == 1:
            got = [await any_message(t) for _ in range(2)]
            assert [(m.tag, m.src) for m in got] == [("hello", 0), (LEFT, 0)], (
                f"node 0 said hello and closed; arrived: {[(m.tag, m.src) for m in got]}"
            )
            for elements in (1, MEGABYTE):
                await t.send(0, Message("too late", (torch.zeros(elements),)))
            await t.send(2, Message("still here"))
        else:
            m = await next_message(t)
            assert (m.tag, m.src) == ("still here", 1), f"'{m.tag}' arrived from node {m.src}"

    world(3, body)


def the_clock_never_goes_back(world: World) -> None:
    """And `sleep` lets at least its time pass on it."""

    async def body(t: Transport) -> None:
        times = [t.now()]
        for seconds in (0.0, 0.001, 0.02):
            began = t.now()
            await t.sleep(seconds)
            times += [began, t.now()]
            assert times[-1] - began >= 0.99 * seconds, f"sleep({seconds}) lasted {times[-1] - began:.6f} s"
        assert times == sorted(times), f"now() went back: {times}"

    world(1, body)


def a_node_can_send_to_itself(world: World) -> None:
    """A copy, as to any other node."""

    async def body(t: Transport) -> None:
        if t.rank == 1:
            await next_message(t)
            return
        x = torch.arange(3.0)
        await t.send(0, Message("self", (x,), seq=5))
        x.zero_()
        m = await next_message(t)
        assert (m.tag, m.src, m.seq) == ("self", 0, 5), f"sent to itself, arrived as {m!r}"
        assert m.body.tolist() == [0, 1, 2], f"sent [0, 1, 2] to itself, got {m.body.tolist()}"
        await t.send(1, Message("done"))

    world(2, body)


def all_reduce_gives_every_worker_the_sum(world: World) -> None:
    """Only where the transport offers it; lengths may change from call to call."""

    async def body(t: Transport) -> None:
        if not isinstance(t, AllReduces):
            return
        for elements in (1, 1000, 1000, 3):
            v = torch.arange(elements, dtype=torch.float64) * (t.rank + 1)
            sent = await t.all_reduce(v, PATIENCE_SECONDS)
            assert torch.equal(v, torch.arange(elements, dtype=torch.float64) * 6), (
                f"1 + 2 + 3 times i gave {v}"
            )
            assert sent > 0, "an all-reduce among three claims to have sent nothing"

    world(3, body)


def a_sum_begins_before_all_of_it_is_computed(world: World) -> None:
    """Parts in any order, some that are never started, and one reduction after the other."""
    parts = [slice(600, 1000), slice(0, 200), slice(200, 600), slice(200, 200)]

    async def body(t: Transport) -> None:
        if not isinstance(t, Overlaps):
            return
        for started in (0, 2, 4, 4):
            v = torch.zeros(1000, dtype=torch.float64)
            reduction = t.begin_all_reduce(v, parts, PATIENCE_SECONDS)
            for number, part in enumerate(parts):
                v[part] = torch.arange(part.start, part.stop) * (t.rank + 1)
                if number < started:
                    reduction.start(number)
                await t.sleep(0.002 * t.rank)
            sent = await reduction.finish()
            assert torch.equal(v, torch.arange(1000, dtype=torch.float64) * 6), f"1 + 2 + 3 times i gave {v}"
            assert sent == 2 * 2 * v.nbytes // 3, (
                f"a ring of three sends 4 / 3 of {v.nbytes} bytes, not {sent}"
            )

    world(3, body)


def different_parts_are_refused_and_harmless(world: World) -> None:
    """ValueError on all workers, and the next sum is as if nothing had been."""

    async def body(t: Transport) -> None:
        if not isinstance(t, Overlaps):
            return
        for number, middle in enumerate((4, 5 + t.rank, 5, 4)):
            v = torch.full((10,), t.rank + 1.0)
            try:
                reduction = t.begin_all_reduce(v, [slice(middle, 10), slice(middle)], PATIENCE_SECONDS)
            except ValueError:
                assert number == 1, f"parts of {middle} and {10 - middle} from all were refused"
                continue
            assert number != 1, "each worker brought other parts, and nobody was told"
            await reduction.finish()
            assert v.tolist() == [6.0] * 10, f"parts of {middle} and {10 - middle}: 1 + 2 + 3 gave {v}"

    world(3, body)


def who_leaves_during_a_sum_is_missed(world: World) -> None:
    """Its own start is not enough: the others get a PeerLost."""

    async def body(t: Transport) -> None:
        if not isinstance(t, Overlaps):
            return
        reduction = t.begin_all_reduce(torch.ones(1000), [slice(500), slice(500, 1000)], PATIENCE_SECONDS)
        reduction.start(0)
        if t.rank == 1:
            await t.close()
            return
        said = ""
        try:
            await reduction.finish()
        except PeerLost as lost:
            said = str(lost)
        assert "worker 1 " in said, f"worker 1 left during a sum, and the others heard: {said or 'nothing'}"

    world(3, body)


def who_never_uses_a_window_may_bring_nothing(world: World) -> None:
    """Only where there are windows, which a transport may have on some systems alone."""

    async def body(t: Transport) -> None:
        if isinstance(t, Windows):
            with contextlib.suppress(Unavailable):
                await t.open_window(0, torch.ones(0 if t.rank == 2 else 3))
                if t.rank == 1:
                    seen = [await t.accumulate(0, torch.ones(3)), await t.fetch(0, out := torch.empty(3))]
                    assert [*seen, *out] == [0, 1, 2, 2, 2], f"a window of 1s, 1 added once: {seen}, {out}"
                for peer in (1, 2) if t.rank == 0 else (0,):  # so that the owner stays for both
                    await t.send(peer, Message("done"))
                    await next_message(t)

    world(3, body)


CHECKS: tuple[Callable[[World], None], ...] = (
    messages_of_a_peer_keep_their_order,
    a_sender_may_overwrite_what_it_sent,
    all_header_fields_arrive,
    every_dtype_and_empty_parts_arrive,
    several_parts_stay_apart,
    large_messages_cross_without_deadlock,
    recv_gives_up_after_its_timeout,
    drain_takes_what_is_there_and_never_waits,
    close_flushes_and_left_comes_last,
    sending_to_a_peer_that_left_is_harmless,
    the_clock_never_goes_back,
    a_node_can_send_to_itself,
    all_reduce_gives_every_worker_the_sum,
    a_sum_begins_before_all_of_it_is_computed,
    different_parts_are_refused_and_harmless,
    who_leaves_during_a_sum_is_missed,
    who_never_uses_a_window_may_bring_nothing,
)


async def any_message(t: Transport) -> Message:
    """The next message, notices included."""
    try:
        return await t.recv(PATIENCE_SECONDS)
    except TimeoutError:
        raise AssertionError(
            f"node {t.rank} waited {PATIENCE_SECONDS:g} s for a message that was sent"
        ) from None


async def next_message(t: Transport) -> Message:
    """The next message that is not the notice of a peer whose body was done earlier."""
    while (m := await any_message(t)).tag == LEFT:
        pass
    return m
