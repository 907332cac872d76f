"""The keeper's process: one more of a run whose workers come and go. It runs no code of the user's."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from shoal.core.identity import NodeIdentity
from shoal.engine.channel import Channel
from shoal.engine.keeper import Keeper
from shoal.engine.mailbox import Mailbox
from shoal.engine.progress import Progress
from shoal.launch.control import Control, leave_with_parent
from shoal.launch.drive import drive
from shoal.launch.join import connect, file_store
from shoal.launch.member import UNNEEDED, Member
from shoal.launch.recovery import message_limit
from shoal.launch.stop_signals import ctrl_c_ignored
from shoal.storage.journal import Journal
from shoal.transports.rendezvous import Store

FORK_SERVER = "shoal.launch.fork_server"
"""The module that keeps signals from the fork server. It comes first: the others take seconds."""

ROSTER = "shoal/roster"
"""The key under which worker 0 says whether the workers of a script need a keeper."""

KEPT, NONE = "kept", "none"

LOOK_SECONDS = 0.02


@dataclass(frozen=True)
class KeeperPlace:
    """Where the keeper of a run meets the workers."""

    workers: int
    folder: str
    transport: str
    timeout: float
    patience: float

    def identity(self, incarnation: int) -> NodeIdentity:
        """That of the keeper: it comes after the workers."""
        return NodeIdentity(self.workers, self.workers, incarnation=incarnation, elastic=True)

    def open_store(self) -> Store:
        """The store in which all of them find each other."""
        return file_store(self.folder, self.workers + 1)


def announce(store: Store, *, is_kept: bool) -> None:
    """Worker 0 of a script tells the keeper whether anybody needs it."""
    store.set(ROSTER, KEPT if is_kept else NONE)


def keep(place: KeeperPlace, incarnation: int, control: Control, store: Store | None = None) -> None:
    """Keep the roster of a run whose workers come and go, until all have gone.

    The keeper of a script has looked into the `store` already, and said that it is ready.
    """
    me, is_ready = place.identity(incarnation), store is not None
    transport = connect(
        place.transport,
        me,
        store or place.open_store(),
        vector_bytes=0,
        timeout=place.timeout,
        patience=place.patience,
    )
    channel = Channel(transport, me)
    log = Journal(Path(place.folder) / "keeper", "memory", message_limit(0))
    keeper = Keeper(me, channel, Mailbox(channel, me, Progress(me.workers)), log)
    if not is_ready:
        control.tell("ready")
    control.await_go()
    drive(keeper.live())
    drive(transport.close())


def start_keeper(place: KeeperPlace, incarnation: int) -> Member:
    """Start the keeper of a script's run, which ends at once if its strategy needs none."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([FORK_SERVER, __name__])
    with ctrl_c_ignored():  # the fork server inherits this and keeps it
        forkserver.ensure_running()
    name = place.identity(incarnation).name
    ours, theirs = context.Pipe()
    process = context.Process(name=name, target=_main, args=(place, incarnation, theirs), daemon=True)
    with theirs:
        process.start()
    return Member(place.workers, name, process, ours, incarnation)


def _main(place: KeeperPlace, incarnation: int, connection: Connection) -> None:
    leave_with_parent()
    control = Control(connection)
    control.defer_sigterm()
    torch.set_num_threads(1)
    try:
        control.tell("ready")  # who never calls attach() must not have to wait for the keeper
        store = place.open_store()
        if _is_needed(store, control):
            keep(place, incarnation, control, store)
            control.tell("done")
        else:
            control.tell("done", **UNNEEDED)
    except BaseException as error:
        control.tell_failure(error)
    finally:
        control.close()


def _is_needed(store: Store, control: Control) -> bool:
    """Wait until worker 0 has called attach(); what it says. A launcher that is gone ends the wait."""
    while not store.check([ROSTER]):
        control.heard()
        time.sleep(LOOK_SECONDS)
    return store.get(ROSTER) == KEPT.encode()
