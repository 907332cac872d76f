"""Coding: the codec at one node, with the state of each stream of vectors it compresses."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.core.codec import REST, Codec, Identity, Payload, State, expect
from shoal.core.seeds import derive
from shoal.core.vector import Layout, describe_flaw
from shoal.engine.channel import Channel

REHEARSED = 4096
"""Elements of the vector with which kernels are loaded."""


class Coding:
    """Encodes and decodes for one node. A stream is all vectors that are sent under one key.

    `like` is a tensor with the model's dtype and device; `begins` is where this node's slice lies in the
    model's vector, which `layout` describes. `at` is where a vector begins there, None where it is no slice
    of it. An average that is compressed again is `merged`, for its encoder and for its decoders.
    """

    def __init__(
        self,
        codec: Codec,
        channel: Channel,
        *,
        like: Tensor,
        rank: int,
        workers: int,
        layout: Layout | None = None,
        begins: int = 0,
        seed: int = 0,
    ) -> None:
        self.codec = codec
        self.layout = layout
        self.begins = begins
        self.states: dict[str, State] = {}
        self._before: dict[str, State] = {}  # of streams in averages under way, which checkpoints begin again
        self._channel = channel
        self._meter = channel.meter
        self._seconds_per_byte: float | None = getattr(channel.transport, "seconds_per_byte", None)
        self._dtype, self._device = like.dtype, like.device
        self._rank, self._workers, self._seed = rank, workers, seed
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
        under_way: bool = False,
    ) -> Payload:
        """Compress the next vector of the stream `key`, to be sent `times` times.

        Without `feeds` the caller does the error feedback itself. A vector that is not finite, or has no
        weight where it arrives (`counts`), leaves the stream's state as it was: later ones would suffer.
        One that is `under_way` until `complete` is encoded once more after a checkpoint meanwhile.
        """
        began = self._channel.now()
        codec = self.fitted(at, v.numel(), merged)
        if codec.exact and type(codec).init is Codec.init:  # without state, which most exact codecs lack
            payload, _ = codec.encode(v, {})
            self._meter.encode_seconds += self._channel.now() - began
            return payload
        state = self.state_of(key, codec, v)
        if under_way:
            self._before[key] = {name: tensor.clone() for name, tensor in state.items()}
        feeds = feeds and codec.feedback != "none"
        own = {name: tensor for name, tensor in state.items() if name != REST}
        with self._channel.apart():
            if (feeds or own) and not (counts and bool(v.sum().isfinite())):
                payload, _ = codec.encode(v, codec.init(v))  # without what is held, which would count twice
                self.states.setdefault(key, state)
            elif feeds:
                rest = state[REST] if REST in state else torch.zeros_like(v)
                payload, own = codec.encode_rest(v, rest, own)
                self.states[key] = {**own, REST: rest}
            else:
                payload, self.states[key] = codec.encode(v, own)
        self._meter.encode_seconds += self._channel.now() - began
        if not codec.exact:
            self._channel.charge("encode", v.nbytes)
            self.weigh(times * v.nbytes, times * sum(part.nbytes for part in payload))
        return payload

    def complete(self, keys: Iterable[str], counted: bool = True) -> None:
        """The vectors of these streams that were under way have arrived.

        Unless they `counted` there, the streams are as if there had been none.
        """
        for key in keys:
            before = self._before.pop(key, None)
            if before is not None and not counted:
                self.states[key] = before

    def forget(self) -> None:
        """Begin all streams anew."""
        self.states.clear()
        self._before.clear()

    def rehearse(self) -> None:
        """Compress a short vector and forget it, so that no step pays the seconds of loading kernels.

        Codecs that need all workers, or layers, load theirs with the first message.
        """
        for merged in (False, True):
            codec = self.fitted(None, REHEARSED, merged)
            if codec.exact or codec.needs_all or codec.needs_products:  # nothing to load, or not by itself
                return
            v = torch.ones(REHEARSED, dtype=self._dtype, device=self._device)
            payload, state = codec.encode(v, codec.init(v))
            if codec.feedback != "none":
                payload, _ = codec.encode_rest(v, torch.zeros_like(v), state)
            codec.decode(payload, torch.empty_like(v))

    def state_of(self, key: str, codec: Codec, v: Tensor) -> State:
        """The state of the stream `key`; at first, the codec's initial state."""
        state = self.states.get(key)
        return codec.init(v, derive(self._seed, "codec", self._rank, key)) if state is None else state

    def decode(self, payload: Payload, numel: int, at: int | None = None, *, merged: bool = False) -> Tensor:
        """The vector of `numel` elements that a payload stands for."""
        began = self._channel.now()
        here = tuple([part if part.device == self._device else part.to(self._device) for part in payload])
        codec = self.fitted(at, numel, merged)
        if isinstance(codec, Identity):
            (decoded,) = expect(here, (self._dtype, numel))  # no room is made that it would leave empty
        else:
            out = torch.empty(numel, dtype=self._dtype, device=self._device)
            with self._channel.apart():
                decoded = codec.decode(here, out)
        if not codec.exact:
            self._channel.charge("decode", decoded.nbytes)
        self._meter.decode_seconds += self._channel.now() - began
        return decoded

    def fitted(self, at: int | None, numel: int, merged: bool = False) -> Codec:
        """The codec for a vector of `numel` elements that begins at `at` of the model's."""
        place = (-1 if at is None else at, numel, merged)
        if place not in self._fitted:
            layout = self.layout
            pieces = () if at is None or layout is None else layout.pieces(at, at + numel)
            codec = self.codec.fit(pieces)
            self._fitted[place] = codec.merged if merged else codec
        return self._fitted[place]

    def uncompressed(self, like: Tensor) -> Coding:
        """The same without compression, for vectors of the dtype and device of `like`.

        They travel as this codec writes vectors of no known layers, if that is exact and needs no average.
        """
        coding, exact = copy(self), self.codec.fit(())
        is_plain = exact.exact and not exact.needs_all
        coding.codec, coding.layout = exact if is_plain else Identity(), None
        coding._dtype, coding._device = like.dtype, like.device
        coding.states, coding._before, coding._fitted = {}, {}, {}
        return coding

    def averaging(self, nbytes: int) -> int:
        """The bytes that most collectives send for the average of a vector of `nbytes`; see `weigh`."""
        return round(2 * (self._workers - 1) / self._workers * nbytes)

    def weigh(self, dense: int, coded: int) -> None:
        """Count bytes that were compressed, and estimate the time that compression has saved so far.

        The estimate prices the bytes that did not travel like those that did: at the network's known cost,
        or at what sending has taken so far. Peers' waiting is not counted, so the gain may be larger.
        """
        meter, price = self._meter, self._seconds_per_byte
        meter.dense_bytes += dense
        meter.coded_bytes += coded
        if price is None:
            price = meter.send_seconds / max(1, meter.bytes_sent)
        spared = (meter.dense_bytes - meter.coded_bytes) * price
        meter.saved_seconds = spared - meter.encode_seconds - meter.decode_seconds

    def flaw(self, vector: Tensor) -> str | None:
        """Which element of this node's slice is not finite, by its parameter's name; None if all are."""
        return describe_flaw(vector, self.layout, self.begins)

    def state(self) -> dict[str, Any]:
        """The states of all streams, without what is under way."""
        return {**self.states, **self._before}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        here = partial(Tensor.to, device=self._device, copy=True)
        self.states = {
            key: {name: here(tensor) for name, tensor in memory.items()} for key, memory in state.items()
        }
