"""A client pushes and pulls in two halves, and says what was refused."""

import pytest
import torch

from parts import nothing, play, vector
from shoal.core.errors import Diverged, PeerLost
from shoal.core.identity import SERVER
from shoal.engine import client
from shoal.engine.client import MOST_REFUSALS
from shoal.engine.protocol import Ack, Pull, Push, Refused, Reply


def serving(answer, requests):
    async def serve(p):
        for _ in range(requests):
            await p.channel.send(0, answer(await p.mailbox.next()))

    return serve


def test_a_push_carries_samples_rate_and_the_version_that_was_pulled():
    seen = []

    def answer(m):
        if isinstance(m, Pull):
            return Reply(parts=(vector(5.0, 6.0),), seq=m.seq, version=3)
        seen.append((type(m), m.count, m.rate, m.version, m.parts[0].tolist()))
        return Ack(seq=m.seq, version=4)

    async def work(p):
        p.progress.count_gradient(8)
        out = await p.client.pull(SERVER, torch.zeros(2, dtype=torch.float64))
        await (await p.client.start_push(SERVER, out, None, None))()
        return out.tolist(), p.progress.unmerged

    assert play(work, serving(answer, 2), servers=1)[0] == ([5.0, 6.0], 0.0)
    assert seen == [(Push, 8, 1.0, 3, [5.0, 6.0])]


def test_refusals_are_faults_until_there_are_too_many():
    reason = torch.tensor(list(b"element 0 is nan"), dtype=torch.uint8)

    async def work(p):
        for _ in range(MOST_REFUSALS - 1):
            await (await p.client.start_push(SERVER, vector(1.0, 1.0), 1.0, None))()
        with pytest.raises(Diverged, match="10 updates in a row were refused; the last: element 0 is nan"):
            await (await p.client.start_push(SERVER, vector(1.0, 1.0), 1.0, None))()
        return len(p.channel.meter.faults)

    def refuse(m):
        return Refused(parts=(reason,), seq=m.seq)

    assert play(work, serving(refuse, MOST_REFUSALS), servers=1)[0] == MOST_REFUSALS


def test_a_look_takes_no_number_from_what_is_trained_on():
    """A run that is resumed may look more often; its pushes must have the numbers that the server knows."""
    asked = []

    def answer(m):
        asked.append((m.tag, m.seq))
        return Ack(seq=m.seq) if isinstance(m, Push) else Reply(parts=(vector(5.0, 6.0),), seq=m.seq)

    async def work(p):
        for _ in range(2):
            assert (await p.client.look()).tolist() == [5.0, 6.0]
            await (await p.client.start_push(SERVER, vector(1.0, 1.0), 1.0, None))()
        return p.mailbox.state()

    assert play(work, serving(answer, 4), servers=1)[0] == {"1": 2}
    assert asked == [("look", -1), ("push", 1), ("look", -2), ("push", 2)]


# -- pulls from several shards ---------------------------------------------------------------------


def shard(*values, version=1, after=0.0, lent=None):
    """Answers pulls with its slice; `lent` is told, with the time, when it was read in place."""

    async def serve(p):
        m = await p.mailbox.next()
        while isinstance(m, Pull):
            await p.channel.transport.sleep(after)
            give_back = None if lent is None else lambda: lent(p.channel.now())
            await p.channel.send(
                0, Reply(parts=(vector(*values),), seq=m.seq, version=version, release=give_back)
            )
            m = await p.mailbox.next()

    return serve


async def pull_two(p):
    out = await p.client.pull(SERVER, vector(1.0, 2.0))
    return out.tolist(), p.client.state()


@pytest.mark.parametrize("lent", [None, lambda now: True], ids=["sent", "lent"])
def test_a_pull_that_loses_a_server_leaves_its_target_as_it_was(lent):
    async def work(p):
        out = vector(1.0, 2.0)
        with pytest.raises(PeerLost):
            await p.client.pull(SERVER, out)
        return out.tolist(), p.client.state()

    said = play(work, shard(5.0, lent=lent), nothing, servers=1, shards=2)
    assert said[0] == ([1.0, 2.0], {})  # nor has it seen the first shard's version


def test_a_read_through_windows_that_loses_a_server_does_so_too():
    async def fetch(owner, out):
        if owner == 2:
            raise PeerLost("it is gone")
        out.fill_(5.0)
        return 7

    async def work(p):
        p.one_sided.is_open, p.one_sided.fetch = True, fetch
        out = vector(1.0, 2.0)
        with pytest.raises(PeerLost):
            await p.client.pull(SERVER, out)
        return out.tolist(), p.client.state()

    assert play(work, nothing, nothing, servers=1, shards=2)[0] == ([1.0, 2.0], {})


def test_a_shard_s_memory_is_given_back_before_the_next_shard_has_answered():
    read = []
    first = shard(5.0, version=3, lent=lambda now: read.append(now) or True)
    said = play(pull_two, first, shard(6.0, version=4, after=10.0), servers=1, shards=2)
    assert said[0] == ([5.0, 6.0], {"1": 3, "2": 4})
    assert read == [0.5]  # after one round trip


def test_once_all_shards_have_answered_they_are_read_straight_into_the_target():
    out, at_release = vector(1.0, 2.0), []
    first = shard(5.0, after=10.0, lent=lambda now: at_release.append(out.tolist()) or True)
    second = shard(6.0, lent=lambda now: at_release.append(out.tolist()) or True)

    async def work(p):
        return (await p.client.pull(SERVER, out)).tolist()

    assert play(work, first, second, servers=1, shards=2)[0] == [5.0, 6.0]
    assert at_release == [[5.0, 2.0], [5.0, 6.0]]  # no copy in between


def test_the_rest_of_a_shard_is_read_straight_into_the_target_when_the_others_answer_meanwhile(monkeypatch):
    monkeypatch.setattr(client, "PIECE", 2)
    out, at_release, looks = torch.zeros(12, dtype=torch.float64), [], iter([False, False, True])
    first = shard(*[5.0] * 6, lent=lambda now: at_release.append(out.tolist()) or True)

    async def work(p):
        monkeypatch.setattr(p.mailbox, "has_answer", lambda question: next(looks))
        return (await p.client.pull(SERVER, out)).tolist()

    assert play(work, first, shard(*[6.0] * 6, after=10.0), servers=1, shards=2)[0] == [5.0] * 6 + [6.0] * 6
    assert at_release == [[0.0] * 4 + [5.0] * 2 + [0.0] * 6]  # four elements were set aside


@pytest.mark.parametrize("shards", [1, 2])
def test_a_vector_that_was_reclaimed_before_it_was_read_is_asked_for_again(shards):
    answers = [False, True]
    servers = [shard(5.0, lent=lambda now: answers.pop(0)), shard(6.0)][:shards]

    async def work(p):
        return (await p.client.pull(SERVER, torch.zeros(shards, dtype=torch.float64))).tolist()

    assert play(work, *servers, servers=1, shards=shards)[0] == [5.0, 6.0][:shards]
    assert not answers
