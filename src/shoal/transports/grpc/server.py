"""HubServer: the gRPC server of a hub. Checks tokens, finds sessions, turns errors into status codes."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Set
from concurrent.futures import Future
from typing import Any, NoReturn, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from shoal.core.errors import ShoalError, WireError
from shoal.transports.endpoint import CLOSING_SECONDS
from shoal.transports.grpc.control_pb2 import FetchRequest, JoinRequest, PollRequest
from shoal.transports.grpc.hub import Hub, JoinRefused, SessionEnded
from shoal.transports.grpc.hub_protocol import (
    FETCH,
    JOIN,
    LINE,
    MOVE,
    PLACE,
    POLL,
    POST,
    PUSH,
    SESSION,
    STAY,
    GrpcConfig,
    server_options,
)
from shoal.transports.grpc.security import Security, is_admitted, join_address, split_address
from shoal.transports.grpc.sessions import Session

SESSION_OVER = "this session has ended"

MOST_CALLS = 64
"""Concurrent calls in runs of up to 20 nodes; three per node in larger ones."""

GRACE_SECONDS = 0.5
"""How long connections may take to end in order when the server closes."""

MOST_LOGGED = 100
"""Refusals logged per minute, so that strangers cannot fill the disk."""

MOST_LOGGED_OF_ONE = 20
"""Refusals of one address logged per minute, so that it leaves room for others."""

log = logging.getLogger("shoal")

Control = TypeVar("Control", bound=Message)


class Places(Protocol):
    """The places of a run that processes from elsewhere may take. Called from the threads of the server."""

    def grant(self, asked: bytes, caller: str, present: Set[int]) -> tuple[int, bytes]:
        """A place, by a number of its own, and what to tell who gets it.

        `present` are the ranks of nodes that are there. Raises ShoalError with the reason if there is none.
        """
        ...

    def hear(self, grant: int, said: bytes) -> None:
        """Take an event of who holds that place. Raises ShoalError if it is none."""
        ...

    def free(self, grant: int) -> None:
        """Who held that place has gone."""
        ...


class HubServer:
    """Listens for a hub. Strangers get a short refusal and a line in the log; they cost no memory."""

    def __init__(
        self, hub: Hub, config: GrpcConfig, security: Security, listen: str, places: Places | None = None
    ) -> None:
        host, _ = split_address(listen)
        security.check_listening(host)
        self._hub = hub
        self._places = places
        self._rank = config.rank
        self._passwords = security.passwords(config.run_id)
        self._stay_seconds = config.failure_timeout
        self._longest = 2 * config.call_seconds(config.limit_bytes)
        self._refusals = _RefusalLog(config.rank)
        self._handlers = {
            JOIN: grpc.unary_unary_rpc_method_handler(self._join),
            MOVE: grpc.unary_unary_rpc_method_handler(self._move),
            POLL: grpc.unary_unary_rpc_method_handler(self._poll),
            FETCH: grpc.unary_stream_rpc_method_handler(self._fetch, response_serializer=bytes),
            POST: grpc.unary_unary_rpc_method_handler(self._post),
            PUSH: grpc.stream_unary_rpc_method_handler(self._push),
            STAY: grpc.unary_unary_rpc_method_handler(self._stay),
            PLACE: grpc.stream_stream_rpc_method_handler(self._place),
        }
        # a stream, so that gRPC reads nothing of a stranger's request
        self._refuse = grpc.stream_stream_rpc_method_handler(self._reject)
        most = max(MOST_CALLS, (4 + bool(places)) * config.size)
        self._threads = DaemonThreadPool(f"shoal {config.rank} hub")
        self._server = grpc.server(
            self._threads,
            handlers=(self,),
            options=server_options(config),
            maximum_concurrent_rpcs=most,
        )
        port = self._bind(listen, security)
        self.address = join_address(host, port)
        self._server.start()

    def close(self) -> None:
        """Release the port and the threads. Calls under way are cancelled after GRACE_SECONDS."""
        self._server.stop(GRACE_SECONDS).wait(CLOSING_SECONDS)
        self._threads.shutdown()

    def service(self, details: Any) -> Any:
        """The handler of a call; gRPC asks for it before it reads the request."""
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
            self._threads.shutdown()
            raise OSError(f"node {self._rank} cannot listen on {listen}: {error}") from error

    # -- the calls -----------------------------------------------------------------------------

    def _join(self, request: bytes, context: Any) -> bytes:
        try:
            welcome = self._hub.join(_parse(JoinRequest, request), context.peer())
        except (JoinRefused, WireError) as refusal:
            self._refusals.add(context.peer(), str(refusal))
            _abort(context, grpc.StatusCode.FAILED_PRECONDITION, str(refusal))
        return welcome.SerializeToString()

    def _move(self, request: bytes, context: Any) -> bytes:
        session = self._find_session(context)
        session.touch()
        session.move_to(_line(context))
        return b""

    def _poll(self, request: bytes, context: Any) -> bytes:
        with self._in_session(context) as session:
            ask = _parse(PollRequest, request)
            return self._hub.poll(session, ask.received, ask.maps)

    def _stay(self, request: bytes, context: Any) -> bytes:
        with self._in_session(context) as session:
            if session.ends_within(self._stay_seconds):
                raise SessionEnded
        return b""

    def _fetch(self, request: bytes, context: Any) -> Iterator[memoryview]:
        with self._in_session(context) as session:
            yield from self._hub.fetch(session, _parse(FetchRequest, request).number)

    def _post(self, request: bytes, context: Any) -> bytes:
        return self._push(iter((request,)), context)

    def _push(self, requests: Iterator[bytes], context: Any) -> bytes:
        with self._in_session(context) as session:
            return self._hub.receive(session, requests).SerializeToString()

    def _place(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        if self._places is None:
            _abort(context, grpc.StatusCode.FAILED_PRECONDITION, "this run has no open places")
        if not self._hub.has_started:
            _abort(context, grpc.StatusCode.FAILED_PRECONDITION, "the run has not begun yet; try again")
        try:
            grant, told = self._places.grant(next(requests, b""), context.peer(), self._hub.present())
        except ShoalError as refusal:
            self._refusals.add(context.peer(), str(refusal))
            _abort(context, grpc.StatusCode.FAILED_PRECONDITION, str(refusal))
        try:
            yield told
            for said in requests:
                self._places.hear(grant, said)
        except ShoalError as fault:
            _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(fault))
        finally:
            self._places.free(grant)

    @contextlib.contextmanager
    def _in_session(self, context: Any) -> Iterator[Session]:
        """Run a call of a client. If it breaks off, or is invalid, the session is lost."""
        session, line = self._find_session(context), _line(context)
        finished = False

        def ended() -> None:
            if not finished:
                self._hub.lose(session, "its connection broke", line)

        try:
            session.begin_call(context, line)
            _check_line(context, line, session)
            session.touch()
            if not context.add_callback(ended):
                ended()
            yield session
        except WireError as error:
            fault: Exception = error
        except SessionEnded:
            fault = SessionEnded()
        except grpc.RpcError:
            self._hub.lose(session, "it broke off a call", line)
            raise
        else:
            return
        finally:
            finished = True
            session.end_call(context)
        _check_line(context, line, session)  # a call that was cut off may look like one that is invalid
        self._end_session(context, session, fault)

    def _find_session(self, context: Any) -> Session:
        session = self._hub.find(_metadata(context.invocation_metadata()).get(SESSION, ""))
        if session is None:
            _abort(context, grpc.StatusCode.NOT_FOUND, SESSION_OVER)
        if context.time_remaining() > self._longest:
            _abort(context, grpc.StatusCode.INVALID_ARGUMENT, "a call without a deadline")
        return session

    def _end_session(self, context: Any, session: Session, fault: Exception) -> NoReturn:
        if isinstance(fault, SessionEnded):
            _abort(context, grpc.StatusCode.NOT_FOUND, SESSION_OVER)
        self._refusals.add(context.peer(), str(fault))
        self._hub.lose(session, str(fault))
        _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(fault))

    def _reject(self, _: Any, context: Any) -> NoReturn:
        self._refusals.add(context.peer(), "no token of this run, or a wrong one")
        _abort(context, grpc.StatusCode.UNAUTHENTICATED, "not admitted")


Task = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class DaemonThreadPool:
    """The thread pool that gRPC needs. Threads start on demand and are daemons.

    A ThreadPoolExecutor stops before exit handlers run, and a hub may say goodbye in one.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []

    def submit(self, work: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Run `work(*args)` in a thread."""
        future: Future[Any] = Future()
        self._tasks.put((future, work, args))
        if not self._idle.acquire(blocking=False):
            name = f"{self._name} {len(self._threads)}"
            self._threads.append(threading.Thread(target=self._serve, name=name, daemon=True))
            self._threads[-1].start()
        return future

    def shutdown(self) -> None:
        """Let the threads finish their work and end."""
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, work, args = task
            try:
                future.set_result(work(*args))
            except BaseException as error:
                future.set_exception(error)
            del task, future, work, args  # an idle thread keeps no references
            self._idle.release()


class _RefusalLog:
    """Logs each refusal, up to a limit per minute in all and per address."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._since = -float("inf")
        self._logged: Counter[str] = Counter()  # address -> logged refusals

    def add(self, peer: str, why: str) -> None:
        address = peer.rpartition(":")[0]  # without its port
        now = time.monotonic()
        with self._lock:
            if now - self._since > 60:
                self._since = now
                self._logged.clear()
            if self._logged[address] >= MOST_LOGGED_OF_ONE or self._logged.total() >= MOST_LOGGED:
                return
            self._logged[address] += 1
            is_last = self._logged[address] == MOST_LOGGED_OF_ONE or self._logged.total() == MOST_LOGGED
        more = " (further refusals are not logged for a minute)" if is_last else ""
        log.warning("node %d refused %s: %s%s", self._rank, peer, why, more)


def _abort(context: Any, code: Any, text: str) -> NoReturn:
    context.abort(code, text)  # raises
    raise AssertionError(text)


def _metadata(pairs: Any) -> dict[str, str]:
    return {key: value for key, value in pairs or () if isinstance(value, str)}


def _check_line(context: Any, line: int, session: Session) -> None:
    if line < session.line:
        _abort(context, grpc.StatusCode.ABORTED, "this connection was replaced")


def _line(context: Any) -> int:
    number = _metadata(context.invocation_metadata()).get(LINE, "0")
    if not number.isdecimal():
        _abort(context, grpc.StatusCode.INVALID_ARGUMENT, "not a number of connections")
    return int(number)


def _parse(kind: type[Control], data: bytes) -> Control:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise WireError(f"not a {kind.__name__}: {error}") from error
