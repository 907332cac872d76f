"""A node that computes, or waits, answers its peers all the same."""

import queue
import threading
from contextlib import suppress

import pytest
import torch

from parts import play, vector
from shoal.codecs import CODECS
from shoal.core.errors import PeerLost
from shoal.core.identity import NodeIdentity
from shoal.core.replica import Gradient
from shoal.core.transport import Message
from shoal.engine.engine import Engine
from shoal.engine.gradients import Gradients
from shoal.launch.background import BackgroundThread
from shoal.launch.drive import drive
from shoal.sim import Simulation
from shoal.strategies import Local
from shoal.testing.problems import Slope, VectorReplica

# -- in virtual time -------------------------------------------------------------------------------


def noting(p, heard):
    """Handlers that note when which word comes."""

    async def note(m):
        heard.append((m.tag, m.count, p.channel.now()))

    return note


def say(*tags, after=0.0):
    """A node that says these words to worker 0, numbered, and goes."""

    async def body(p):
        await p.channel.transport.sleep(after)
        for k, tag in enumerate(tags):
            await p.channel.send(0, Message(tag, count=k))

    return body


async def computed(p, seconds, **handlers):
    """A gradient that takes so long, with these handlers of messages."""
    p.gradients.duration = lambda samples: seconds
    return await p.gradients.next(handlers)


def test_messages_are_dealt_with_while_a_gradient_is_computed():
    async def compute(p):
        heard = []
        g = await computed(p, 1.0, word=noting(p, heard))
        meter = p.channel.meter
        return heard, g.tolist(), p.channel.now(), meter.compute_seconds, meter.wait_seconds

    done = play(compute, say("word", "word"))
    assert done[0] == ([("word", 0, 0.25), ("word", 1, 0.25)], [1.0, 1.0], 1.0, 1.0, 0.0)


def test_what_had_come_before_is_dealt_with_too_and_what_comes_after_is_not():
    async def compute(p):
        heard = []
        await p.channel.transport.sleep(0.75)
        await computed(p, 1.0, word=noting(p, heard))
        last = await p.mailbox.find("word", 1)
        return heard, last.count, p.channel.now()

    async def speak(p):
        for k, pause in enumerate((0.25, 0.5, 2.25)):
            await p.channel.transport.sleep(pause)
            await p.channel.send(0, Message("word", count=k))

    assert play(compute, speak)[0] == ([("word", 0, 0.75), ("word", 1, 1.0)], 2, 3.25)


@pytest.mark.timeout(20)
def test_other_tags_are_left_for_later_and_time_passes_all_the_same():
    async def compute(p):
        heard = []
        await computed(p, 1.0, word=noting(p, heard))
        return heard, p.channel.now(), [m.tag for m in p.mailbox.poll("other")]

    assert play(compute, say("other", "word", "other"))[0] == ([("word", 1, 0.25)], 1.0, ["other", "other"])


def test_the_gradient_is_that_of_the_model_as_it_was():
    async def compute(p):
        public = p.replica.x.clone()

        async def add(m):
            public.add_(m.body)

        g = await computed(p, 1.0, add=add)
        return g.tolist(), p.replica.x.tolist(), public.tolist()

    async def speak(p):
        await p.channel.send(0, Message("add", (vector(3.0, 4.0),)))

    assert play(compute, speak)[0] == ([1.0, 1.0], [0.0, 0.0], [3.0, 4.0])


def test_a_handler_may_answer_and_the_other_waits_a_round_trip():
    async def compute(p):
        async def tell(m):
            await p.channel.send(m.src, Message("model", (p.replica.x,)))

        await computed(p, 10.0, ask=tell)
        return p.channel.now()

    async def ask(p):
        await p.channel.transport.sleep(0.5)
        await p.channel.send(0, Message("ask"))
        return (await p.mailbox.find("model", 0)).body.tolist(), p.channel.now()

    assert play(compute, ask) == {0: 10.0, 1: ([0.0, 0.0], 1.0)}


def test_two_who_wait_for_each_other_answer_meanwhile():
    async def both(p):
        async def tell(m):
            await p.channel.send(m.src, Message("answer", count=p.me.rank))

        await p.channel.send(1 - p.me.rank, Message("ask"))
        return (await p.mailbox.find("answer", 1 - p.me.rank, handlers={"ask": tell})).count

    assert play(both, both) == {0: 1, 1: 0}


def test_waiting_with_handlers_still_notices_that_the_other_has_gone():
    async def wait(p):
        heard = []
        with pytest.raises(PeerLost, match="worker 1 left before it sent 'answer'"):
            await p.mailbox.find("answer", 1, handlers={"word": noting(p, heard)})
        return heard

    assert play(wait, say("word", after=1.0))[0] == [("word", 0, 1.25)]


def test_a_gradient_that_takes_no_time_deals_with_what_is_there():
    async def compute(p):
        heard = []
        await p.mailbox.find("first", 1)
        await computed(p, 0.0, word=noting(p, heard))
        return heard

    assert play(compute, say("word", "first"))[0] == [("word", 0, 0.25)]


class StepsByItself(VectorReplica):
    """A replica that takes a step without handing its gradient over."""

    async def step(self, check):
        gradient = await self.gradient()
        check(gradient.loss)
        self.descend(gradient.vector)
        return gradient.count


@pytest.mark.parametrize("replica", [StepsByItself, VectorReplica])
def test_the_loss_of_a_local_step_is_checked_once(replica, monkeypatch):
    check, checked = Gradients._check, []

    def note(self, loss):
        checked.append(loss)
        check(self, loss)

    monkeypatch.setattr(Gradients, "_check", note)
    start = torch.tensor([1.0], dtype=torch.float64)
    run = Simulation(Local(period=2), lambda k: replica(Slope(), k, start.clone()), workers=1, steps=2)
    run.run()
    assert len(checked) == 2
    assert run.nodes[0].samples == 2


# -- in another thread -----------------------------------------------------------------------------


class Line:
    """One end of a network of two; messages are put into its queue by hand."""

    rank, size = 0, 2

    def __init__(self):
        self.arrived = queue.SimpleQueue()
        self.sent = []

    def now(self):
        return 0.0

    async def send(self, dst, m):
        self.sent.append((dst, m))

    async def recv(self, timeout=None):
        try:
            return self.arrived.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError from None

    def drain(self):
        with suppress(queue.Empty):
            while True:
                yield self.arrived.get_nowait()


class Held:
    """A replica whose gradient is not there before somebody says so."""

    lr = 1.0

    def __init__(self):
        self.x = torch.zeros(1)
        self.go_on = threading.Event()
        self.thread = None

    async def gradient(self):
        self.thread = threading.current_thread()
        assert self.go_on.wait(20), "nobody answered while the gradient was computed"
        return Gradient(torch.tensor([2.0]), 1, 0.0)


async def no_mean(node, v, weight):
    raise AssertionError


@pytest.fixture
def background():
    threads = BackgroundThread()
    yield threads
    threads.close()


def node_with(replica, **options):
    me = NodeIdentity(0, 2)
    return Engine(Line(), replica, me, mean=no_mean, codec=CODECS.make("none"), **options)


def test_with_a_background_messages_are_dealt_with_while_another_thread_computes(background):
    replica = Held()
    node = node_with(replica, background=background)

    async def release(m):
        assert threading.current_thread() is threading.main_thread()
        replica.go_on.set()

    node.transport.arrived.put(Message("word", src=1))
    assert drive(node.gradients.next({"word": release})).item() == 2.0
    assert replica.thread is not threading.main_thread()
    assert (node.samples, node.progress.clock) == (1, 1)


def test_the_thread_is_always_the_same(background):
    replica, seen = Held(), set()
    node = node_with(replica, background=background)
    replica.go_on.set()
    for _ in range(3):
        drive(node.gradients.next({}))
        seen.add(replica.thread)
    assert len(seen) == 1


def test_what_the_gradient_raises_is_raised_here(background):
    class Broken(Held):
        async def gradient(self):
            raise RuntimeError("the cat walked over the keyboard")

    with pytest.raises(RuntimeError, match="the cat"):
        drive(node_with(Broken(), background=background).gradients.next({}))


def test_without_handlers_the_gradient_is_computed_right_here(background):
    replica = Held()
    replica.go_on.set()
    node = node_with(replica, background=background)
    assert drive(node.gradients.next(None)).item() == 2.0
    assert replica.thread is threading.main_thread()


def test_without_a_background_messages_are_dealt_with_when_the_gradient_is_there():
    # as in a loop of one's own: its thread computes, and answers when optimizer.step() is called
    replica, heard = Held(), []
    replica.go_on.set()
    node = node_with(replica)

    async def note(m):
        heard.append(m.tag)

    node.transport.arrived.put(Message("word", src=1))
    node.transport.arrived.put(Message("other", src=1))
    drive(node.gradients.next({"word": note}))
    assert heard == ["word"]
    assert [m.tag for m in node.mailbox.poll("other")] == ["other"]
