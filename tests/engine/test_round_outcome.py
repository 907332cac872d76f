"""The outcome of a round is the same after a journey in a message, or in the state of a worker."""

import torch

from parts import vector
from shoal.engine.round_outcome import RoundOutcome

OUTCOME = RoundOutcome(vector(1.5, -2.0), 192.0, (0, 2), (0, 2, 3))


def same(a, b):
    return torch.equal(a.average, b.average) and (a.total, a.contributors, a.dealt) == (
        b.total,
        b.contributors,
        b.dealt,
    )


def test_a_member_that_lacks_it_gets_all_of_it():
    m = OUTCOME.message(5, epoch=3)
    assert (m.tag, m.seq, m.version) == ("round result", 5, 3)
    assert same(RoundOutcome.of(m, like=vector()), OUTCOME)


def test_a_joiner_gets_it_with_its_state():
    assert same(RoundOutcome.of_state(vars(OUTCOME), like=vector()), OUTCOME)
    lists = vars(OUTCOME) | {"contributors": [0, 2], "dealt": [0, 2, 3]}  # as JSON brings them
    assert same(RoundOutcome.of_state(lists, like=vector()), OUTCOME)
