"""The keeper's process: one more of a run whose workers come and go. It runs no code of the user's."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from shoal.core.identity import NodeIdentity
from shoal.engine.channel import Channel
from shoal.engine.keeper import Keeper
from shoal.engine.mailbox import Mailbox
from shoal.engine.progress import Progress
from shoal.launch.control import Control, leave_with_parent
from shoal.launch.drive import drive
from shoal.launch.join import RUN_KEY, Access, connect, file_store
from shoal.launch.member import UNNEEDED, Member
from shoal.launch.open_places import OpenPlaces
from shoal.launch.recovery import message_limit
from shoal.launch.relayed_store import RelayedStore
from shoal.launch.script_process import VARIABLE
from shoal.launch.stop_signals import ctrl_c_ignored
from shoal.launch.visitors import LAST_SECONDS
from shoal.storage.journal import Journal
from shoal.transports.rendezvous import Store

FORK_SERVER = "shoal.launch.fork_server"
"""The module that keeps signals from the fork server. It comes first: the others take seconds."""

SLOW_IMPORTS = ("torch._dynamo",)
"""Modules that torch imports on first use of an optimizer. The fork server imports them once for all."""

ROSTER = "shoal/roster"
"""The key under which worker 0 of a script says what its model is, or that nobody needs a keeper."""

LOOK_SECONDS = 0.02

NOBODY_WAITS = "nobody waits for others to join in this run; that is for workers who average among themselves"

NOBODY_RETURNS = "in this run nobody takes the place of a worker that is killed"


@dataclass(frozen=True)
class KeeperPlace:
    """Where the keeper of a run meets the workers, and what model it passes on where it relays.

    With fewer than `least` workers the others wait for more. Of the `workers`, `begins_with` are there at the
    start; the other places are open to whoever has the run's token. `invitation` is what such a worker is
    told, and `hint` the end of the command that asks for it.
    """

    workers: int
    folder: str
    transport: str
    timeout: float
    patience: float
    least: int = 1
    access: Access | None = None
    vector_bytes: int = 0
    manifest: str = ""
    begins_with: int | None = None
    invitation: dict[str, Any] = field(default_factory=dict)
    hint: str = ""
    spares: int = 0  # in a script's run, to be refused where they are of no use
    relayed: bool = False  # whether not all workers can call each other
    store_connection: int | None = None  # file descriptor of the pipe to the store, on several hosts

    def identity(self, incarnation: int) -> NodeIdentity:
        """That of the keeper: it comes after the workers."""
        places, first = self.workers, self.begins_with
        return NodeIdentity(
            places, places, incarnation=incarnation, elastic=True, begins_with=first, relayed=self.relayed
        )

    def open_store(self) -> Store:
        """The store in which all of them find each other."""
        if self.store_connection is not None:
            return RelayedStore(Connection(self.store_connection))
        return file_store(self.folder, self.workers + 1)


def announce(
    store: Store, vector_bytes: int, manifest: str, described: Sequence[str], *, is_kept: bool
) -> None:
    """Worker 0 of a script tells the keeper whether anybody needs it, and what the model is."""
    model = {"vector_bytes": vector_bytes, "manifest": manifest, "described": described}
    store.set(ROSTER, json.dumps(model if is_kept else None))


def tell_model(store: Store, described: Sequence[str]) -> None:
    """Have a worker that joins a script's run find there what the model of the run is."""
    store.set(ROSTER, json.dumps({"described": described}))


def told_model(store: Store) -> list[str]:
    """What the model of a script's run is, line by line, as worker 0 has described it."""
    lines: list[str] = json.loads(store.get(ROSTER))["described"]
    return lines


def keep(place: KeeperPlace, incarnation: int, control: Control, store: Store | None = None) -> None:
    """Keep the roster of a run whose workers come and go, until all have gone.

    The keeper of a script has looked into the `store` already, and said that it is ready.
    """
    me, is_ready, store = place.identity(incarnation), store is not None, store or place.open_store()
    places = _open_places(place, store, control)
    transport = connect(
        place.transport,
        me,
        store,
        vector_bytes=place.vector_bytes,
        timeout=place.timeout,
        patience=place.patience,
        manifest=place.manifest,
        access=place.access,
        places=places,
    )
    channel = Channel(transport, me)
    cut_off = (
        0.0 if place.transport == "processes" else place.timeout
    )  # how long it may be, and the run go on
    keeper = Keeper(
        me,
        channel,
        Mailbox(channel, me, Progress(me.workers), recovery=cut_off),
        Journal(Path(place.folder) / "keeper", "memory", message_limit(0)),
        least=place.least,
        relays=place.transport == "grpc" and me.hubs == (me.rank,),
        on_wait=lambda why: control.tell("warning", text=why),
    )
    if places is not None:
        places.is_over = lambda: keeper.roster.is_over
        if not incarnation:
            control.tell("warning", text=places.invite(store, me.rank, place.hint))
    if not is_ready:
        control.tell("ready")
    control.await_go()
    drive(keeper.live())
    control.tell("over")  # before it closes: who comes later finds nobody who could say so
    if places is not None:
        places.await_farewells(LAST_SECONDS)
    drive(transport.close())


def _open_places(place: KeeperPlace, store: Store, control: Control) -> OpenPlaces | None:
    """The places that workers from elsewhere may take; None if there are none."""
    if place.begins_with is None:
        return None
    return OpenPlaces(
        range(place.begins_with, place.workers),
        Path(place.folder),
        lambda: {**place.invitation, "run_id": store.get(RUN_KEY).decode()},
        lambda rank, event: control.tell("place", rank=rank, of=event),
    )


def _knowing(place: KeeperPlace, vector_bytes: int, manifest: str, described: list[str]) -> KeeperPlace:
    """The same place when the model is known; those who join are told what it is."""
    told = {**place.invitation, "model": described}
    return replace(place, vector_bytes=vector_bytes, manifest=manifest, invitation=told)


def start_keeper(place: KeeperPlace, number: int, incarnation: int) -> Member:
    """Start the keeper of a script's run, the member of that number. It ends at once if nobody needs it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([FORK_SERVER, __name__])
    with ctrl_c_ignored():  # the fork server inherits this and keeps it
        forkserver.ensure_running()
    name = place.identity(incarnation).name
    ours, theirs = context.Pipe()
    process = context.Process(name=name, target=_main, args=(place, incarnation, theirs), daemon=True)
    with theirs:
        process.start()
    return Member(number, name, process, ours, incarnation)


def _main(place: KeeperPlace, incarnation: int, connection: Connection) -> None:
    leave_with_parent()
    control = Control(connection)
    control.defer_sigterm()
    torch.set_num_threads(1)
    try:
        control.tell("ready")  # who never calls attach() must not have to wait for the keeper
        store = place.open_store()
        model = _await_model(store, control)
        if model is None and place.least > 1:
            raise ValueError(f"min_workers={place.least}: {NOBODY_WAITS}")
        if model is None and place.spares:
            raise ValueError(f"spares={place.spares}: {NOBODY_RETURNS}")
        if model is None:
            control.tell("done", **UNNEEDED)
        else:
            keep(_knowing(place, **model), incarnation, control, store)
            control.tell("done")
    except BaseException as error:
        control.tell_failure(error)
    finally:
        control.close()


def _await_model(store: Store, control: Control) -> dict[str, Any] | None:
    """Wait until worker 0 has called attach(): what its model is, or None if nobody needs a keeper.

    A launcher that is gone ends the wait.
    """
    while not store.check([ROSTER]):
        control.heard()
        time.sleep(LOOK_SECONDS)
    model: dict[str, Any] | None = json.loads(store.get(ROSTER))
    return model


def main() -> None:
    """Keep the roster of a run on several hosts, for the agent that has started this process."""
    fields = json.loads(os.environ[VARIABLE])
    incarnation, control = fields.pop("incarnation"), fields.pop("control")
    _main(KeeperPlace(**{**fields, "access": Access(**fields["access"])}), incarnation, Connection(control))


if __name__ == "__main__":
    main()
