"""A script's own optimizer, in real processes: it trains as in plain torch, or one sentence says why not."""

from itertools import cycle, product
from pathlib import Path

import pytest
import torch

from loops import OPTIMIZERS, trained_plainly
from sampling import mostly_soak
from scripts import final_weights, run_loop
from shoal.core.errors import WorkerFailed

SCRIPT = Path(__file__).with_name("optimizers.py")
PLACES = list(product(["processes", "grpc"], [1, 2], ["asgd", "ssp", "sync_server", "downpour"]))
SOME = [(word, *place) for word, place in zip(OPTIMIZERS, cycle(PLACES[::3]), strict=False)]
ALL = [(word, *place) for word, place in product(OPTIMIZERS, PLACES)]

pytestmark = pytest.mark.usefixtures("warm_scripts")


def check(word, transport, servers, strategy, **place):
    (printed,) = run_loop(
        word, workers=1, strategy=strategy, script=SCRIPT, transport=transport, servers=servers, **place
    )
    assert torch.equal(final_weights(printed), trained_plainly(word))


@pytest.mark.parametrize(("word", "transport", "servers", "strategy"), mostly_soak(SOME, few=3))
def test_one_worker_with_a_server_trains_as_plain_torch_does(word, transport, servers, strategy):
    check(word, transport, servers, strategy)


@pytest.mark.soak
@pytest.mark.parametrize(("word", "transport", "servers", "strategy"), ALL)
def test_every_optimizer_with_every_server(word, transport, servers, strategy):
    check(word, transport, servers, strategy)


REFUSED = {
    "lbfgs": ("LBFGS(model.parameters())", "sync", "LBFGS evaluates its closure several times in a step"),
    "lbfgs with a server": ("LBFGS(model.parameters())", "asgd", "it trains on one worker, without a server"),
    "sparse adam": ("SparseAdam(model.parameters())", "bmuf", "SparseAdam steps the rows that a sparse"),
    "strom": ("AdamW(model.parameters())", "strom", "Strom takes every step itself, as plain SGD"),
    "muon": ("Muon([model.weight])", "asgd", "Muon looks at whole tensors, and each of 2 servers"),
}
BY_RANK = """
import torch, shoal
from shoal.launch.environment import Place
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + Place.find().rank % 2), momentum=0.9)
training = shoal.attach(model, optimizer)
model(torch.full((1, 4), 1.0 + training.rank)).sum().backward()
optimizer.step()
training.finish()
print("trained")
"""


@pytest.mark.parametrize("strategy", ["sync", "asgd"])
def test_workers_with_other_options_than_worker_0_are_refused(strategy, tmp_path):
    script = tmp_path / "by_rank.py"
    script.write_text(BY_RANK)
    said = r"worker 0's optimizer has lr=0.1 \(SGD, group 0\), that of worker 1 has lr=0.2 \(SGD, group 0\)"
    with pytest.raises(WorkerFailed, match=said):
        run_loop(strategy=strategy, script=script)
    assert run_loop(strategy="local", script=script) == ["trained", "trained"]


SMALL = """
import torch, shoal
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.{optimizer}
training = shoal.attach(model, optimizer)
"""


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_as_written_is_refused(case, tmp_path):
    optimizer, strategy, sentence = REFUSED[case]
    script = tmp_path / "small.py"
    script.write_text(SMALL.format(optimizer=optimizer))
    with pytest.raises(WorkerFailed, match=sentence):
        run_loop(strategy=strategy, script=script, servers=2 if strategy == "asgd" else 1)
