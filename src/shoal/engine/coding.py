"""Coding: the codec at one node, with what each stream of vectors remembers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shoal.core.codec import Codec, Payload, State
from shoal.core.seeds import derive
from shoal.core.sparse import SparseCodec, SparseVector
from shoal.core.transport import Priced

if TYPE_CHECKING:
    from shoal.vocabulary.node import Node

REST = "rest"
"""Where the state of a stream holds what its payloads have lacked so far."""


class Coding:
    """What a node encodes and decodes. A stream is all vectors that are sent under one key.

    `at` is where a vector begins in the model's, None where it is no slice of it. An average that is
    compressed anew is `merged`, for whoever encodes it and whoever decodes it.
    """

    def __init__(self, node: Node, codec: Codec, seed: int) -> None:
        self.codec = codec
        self.states: dict[str, State] = {}
        self._node = node
        self._seed = seed
        self._fitted: dict[tuple[int, int, bool], Codec] = {}

    def encode(
        self,
        key: str,
        v: Tensor,
        at: int | None = None,
        *,
        merged: bool = False,
        feeds: bool = True,
        counts: bool = True,
        times: int = 1,
    ) -> Payload:
        """Compress one vector of the stream called `key`, to be sent so many times.

        What was lost is not fed back for a sender that sees to that itself, and does not say `feeds`. A
        vector that is not finite, or does not count where it arrives, leaves no trace: later ones would
        suffer from it.
        """
        began = self._node.transport.now()
        codec = self._codec(at, v.numel(), merged)
        state = self.state(key, codec, v)
        feeds = feeds and (codec.feedback == "double" or (codec.feedback == "residual" and not merged))
        own = {name: tensor for name, tensor in state.items() if name != REST}
        if (feeds or own) and not (counts and bool(v.sum().isfinite())):
            payload, _ = codec.encode(v, {name: tensor.clone() for name, tensor in own.items()})
            self.states.setdefault(key, state)
        elif feeds:
            rest = state[REST] if REST in state else torch.zeros_like(v)
            payload, own = codec.encode_rest(v, rest, own)
            self.states[key] = {**own, REST: rest}
        else:
            payload, self.states[key] = codec.encode(v, own)
        self._node.meter.encode_seconds += self._node.transport.now() - began
        if not codec.exact:
            self.weigh(times * v.nbytes, times * sum(part.nbytes for part in payload))
        return payload

    def state(self, key: str, codec: Codec, v: Tensor) -> State:
        """What the stream called `key` remembers; at first, what the codec begins with."""
        state = self.states.get(key)
        return codec.init(v, derive(self._seed, "codec", self._node.rank, key)) if state is None else state

    def decode(self, payload: Payload, numel: int, at: int | None = None, *, merged: bool = False) -> Tensor:
        """The vector of `numel` elements that a payload stands for."""
        node = self._node
        began = node.transport.now()
        here = tuple(part.to(node.x.device) for part in payload)
        out = torch.empty(numel, dtype=node.x.dtype, device=node.x.device)
        decoded = self._codec(at, numel, merged).decode(here, out)
        node.meter.decode_seconds += node.transport.now() - began
        return decoded

    def read(self, payload: Payload, numel: int, at: int | None = None) -> SparseVector:
        """The same as a sparse vector, where the codec makes vectors so."""
        node = self._node
        began = node.transport.now()
        codec = self._codec(at, numel, merged=False)
        if not isinstance(codec, SparseCodec):
            raise TypeError(f"{codec} does not make vectors sparse")
        vector = codec.read(tuple(part.to(node.x.device) for part in payload), numel, node.x.dtype)
        node.meter.decode_seconds += node.transport.now() - began
        return vector

    def averaging(self, nbytes: int) -> int:
        """What most ways to form an average send of a vector of so many bytes, for `weigh`."""
        return round(2 * (self._node.size - 1) / self._node.size * nbytes)

    def weigh(self, dense: int, coded: int) -> None:
        """Account for bytes that were compressed, and estimate what that has saved so far.

        That is what did not travel, at the price of what did: what the network is known to take, else what
        sending has taken so far. Time that others waited is not counted, so it may have saved more.
        """
        meter, transport = self._node.meter, self._node.transport
        meter.dense_bytes += dense
        meter.coded_bytes += coded
        if isinstance(transport, Priced):
            price = transport.seconds_per_byte
        else:
            price = meter.send_seconds / max(1, meter.bytes_sent)
        spared = (meter.dense_bytes - meter.coded_bytes) * price
        meter.saved_seconds = spared - meter.encode_seconds - meter.decode_seconds

    def _codec(self, at: int | None, numel: int, merged: bool) -> Codec:
        place = (-1 if at is None else at, numel, merged)
        if place not in self._fitted:
            layout = self._node.layout
            pieces = () if at is None or layout is None else layout.pieces(at, at + numel)
            codec = self.codec.fit(pieces)
            self._fitted[place] = codec.merged if merged else codec
        return self._fitted[place]
