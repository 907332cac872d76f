"""attach(): you own the training loop. `optimizer.step()` synchronises the workers."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from shoal.api.agreement import BUFFERS_ARE
from shoal.api.attachment import Attachment, current, set_current
from shoal.api.notices import UNUSED_ARE
from shoal.core.codec import Codec
from shoal.core.limits import one_of
from shoal.engine.membership_errors import RunIsOver
from shoal.launch.environment import Place
from shoal.launch.join import choose_codec
from shoal.launch.worker_group import groups_inside, join_group, ranks_inside
from shoal.replicas.local_shards import is_distributed
from shoal.replicas.optimizer import has_inner, held_by, steps_each_element
from shoal.replicas.served import check_optimizer
from shoal.replicas.wrapped import check_wrappers, save_apart, tell_rank, unwrap_optimizer
from shoal.runs.refusals import check_places
from shoal.strategies import STRATEGIES
from shoal.strategies.single import Single
from shoal.vocabulary.strategy import Sends, Setting, Strategy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_was_launched = False
Listener = Callable[[Attachment, nn.Module, Sequence[torch.optim.Optimizer]], None]
_listeners: list[Listener] = []


def when_attached(listener: Listener) -> None:
    """Have `listener` called with what attach() is about to return in this process, and what it was given."""
    _listeners.append(listener)


def attach(
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    strategy: Strategy | str | None = None,
    *,
    codec: Codec | str | None = None,
    buffers: str = "mean",
    unused: str = "refused",
    mesh: DeviceMesh | None = None,
) -> Attachment:
    """Synchronise this model with its replicas in the other processes at every `optimizer.step()`.

    A script with several models, or several optimizers that it steps at different times, gives lists of them.
    A strategy or codec on the command line of `shoal run` overrides the one given here. A script started with
    plain `python` is a single worker. All replicas start from worker 0's weights. In the end running
    statistics, such as those of BatchNorm, are averaged over the workers, and all other buffers are worker
    0's; `buffers="first"` takes all from worker 0, `"own"` leaves them as each worker has them. A
    parameter without a gradient is refused where the strategy would move it and plain PyTorch would not;
    with `unused="zeros"` its gradient is zero. In a process that is one of the strategy's servers this call
    serves the workers, and exits the process when training is over; so it does in a worker that was started
    again when the others are done.
    `mesh` makes several processes one worker: those of the mesh, or of all its dimensions but the one named
    "workers". Each keeps its shard of the model together with the shards in the same position of the others.
    Raises ValueError if the process has called attach() before, or if the settings do not fit.
    """
    return attach_at(
        Place.find(), model, optimizer, strategy, codec=codec, buffers=buffers, unused=unused, mesh=mesh
    )


def is_due() -> bool:
    """Whether this process may be one of several workers, and has not called attach() yet."""
    if _was_launched or current() is not None:
        return False
    place = Place.find()
    if place.strategy is None:  # the script names it, perhaps with servers
        return place.nodes > 1
    return place.identity(choose_strategy(place, None)).workers > 1


def attach_at(
    found: Place,
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    strategy: Strategy | str | None = None,
    *,
    codec: Codec | str | None = None,
    buffers: str = "mean",
    unused: str = "refused",
    mesh: DeviceMesh | None = None,
) -> Attachment:
    """The same at a place in a run that is given, instead of the one that the launcher tells."""
    global _was_launched
    if current() is not None:
        raise ValueError(
            "attach() was called before; call finish() on what it returned first. Several models and "
            "optimizers go into one call: attach([model, other], [optimizer, another])"
        )
    if _was_launched:
        raise ValueError("attach() was called before: a process takes part in a run once")
    place = join_group(found, mesh)
    _was_launched = bool(place.launched)
    chosen = choose_strategy(place, strategy)
    coder = choose_codec(codec if place.codec is None else place.codec, chosen)
    workers = _check_numbers(place, chosen, coder)
    if coder.needs_products:
        raise ValueError(
            f"{coder} needs the factors of each layer's gradient, which Shoal cannot record in your own "
            "loop; take 'low_rank' here, or shoal.run"
        )
    whole = model if isinstance(model, nn.Module) else nn.ModuleList(model)
    given = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    check_wrappers(whole, workers)
    _check_group(whole, mesh, place, coder)
    _check_optimizers([unwrap_optimizer(one) for one in given], chosen, coder, workers, place)
    one_of(BUFFERS_ARE, buffers=buffers)
    one_of(UNUSED_ARE, unused=unused)
    _check_batch_norm(whole, chosen, workers)
    try:
        attachment = Attachment(whole, given, chosen, coder, place, groups_inside(mesh), buffers, unused)
    except RunIsOver:  # it was started again, and the others are done
        place.open_control().tell("came too late")
        sys.exit(0)
    tell_rank(attachment.rank)
    save_apart(whole)
    if attachment.engine.is_server:
        attachment.serve()
        sys.exit(0)
    return _announced(attachment, whole, given)


def _check_numbers(place: Place, strategy: Strategy, codec: Codec) -> int:
    """How many workers there may be. Raises ValueError if the strategy cannot do with so many."""
    me = place.identity(strategy)
    for workers in {len(me.first_workers), me.workers}:
        strategy.check(Setting(workers, codec, own_loop=bool(place.launched), shards=place.servers))
    if place.begins_with is not None:
        word = STRATEGIES.name_of(strategy)
        check_places(place.nodes, place.begins_with, place.transport, word, elastic=me.elastic)
    return me.workers


def _announced(
    attachment: Attachment, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> Attachment:
    """Make it the attachment of this process, and tell whoever listens."""
    set_current(attachment)
    atexit.register(attachment.leave)
    for listener in _listeners:
        listener(attachment, model, optimizers)
    return attachment


def _check_group(model: nn.Module, mesh: DeviceMesh | None, place: Place, codec: Codec) -> None:
    """Raise ValueError for what a process that holds shards cannot do, or says nothing of its mesh."""
    shards = [p for p in model.parameters() if is_distributed(p)]
    sharded, inside = bool(shards), set() if mesh is None else set(ranks_inside(mesh))
    if mesh is not None and any(not inside.issuperset(p.device_mesh.mesh.flatten().tolist()) for p in shards):
        raise ValueError(
            "the model's parameters are cut over processes of several workers, whose models only the "
            'strategy may touch; cut them over the dimensions inside a worker, as mesh["inside"]'
        )
    if sharded and place.group == 1 and place.nodes > 1:
        raise ValueError(
            "the model's parameters are DTensors, cut over a mesh of processes; say over which: "
            "attach(..., mesh=mesh)"
        )
    if place.group > 1 and place.checkpoint is not None and place.is_joined:
        raise ValueError(
            f"{place.launched} started the processes, and those of a group could not agree where to stop; "
            "start them with `shoal run --group`, or use torch.distributed.checkpoint in your loop"
        )
    if sharded and codec.needs_matrices:
        raise ValueError(
            f"{codec} looks at whole matrices, and each process holds a shard of them; take 'top_k', "
            "'one_bit' or another codec of single elements"
        )


def choose_strategy(place: Place, given: Strategy | str | None) -> Strategy:
    """The command line's strategy, else `given`; that of a single worker if nobody launched this process.

    Raises ValueError if it does not fit how the processes were started.
    """
    if place.launched == "":
        if isinstance(given, str):
            STRATEGIES.read(given)  # so that a misspelt name fails here, not at the first launch
        return Single()
    if place.strategy is not None:
        chosen = STRATEGIES.make(place.strategy, **place.strategy_options)
    elif isinstance(given, Strategy):
        chosen = given
    else:
        chosen = STRATEGIES.read(given or "sync")
    workers = place.identity(chosen).workers
    if place.launched == "shoal" and place.strategy is None and chosen.servers:
        word = STRATEGIES.name_of(chosen)
        raise ValueError(
            f"strategy {word!r} needs a server, so it must be named on the command line, where the processes "
            f"are started: shoal run -n {place.nodes} --strategy {word} ..."
        )
    if workers < 1:
        raise ValueError(
            f"{type(chosen).__name__} needs {place.nodes - workers} server beside at least 1 worker; "
            f"start {1 - workers} more"
        )
    return chosen


def _check_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], strategy: Strategy, codec: Codec, workers: int, place: Place
) -> None:
    """Raise ValueError if the strategy, or a checkpoint, cannot do with one of them, or with several."""
    for one in optimizers:
        check_optimizer(strategy, one, workers, place.servers)
        if strategy.looks_at and (place.group > 1 or any(map(is_distributed, held_by(one)))):
            raise ValueError(
                f"{type(strategy).__name__} looks at {strategy.looks_at}, and each process of a group "
                "holds some or parts of them; take 'diloco'"
            )
        if (
            strategy.steps_at_server
            and any(map(is_distributed, held_by(one)))
            and not steps_each_element(one)
        ):
            raise ValueError(
                f"{type(one).__name__} looks at whole tensors, and a server of {strategy} steps shards of "
                "them; take a strategy whose workers step, as 'sync' or 'diloco'"
            )
        if place.checkpoint is not None and has_inner(one):
            raise ValueError(
                f"{type(one).__name__} has another optimizer inside, whose state a checkpoint would miss; "
                "train without --checkpoint, or with that optimizer itself"
            )
    if len(optimizers) > 1:
        _check_several(strategy, codec)


def _check_several(strategy: Strategy, codec: Codec) -> None:
    """Raise ValueError where a step of one optimizer could carry something of another's."""
    averages = strategy.sends in (Sends.GRADIENTS, Sends.MEAN_GRADIENTS)
    if averages and not codec.exact and codec.cast is None:
        raise ValueError(
            f"{codec} may send some of a gradient with a later one, which is that of another optimizer; with "
            "several optimizers take codec 'fp16' or 'none'"
        )
    if strategy.mixes_steps or strategy.one_rate:
        raise ValueError(
            f"{strategy} mixes steps that may be of different optimizers, by merging their gradients or by "
            "momentum; with several optimizers take 'sync', 'bmuf', 'diloco', 'sync_server' or 'asgd'"
        )


def _check_batch_norm(model: nn.Module, strategy: Strategy, workers: int) -> None:
    """Raise ValueError for layers that would quietly not do what they are for.

    They talk through torch.distributed, in step with each other.
    """
    ready = dist.is_available() and dist.is_initialized() and dist.get_world_size() == workers
    if workers == 1 or (ready and strategy.sends is Sends.MEAN_GRADIENTS):
        return
    if any(isinstance(layer, nn.SyncBatchNorm) for layer in model.modules()):
        raise ValueError(
            "SyncBatchNorm talks to the other workers through torch.distributed, at every layer: it needs "
            "strategy 'sync' under torchrun, and init_process_group() before attach(). Or take BatchNorm, "
            "whose statistics are averaged in the end, or GroupNorm."
        )
