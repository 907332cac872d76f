"""A state arrives as it was sent, in pieces that every transport takes."""

import pytest
import torch

from shoal.core.errors import WireError
from shoal.engine.state_transfer import PIECE_BYTES, StateArrival, messages


def carried(state, epoch=3):
    head, *parts = messages(state, epoch)
    arrival = StateArrival(head)
    for part in parts:
        arrival.add(part)
    assert arrival.is_whole
    assert arrival.epoch == epoch
    return arrival.state(), [head, *parts]


def test_every_kind_of_value_survives():
    state = {
        "x": torch.randn(7),
        "half": torch.ones(3, 2, dtype=torch.bfloat16),
        "scalar": torch.tensor(5, dtype=torch.int64),
        "none": torch.empty(0),
        "flags": torch.tensor([True, False]),
        "nested": {"a": [1, 2.5, None, "text"], 3: torch.arange(4)},
    }
    there, _ = carried(state)
    for name in ("x", "half", "scalar", "none", "flags"):
        assert torch.equal(there[name], state[name])
        assert there[name].dtype == state[name].dtype
    assert there["nested"]["a"] == [1, 2.5, None, "text"]
    assert torch.equal(there["nested"][3], torch.arange(4))


def test_a_large_tensor_travels_in_pieces():
    x = torch.randn(PIECE_BYTES // 4 + 10)
    there, sent = carried({"x": x})
    assert torch.equal(there["x"], x)
    assert len(sent) == 3
    assert all(part.nbytes <= PIECE_BYTES for m in sent for part in m.parts)


def test_a_piece_out_of_turn_is_refused():
    head, first = messages({"x": torch.ones(3)}, 0)
    arrival = StateArrival(head)
    arrival.add(first)
    with pytest.raises(WireError, match="piece 0"):
        arrival.add(first)
