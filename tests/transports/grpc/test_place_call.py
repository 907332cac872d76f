"""A process from elsewhere asks a hub for a place over gRPC, holds it, and gives it back."""

import json

import pytest
import torch.distributed as dist
from forwarder import Forwarder
from grpc_nodes import RUN, connect, drive, in_threads, notices, wait_until

from shoal.core.errors import Unavailable
from shoal.launch import place_call
from shoal.launch.join import Access
from shoal.launch.open_places import OpenPlaces
from shoal.launch.place_call import PlaceCall
from shoal.transports.grpc import Security

pytestmark = pytest.mark.usefixtures("grpc_core")

TOKEN = "t" * 32


@pytest.fixture
def token(tmp_path):
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    return Access(token_file=str(file))


@pytest.fixture
def run(tmp_path):
    """A hub of rank 2, worker 0, and a place of rank 1 that is open; what the hub's launcher is told."""
    told, store = [], dist.HashStore()
    places = OpenPlaces(
        [1], tmp_path, lambda: {"run_id": RUN}, lambda rank, event: told.append((rank, event))
    )
    options = {"hubs": (2,), "security": Security(tokens=(TOKEN,)), "late": (1,)}

    def node(k):
        return connect(2 * k, 3, store, **options, **({"places": places} if k else {}))

    worker, hub = in_threads(2, node)
    yield hub, told, lambda **more: connect(1, 3, store, **options, **more)
    for transport in (worker, hub):
        drive(transport.close())


def events(told):
    return [(rank, event["event"]) for rank, event in told]


def test_a_place_is_held_while_the_call_lasts(run, token):
    hub, told, _ = run
    call = PlaceCall(hub.address, token)
    assert call.granted == {"run_id": RUN, "rank": 1, "incarnation": 1, "secret": call.granted["secret"]}
    with pytest.raises(Unavailable, match="all its places are taken"):
        PlaceCall(hub.address, token)
    call.tell({"event": "progress", "step": 3})
    call.close()
    wait_until(lambda: events(told) == [(1, "came"), (1, "progress"), (1, "gone")])
    again = PlaceCall(hub.address, token)
    assert again.granted["incarnation"] == 2
    again.close()


def test_nobody_waits_for_a_late_node_and_all_hear_when_it_comes(run):
    hub, _, join = run
    late = join(incarnation=1)
    assert notices(hub, 1) == [("joined", 1, 1)]
    drive(late.close())
    assert notices(hub, 1) == [("left", 1, 0)]


def test_a_wrong_token_and_none_are_refused(run, tmp_path, monkeypatch):
    hub, told, _ = run
    monkeypatch.delenv("SHOAL_TOKEN", raising=False)
    with pytest.raises(ValueError, match="joined with its token"):
        PlaceCall(hub.address, Access())
    monkeypatch.setenv("SHOAL_TOKEN", "w" * 32)
    with pytest.raises(Unavailable, match="does not know this token"):
        PlaceCall(hub.address, Access())
    assert told == []


def test_another_host_is_called_with_tls_alone(token):
    with pytest.raises(ValueError, match=r"10.0.0.1 is another host: give --authority"):
        PlaceCall("10.0.0.1:7000", token)


def test_where_nobody_listens_the_address_may_be_wrong(token):
    with pytest.raises(Unavailable, match=r"127.0.0.1:1: nobody answers there"):
        PlaceCall("127.0.0.1:1", token)


def test_a_run_without_open_places_says_so(token):
    store = dist.HashStore()
    nodes = in_threads(2, lambda k: connect(k, 2, store, security=Security(tokens=(TOKEN,))))
    with pytest.raises(Unavailable, match="this run has no open places"):
        PlaceCall(nodes[0].address, token)
    for node in nodes:
        drive(node.close())


def test_what_is_no_event_ends_the_call(run, token):
    hub, told, _ = run
    call = PlaceCall(hub.address, token)
    call.tell({"event": "kill everybody"})
    wait_until(lambda: call.lost_for > 0)
    call.close()
    assert "kill" not in json.dumps(told)


@pytest.mark.slow
def test_a_call_whose_connection_goes_dead_is_made_again_on_a_new_one(run, token, monkeypatch):
    hub, told, _ = run
    monkeypatch.setattr(place_call, "FAILURE_SECONDS", 0.4)
    monkeypatch.setattr(place_call, "AGAIN_SECONDS", 0.05)
    between = Forwarder(hub.address)
    call = PlaceCall(between.address, token)
    between.go_dead()
    wait_until(lambda: events(told).count((1, "came")) == 2)  # on a new connection, with its own secret
    wait_until(lambda: call.lost_for == 0)
    call.tell({"event": "progress", "step": 7})
    wait_until(lambda: events(told)[-1] == (1, "progress"))
    with pytest.raises(Unavailable, match="all its places are taken"):
        PlaceCall(hub.address, token)
    call.close()
    between.close()
    wait_until(lambda: events(told)[-1] == (1, "gone"))


def test_a_call_that_is_made_again_after_the_end_ends_at_once(run, token):
    hub, told, _ = run
    call = PlaceCall(hub.address, token)
    call._closing.set()  # after which `close` waits for the call
    call._redial()
    wait_until(lambda: events(told).count((1, "came")) == 2 and events(told)[-1] == (1, "gone"))
    call.close()
