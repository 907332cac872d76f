"""PushReader: what is in a push, of the whole model or of a fragment."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shoal.core.errors import WireError
from shoal.core.vector import describe_flaw
from shoal.engine.coding import Coding
from shoal.engine.protocol import Push, PushWithNumbers


class PushReader:
    """Decodes pushes at a server whose slice of the model has `numel` elements."""

    def __init__(self, coding: Coding, numel: int) -> None:
        self._coding = coding
        self._numel = numel
        self.fragments: Sequence[int] = ()  # their lengths, where each version moves the next one alone

    def decode(self, m: Push) -> tuple[Tensor, ...]:
        """The vector of a push, and its numbers. Raises WireError where it would spoil the model."""
        coding = self._coding
        payload, numbers = (m.parts[:-1], m.parts[-1:]) if isinstance(m, PushWithNumbers) else (m.parts, ())
        if self.fragments:
            vector = coding.decode(payload, self.fragments[m.version % len(self.fragments)])
            flaw = describe_flaw(vector)
        else:
            vector = coding.decode(payload, self._numel, coding.begins)
            flaw = coding.flaw(vector)
        if flaw is not None:
            raise WireError(flaw)
        return (vector, *numbers)
