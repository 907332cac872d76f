"""The loop of tests/support/loops.py as a script: trains with the optimizer named, and prints the weights."""

import sys

from torch import nn

import shoal
from loops import STEPS, Loop

loop = Loop(sys.argv[1])
training = shoal.attach(loop.model, loop.optimizer)
for t in range(STEPS):
    loop.run_step(t)
    loop.schedule.step()
training.finish()
flat = nn.utils.parameters_to_vector(loop.model.parameters()).detach()
print(f"weights {flat.numpy().tobytes().hex()}")
