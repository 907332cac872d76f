"""Sharing: the memory that the two ends of a stay have in common, where they are processes of one host."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shoal.core.errors import WireError
from shoal.transports.frames import ELSEWHERE, MAGIC, PARCEL, PLACE_BYTES, Place, Shape, decode_place
from shoal.transports.parcels import Mappings, Outbox


class Sharing:
    """Parcels to the other end of a stay, and from it; each direction works, or does not, by itself.

    `unpack` and `close` must not meet: whoever holds this sees to that.
    """

    def __init__(self, pid: int, limit_bytes: int, *, is_mapped: bool = False) -> None:
        self.pid = pid  # of the process whose memory can be mapped here; 0 if it cannot
        self.is_mapped = is_mapped  # whether the other end can map memory of this process
        self._outbox = Outbox(limit_bytes)
        self._mappings = Mappings(pid, limit_bytes)

    def wrap(self, header: bytes, parts: Sequence[Tensor]) -> tuple[bytes, Sequence[Tensor]]:
        """The same message, by way of memory if it is large, a buffer is free, and the other end maps it."""
        return self._outbox.wrap(header, parts) if self.is_mapped else (header, parts)

    def open(
        self, header: memoryview | bytes, rest: memoryview
    ) -> tuple[memoryview | bytes, Place | None, memoryview]:
        """A header as it is without memory, the place of its parts if they lie there, and what follows.

        Raises WireError for a place that is none, or where no memory is shared.
        """
        if bytes(header[: len(ELSEWHERE)]) != ELSEWHERE:
            return header, None, rest
        if not self.pid:
            raise WireError("it speaks of shared memory, but none was agreed on")
        if len(rest) != PLACE_BYTES:
            raise WireError(f"a place has {PLACE_BYTES} bytes, got {len(rest)}")
        place = decode_place(rest)
        if place.kind != PARCEL:
            raise WireError(f"only parcels travel here, not what is of kind {place.kind}")
        return MAGIC + bytes(header[len(MAGIC) :]), place, rest[PLACE_BYTES:]

    def unpack(self, place: Place, shapes: Sequence[Shape]) -> tuple[Tensor, ...]:
        """The parts that lie there. Raises WireError if that is not memory of the other end."""
        return self._mappings.unpack(place, shapes)

    def close(self) -> None:
        """Let go of all memory; what tensors look at stays."""
        self._outbox.close()
        self._mappings.clear()
