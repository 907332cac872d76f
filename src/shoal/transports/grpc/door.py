"""Door: the gRPC server in front of a hub. It asks callers for the token and turns errors into answers."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from shoal.core.errors import WireError
from shoal.transports.endpoint import CLOSING_SECONDS
from shoal.transports.grpc.control_pb2 import Ask, Hello, Want
from shoal.transports.grpc.crew import Crew
from shoal.transports.grpc.guest import Guest
from shoal.transports.grpc.hub import Ended, Hub, Refused
from shoal.transports.grpc.security import Security, is_admitted, join_address, split_address
from shoal.transports.grpc.terms import Terms
from shoal.transports.grpc.wire import FETCH, JOIN, POLL, POST, PUSH, patience, server_options

SESSION = "shoal-session"
"""Name of the metadata in which a guest shows its session."""

OVER = "this stay has ended"

MOST_CALLS = 64
"""Calls that may be under way at once, in runs of up to 20 nodes; three a node in larger ones."""

GRACE_SECONDS = 0.5
"""How long a connection has to end in order when the door closes."""

MOST_COMPLAINTS = 100
"""Refusals that are logged within a minute, so that strangers cannot fill the disk."""

MOST_OF_ONE = 20
"""Refusals of one address that are logged within a minute, so that it leaves room for others."""

log = logging.getLogger("shoal")

Control = TypeVar("Control", bound=Message)


class Door:
    """Listens for a hub. Strangers hear one word and leave a line in the log; they cost no memory."""

    def __init__(self, hub: Hub, terms: Terms, security: Security, listen: str) -> None:
        host, _ = split_address(listen)
        security.check_listening(host)
        self._hub = hub
        self._rank = terms.rank
        self._passwords = security.passwords(terms.run_id)
        self._longest = 2 * patience(terms.failure_timeout, terms.limit_bytes)
        self._complaints = _Complaints(terms.rank)
        self._handlers = {
            JOIN: grpc.unary_unary_rpc_method_handler(self._join),
            POLL: grpc.unary_unary_rpc_method_handler(self._poll),
            FETCH: grpc.unary_stream_rpc_method_handler(self._fetch, response_serializer=bytes),
            POST: grpc.unary_unary_rpc_method_handler(self._post),
            PUSH: grpc.stream_unary_rpc_method_handler(self._push),
        }
        # a stream, so that gRPC asks for nothing of what a stranger has to say
        self._refuse = grpc.stream_stream_rpc_method_handler(self._turn_away)
        most = max(MOST_CALLS, 3 * terms.size)
        self._crew = Crew(f"shoal {terms.rank} hub")
        self._server = grpc.server(
            self._crew,
            handlers=(self,),
            options=server_options(terms.failure_timeout),
            maximum_concurrent_rpcs=most,
        )
        port = self._bind(listen, security)
        self.address = join_address(host, port)
        self._server.start()

    def close(self) -> None:
        """Release the port and the threads. Calls that are still under way are cut off after a moment."""
        self._server.stop(GRACE_SECONDS).wait(CLOSING_SECONDS)
        self._crew.shutdown()

    def service(self, details: Any) -> Any:
        """What answers a call; gRPC asks before it reads anything of it."""
        if not is_admitted(_metadata(details.invocation_metadata).get("authorization", ""), self._passwords):
            return self._refuse
        return self._handlers.get(details.method)

    def _bind(self, listen: str, security: Security) -> int:
        credentials = security.server_credentials()
        try:
            if credentials is None:
                return int(self._server.add_insecure_port(listen))
            return int(self._server.add_secure_port(listen, credentials))
        except RuntimeError as error:
            self._crew.shutdown()
            raise OSError(f"node {self._rank} cannot listen on {listen}: {error}") from error

    # -- the calls -----------------------------------------------------------------------------

    def _join(self, request: bytes, context: Any) -> bytes:
        try:
            welcome = self._hub.join(_parse(Hello, request), context.peer())
        except (Refused, WireError) as refusal:
            self._complaints.add(context.peer(), str(refusal))
            _abort(context, grpc.StatusCode.FAILED_PRECONDITION, str(refusal))
        return welcome.SerializeToString()

    def _poll(self, request: bytes, context: Any) -> bytes:
        with self._visit(context) as guest:
            ask = _parse(Ask, request)
            return self._hub.poll(guest, ask.received, ask.maps)

    def _fetch(self, request: bytes, context: Any) -> Iterator[memoryview]:
        with self._visit(context) as guest:
            yield from self._hub.fetch(guest, _parse(Want, request).number)

    def _post(self, request: bytes, context: Any) -> bytes:
        return self._push(iter((request,)), context)

    def _push(self, requests: Iterator[bytes], context: Any) -> bytes:
        with self._visit(context) as guest:
            return self._hub.receive(guest, requests).SerializeToString()

    @contextlib.contextmanager
    def _visit(self, context: Any) -> Iterator[Guest]:
        """A call of a guest. If it breaks off, or makes no sense, the guest is lost."""
        guest = self._recognise(context)
        finished = False

        def ended() -> None:
            if not finished:
                self._hub.lose(guest, "its connection broke")

        guest.touch()
        guest.calls.add(context)
        try:
            if not context.add_callback(ended):
                ended()
            yield guest
        except WireError as error:
            fault: Exception = error
        except Ended:
            fault = Ended()
        except grpc.RpcError:
            self._hub.lose(guest, "it broke off a call")
            raise
        else:
            return
        finally:
            finished = True
            guest.calls.discard(context)
        self._dismiss(context, guest, fault)

    def _recognise(self, context: Any) -> Guest:
        guest = self._hub.find(_metadata(context.invocation_metadata()).get(SESSION, ""))
        if guest is None:
            _abort(context, grpc.StatusCode.NOT_FOUND, OVER)
        if context.time_remaining() > self._longest:
            _abort(context, grpc.StatusCode.INVALID_ARGUMENT, "a call without a deadline")
        return guest

    def _dismiss(self, context: Any, guest: Guest, fault: Exception) -> NoReturn:
        if isinstance(fault, Ended):
            _abort(context, grpc.StatusCode.NOT_FOUND, OVER)
        self._complaints.add(context.peer(), str(fault))
        self._hub.lose(guest, str(fault))
        _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(fault))

    def _turn_away(self, _: Any, context: Any) -> NoReturn:
        self._complaints.add(context.peer(), "it shows no token of this run, or a wrong one")
        _abort(context, grpc.StatusCode.UNAUTHENTICATED, "not admitted")


class _Complaints:
    """One line in the log for each refusal, but only so many a minute, of all and of one address."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._since = -float("inf")
        self._logged: Counter[str] = Counter()  # address -> lines; never more addresses than lines

    def add(self, peer: str, why: str) -> None:
        address = peer.rpartition(":")[0]  # whatever its port
        now = time.monotonic()
        with self._lock:
            if now - self._since > 60:
                self._since = now
                self._logged.clear()
            if self._logged[address] >= MOST_OF_ONE or self._logged.total() >= MOST_COMPLAINTS:
                return
            self._logged[address] += 1
            is_last = self._logged[address] == MOST_OF_ONE or self._logged.total() == MOST_COMPLAINTS
        more = " (no more such lines for a minute)" if is_last else ""
        log.warning("node %d refused %s: %s%s", self._rank, peer, why, more)


def _abort(context: Any, code: Any, text: str) -> NoReturn:
    context.abort(code, text)  # raises
    raise AssertionError(text)


def _metadata(pairs: Any) -> dict[str, str]:
    return {key: value for key, value in pairs or () if isinstance(value, str)}


def _parse(kind: type[Control], data: bytes) -> Control:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise WireError(f"not a {kind.__name__}: {error}") from error
