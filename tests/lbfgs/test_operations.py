"""What the coordinator has shards do, and its way through a message."""

from __future__ import annotations

import pytest
import torch

from shoal.core.errors import WireError
from shoal.lbfgs.operations import (
    AbsoluteSum,
    ClosePass,
    Combine,
    Dots,
    DropPass,
    EndTraining,
    OpenPass,
    decoded,
    encoded,
)


def test_every_operation_arrives_as_it_was_sent():
    sent = [
        Combine("d", ((-0.1, "g"), (1e-300, "s11"))),
        Combine("point", ()),
        Dots((("new", "d"), ("g", "g"))),
        AbsoluteSum("g"),
        OpenPass(7),
        ClosePass(60000.0, ((0, 3), (1, 1 << 20)), 1 / 3),
        DropPass(12.0),
        EndTraining(),
    ]
    assert decoded(encoded(sent)) == sent
    assert encoded(sent).dtype == torch.uint8


@pytest.mark.parametrize("text", ["", "{}", '[["Explode"]]', '[["Combine"]]', "\xff"])
def test_what_is_no_operation_is_refused(text):
    data = torch.tensor(list(text.encode("latin-1")), dtype=torch.uint8)
    if text == "{}":
        assert decoded(data) == []
        return
    with pytest.raises(WireError, match="no operations"):
        decoded(data)
