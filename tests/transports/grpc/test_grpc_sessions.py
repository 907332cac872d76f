"""What a node is told of its peers over gRPC: presence, loss, and returns that it did not see."""

from shoal.core.transport import JOINED, LOST
from shoal.transports.grpc.sessions import PeerTracker


def told(*events):
    """The notices after these calls of a tracker: tag, peer, incarnation; and the incarnations it knows."""
    heard, known = [], {}
    tracker = PeerTracker(lambda m: heard.append((m.tag, m.src, m.incarnation)), {}, known)
    for name, *args in events:
        getattr(tracker, name)(*args)
    return heard, known


def test_the_first_arrival_is_not_announced_whatever_its_incarnation():
    assert told(("joined", 1, 3, 7)) == ([], {1: 3})


def test_a_return_is_announced_after_the_loss():
    heard, known = told(("joined", 1, 0, 1), ("lost", 1, "killed"), ("joined", 1, 1, 2))
    assert heard == [(LOST, 1, 0), (JOINED, 1, 1)]
    assert known == {1: 1}


def test_a_peer_that_was_restarted_while_this_node_was_cut_off_is_announced():
    heard, known = told(("joined", 1, 0, 1), ("cut_off", 1, "the hub is lost"), ("joined", 1, 1, 1))
    assert heard == [(LOST, 1, 0), (JOINED, 1, 1)]
    assert known == {1: 1}


def test_a_peer_that_is_the_same_after_the_hub_was_away_is_not():
    heard, _ = told(("joined", 1, 0, 1), ("cut_off", 1, "the hub is lost"), ("joined", 1, 0, 2))
    assert heard == []
