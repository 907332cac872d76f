"""Attachment: a model in the user's own training loop, kept together with its replicas."""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.api.agreement import as_sent, check_alike, largest_message, merge_buffers, start_alike
from shoal.api.comings import Comings
from shoal.api.group_pace import GroupPace
from shoal.api.loop_data import LoopData
from shoal.api.notices import Notices
from shoal.api.own_place import OwnPlace, describe_undone, find_place
from shoal.api.same_model import check_same, describe
from shoal.api.saves import saves_of
from shoal.api.shown_solution import ShownSolution
from shoal.core.codec import Codec
from shoal.core.identity import NodeIdentity
from shoal.core.replica import NoMoreSteps
from shoal.engine.engine import Engine
from shoal.launch.control import Reporter
from shoal.launch.drive import drive
from shoal.launch.environment import Place
from shoal.launch.join import choose_mean, connect
from shoal.launch.keeper_process import announce
from shoal.launch.recovery import RECOVERY_SECONDS
from shoal.replicas.attached import AttachedReplica
from shoal.replicas.passes import Passes
from shoal.replicas.wrapped import rebind, unwrap_optimizer
from shoal.runs.result import report
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Sends, Strategy

LEAVING_SECONDS = 2.0
"""How long a worker that gives up waits for the others to answer its goodbye."""

AMP = "_step_supports_amp_scaling"
"""The attribute by which torch.amp.GradScaler recognises an optimizer that unscales gradients itself."""

_current: Attachment | None = None


def current() -> Attachment | None:
    """The attachment of this process, from attach() until it is finished; else None."""
    return _current


def set_current(attachment: Attachment | None) -> None:
    """Make it the attachment of this process."""
    global _current
    _current = attachment


class Attachment:
    """A model in your own training loop. Call `finish()` after the loop to get the trained parameters.

    The end of a `with` block or of the script calls `finish()`, too.
    """

    def __init__(
        self,
        model: nn.Module,
        given: Sequence[torch.optim.Optimizer],
        strategy: Strategy,
        codec: Codec,
        place: Place,
        groups: Sequence[Any],
        buffers: str,
        unused: str,
    ) -> None:
        optimizers = [unwrap_optimizer(one) for one in given]
        self._given = given  # some may be wrappers
        self._model = model
        self._buffers = buffers
        self._strategy = strategy
        self._joins = place.joins
        self._told_loss: Tensor | float | None = None
        me = place.identity(strategy)
        self._control = place.open_control(me)
        self._replica = AttachedReplica(model, *optimizers)
        self._replica.in_group = place.group > 1
        self._replica.passes = Passes(me.rank, len(me.first_workers))
        self.position = place.position  # of this process in its worker's group; 0 without a mesh
        self._between_steps = saves_of(place, strategy, codec, self._control, model, self._replica)
        self.engine = engine = self._join(place, me, codec)
        self._resumed_from: int | None = None
        self._start(place)
        self.data = LoopData(engine, self._replica, self._idle, average=strategy.is_elastic)
        self._pace = GroupPace(engine, self._replica, groups)
        self._place = OwnPlace(engine, self._replica, self.data, self._control, self.abandon)
        self._comings = None
        if engine.membership is not None:  # workers come and go
            self._comings = Comings(engine, strategy, self._replica, self.data, model, buffers)
        self._replica.tells_servers = strategy.steps_at_server
        self._notices = Notices(self.engine, strategy, self._replica, unused)
        returns = place.returns and (me.elastic or me.restarts)
        self._control.tell("ready", survives=strategy.survives, returns=returns)
        elapsed, finished, _ = self._control.await_go()
        engine.excuse(finished)
        self._began = engine.channel.now() - elapsed
        self._life = strategy.live(Node(engine))
        self._shown = ShownSolution(engine, self._replica, strategy)
        self._ended = False  # the strategy has ended: it has nothing more to do
        self._released = False  # the model and the optimizer are the user's again
        self._failure: Exception | None = None
        if not me.is_server:
            self._taken = [self._take_over(n, optimizer) for n, optimizer in enumerate(optimizers)]
            rebind(self._given)
            self._go_on(lambda: self._life.send(None))
            self._resumed_from = self._place.start(self._resumed_from)

    def _join(self, place: Place, me: NodeIdentity, codec: Codec) -> Engine:
        """Build this process's node and connect it to the others."""
        x, store = self._replica.x, place.open_store() if place.nodes > 1 else None
        vector_bytes = max(x.nbytes, largest_message(self._model, self._replica.untrained))
        manifest = self._replica.layout.manifest(x.dtype)
        described = describe(self._strategy, codec, self._model, self._replica)
        if store is not None and place.joins:
            check_same(store, described)
        elif store is not None and place.keeper and not (me.rank or me.incarnation):
            announce(store, vector_bytes, manifest, described, is_kept=me.elastic)
        transport = connect(
            place.transport,
            me,
            store,
            vector_bytes=vector_bytes,
            manifest=manifest,
            **place.connection,
        )
        return Engine(
            transport,
            self._replica.served(me) if me.is_server else self._replica,
            me,
            mean=choose_mean(place.collective, transport, codec, me.workers),
            codec=codec,
            timeout=place.timeout,
            between_steps=self._between_steps,
            observers=() if self.position else (Reporter(self._control, self._note_loss),),
            **place.recovery.settings(me, self._replica.layout, x.nbytes),
        )

    def _start(self, place: Place) -> None:
        """Start with the others or, where they are under way, find out where; a server has its log."""
        engine = self.engine
        if engine.is_server and place.returns and place.recovery.servers_return:
            engine.service.reached.awaits_seconds = RECOVERY_SECONDS
        if not place.incarnation:
            self._start_together()
        elif not engine.is_server:
            engine.coding.rehearse()
            if engine.identity.servers:
                drive(find_place(engine, self._replica, self._control))
                self._between_steps.begin_at(engine.t)

    def _start_together(self) -> None:
        """Start from worker 0's weights, or from a checkpoint."""
        engine = self.engine
        engine.coding.rehearse()
        drive(start_alike(engine, (self._replica.x, *self._replica.untrained)))
        if self._strategy.sends is Sends.MEAN_GRADIENTS or self._strategy.steps_at_server:
            drive(check_alike(engine, self._replica.options))
        if engine.is_server:
            engine.x.copy_(self._replica.x[engine.identity.own_slice(self._replica.x.numel())])
            engine.service.beside = [as_sent(tensor) for tensor in self._replica.untrained]
        engine.meter.reset()  # do not count the messages so far
        self._resumed_from = drive(self._between_steps.resume(engine))
        self._replica.agree()

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
        """The number of workers that the run was started with."""
        return len(self.engine.identity.first_workers)

    @property
    def is_first(self) -> bool:
        """Whether this worker is the first of those that are there: the one to print, to test and to save.

        Worker 0, or while it is away the next one. A worker that has come back is not the first before it has
        trained with the others again, while its loop runs through the epochs that they have done.
        """
        if self._comings is not None:
            return self._comings.is_first
        return self._place.is_first

    @property
    def resumed_from(self) -> int | None:
        """The step at which this worker goes on: that of a checkpoint, or of the others if it came back."""
        self._place.was_asked = True
        return self._resumed_from

    @property
    def failed(self) -> bool:
        """Whether a step has raised an error, which finish() raises again."""
        return self._failure is not None

    def saw(self, samples: int) -> None:
        """Add `samples` to the weight of the next step in averages. `shard` calls this for you."""
        self._replica.saw(samples)

    def finish(self) -> None:
        """Merge the last updates, load the trained parameters into the model, and leave the run.

        Further calls do nothing. After a step that failed it raises that error again: there is no result.
        """
        if self._failure is not None:
            self.abandon()
            raise self._failure
        if self._released:
            return
        self._place.end_loop()
        try:
            while not self._ended and self._go_on(lambda: self._life.throw(NoMoreSteps())):
                pass  # the strategy may continue without data while other workers have some
            self._replica.agree()
            self._notices.before_end()
            if self.engine.membership is None and not self._strategy.independent:
                with torch.no_grad():
                    drive(merge_buffers(self.engine, self._model, self._buffers, self._place.part_done))
        except BaseException:
            self.abandon()
            raise
        self._released = True
        self._close()
        set_current(None)
        if self._resumed_from is None:
            self._notices.at_end()

    @contextlib.contextmanager
    def common_model(self) -> Iterator[nn.Module]:
        """Inside the block the model holds what all workers have learnt together, to be evaluated or saved.

        That is the server's model, or that of the last merge. It waits for no other worker, so one may do it
        alone. Neighbour-to-neighbour strategies have no common model before finish(): there it is this
        worker's own. Buffers are this worker's. After the block the model is as it was.
        """
        if self._released:
            yield self._model
            return
        with self._shown.in_model():
            yield self._model

    def abandon(self) -> None:
        """Release the model and leave the run without a result; workers that wait for this one give up."""
        if not self._released:
            self._released = True
            self._life.close()
            self._give_back()
            leaving = threading.Thread(target=self._hang_up, name="shoal leaves", daemon=True)
            leaving.start()
            leaving.join(LEAVING_SECONDS)  # what ended training must be heard of, whoever does not answer
            set_current(None)

    def report(
        self, loss: Tensor | float | None = None, *, test_accuracy: Tensor | float | None = None
    ) -> None:
        """Tell the launcher figures that only your loop knows, for the live page and the records of the run.

        Call it after any step, or all: a loss is read only when this worker's next report is due. The test
        accuracy, in per cent, is passed on at once, also after `finish()`, by the first worker that is there.
        """
        self._told_loss = self._told_loss if loss is None else loss
        if test_accuracy is not None and self.position == 0 and self.is_first:
            self._control.tell("figures", test_accuracy=float(test_accuracy))

    def _note_loss(self) -> None:
        if self._told_loss is not None:
            self.engine.meter.loss = float(torch.as_tensor(self._told_loss).detach())

    def _hang_up(self) -> None:
        with contextlib.suppress(Exception):  # training has failed already, and that is what is reported
            if not self._joins or drive(self.engine.say_goodbye()):  # else the others must see it vanish
                drive(self.engine.transport.close())

    def leave(self) -> None:
        """Finish at the end of the script, unless an exception ends it: the others must notice that."""
        if not self._released and not self.failed and getattr(sys, "last_value", None) is None:
            with self._notices.at_script_end():
                self.finish()

    def serve(self) -> None:
        """Run the strategy's server until every worker has left."""
        drive(self._life)
        if (undone := describe_undone(self.engine)) is not None:
            self._control.announce(undone)
        self._released = True
        self._close()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.abandon()

    def _take_over(self, number: int, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        """Make `optimizer.step()` hand the gradient over and run the strategy until it wants the next one.

        Returns what makes the optimizer the user's own again.
        """
        original, scales_itself = optimizer.step, getattr(optimizer, AMP, None)

        def step(_: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            self._replica.turn_to(number)
            loss = None if closure is None else self._replica.evaluate(closure)
            if self._shown.is_shown:
                raise ValueError("optimizer.step() inside common_model(): train outside of the block")
            self._before_step()
            self._notices.before_step(optimizer)
            optimizer._opt_called = True  # type: ignore[attr-defined]  # what a scheduler looks for
            self._go_on(lambda: self._life.send(None))
            self._pace.end_step()
            self.data.warn_of_loss(lambda: self.is_first)
            return self._replica.own_loss if loss is None else loss

        def give_back() -> None:
            optimizer.step = original  # type: ignore[method-assign]
            if scales_itself is None:
                delattr(optimizer, AMP)
            else:
                setattr(optimizer, AMP, scales_itself)

        if self.engine.incarnation or self._resumed_from is not None:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # or schedulers warn
        # an earlier learning-rate scheduler looks for the attribute it set on the step it wrapped
        step.__dict__.update(getattr(original, "__dict__", {}))
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
        setattr(optimizer, AMP, True)  # GradScaler then always calls step(), and leaves skipping to us
        return give_back

    def _before_step(self) -> None:
        """See to it that a loop of a worker that was, or may be, started again goes on where it should."""
        if self._place.is_back:
            self._place.check()
            if self._comings is not None:
                self._comings.check()
        drive(self._place.note_step())

    def _idle(self) -> None:
        """Take a step in which this worker has no batch, and others have."""
        self._replica.is_idle = True
        try:
            self._go_on(lambda: self._life.send(None))
        finally:
            self._replica.is_idle = False
        self._pace.end_step()

    def _give_back(self) -> None:
        """Restore the user's optimizers and model."""
        self._replica.release()
        for give_back in self._taken:
            give_back()
        rebind(self._given)

    def _go_on(self, resume: Callable[[], object]) -> bool:
        """Run the strategy until it wants a gradient or has ended. Returns whether it wants a gradient."""
        if self._failure is not None:
            raise self._failure
        self._replica.enter()
        try:
            with torch.no_grad():
                resume()
        except StopIteration:
            self._ended = True
            return False
        except Exception as failure:
            self._failure = failure
            raise
        finally:
            self._replica.leave()
        return True

    def _close(self) -> None:
        engine = self.engine
        seconds = engine.channel.now() - self._began
        self._note_loss()
        drive(engine.transport.close())
        if not engine.is_server:
            self._give_back()
        self._control.tell("done", **report(engine, seconds))
