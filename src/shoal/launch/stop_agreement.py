"""StopAgreement: how workers without a launcher of ours all stop at the same step, with a checkpoint."""

from __future__ import annotations

import atexit
import signal
import threading
import time
from typing import Any

from shoal.core.identity import NodeIdentity
from shoal.launch.control import Control, Go
from shoal.transports.rendezvous import Store

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What asks a node to stop. Schedulers send SIGTERM; `sbatch --signal=USR1@60` sends the other earlier."""

LOOK_SECONDS = 0.25
"""How often a node looks in the store whether another was asked to stop."""

PATIENCE = 5.0
"""How long the workers wait for one that does not answer. Then it counts as dead: they stop without it."""

ASKED, STEP, END = "shoal/stop/asked", "shoal/stop/step", "end"


class StopAgreement(Control):
    """Stands in for the launcher of a run that another program has started: it gives the orders to stop.

    A signal to any node asks all of them. A thread at each worker then promises a step: the next before which
    that worker can stop. The largest promised step is where all stop; a worker that comes to its own promised
    step earlier waits there until the largest is known. As threads promise, and not the training loops, a
    worker that waits for messages of another keeps nobody waiting.
    """

    def __init__(self, store: Store, me: NodeIdentity) -> None:
        super().__init__()
        self._store = store
        self._me = me
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._step = 0  # the step before which the training loop was last seen
        self._promised: int | None = None
        self._order: dict[str, Any] | None = None  # that the training loop has not heard yet
        self._asked = self._finished = False
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="shoal looks for a stop", daemon=True)
        self._handlers: dict[signal.Signals, Any] = {}

    def tell(self, event: str, **fields: Any) -> None:
        """Begin to look when the node is ready, and end when it is done."""
        if event == "ready":
            self._handle_signals()
            self._watcher.start()
            atexit.register(self.close)  # a thread inside the store would abort an interpreter that ends
        elif event == "done":
            self._finished = True
            self.close()

    def heard(self, step: int = 0) -> dict[str, Any] | None:
        """The order that came since the last call, for a worker before `step`; never waits."""
        with self._lock:
            self._step = step
            order, self._order = self._order, None
            return order

    def await_order(self) -> dict[str, Any]:
        """Wait for the next order."""
        with self._news:
            while self._order is None:
                self._news.wait()
            order, self._order = self._order, None
            return order

    def await_go(self) -> Go:
        """Start at once."""
        return Go(0.0, ())

    def close(self) -> None:
        """End the thread, and give the signals back."""
        atexit.unregister(self.close)
        self._closing.set()
        if self._watcher.is_alive() and self._watcher is not threading.current_thread():
            self._watcher.join()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def _handle_signals(self) -> None:
        """Take the signals for which the script has no handler of its own."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:
                self._handlers[number] = signal.signal(number, self._ask)

    def _ask(self, number: int, frame: object) -> None:
        self._asked = True  # no more: the signal may have come while this very thread used the store

    def _watch(self) -> None:
        try:
            while not self._closing.wait(LOOK_SECONDS):
                if self._asked:
                    self._store.set(ASKED, self._me.name)
                if not self._me.is_server and self._store.check([ASKED]):
                    self._agree()
                    return
            if self._finished and not self._me.is_server:
                self._store.set(self._key(self._me.rank), END)
        except RuntimeError:  # the store is gone, and the node that kept it: nobody can agree any more
            while not self._asked and not self._closing.wait(LOOK_SECONDS):
                pass
            self._give(self._promise())

    def _agree(self) -> None:
        """Promise a step, and pass the one that all agree on to the training loop."""
        self._store.set(self._key(self._me.rank), str(self._promise()))
        deadline = time.monotonic() + PATIENCE
        while not self._store.check([STEP]):
            keys = [self._key(rank) for rank in range(self._me.workers)]
            said = [self._store.get(key).decode() for key in keys if self._store.check([key])]
            if len(said) == len(keys) or time.monotonic() > deadline:
                # a finished worker is past every step of the others: too late for a checkpoint of all
                step = END if END in said else str(max(map(int, said)))
                self._store.compare_set(STEP, "", step)
            elif self._closing.wait(LOOK_SECONDS / 5):
                return
        agreed = self._store.get(STEP).decode()
        self._give(None if agreed == END else max(int(agreed), self._promised or 0))

    def _promise(self) -> int:
        with self._lock:
            self._promised = self._step + 1
            self._order = {"order": "run to", "step": self._promised, "final": False}
            return self._promised

    def _give(self, step: int | None) -> None:
        with self._news:
            self._order = {"order": "run to", "step": step, "final": True}
            self._news.notify()

    def _key(self, rank: int) -> str:
        return f"shoal/stop/promised/{rank}"
