from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JoinRequest(_message.Message):
    __slots__ = ("protocol", "run_id", "manifest", "size", "hubs", "limit_bytes", "failure_timeout", "rank", "incarnation", "nonce", "pid", "fd", "serial")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    HUBS_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    FAILURE_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    FD_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    run_id: str
    manifest: str
    size: int
    hubs: _containers.RepeatedScalarFieldContainer[int]
    limit_bytes: int
    failure_timeout: float
    rank: int
    incarnation: int
    nonce: bytes
    pid: int
    fd: int
    serial: int
    def __init__(self, protocol: _Optional[int] = ..., run_id: _Optional[str] = ..., manifest: _Optional[str] = ..., size: _Optional[int] = ..., hubs: _Optional[_Iterable[int]] = ..., limit_bytes: _Optional[int] = ..., failure_timeout: _Optional[float] = ..., rank: _Optional[int] = ..., incarnation: _Optional[int] = ..., nonce: _Optional[bytes] = ..., pid: _Optional[int] = ..., fd: _Optional[int] = ..., serial: _Optional[int] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("session", "incarnation", "pid", "fd", "serial")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    FD_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    session: str
    incarnation: int
    pid: int
    fd: int
    serial: int
    def __init__(self, session: _Optional[str] = ..., incarnation: _Optional[int] = ..., pid: _Optional[int] = ..., fd: _Optional[int] = ..., serial: _Optional[int] = ...) -> None: ...

class PollRequest(_message.Message):
    __slots__ = ("received", "maps")
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    MAPS_FIELD_NUMBER: _ClassVar[int]
    received: int
    maps: bool
    def __init__(self, received: _Optional[int] = ..., maps: bool = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("busy",)
    BUSY_FIELD_NUMBER: _ClassVar[int]
    busy: bool
    def __init__(self, busy: bool = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("rank", "state", "incarnation", "session_number", "reason")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        HERE: _ClassVar[Peer.State]
        LOST: _ClassVar[Peer.State]
        LEFT: _ClassVar[Peer.State]
    HERE: Peer.State
    LOST: Peer.State
    LEFT: Peer.State
    RANK_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_NUMBER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    rank: int
    state: Peer.State
    incarnation: int
    session_number: int
    reason: str
    def __init__(self, rank: _Optional[int] = ..., state: _Optional[_Union[Peer.State, str]] = ..., incarnation: _Optional[int] = ..., session_number: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Roster(_message.Message):
    __slots__ = ("peers",)
    PEERS_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    def __init__(self, peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ...) -> None: ...
