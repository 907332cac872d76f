"""Imported by the fork server of multiprocessing: signals must not end it, and with it all nodes of a run.

A terminal signals the launcher's process group, a service manager every process of the run. The launcher
alone decides what follows. Processes that the server forks have the default handlers again.
"""

from __future__ import annotations

import os
import signal
import sys

from shoal.launch.huge_pages import with_huge_pages
from shoal.launch.quick_exit import end_quickly
from shoal.launch.stop_signals import STOPPING

NAME = "multiprocessing.forkserver"


def _keep_out_of_it() -> None:
    os.setpgid(0, 0)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOPPING}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    os.register_at_fork(after_in_child=restore)


if any(NAME in word for word in sys.orig_argv):  # not where somebody else imports this module
    os.environ.update(with_huge_pages(os.environ))  # before torch is imported
    _keep_out_of_it()
    end_quickly()
