"""A client pushes and pulls in two halves, and says what was refused."""

import pytest
import torch

from parts import play, vector
from shoal.core.errors import Diverged
from shoal.core.identity import SERVER
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
