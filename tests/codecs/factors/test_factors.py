"""Factors as a codec: what travels of a vector by itself, and who may have the codec."""

import pytest
import torch
from torch import nn

import shoal
from shoal.codecs import CODECS, ByLayer, Factors
from shoal.codecs.wire import HEADER, seal
from shoal.core.errors import WireError
from shoal.strategies import ASGD, CHOCO, EASGD, Local, Strom, SyncServer
from shoal.vocabulary.strategy import Setting


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_a_vector_by_itself_travels_as_it_is():
    codec, v = Factors(), drawn(1000)
    payload, state = codec.encode(v, codec.init(v))
    assert torch.equal(codec.decode(payload, torch.empty_like(v)), v)
    assert state == {} and codec.feedback == "none"
    assert sum(part.nbytes for part in payload) == v.nbytes + HEADER.size
    assert CODECS.make("factors") == codec and codec.code == 14


def test_a_vector_of_another_length_or_kind_is_refused():
    codec = Factors()
    for payload in (
        seal(14, 9, 9, torch.zeros(8)),
        seal(14, 9, 9, torch.zeros(9).double()),
        seal(14, 9, 9),
        seal(14, 9, 9, torch.zeros(9), torch.zeros(1)),
        seal(13, 9, 9, torch.zeros(9)),
    ):
        with pytest.raises(WireError):
            codec.decode(payload, torch.empty(9))


@pytest.mark.parametrize("strategy", [ASGD(), SyncServer(), Local(), EASGD(), CHOCO(), Strom()], ids=repr)
def test_strategies_that_do_not_average_gradients_refuse_it(strategy):
    with pytest.raises(ValueError, match="does something else; take strategy 'sync'"):
        strategy.check(Setting(4, Factors()))


def test_a_loop_of_ones_own_and_ddp_and_single_layers_refuse_it():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="cannot record in your own loop; take 'low_rank' here"):
        shoal.attach(model, optimizer, "sync", codec="factors")
    with pytest.raises(ValueError, match="DDP hands over gradients alone; take 'low_rank'"):
        shoal.comm_hook("factors")
    with pytest.raises(ValueError, match="take it for the whole model"):
        ByLayer(large="factors")
