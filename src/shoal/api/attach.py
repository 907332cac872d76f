"""attach(): you own the training loop. `optimizer.step()` synchronises the workers."""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.codecs import CODECS
from shoal.core.codec import Codec
from shoal.core.identity import NodeIdentity
from shoal.core.replica import NoMoreSteps
from shoal.core.transport import Message
from shoal.core.vector import named_weights
from shoal.engine.engine import Engine
from shoal.launch.between_steps import BetweenSteps
from shoal.launch.control import Reporter
from shoal.launch.drive import drive
from shoal.launch.environment import Place
from shoal.launch.join import Access, choose_mean, connect
from shoal.replicas.attached import AttachedReplica
from shoal.replicas.served import check_optimizer
from shoal.runs.curve import holds_solution
from shoal.runs.result import report
from shoal.storage.checkpoint import Checkpoints
from shoal.strategies import STRATEGIES
from shoal.strategies.single import Single
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Sends, Setting, Strategy

LEAVING_SECONDS = 2.0
"""How long a worker that gives up waits for the others to answer its goodbye."""

AMP = "_step_supports_amp_scaling"
"""The attribute by which torch.amp.GradScaler recognises an optimizer that unscales gradients itself."""

_current: Attachment | None = None
_was_launched = False


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy | str | None = None,
    *,
    codec: Codec | str | None = None,
) -> Attachment:
    """Synchronise this model with its replicas in the other processes at every `optimizer.step()`.

    A strategy or codec on the command line of `shoal run` overrides the one given here. A script started with
    plain `python` is a single worker. All replicas start from worker 0's weights. In a process that is one of
    the strategy's servers this call serves the workers, and exits the process when training is over.
    Raises ValueError if the process has called attach() before, or if the settings do not fit.
    """
    global _current, _was_launched
    if _current is not None:
        raise ValueError("attach() was called before; call finish() on what it returned first")
    if _was_launched:
        raise ValueError("attach() was called before: a process takes part in a run once")
    place = Place.find()
    _was_launched = bool(place.launched)
    chosen = _choose_strategy(place, strategy)
    named = codec if place.codec is None else place.codec
    coder = named if isinstance(named, Codec) else CODECS.read(named or "none")
    chosen.check(Setting(place.identity(chosen).workers, coder, own_loop=bool(place.launched)))
    if coder.needs_products:
        raise ValueError(
            f"{coder} needs the factors of each layer's gradient, which Shoal cannot record in your own "
            "loop; take 'low_rank' here, or shoal.run"
        )
    check_optimizer(chosen, optimizer, place.identity(chosen).workers, place.servers)
    attachment = Attachment(model, optimizer, chosen, coder, place)
    if attachment.engine.is_server:
        attachment.serve()
        sys.exit(0)
    _current = attachment
    atexit.register(attachment.leave)
    return attachment


def current() -> Attachment | None:
    """The attachment of this process, from attach() until it is finished; else None."""
    return _current


def _choose_strategy(place: Place, given: Strategy | str | None) -> Strategy:
    if place.launched == "":
        if isinstance(given, str):
            STRATEGIES.make(given)  # so that a misspelt name fails here, not at the first launch
        return Single()
    if place.strategy is not None:
        chosen = STRATEGIES.make(place.strategy, **place.strategy_options)
    elif isinstance(given, Strategy):
        chosen = given
    else:
        chosen = STRATEGIES.make(given or "sync")
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


class Attachment:
    """A model in your own training loop. Call `finish()` after the loop to get the trained parameters.

    The end of a `with` block or of the script calls `finish()`, too.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        codec: Codec,
        place: Place,
    ) -> None:
        self._model = model
        self._strategy = strategy
        self._control = place.open_control()
        self._replica = AttachedReplica(model, optimizer)
        me = place.identity(strategy)
        self._between_steps = self._make_between_steps(place, codec, me.workers)
        self.engine = self._join(place, me, codec)
        self.resumed_from: int | None = None  # step of the checkpoint
        if not place.incarnation:  # a restarted server recovers from its log instead
            self._start_together()
        self._batches_to_skip = self._replica.batches
        self._first_shard: object = None
        self._control.tell("ready")
        elapsed, finished = self._control.await_go()
        self.engine.service.excuse(finished)
        self._began = self.engine.channel.now() - elapsed
        self._life = strategy.live(Node(self.engine))
        self._ended = False  # the strategy has nothing more to do
        self._released = False  # the model and the optimizer are the user's again
        self._failure: Exception | None = None
        if not me.is_server:
            self._take_over(optimizer)
            self._go_on(lambda: self._life.send(None))

    def _join(self, place: Place, me: NodeIdentity, codec: Codec) -> Engine:
        """Build this process's node and connect it to the others."""
        x = self._replica.x
        transport = connect(
            place.transport,
            me,
            place.open_store() if place.nodes > 1 else None,
            vector_bytes=max(t.nbytes for t in (x, *self._others())),
            timeout=place.timeout,
            manifest=self._replica.layout.manifest(x.dtype),
            access=Access(**place.access),
        )
        return Engine(
            transport,
            self._replica.served(me) if me.is_server else self._replica,
            me,
            mean=choose_mean(place.collective, transport, codec, me.workers),
            codec=codec,
            timeout=place.timeout,
            between_steps=self._between_steps,
            observers=(Reporter(self._control),),
            **place.recovery.settings(me, self._replica.layout, x.nbytes),
        )

    def _start_together(self) -> None:
        """Start from worker 0's weights, or from a checkpoint."""
        engine = self.engine
        drive(self._same_start())
        if engine.is_server:
            engine.x.copy_(self._replica.x[engine.identity.own_slice(self._replica.x.numel())])
        engine.meter.reset()  # do not count the messages so far
        self.resumed_from = self._between_steps.resume(engine)

    @property
    def node(self) -> Node:
        """This worker's node, for a loop that sends its own messages."""
        return Node(self.engine)

    @property
    def rank(self) -> int:
        """This worker's rank, from 0."""
        return self.engine.rank

    @property
    def workers(self) -> int:
        """The number of workers."""
        return self.engine.identity.workers

    def saw(self, samples: int) -> None:
        """Add `samples` to the weight of the next step in averages. `shard` calls this for you."""
        self._replica.samples += samples

    def hand_out(self, samples: int) -> None:
        """Count a batch that `shard` gave to the loop, so that a resumed run skips it."""
        self._replica.batches += 1
        self.saw(samples)

    def leads(self, shard: object) -> bool:
        """Whether `shard` is the one iterated first, whose batches are counted: the training data."""
        if self._first_shard is None:
            self._first_shard = shard
        return self._first_shard is shard

    def skip_batches(self, most: int) -> int:
        """How many of the next `most` batches a resumed run must skip. Each batch is skipped only once."""
        skipped = min(most, self._batches_to_skip)
        self._batches_to_skip -= skipped
        return skipped

    def finish(self) -> None:
        """Merge the last updates, load the trained parameters into the model, and leave the run.

        Further calls do nothing. After a step that failed it raises that error again: there is no result.
        """
        global _current
        if self._failure is not None:
            self.abandon()
            raise self._failure
        if self._released:
            return
        try:
            while not self._ended and self._go_on(lambda: self._life.throw(NoMoreSteps())):
                pass  # the strategy may continue without data while other workers have some
        except BaseException:
            self.abandon()
            raise
        self._released = True
        self._close()
        _current = None

    def abandon(self) -> None:
        """Release the model and leave the run without a result; workers that wait for this one give up."""
        global _current
        if not self._released:
            self._released = True
            self._life.close()
            self._give_back()
            leaving = threading.Thread(target=self._hang_up, name="shoal leaves", daemon=True)
            leaving.start()
            leaving.join(LEAVING_SECONDS)  # what ended training must be heard of, whoever does not answer
            _current = None

    def _hang_up(self) -> None:
        with contextlib.suppress(Exception):  # training has failed already, and that is what is reported
            drive(self.engine.transport.close())

    def leave(self) -> None:
        """Finish at the end of the script, unless an exception ends it: the others must notice that."""
        if not self._released and self._failure is None and getattr(sys, "last_value", None) is None:
            self.finish()

    def serve(self) -> None:
        """Run the strategy's server until every worker has left."""
        drive(self._life)
        self._released = True
        self._close()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.abandon()

    def _take_over(self, optimizer: torch.optim.Optimizer) -> None:
        """Make `optimizer.step()` hand the gradient over and run the strategy until it wants the next one."""
        self._optimizer, self._original_step = optimizer, optimizer.step
        self._replica.original_step = optimizer.step

        def step(_: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            loss = None if closure is None else self._replica.evaluate(closure)
            self._check_freezing()
            optimizer._opt_called = True  # type: ignore[attr-defined]  # what a scheduler looks for
            self._go_on(lambda: self._life.send(None))
            return self._replica.own_loss if loss is None else loss

        # an earlier learning-rate scheduler looks for the attribute it set on the step it wrapped
        step.__dict__.update(getattr(optimizer.step, "__dict__", {}))
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
        self._scales_itself = getattr(optimizer, AMP, None)
        setattr(optimizer, AMP, True)  # GradScaler then always calls step(), and leaves skipping to us

    def _check_freezing(self) -> None:
        """Raise ValueError if a parameter was frozen since attach() that the strategy would still move."""
        by_gradients = self._strategy.sends in (Sends.MEAN_GRADIENTS, Sends.NOTHING)
        if not by_gradients and not all(p.requires_grad for p in self._replica.parameters):
            raise ValueError(
                f"a parameter was frozen after attach(), and {type(self._strategy).__name__} would still "
                "move it. Freeze it before attach(), or take strategy 'sync'."
            )

    def _give_back(self) -> None:
        """Restore the user's optimizer and model."""
        self._replica.release()
        self._optimizer.step = self._original_step  # type: ignore[method-assign]
        if self._scales_itself is None:
            delattr(self._optimizer, AMP)
        else:
            setattr(self._optimizer, AMP, self._scales_itself)

    def _go_on(self, resume: Callable[[], object]) -> bool:
        """Run the strategy until it wants a gradient or has ended. Returns whether it wants a gradient."""
        if self._failure is not None:
            raise self._failure
        try:
            with torch.no_grad():
                resume()
        except StopIteration:
            self._ended = True
            return False
        except Exception as failure:
            self._failure = failure
            raise
        return True

    def _others(self) -> list[Tensor]:
        """The model's other parameters, which are not trained, and its buffers."""
        trained = {id(p) for p in self._replica.parameters}
        return [
            *(p.detach() for p in self._model.parameters() if id(p) not in trained),
            *self._model.buffers(),
        ]

    async def _same_start(self) -> None:
        """Broadcast worker 0's weights, those that are not trained and buffers included.

        Raises ValueError at a node whose model has another size or dtype.
        """
        engine, me = self.engine, self.engine.identity
        for mine in (self._replica.x, *self._others()):
            flat = mine.detach().reshape(-1)
            travels = flat.to(torch.uint8) if mine.dtype == torch.bool else flat
            if me.rank == 0:
                for rank in range(1, me.nodes):
                    await engine.channel.send(rank, Message("start", (travels,)))
                continue
            start = (await engine.mailbox.find("start", 0)).body
            if start.numel() != mine.numel() or start.dtype != travels.dtype:
                raise ValueError(
                    f"worker 0 sent a tensor of {start.numel():,} elements ({start.dtype}) for one of "
                    f"{mine.numel():,} ({travels.dtype}) at {me.name}; all processes must build the same "
                    "model"
                )
            mine.copy_(start.view(mine.shape))

    def _make_between_steps(self, place: Place, codec: Codec, workers: int) -> BetweenSteps:
        saved = None
        if place.checkpoint is not None:
            config = {
                "strategy": repr(self._strategy),
                "codec": repr(codec),
                "workers": workers,
                "servers": place.servers,
                "parameters": self._replica.x.numel(),
            }
            saved = Checkpoints(place.checkpoint, config, place.nodes)
        return BetweenSteps(self._control, saved, place.every, self._weights)

    def _weights(self, engine: Engine) -> Mapping[str, Tensor] | None:
        if engine.identity.shards > 1 or not holds_solution(self._strategy, engine):
            return None
        solution = self._strategy.solution(Node(engine))
        return named_weights(self._model, solution, self._replica.parameters)

    def _close(self) -> None:
        engine = self.engine
        seconds = engine.channel.now() - self._began
        drive(engine.transport.close())
        if not engine.is_server:
            self._give_back()
        self._control.tell("done", **report(engine, seconds))
