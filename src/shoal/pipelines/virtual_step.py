"""One step of a pipeline in virtual time: when each stage computes, waits and sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from shoal.pipelines.schedules import BACKWARD, FORWARD, Action, PipelineSchedule
from shoal.sim.kernel import Kernel, Process, suspended
from shoal.sim.models import Network, Wires


@dataclass(frozen=True)
class StageCost:
    """What one microbatch costs a stage, and what the stage holds in memory."""

    forward: float = 1.0  # seconds
    backward: float = 1.0
    output_bytes: int = 0  # to the next stage; as many come back as gradients
    activation_bytes: int = 0  # kept from the forward pass of a microbatch to its backward pass
    state_bytes: int = 0  # parameters, gradients, optimizer

    def __post_init__(self) -> None:
        if min(self.forward, self.backward, self.output_bytes, self.activation_bytes, self.state_bytes) < 0:
            raise ValueError(f"{self}: times and bytes must not be negative")

    def seconds(self, kind: str) -> float:
        """How long a forward or backward pass takes."""
        return self.forward if kind == FORWARD else self.backward


@dataclass(frozen=True)
class MessageCost:
    """Seconds that a device itself spends on a message, in which it does not compute (LogP's overhead o).

    It begins to receive when it is free; if the message comes later, that hides in the waiting. Culler et al.
    1993.
    """

    send: float = 0.0
    receive: float = 0.0

    def __post_init__(self) -> None:
        if min(self.send, self.receive) < 0:
            raise ValueError(f"{self}: times must not be negative")


@dataclass(frozen=True)
class PipelineEvent:
    """A pass that a device made, and when."""

    device: int
    stage: int
    microbatch: int
    kind: str  # forward or backward
    start: float
    end: float


@dataclass(frozen=True)
class PipelineTimeline:
    """One step of a pipeline: its events in the order of their start, and what follows from them."""

    schedule: PipelineSchedule
    devices: int
    microbatches: int
    stages: Sequence[StageCost]
    events: Sequence[PipelineEvent]
    link_bytes: dict[tuple[int, int], int] = field(default_factory=dict)  # by (from device, to device)

    @property
    def seconds(self) -> float:
        """From the first forward pass to the end of the last backward pass."""
        return max(event.end for event in self.events)

    @property
    def busy(self) -> list[float]:
        """Seconds that each device computes."""
        spent = [0.0] * self.devices
        for event in self.events:
            spent[event.device] += event.end - event.start
        return spent

    @property
    def bubble(self) -> float:
        """The share of all devices' time in which they do not compute."""
        return 1 - sum(self.busy) / (self.devices * self.seconds)

    @property
    def overhead(self) -> float:
        """The time without computing as a share of the time with it."""
        return self.devices * self.seconds / sum(self.busy) - 1

    def in_flight(self, stage: int) -> int:
        """The most microbatches whose activations the stage keeps at one moment."""
        return self._peak([1 if s == stage else 0 for s in range(len(self.stages))], stage % self.devices)

    def memory(self, device: int) -> int:
        """The most bytes that a device holds: the state of its stages, and activations in flight."""
        state = sum(stage.state_bytes for stage in self.stages[device :: self.devices])
        return state + self._peak([stage.activation_bytes for stage in self.stages], device)

    def _peak(self, sizes: Sequence[int], device: int) -> int:
        """The largest sum of `sizes` of the stages' microbatches between forward and backward pass."""
        held = peak = 0
        for event in self.events:  # a device's passes do not overlap, so starts are in the order of ends
            if event.device == device:
                held += sizes[event.stage] if event.kind == FORWARD else 0
                peak = max(peak, held)
                held -= sizes[event.stage] if event.kind == BACKWARD else 0
        return peak


def simulate_step(
    schedule: PipelineSchedule,
    stages: Sequence[StageCost],
    microbatches: int,
    network: Network | None = None,
    devices: int | None = None,
    messages: MessageCost | None = None,
) -> PipelineTimeline:
    """One step in virtual time. There are as many devices as stages, or fewer with several stages each.

    `messages` is what sending and receiving cost the devices themselves, by default nothing. The optimizer's
    own time is not counted. Raises ValueError if the schedule cannot have several stages on
    a device and there are more stages than devices.
    """
    devices = len(stages) if devices is None else devices
    chunks, rest = divmod(len(stages), devices)
    if microbatches < 1 or rest or (chunks != 1 and not schedule.chunked):
        raise ValueError(
            f"{schedule.name} cannot run {len(stages)} stages on {devices} devices with {microbatches} "
            "microbatches; take one stage a device (interleaved: the same number on each), and 1 microbatch "
            "or more"
        )
    orders = [schedule.order(rank, devices, microbatches, chunks) for rank in range(devices)]
    step = _Step(schedule, stages, orders, network or Network(), messages or MessageCost())
    step.run()
    events = tuple(sorted(step.events, key=lambda event: (event.start, event.device)))
    return PipelineTimeline(schedule, devices, microbatches, tuple(stages), events, step.link_bytes)


class _Step:
    """The devices of a pipeline as processes in virtual time."""

    def __init__(
        self,
        schedule: PipelineSchedule,
        stages: Sequence[StageCost],
        orders: Sequence[Sequence[Action]],
        network: Network,
        messages: MessageCost,
    ) -> None:
        self.events: list[PipelineEvent] = []
        self.link_bytes: dict[tuple[int, int], int] = {}
        self._schedule, self._stages, self._orders = schedule, stages, orders
        self._messages = messages
        self._network, self._wires, self._kernel = network, Wires(network, seed=0), Kernel()
        self._ready: set[Action] = set()  # passes whose input is there
        self._waiting: dict[int, Action] = {}
        self._processes: list[Process] = []

    def run(self) -> None:
        """Advance virtual time to the end of the step. Raises Deadlock if the orders do not fit together."""
        for rank in range(len(self._orders)):
            process = self._kernel.spawn(self._work(rank), partial(self._describe, rank))
            self._processes.append(process)
        try:
            self._kernel.run()
        finally:
            self._kernel.close()

    async def _work(self, rank: int) -> None:
        for action, after in pairwise([*self._orders[rank], None]):
            assert action is not None
            self._waiting[rank] = action
            if self._comes_from_another(action):
                await self._sleep_until(rank, self._kernel.now + self._messages.receive)
            while not self._has_input(action):
                await suspended()
            start = self._kernel.now
            await self._sleep_until(rank, start + self._stages[action.stage].seconds(action.kind))
            self.events.append(
                PipelineEvent(rank, action.stage, action.microbatch, action.kind, start, self._kernel.now)
            )
            if self._goes_to_another(action):
                await self._sleep_until(rank, self._kernel.now + self._messages.send)
            sent = self._send(rank, action)
            if self._schedule.waits_for_sends and after is not None and after.kind != action.kind:
                await self._sleep_until(rank, sent)

    def _has_input(self, action: Action) -> bool:
        takes_the_batch = action.is_forward and action.stage == 0
        return takes_the_batch or action in self._ready

    def _goes_to_another(self, action: Action) -> bool:
        """Whether the output of a pass leaves the device."""
        stage = action.stage + (1 if action.is_forward else -1)
        return 0 <= stage < len(self._stages) and len(self._orders) > 1

    def _comes_from_another(self, action: Action) -> bool:
        """Whether the input of a pass comes from another device; the last stage has its loss itself."""
        stage = action.stage - (1 if action.is_forward else -1)
        return 0 <= stage < len(self._stages) and len(self._orders) > 1

    async def _sleep_until(self, rank: int, time: float) -> None:
        if time <= self._kernel.now:
            return
        self._kernel.at(time, self._processes[rank].resume)
        while self._kernel.now < time:  # the arrival of an input wakes it, too
            await suspended()

    def _send(self, rank: int, action: Action) -> float:
        """Send the output of a pass to the stage that needs it. Returns when it has left the device."""
        stage = action.stage + (1 if action.is_forward else -1)
        if stage == len(self._stages):  # the loss
            self._ready.add(Action(action.stage, BACKWARD, action.microbatch))
        if not 0 <= stage < len(self._stages):
            return self._kernel.now
        nbytes = self._stages[min(stage, action.stage)].output_bytes
        to, fed = stage % len(self._orders), Action(stage, action.kind, action.microbatch)
        if to == rank:
            self._ready.add(fed)
            return self._kernel.now
        self.link_bytes[rank, to] = self.link_bytes.get((rank, to), 0) + nbytes
        head, length = self._wires.leave(rank, to, nbytes, self._kernel.now)
        self._kernel.at(head, partial(self._receive, to, length, fed))
        return head - self._network.link(rank, to).latency + length

    def _receive(self, rank: int, length: float, fed: Action) -> None:
        """The head of a message has arrived: the pass can begin when its tail has."""
        self._kernel.at(self._wires.enter(rank, length, self._kernel.now), partial(self._arrive, rank, fed))

    def _arrive(self, rank: int, fed: Action) -> None:
        self._ready.add(fed)
        self._processes[rank].resume()

    def _describe(self, rank: int) -> str:
        action = self._waiting[rank]
        return (
            f"device {rank} waits for the input of {action.kind} {action.microbatch} at stage {action.stage}"
        )
