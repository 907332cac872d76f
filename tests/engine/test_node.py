"""The verbs of a node, one by one, in virtual time."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from shoal.codecs import FP16
from shoal.core.codec import Codec, Identity, expect
from shoal.core.errors import Diverged, PeerLost
from shoal.core.identity import SERVER
from shoal.core.replica import Gradient
from shoal.core.transport import Message
from shoal.engine.ledger import WINDOW
from shoal.sim import Compute, Network, Simulation
from shoal.strategies import BMUF, EAMSGD, EASGD, DiLoCo, Local, Single, Sync
from shoal.testing.problems import Problem, Slope, VectorReplica
from shoal.vocabulary.strategy import Strategy

FLAT = Slope(gradients=(0.0,))


@dataclass(frozen=True)
class Script(Strategy):
    """Each worker plays its own part."""

    parts: tuple[Callable[..., Any], ...]
    host: Callable[..., Any] | None = None

    @property
    def servers(self):
        return 0 if self.host is None else 1

    async def worker(self, w):
        await self.parts[w.rank](w)

    async def server(self, s):
        await self.host(s)


def play(*parts, host=None, start=(0.0,), problem=FLAT, steps=1, **options):
    """Run one coroutine function for each worker and return what they return, by rank."""
    said = {}

    def noting(part):
        async def run(node):
            said[node.rank] = await part(node)

        return run

    begin = torch.tensor(start, dtype=torch.float64)
    strategy = Script(tuple(noting(p) for p in parts), host and noting(host))
    simulation = Simulation(
        strategy, lambda rank: problem.replica(rank, begin), workers=len(parts), steps=steps, **options
    )
    simulation.run()
    return said


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


def say(*tags, to=0, after=0.0):
    """A part that says these words, numbered, and goes."""

    async def part(w):
        await w.engine.transport.sleep(after)
        for k, tag in enumerate(tags):
            await w.send(to, Message(tag, count=k))

    return part


# -- recv and poll ---------------------------------------------------------------------------------


def test_recv_finds_its_tag_behind_others_and_loses_none():
    async def listen(w):
        got = [await w.recv("c", src=1), await w.recv("a", src=1), await w.recv("b", src=1)]
        return [(m.tag, m.count) for m in got]

    assert play(listen, say("a", "b", "c"))[0] == [("c", 2), ("a", 0), ("b", 1)]


def test_recv_finds_its_sender_behind_others():
    async def listen(w):
        late = await w.recv("word", src=2)
        early = await w.recv("word", src=1)
        return late.src, early.src, w.engine.channel.now()

    assert play(listen, say("word"), say("word", after=3.0))[0] == (2, 1, 3.0)


def test_recv_without_a_sender_takes_from_anyone():
    async def listen(w):
        return [(await w.recv("word")).src for _ in range(2)]

    assert play(listen, say("word", after=2.0), say("word", after=1.0))[0] == [2, 1]


@pytest.mark.timeout(10)
def test_recv_without_a_sender_finds_its_tag_behind_others():
    async def listen(w):
        first = await w.recv("b")
        return first.tag, (await w.recv("a")).tag

    assert play(listen, say("a", "b", after=1.0))[0] == ("b", "a")


def test_messages_of_one_tag_come_in_the_order_they_were_sent():
    async def listen(w):
        await w.recv("end", src=1)
        return [(await w.recv("word", src=1)).count for _ in range(3)]

    assert play(listen, say("word", "word", "word", "end"))[0] == [0, 1, 2]


def test_what_a_peer_said_before_it_left_is_still_heard():
    async def listen(w):
        await w.recv("late", src=2)
        said = (await w.recv("word", src=1)).tag
        with pytest.raises(PeerLost, match="worker 1 left before it sent 'more' to worker 0") as error:
            await w.recv("more", src=1)
        return said, "step 0" in str(error.value)

    assert play(listen, say("word"), say("late", after=9.0))[0] == ("word", True)


def test_poll_never_waits_and_takes_only_its_tag():
    async def listen(w):
        early = [m.tag for m in w.poll("word")]
        await w.engine.transport.sleep(1.0)
        then = [(m.tag, m.count) for m in w.poll("word")]
        again = list(w.poll("word"))
        other = (await w.recv("other", src=1)).count
        return early, then, again, other, w.engine.channel.now()

    heard = play(listen, say("word", "other", "word", after=0.5))[0]
    assert heard == ([], [("word", 0), ("word", 2)], [], 1, 1.0)


def test_poll_gives_what_an_earlier_recv_put_aside():
    async def listen(w):
        await w.recv("other", src=1)
        return [m.count for m in w.poll("word")]

    assert play(listen, say("word", "word", "other"))[0] == [0, 1]


def test_a_sender_may_change_its_tensor_afterwards():
    async def speak(w):
        v = vector(1.0, 2.0)
        await w.send(0, Message("v", (v,)))
        v.zero_()

    async def listen(w):
        return (await w.recv("v", src=1)).body.tolist()

    assert play(listen, speak, network=Network(latency=1.0))[0] == [1.0, 2.0]


# -- mean ------------------------------------------------------------------------------------------


def averaging(*values, weights=None):
    """What every worker gets for the mean of these vectors."""

    def part(k):
        async def run(w):
            got = await w.mean(vector(*values[k]), weight=None if weights is None else weights[k])
            return got.tolist(), w.engine.merged

        return run

    return play(*(part(k) for k in range(len(values))), start=[0.0] * len(values[0]))


def test_mean_weighs_as_it_is_told():
    got = averaging((0.0, 8.0), (4.0, 0.0), weights=(1, 3))
    assert got[0][0] == got[1][0] == [(1 * 0 + 3 * 4) / 4, (1 * 8 + 3 * 0) / 4]


def test_mean_of_weights_that_are_all_zero_is_zero_and_not_nan():
    got = averaging((5.0, 8.0), (4.0, 1.0), weights=(0, 0))
    assert got[0][0] == got[1][0] == [0.0, 0.0]


def test_without_samples_all_weigh_alike():
    assert averaging((5.0,), (4.0,)) == {0: ([4.5], 0.0), 1: ([4.5], 0.0)}


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [1, 2, 4, 7])
def test_mean_of_vectors_shorter_or_longer_than_the_workers_are_many(workers, length):
    values = [tuple(float((k + 1) * (i + 1)) for i in range(length)) for k in range(workers)]
    got = averaging(*values, weights=[1] * workers)
    middle = [sum(v[i] for v in values) / workers for i in range(length)]
    assert all(got[k][0] == middle for k in range(workers))


def test_mean_weighs_by_the_samples_since_the_last_mean():
    def part(gradients):
        async def run(w):
            for _ in range(gradients):
                await w.grad()
            first = (await w.mean(vector(8.0 * w.rank))).item()
            await w.grad()
            second = (await w.mean(vector(8.0 * w.rank))).item()
            return first, second, w.engine.merged

        return run

    got = play(part(1), part(3), problem=FLAT)
    assert got[0] == got[1] == (8 * 3 / 4, 8 * 1 / 2, 6.0)


def test_mean_takes_a_gradient_that_is_not_there_yet():
    async def run(w):
        return (await w.mean(w.grad())).item()

    assert play(run, run, problem=Slope(gradients=(1.0, 3.0)))[0] == 2.0


def test_mean_leaves_the_vector_it_was_given_alone():
    async def run(w):
        v = vector(1.0 + w.rank, 5.0)
        got = await w.mean(v, weight=1)
        got.zero_()
        return v.tolist()

    assert play(run, run, start=[0.0, 0.0]) == {0: [1.0, 5.0], 1: [2.0, 5.0]}


# -- local work ------------------------------------------------------------------------------------


def test_steps_count_from_zero_and_stop_where_told():
    async def run(w):
        return [(t, w.t) async for t in w.steps()], w.t, w.engine.meter.steps

    assert play(run, steps=3)[0] == ([(0, 0), (1, 1), (2, 2)], 3, 3)


@pytest.mark.parametrize(
    ("period", "warmup", "steps", "ends"),
    [
        (3, 0, 9, [2, 5, 8]),
        (3, 0, 8, [2, 5, 7]),
        (3, 2, 9, [0, 1, 4, 7, 8]),
        (1, 0, 3, [0, 1, 2]),
        (10, 0, 3, [2]),
        (2, 9, 3, [0, 1, 2]),
        (4, 0, 0, []),
    ],
)
def test_blocks_end_where_they_should(period, warmup, steps, ends):
    async def run(w):
        return [t async for t in w.blocks(period, warmup)]

    assert play(run, steps=steps)[0] == ends


def test_assigning_to_x_changes_the_model_in_place():
    async def run(w):
        model = w.engine.replica.x
        w.x = vector(3.0)
        w.x += 1
        w.x -= vector(0.5)
        return model is w.x, model.item()

    assert play(run)[0] == (True, 3.5)


def test_keep_copies_its_start_once_and_then_returns_the_same_tensor():
    async def run(w):
        start = vector(1.0)
        kept = w.keep("momentum", start)
        kept += 1
        return start.item(), w.keep("momentum", start) is kept, w.keep("momentum", start).item()

    assert play(run)[0] == (1.0, True, 2.0)


def test_a_loss_that_is_not_finite_stops_the_run_and_says_where():
    class Explodes(VectorReplica):
        async def gradient(self):
            await super().gradient()
            return Gradient(self.x, 1, float("nan") if self._step == 3 and self._rank == 1 else 0.0)

    start = vector(0.0)
    run = Simulation(Sync(), lambda k: Explodes(Slope(lr=0.25), k, start.clone()), workers=2, steps=5)
    with pytest.raises(Diverged, match="worker 1: the loss became nan at step 2") as error:
        run.run()
    assert "0.25" in str(error.value)


def test_time_passes_in_a_gradient_and_is_booked_as_work():
    async def run(w):
        await w.grad()
        return w.engine.channel.now(), w.engine.meter.compute_seconds, w.engine.samples

    assert play(run, compute=Compute(mean=2.0), problem=Slope(counts=(3,)))[0] == (2.0, 2.0, 3)


def test_every_node_draws_from_a_stream_of_its_own():
    async def run(w):
        return torch.rand(3, generator=w.rng).tolist()

    got = play(run, run, seed=1)
    assert got[0] != got[1]
    assert got == play(run, run, seed=1)
    assert got != play(run, run, seed=2)


# -- with a server ---------------------------------------------------------------------------------


async def serve(s):
    async for m in s.inbox():
        if m.tag == "pull":
            await s.reply(m, s.x)
        elif m.tag == "push":
            s.x += m.body
            s.advance(m.count)
    return s.x.tolist(), dict(s.engine.meter.staleness), s.version


def test_a_pull_is_exact_and_a_push_goes_through_the_codec():
    third = 1 / 3

    async def run(w):
        before = await w.pull(SERVER)
        await w.push(SERVER, vector(third))
        return before.item(), (await w.pull(SERVER)).item()

    rounded = torch.tensor(third).half().double().item()
    got = play(run, host=serve, start=[third], codec=FP16())
    assert got[0] == (third, third + rounded)
    assert rounded != third


def test_a_pull_takes_one_round_trip_and_sees_the_model_of_the_moment_it_was_answered():
    async def reader(w):
        x = (await w.pull(SERVER)).item()
        return x, w.engine.channel.now()

    async def writer(w):
        await w.push(SERVER, vector(5.0))

    network = Network(latency=1.0)
    assert play(reader, writer, host=serve, network=network)[0] == (0.0, 2.0)
    assert play(writer, reader, host=serve, network=network)[1] == (5.0, 2.0)


def test_a_server_goes_on_until_every_worker_has_left_and_counts_what_it_was_told():
    async def run(w):
        await w.pull(SERVER)
        await w.engine.transport.sleep(1.0 + w.rank)
        await w.push(SERVER, vector(1.0))

    assert play(run, run, run, host=serve)[3] == ([3.0], {0: 1, 1: 1, 2: 1}, 3)


def test_a_server_that_goes_is_named():
    async def gone(s):
        return None

    async def run(w):
        await w.engine.transport.sleep(1.0)
        with pytest.raises(PeerLost, match="the server left before it sent the answer to 'pull' to worker 0"):
            await w.pull(SERVER)
        return w.x.item()

    assert play(run, host=gone)[0] == 0.0


def test_a_server_has_neither_gradient_nor_optimizer():
    async def host(s):
        with pytest.raises(TypeError, match="a server computes no gradient"):
            await s.grad()
        with pytest.raises(TypeError, match="a server steps with a worker's learning rate"):
            s.descend(s.x)
        return "refused"

    async def run(w):
        return None

    assert play(run, host=host)[1] == "refused"


# -- checkpoints -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Whole(Codec):
    """Rounds to whole eighths and adds what it left out to the next vector: a codec with a memory."""

    def init(self, like, seed=0):
        return {"left": torch.zeros_like(like)}

    def encode(self, v, state):
        wanted = v + state["left"]
        sent = (wanted * 8).round() / 8
        state["left"].copy_(wanted - sent)  # in place, as an author may
        return (sent,), state

    def decode(self, payload, out):
        (v,) = expect(payload, (out.dtype, out.numel()))
        return v


class Drawn(Problem):
    """Gradients with no short binary form, another one for each worker and step."""

    def gradient(self, rank, step, x):
        return (x - 0.3 * rank) / 3 + torch.sin(x * (rank + 1) + step) / 7


WITHOUT_SERVER = [
    Sync(),
    Local(period=3, reset_momentum=False),
    BMUF(period=3, reset_momentum=False, warmup=1),
    DiLoCo(period=3),
    EASGD(period=3, synchronous=True),
    EAMSGD(period=3, synchronous=True),
]


def built(strategy, codec, steps, workers=3, **options):
    problem, start = Drawn(lr=0.1, momentum=0.9, counts=(1, 2)), vector(0.9, -0.4, 0.2, 0.7)
    return Simulation(
        strategy, lambda k: problem.replica(k, start), workers=workers, steps=steps, codec=codec, **options
    )


def assert_equal_state(here, there):
    assert torch.equal(here.x, there.x)
    mine, other = here.state(), there.state()
    for part in ("progress", "client", "mailbox"):
        assert mine[part] == other[part]
    for name in mine["variables"]:
        assert torch.equal(mine["variables"][name], other["variables"][name]), name
    for key, state in mine["coding"].items():
        assert all(torch.equal(state[name], other["coding"][key][name]) for name in state), key


@pytest.mark.parametrize("codec", [Identity(), FP16(), Whole()], ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("strategy", [Single(), *WITHOUT_SERVER], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("at", [3, 5])
def test_a_run_resumed_from_its_state_is_the_run_that_was_not_interrupted(strategy, codec, at):
    states, workers = {}, 1 if isinstance(strategy, Single) else 3

    async def copy_state(node):
        if node.t == at:
            states[node.rank] = deepcopy(node.state())

    whole = built(strategy, codec, 11, workers, between_steps=copy_state).run()
    resumed = built(strategy, codec, 11, workers)
    for node in resumed.nodes:
        node.load(deepcopy(states[node.rank]))
    resumed.run()
    for here, there in zip(whole.nodes, resumed.nodes, strict=True):
        assert_equal_state(here, there)
    started_over = built(strategy, codec, 11 - at, workers).run()
    assert not torch.equal(started_over.worker(0).x, whole.worker(0).x)


@pytest.mark.parametrize("strategy", WITHOUT_SERVER[:4], ids=lambda s: type(s).__name__)
def test_a_run_that_ended_with_a_whole_block_can_be_made_longer(strategy):
    # elastic averaging cannot: at its end every worker takes over the centre
    steps = 7 if isinstance(strategy, BMUF) else 6
    first, longer = built(strategy, FP16(), steps).run(), built(strategy, FP16(), 2 * steps)
    for node, other in zip(longer.nodes, first.nodes, strict=True):
        node.load(deepcopy(other.state()))
    longer.run()
    whole = built(strategy, FP16(), 2 * steps).run()
    for here, there in zip(whole.nodes, longer.nodes, strict=True):
        assert_equal_state(here, there)


def test_what_was_kept_is_given_back_after_a_restart():
    first, second = built(Local(), Identity(), 2), built(Local(), Identity(), 2)
    first.worker(0).variables.keep("average", vector(1.0, 2.0, 3.0, 4.0))
    second.worker(0).load(first.worker(0).state())
    assert second.worker(0).variables.keep("average", vector(0.0, 0.0, 0.0, 0.0)).tolist() == [1, 2, 3, 4]


def test_a_random_stream_goes_on_where_it_was():
    node, other = (built(Sync(), Identity(), 2).worker(0) for _ in range(2))
    torch.rand(7, generator=node.rng)
    other.load(deepcopy(node.state()))
    assert torch.equal(torch.rand(3, generator=node.rng), torch.rand(3, generator=other.rng))


def test_a_loaded_state_belongs_to_its_reader_and_is_left_as_it_was():
    states = {}

    async def copy_state(node):
        if node.t == 4:
            states[node.rank] = deepcopy(node.state())

    built(Sync(), Whole(), 8, between_steps=copy_state).run()
    before = deepcopy(states)
    resumed = built(Sync(), Whole(), 8)
    for node in resumed.nodes:
        node.load(states[node.rank])
    resumed.run()
    for rank, state in states.items():
        assert torch.equal(state["x"], before[rank]["x"])
        for key, memory in state["coding"].items():
            assert torch.equal(memory["left"], before[rank]["coding"][key]["left"]), key


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_averaged_in_single_precision(dtype):
    """1,001 samples of 40 and 1 of 20: neither the count nor the sum fits a half."""
    problem = Slope(gradients=[40.0, 20.0], counts=[1001, 1])
    run = Simulation(
        Sync(), lambda rank: problem.replica(rank, torch.zeros(3, dtype=dtype)), workers=2, steps=1
    ).run()
    expected = torch.tensor(-(1001 * 40 + 20) / 1002).to(dtype)
    assert all((run.worker(rank).x == expected).all() for rank in range(2))


# -- what a careless caller must not lose -----------------------------------------------------------


def test_what_a_poll_did_not_come_to_is_still_there():
    async def sender(w):
        for number in range(3):
            await w.send(1, Message("word", seq=number))

    async def picky(w):
        await w.engine.transport.sleep(1.0)  # by then all have arrived
        first = next(w.poll("word"))
        return [first.seq, *(m.seq for m in w.poll("word"))]

    assert play(sender, picky)[1] == [0, 1, 2]


def test_more_pushes_than_a_server_remembers_are_not_under_way_at_once():
    most = 0

    async def eager(w):
        nonlocal most
        for _ in range(3 * WINDOW):
            last = await w.begin(w.push(SERVER, torch.ones(1, dtype=torch.float64), count=1))
            most = max(most, len(w.engine.mailbox._open))
        await last

    async def host(s):
        async for m in s.inbox():
            if m.tag == "push":
                s.x += m.body
        return s.x.item()

    assert play(eager, host=host)[1] == 3 * WINDOW
    assert most == WINDOW


def test_what_was_answered_is_not_asked_again():
    async def worker(w):
        sent = await w.begin(w.push(SERVER, torch.ones(1, dtype=torch.float64), count=1))
        await w.engine.transport.sleep(1.0)  # its answer lies there
        w.engine.mailbox.has_arrived()
        await w.engine.mailbox._ask_again(w.size)
        await sent
        return w.engine.meter.messages_sent

    async def host(s):
        return [m.tag async for m in s.inbox()].count("push")

    assert play(worker, host=host) == {0: 1, 1: 1}


# -- averages under way -----------------------------------------------------------------------------


def test_an_average_that_was_started_travels_while_the_worker_computes():
    async def part(w):
        await w.engine.transport.sleep(1.0 - w.rank)  # worker 0 comes a second late
        coming = await w.begin(w.mean(torch.tensor([4.0 * w.rank], dtype=torch.float64), weight=1 + w.rank))
        async for _ in w.steps():
            await w.grad()
        began = w.engine.channel.now()
        return (await coming).item(), w.engine.channel.now() - began

    network = Network(latency=0.25)
    said = play(part, part, steps=4, network=network, compute=Compute(1.0))
    assert {average for average, _ in said.values()} == {(0 * 1 + 4 * 2) / 3}
    assert max(seconds for _, seconds in said.values()) == 0.0


def test_averages_under_way_are_told_apart_in_whatever_order_they_are_taken():
    async def part(w):
        first = await w.begin(w.mean(torch.tensor([1.0 + w.rank], dtype=torch.float64), weight=1))
        second = await w.begin(w.mean(torch.tensor([10.0 + w.rank], dtype=torch.float64), weight=1))
        between = await w.mean(torch.tensor([100.0 + w.rank], dtype=torch.float64), weight=1)
        return [(await second).item(), between.item(), (await first).item()]

    assert play(part, part)[0] == play(part, part)[1] == [10.5, 100.5, 1.5]


# -- rounds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("takes_late", [False, True])
def test_what_nobody_took_in_a_round_that_is_over_is_dropped_unless_it_is_taken_late(takes_late):
    async def listen(w):
        kept = []
        async for _ in w.rounds(takes_late=takes_late):
            await w.grad()
            w.here([1])
            kept.append(len(w.engine.rounds._held))
        return kept

    async def speak(w):
        async for t in w.rounds():
            await w.grad()
            await w.give(t, [0], vector(float(t)))

    said = play(listen, speak, steps=6, compute=Compute(1.0, slow={0: 1.5}))[0]
    assert (max(said) <= 3, said[-1] >= 5) == (not takes_late, takes_late)


def test_samples_count_as_merged_after_each_round():
    async def work(w):
        counts = []
        async for _ in w.rounds():
            await w.grad()
            counts.append(w.engine.merged)
        return counts, w.engine.merged

    assert play(work, work, steps=3, compute=Compute(1.0))[0] == ([0.0, 2.0, 4.0], 6.0)
