"""Did one author write both texts? Two texts through one LSTM, each on its own worker.

shoal run -n 2 examples/branches.py            each worker encodes one text, worker 0 merges
python examples/branches.py                    the same training in one process
python examples/branches.py --devices cuda:0,cuda:1    one process, a GPU for each text
"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.launch.drive import drive
from shoal.programs.models.branches import BranchModel, LastState, propagate

LENGTH, CHARACTERS, AUTHORS, STATES = 140, 256, 4, 64


def texts(authors: Tensor, habits: Tensor, dice: torch.Generator) -> Tensor:
    """Synthetic one-hot texts; every author has favourite characters."""
    return F.one_hot(torch.multinomial(habits[authors], LENGTH, True, generator=dice), CHARACTERS).float()


def pairs(batch: int, seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Endless pairs of texts, and whether one author wrote both."""
    dice = torch.Generator().manual_seed(seed)
    habits = torch.softmax(2 * torch.randn(AUTHORS, CHARACTERS, generator=dice), dim=1)
    while True:
        a, b = torch.randint(AUTHORS, (2, batch), generator=dice)
        b = torch.where(torch.rand(batch, generator=dice) < 0.5, a, b)  # else most would have two authors
        yield texts(a, habits, dice), texts(b, habits, dice), (a == b).float()


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--devices", default="cpu,cpu", help="of the two branches")
args = parser.parse_args()

torch.manual_seed(args.seed)
# A single layer would only add scores of the two texts; comparing them needs a hidden layer.
head = nn.Sequential(nn.Linear(2 * STATES, STATES), nn.ReLU(), nn.Linear(STATES, 1), nn.Flatten(0))
model = BranchModel(LastState(CHARACTERS, STATES), head, args.devices.split(","))
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
training = shoal.attach(model, optimizer, "sync", unused="zeros")  # of other workers' branches
data = pairs(args.batch, args.seed)

for step in range(args.steps):
    a, b, same = next(data)  # the same at all workers; each uses its own part
    optimizer.zero_grad()
    loss = drive(propagate(training.node, model, (a, b), same, F.binary_cross_entropy_with_logits))
    optimizer.step()
    if loss is not None and step % 20 == 19:
        print(f"step {step + 1}: loss {loss:.4f}")

training.finish()
if training.rank == 0:
    with torch.no_grad():
        tests = [next(data) for _ in range(20)]
        right = torch.cat([(model(a, b) > 0) == same.bool() for a, b, same in tests]).float().mean()
    print(f"right about {100 * right:.1f} % of pairs not seen before")
