"""Imported last by the fork server: its children then share its memory and end without tidying it up.

They also find every strategy imported, and the options of all that has a word read from its source.

A collection of garbage writes to every object that it visits, and at its end a process takes back one by one
the hundreds of operators that torch has registered. Both copy most of what was shared until then.
"""

import gc
import weakref

import torch

from power_cuts import expect_no_power_cut
from shoal.codecs import CODECS
from shoal.programs.tasks import TASKS
from shoal.strategies import STRATEGIES

for catalogue in (STRATEGIES, CODECS, TASKS):
    for word in catalogue:
        catalogue.check(word)
for word in STRATEGIES:
    assert STRATEGIES[word]
torch.set_num_threads(1)  # as in the tests themselves: threads wait for each other on busy cores
expect_no_power_cut()
gc.collect()
gc.freeze()
for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
    finalizer.atexit = False
