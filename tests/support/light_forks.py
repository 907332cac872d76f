"""Imported last by the fork server: its children then share its memory and end without tidying it up.

A collection of garbage writes to every object that it visits, and at its end a process takes back one by one
the hundreds of operators that torch has registered. Both copy most of what was shared until then.
"""

import gc
import weakref

import torch

torch.set_num_threads(1)  # as in the tests themselves: threads wait for each other on busy cores
gc.collect()
gc.freeze()
for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
    finalizer.atexit = False
