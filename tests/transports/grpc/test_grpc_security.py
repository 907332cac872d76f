"""gRPC: strangers, wrong papers and nonsense are refused at once, and the hub lives."""

from __future__ import annotations

import contextlib
import logging
import pickle
import random
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
import torch.distributed as dist
from grpc_nodes import (
    LIMIT,
    PATIENCE,
    RUN,
    WAYS,
    Caller,
    Puppet,
    connect,
    hub_and_caller,
    is_alive,
    message,
    nodes,
    notices,
    receive,
    script,
    wait_until,
)
from harness import drive, in_threads, is_shared

from shoal.core.errors import PeerLost
from shoal.core.transport import HEADER_BYTES, JOINED, LOST, Message
from shoal.transports import frames
from shoal.transports.grpc import Security
from shoal.transports.grpc.control_pb2 import PollRequest
from shoal.transports.grpc.hub_protocol import (
    CALL_BYTES,
    FETCH,
    JOIN,
    POLL,
    POST,
    PUSH,
    Envelope,
    open_records,
)
from shoal.transports.grpc.server import MOST_CALLS, MOST_LOGGED, MOST_LOGGED_OF_ONE, _RefusalLog
from shoal.transports.shared_memory import memory

pytestmark = pytest.mark.usefixtures("grpc_core")

TOKEN, OTHER_TOKEN = "t" * 64, "o" * 64


HUGE = frames.encode(Message("x"), (torch.empty(1).expand(1 << 40),), 1)
"""A header that announces four terabytes."""


@contextlib.contextmanager
def waiting_hub(**options: Any) -> Iterator[tuple[Any, Callable[[], Any]]]:
    """The store of a hub that waits for node 1, and how to get that hub once node 1 has come."""
    store = dist.HashStore()
    hub: list[Any] = []
    thread = threading.Thread(target=lambda: hub.append(connect(0, 2, store, **options)))
    thread.start()

    def joined() -> Any:
        thread.join(PATIENCE)
        return hub[0]

    try:
        yield store, joined
    finally:
        thread.join(PATIENCE)
        if hub:
            drive(hub[0].close())


# Where a hub may listen


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.168.0.1", "example.org"])
def test_a_hub_refuses_other_hosts_without_security(host: str) -> None:
    bare = host.strip("[]")
    with pytest.raises(ValueError, match=r"^refusing to listen on .* \(or insecure=True\)$") as refusal:
        connect(0, 1, dist.HashStore(), listen=f"{host}:0")
    assert f"on {bare} without tls=…, token_file=… (or" in str(refusal.value)
    with pytest.raises(ValueError, match=f"^refusing to listen on {bare} without tls=… "):
        connect(0, 1, dist.HashStore(), listen=f"{host}:0", security=Security(tokens=(TOKEN,)))


def test_a_node_refuses_to_show_itself_to_other_hosts_in_the_clear() -> None:
    store = dist.HashStore()
    store.set("shoal/grpc/0", "192.168.0.1:50051")
    with pytest.raises(PeerLost, match=r"refusing to call 192.168.0.1 without tls=… \(or insecure=True\)"):
        connect(1, 2, store)


def test_insecure_opens_a_hub_to_other_hosts() -> None:
    t = connect(0, 1, dist.HashStore(), listen="0.0.0.0:0", security=Security(insecure=True))
    drive(t.close())


def test_an_address_without_a_port_or_taken_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'127.0.0.1' is not host:port"):
        connect(0, 1, dist.HashStore(), listen="127.0.0.1")
    with (
        nodes(1) as ((t,), _),
        pytest.raises(OSError, match=f"node 0 cannot listen on {t.address}"),
    ):
        connect(0, 1, dist.HashStore(), listen=t.address)


@pytest.mark.slow
def test_who_says_nothing_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.transports.grpc.hub_protocol.HANDSHAKE_SECONDS", 0.3)
    with nodes(1) as ((t,), _):
        host, port = t.address.split(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE) as silent:
            while silent.recv(1024):
                pass


# Tokens


@pytest.mark.parametrize(
    ("mode", "text", "complaint"),
    [
        (0o640, TOKEN, r"open to others \(mode 0640\): chmod 600"),
        (0o600, "", "is empty"),
        (0o600, "short", "at least 32 printable"),
        (0o600, f"{TOKEN}\n{OTHER_TOKEN}\n{TOKEN}", "3 tokens, at most 2"),
    ],
)
def test_a_bad_token_file_is_refused(mode: int, text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.touch(mode)
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ValueError, match=complaint):
        Security(token_file=path).secrets()


def test_a_token_comes_from_a_private_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(f"{TOKEN}\n{OTHER_TOKEN}\n")
    assert Security(token_file=path).secrets() == (TOKEN, OTHER_TOKEN)
    assert Security().secrets() == ()
    monkeypatch.setenv("SHOAL_TOKEN", TOKEN)
    assert Security().secrets() == (TOKEN,)
    monkeypatch.delenv("SHOAL_TOKEN")


def test_a_token_is_never_shown() -> None:
    assert TOKEN not in repr(Security(tokens=(TOKEN,)))


@pytest.mark.parametrize("shown", [(), (OTHER_TOKEN,)], ids=["none", "wrong"])
def test_a_wrong_token_is_refused_at_once_and_the_hub_lives(
    shown: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    began = time.monotonic()
    with (
        caplog.at_level(logging.WARNING, "shoal"),
        waiting_hub(security=Security(tokens=(TOKEN,))) as (store, joined),
    ):
        with pytest.raises(PeerLost, match=r"node 0 at .* refused node 1: not admitted$"):
            connect(1, 2, store, security=Security(tokens=shown))
        assert time.monotonic() - began < 5
        t = connect(1, 2, store, security=Security(tokens=(TOKEN,)))
        drive(t.send(0, Message("right")))
        assert receive(joined()).tag == "right"
        drive(t.close())
    assert "no token of this run, or a wrong one" in caplog.text
    assert TOKEN not in caplog.text and OTHER_TOKEN not in caplog.text


@pytest.mark.parametrize("security", [Security(), Security(tokens=(TOKEN,))], ids=["no token", "token"])
def test_strangers_who_say_half_a_sentence_hold_up_nobody(security: Security) -> None:
    """They are turned away before anything of it is read, whether there is a token or not."""
    over = threading.Event()

    def never() -> Iterator[bytes]:
        over.wait(PATIENCE)
        yield b""

    with waiting_hub(security=security) as (store, joined):
        address = store.get("shoal/grpc/0").decode()
        shown = ((), (("authorization", f"Bearer {OTHER_TOKEN}"),))
        with Caller(address) as stranger:
            calls = [
                stranger.channel.stream_unary(JOIN).future(never(), metadata=shown[i % 2])
                for i in range(MOST_CALLS + 8)
            ]
            t = connect(1, 2, store, security=security, timeout=PATIENCE / 4)
            assert {call.code().name for call in calls} <= {"UNAUTHENTICATED", "RESOURCE_EXHAUSTED"}
            over.set()
        assert joined().address
        drive(t.close())


def test_one_address_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    complaints = _RefusalLog(0)
    with caplog.at_level(logging.WARNING, "shoal"):
        for port in range(3 * MOST_LOGGED_OF_ONE):
            complaints.add(f"ipv4:10.0.0.1:{port}", "a wrong token")
        assert len(caplog.records) == MOST_LOGGED_OF_ONE
        assert (
            caplog.records[-1]
            .getMessage()
            .endswith("a wrong token (further refusals are not logged for a minute)")
        )
        complaints.add("ipv6:[::1]:1", "a wrong token")
        assert len(caplog.records) == MOST_LOGGED_OF_ONE + 1
        for i in range(1000):
            complaints.add(f"ipv4:10.0.{i // 256}.{i % 256}:1", "a wrong token")
        assert len(caplog.records) == MOST_LOGGED
        assert len(complaints._logged) <= MOST_LOGGED, "it remembers no more addresses than it has logged"
        complaints._since -= 61
        complaints.add("ipv4:10.0.0.1:1", "a wrong token")
        assert len(caplog.records) == MOST_LOGGED + 1


def test_tokens_can_be_changed_one_node_at_a_time() -> None:
    with waiting_hub(security=Security(tokens=(OTHER_TOKEN, TOKEN))) as (store, joined):
        t = connect(1, 2, store, security=Security(tokens=(TOKEN,)))
        assert joined().address
        drive(t.close())


# Certificates


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two authorities; certificates of `hub` and `worker` from the one, of `stranger` from the other."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("papers")
    fresh = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")

    def openssl(line: str) -> None:
        subprocess.run(["openssl", *line.split()], cwd=folder, check=True, capture_output=True)

    for authority in ("ours", "theirs"):
        openssl(f"req -x509 {fresh} -keyout {authority}.key -out {authority}.pem -subj /CN={authority}")
    for name, authority in (("hub", "ours"), ("worker", "ours"), ("stranger", "theirs")):
        openssl(f"req {fresh} -keyout {name}.key -out {name}.csr -subj /CN={name}".replace("-days 2", ""))
        openssl(
            f"x509 -req -in {name}.csr -CA {authority}.pem -CAkey {authority}.key -CAcreateserial "
            f"-out {name}.pem -days 2 -extfile names"
        )
    return folder


def shows(papers: Path, name: str | None, trusts: str | None = "ours", mutual: bool = False) -> Security:
    return Security(
        certificate=papers / f"{name}.pem" if name else None,
        key=papers / f"{name}.key" if name else None,
        authority=papers / f"{trusts}.pem" if trusts else None,
        mutual=mutual,
        tokens=(TOKEN,),
    )


@pytest.mark.parametrize("share", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("mutual", [False, True], ids=["tls", "mutual"])
@pytest.mark.parametrize("listen", ["127.0.0.1:0", "0.0.0.0:0"])
def test_the_right_certificates_let_a_node_in(
    mutual: bool, listen: str, share: bool | None, papers: Path
) -> None:
    hub = shows(papers, "hub", mutual=mutual)
    with waiting_hub(security=hub, listen=listen, advertise="127.0.0.1") as (store, joined):
        worker = shows(papers, "worker" if mutual else None, mutual=mutual)
        t = connect(1, 2, store, security=worker, share_memory=share)
        drive(t.send(0, Message("x", (torch.ones(300_000),))))
        got = receive(joined()).body
        assert got.sum() == 300_000
        assert is_shared(got) is (share is None and memory.is_supported())
        del got
        drive(joined().send(1, Message("x", (torch.ones(300_000),))))
        assert receive(t).body.sum() == 300_000
        drive(t.close())


@pytest.mark.parametrize(
    ("wrong", "mutual", "complaint"),
    [
        ((None, "theirs"), False, "does not trust the other's certificate"),
        ((None, None), False, "disconnects during the handshake. Does it require TLS, or a certificate"),
        ((None, "ours"), True, "disconnects during the handshake. Does it require TLS, or a certificate"),
        (("stranger", "ours"), True, "disconnects during the handshake"),
    ],
    ids=["wrong authority", "no tls", "no certificate", "certificate of another authority"],
)
def test_wrong_certificates_are_refused_at_once_and_the_hub_lives(
    wrong: tuple[str | None, str | None], mutual: bool, complaint: str, papers: Path
) -> None:
    with waiting_hub(security=shows(papers, "hub", mutual=mutual)) as (store, joined):
        began = time.monotonic()
        with pytest.raises(PeerLost, match=f"node 0 at .* refused node 1: .*{complaint}"):
            connect(1, 2, store, security=shows(papers, *wrong))
        assert time.monotonic() - began < 5
        t = connect(1, 2, store, security=shows(papers, "worker", mutual=mutual))
        assert joined().address
        drive(t.close())


def test_tls_to_a_hub_that_has_none_is_refused(papers: Path) -> None:
    with waiting_hub() as (store, joined):
        with pytest.raises(PeerLost, match="does not trust the other's certificate"):
            connect(1, 2, store, security=shows(papers, None))
        t = connect(1, 2, store)
        assert joined().address
        drive(t.close())


def test_incomplete_security_is_a_value_error(papers: Path) -> None:
    with pytest.raises(ValueError, match="certificate and key belong together"):
        Security(certificate=papers / "hub.pem")
    with pytest.raises(ValueError, match="mutual TLS needs certificate, key and authority"):
        Security(mutual=True)
    with pytest.raises(ValueError, match="not both"):
        Security(tokens=(TOKEN,), token_file="x")


# Another run, another model, another node of that name


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"run_id": "6" * 32}, "not admitted$"),
        ({"run_id": "6" * 32, "security": Security(tokens=(TOKEN,))}, "not admitted$"),
        ({"manifest": "4 x float32"}, "node 1 has manifest '4 x float32', node 0 has '3 x float32'$"),
        ({"limit_bytes": 7}, f"node 1 has limit_bytes 7, node 0 has {LIMIT}$"),
        ({"failure_timeout": 1.0}, r"node 1 has failure_timeout 1.0, node 0 has 5.0$"),
    ],
)
def test_a_node_of_another_run_is_refused_at_once(
    changed: dict[str, Any], complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "shoal"), waiting_hub() as (store, joined):
        with pytest.raises(PeerLost, match=complaint) as refusal:
            connect(1, 2, store, **changed)
        assert RUN not in str(refusal.value)
        t = connect(1, 2, store)
        assert joined().address
        drive(t.close())
    assert len([r for r in caplog.records if r.name == "shoal"]) == 1
    assert RUN not in caplog.text


def test_a_node_of_another_run_with_the_same_token_is_refused() -> None:
    security = Security(tokens=(TOKEN,))
    with waiting_hub(security=security) as (store, joined):
        with pytest.raises(PeerLost, match=r"the run ids differ: this is another run$") as refusal:
            connect(1, 2, store, run_id="6" * 32, security=security)
        assert RUN not in str(refusal.value)
        t = connect(1, 2, store, security=security)
        assert joined().address
        drive(t.close())


def test_a_rank_that_is_taken_is_refused() -> None:
    with nodes(2) as ((hub, t), store):
        with pytest.raises(
            PeerLost, match=r"refused node 1: node 1 has already joined, from ipv4:127.0.0.1:"
        ):
            connect(1, 2, store)
        drive(t.send(0, Message("still here")))
        assert receive(hub).tag == "still here"


def test_a_node_that_was_replaced_is_refused() -> None:
    with nodes(2) as ((hub, old), store):
        new = connect(1, 2, store, incarnation=1)
        assert notices(hub, 2) == [(LOST, 1, 0), (JOINED, 1, 1)]
        with pytest.raises(PeerLost, match="this is incarnation 0 of node 1, which was restarted"):
            connect(1, 2, store)
        assert notices(old, 1) == [(LOST, 0, 0)]
        drive(old.send(0, Message("late")))
        drive(new.send(0, Message("in time")))
        assert receive(hub).tag == "in time"
        drive(new.close())


@pytest.mark.parametrize("changes", [{"rank": 0}, {"rank": 7}, {"protocol": 99}, {"size": 3}])
def test_who_cannot_be_a_guest_is_refused(changes: dict[str, Any]) -> None:
    with hub_and_caller() as (hub, caller):
        with pytest.raises(grpc.RpcError) as refusal:
            caller.join(**changes)
        assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert list(hub.drain()) == []


def test_wrong_terms_are_a_value_error() -> None:
    for wrong in ({"run_id": "x"}, {"failure_timeout": 0.0}, {"limit_bytes": 0}, {"incarnation": -1}):
        with pytest.raises(ValueError, match=r"run_id|must be positive"):
            connect(0, 1, dist.HashStore(), **wrong)
    for hubs in ((), (0, 0), (9,)):
        with pytest.raises(ValueError, match="must name one or more different ranks"):
            connect(0, 2, dist.HashStore(), hubs)
    with pytest.raises(ValueError, match="rank=3 is not one of the 2 nodes"):
        connect(3, 2, dist.HashStore())
    with pytest.raises(ValueError, match="pass addresses, or a store"):
        connect(0, 2, None)


# Nonsense from somebody who has joined


def header_with(at: int, byte: int) -> bytes:
    envelope, body = message("x", torch.ones(3))
    begin = len(envelope) - HEADER_BYTES
    return envelope[: begin + at] + bytes([byte]) + envelope[begin + at + 1 :] + body


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("it was unpickled",))


NONSENSE = {
    "nothing": (b"", "an envelope has at least"),
    "noise": (random.Random(1).randbytes(5000), "sent message|not a message"),
    "a pickle": (pickle.dumps([Bomb()]) * 10, "sent message|not a message"),
    "a pickle in an envelope": (
        message()[0][:-HEADER_BYTES] + pickle.dumps([Bomb()]) * 10,
        "not a Shoal message",
    ),
    "a header cut off": (message()[0][:60], "an envelope has at least"),
    "a body cut off": (b"".join(message("x", torch.ones(3)))[:-1], "is 1 bytes shorter than its header says"),
    "a body too long": (b"".join(message("x", torch.ones(3))) + b"!", "longer than its header says"),
    "too large": (Envelope(1, 0, 0, HUGE).pack(), "exceeds the limit of 16,777,216"),
    "an unknown dtype": (header_with(68, 99), "unknown dtype code 99"),
    "another version": (header_with(4, 99), "speaks version 99"),
    "another's name": (b"".join(message(src=0)), "in the name of node 0"),
    "a notice": (b"".join(message(LOST)), "'lost'"),
    "a gap": (b"".join(message(number=2)), "sent message 2 after message 0"),
    "nowhere": (b"".join(message(dst=7)), "does not forward from node 1 to node 7"),
    "back to itself": (b"".join(message(dst=1)), "does not forward from node 1 to node 1"),
}


@pytest.mark.parametrize(("said", "complaint"), NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_refused_with_a_clear_line_and_the_hub_lives(
    said: bytes, complaint: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for poisoned in ("pickle.loads", "pickle.load", "torch.load"):
        monkeypatch.setattr(poisoned, lambda *_: pytest.fail("something was unpickled"))
    with caplog.at_level(logging.WARNING, "shoal"), hub_and_caller() as (hub, caller):
        text = caller.is_refused("INVALID_ARGUMENT", POST, said)
        assert notices(hub, 1) == [(LOST, 1, 0)]
        assert re.search(complaint, text), text
        assert hub.reasons[1] == text
        assert [r.getMessage().endswith(text) for r in caplog.records if r.name == "shoal"] == [True]
        assert is_alive(hub, caller)


def test_a_stream_that_goes_wrong_is_refused_and_the_hub_lives() -> None:
    envelope, body = message("x", torch.ones(1 << 20))
    streams = {
        "INVALID_ARGUMENT": [
            (envelope, body[: 1 << 20]),
            (envelope, body[: 4 << 20][:-1], b"12"),
            (),
        ],
        "RESOURCE_EXHAUSTED": [(envelope, bytes(CALL_BYTES + 1))],
    }
    with hub_and_caller() as (hub, caller):
        for code, pieces in ((code, p) for code, all_of_them in streams.items() for p in all_of_them):
            with pytest.raises(grpc.RpcError) as refusal:
                caller.push(*pieces)
            assert refusal.value.code().name == code
            assert notices(hub, 1) == [(LOST, 1, 0)]
            caller.join()
            assert notices(hub, 1) == [(JOINED, 1, 0)]
        assert sum(flow._inside for flow in hub._hub._inbox) == 0
        assert is_alive(hub, caller) if notices_of_rejoin(hub, caller) else False


def notices_of_rejoin(hub: Any, caller: Caller) -> bool:
    """Leave, so that joining again is told."""
    hub._hub.lose(hub._hub._by_rank[1], "it is asked to")
    return notices(hub, 1) == [(LOST, 1, 0)]


@pytest.mark.parametrize("method", [POLL, FETCH, POST, PUSH])
def test_a_call_without_a_session_or_a_deadline_is_refused(method: str) -> None:
    with hub_and_caller() as (hub, caller):
        assert caller.is_refused("INVALID_ARGUMENT", method, b"", timeout=None) == "a call without a deadline"
        caller.metadata["shoal-session"] = "0" * 32
        assert caller.is_refused("NOT_FOUND", method, b"") == "this session has ended"
        assert list(hub.drain()) == []


@pytest.mark.parametrize("method", [JOIN, POLL, FETCH])
def test_malformed_control_messages_are_refused(method: str) -> None:
    with hub_and_caller() as (_, caller):
        code = "FAILED_PRECONDITION" if method == JOIN else "INVALID_ARGUMENT"
        assert caller.is_refused(code, method, b"\xff\xff\xff").startswith("not a")


def test_what_was_not_offered_cannot_be_fetched() -> None:
    with hub_and_caller() as (_, caller):
        text = caller.is_refused("INVALID_ARGUMENT", FETCH, b"\x08\x05")
        assert text == "node 1 fetches message 5, which was not announced to it"


def test_a_message_that_was_not_acknowledged_is_brought_again_and_never_twice() -> None:
    with hub_and_caller() as (hub, caller):
        drive(hub.send(1, Message("one")))
        drive(hub.send(1, Message("two")))

        def poll(received: int) -> list[int]:
            answer = caller.call(POLL, PollRequest(received=received).SerializeToString())
            return [number for number, _, _ in open_records(answer)]

        first = poll(0)
        assert poll(0) == first
        assert poll(first[-2]) == first[-1:]
        drive(hub.send(1, Message("three")))
        assert poll(first[-1]) == [first[-1] + 1]


@pytest.mark.slow
def test_random_frames_neither_crash_nor_confuse_a_hub() -> None:
    rng = random.Random(0)
    whole = b"".join(message("x", torch.ones(5)))
    with hub_and_caller() as (hub, caller):
        taken = 0
        for incarnation in range(1, 401):
            frame = bytearray(whole)
            for _ in range(rng.randrange(1, 4)):
                frame[rng.randrange(len(frame))] = rng.randrange(256)
            if rng.random() < 0.5:
                del frame[rng.randrange(len(frame)) :]
            outcome = caller.outcome(POST, bytes(frame))
            assert outcome in ("OK", "INVALID_ARGUMENT")
            taken += outcome == "OK"
            caller.join(incarnation=incarnation)
        assert 0 < taken < 400
        said = [m for m in hub.drain() if m.tag not in (LOST, JOINED, "left")]
        assert len(said) <= taken and all(m.src == 1 for m in said)
        caller.call(POST, whole)
        assert receive(hub).body.tolist() == [1.0] * 5


# Memory


STORM = 6  # callers at once, each with one call at a time; every second one has the token

ACCOUNTS = """
import gc, tracemalloc
from shoal.transports.frames import BufferPool
allocated, empty = [], BufferPool.empty
def counted(self, dtype, elements):
    allocated.append(dtype.itemsize * elements)
    return empty(self, dtype, elements)
BufferPool.empty = counted
tracemalloc.start()
gc.collect()
before = tracemalloc.get_traced_memory()[0]
def account():
    gc.collect()
    held, peak = (size - before for size in tracemalloc.get_traced_memory())
    waiting = sum(flow._inside for flow in (*t._hub._inbox, *t._hub._transit))
    print(held, peak, sum(allocated), waiting, flush=True)
"""
"""What a hub keeps books of: bytes of Python objects (requests are such), receive buffers, flow control."""


def pour(address: str, shown: str) -> None:
    whole = bytes(CALL_BYTES)
    announced = Envelope(1, 0, 0, HUGE).pack()
    with Caller(address, authorization=shown) as caller:
        for said in (whole, bytes(4 * CALL_BYTES), announced + whole[:-4096]):
            for method in (POST, PUSH, JOIN, "/shoal.Hub/Nonsense"):
                assert caller.outcome(method, said) != "OK"


def storm(address: str) -> None:
    """Send 576 MB to a hub."""
    in_threads(STORM, lambda i: pour(address, ("Bearer " + TOKEN, "Bearer no")[i % 2]))


@contextlib.contextmanager
def hub_in_another_process(puppet: Puppet, path: Path, then: str = "") -> Iterator[str]:
    """Its address. It must still work at the end."""
    puppet.do(script(0, 2, path, then, security=f"Security(tokens=({TOKEN!r},))"))
    t = connect(1, 2, dist.FileStore(str(path), 100), security=Security(tokens=(TOKEN,)))
    assert puppet.hear() == "here\n"
    try:
        yield dist.FileStore(str(path), 100).get("shoal/grpc/0").decode()
        drive(t.send(0, Message("still here")))
    finally:
        drive(t.close())
        puppet.do("print(drive(t.recv(10)).tag, drive(t.recv(10)).tag, flush=True); drive(t.close())")
    assert puppet.hear() == "still here left\n"


@pytest.mark.slow
def test_memory_stays_bounded_whatever_pours_in(puppet: Puppet, tmp_path: Path) -> None:
    """By the hub's own accounts, so that a busy machine changes nothing."""

    def account() -> tuple[int, ...]:
        puppet.do("account()")
        return tuple(map(int, puppet.hear().split()))

    with hub_in_another_process(puppet, tmp_path / "store", ACCOUNTS) as address:
        for _ in range(2):
            storm(address)
            # what one call leaves behind would be CALL_BYTES; a handler may still be on its way out
            wait_until(lambda: account()[0] < CALL_BYTES // 4)
        _, peak, allocated, waiting = account()
        assert peak <= 2 * (STORM // 2) * CALL_BYTES, "a call and the one before it, of each with the token"
        assert (allocated, waiting) == (0, 0), "nothing is allocated for what is refused"
    puppet.do("tracemalloc.stop(); BufferPool.empty = empty")


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_resident_memory_stays_bounded_whatever_pours_in(puppet: Puppet, tmp_path: Path) -> None:
    """What gRPC itself holds included. A busy machine may break these bounds."""

    def resident() -> int:
        """Megabytes that the hub uses."""
        pages = "int(open('/proc/self/statm').read().split()[1])"
        puppet.do(f"print({pages} * os.sysconf('SC_PAGE_SIZE') >> 20, flush=True)")
        return int(puppet.hear())

    with hub_in_another_process(puppet, tmp_path / "store") as address:
        storm(address)
        storm(address)  # pools are full after one, or after two on a busy machine
        sizes = [resident()]
        for _ in range(4):
            storm(address)
            sizes.append(resident())
        grown = [after - before for before, after in pairwise(sizes)]
        assert sizes[-1] - sizes[0] < 64, sizes
        assert min(grown) < 4 and sorted(grown)[1] < 16, sizes  # a leak would add to each
