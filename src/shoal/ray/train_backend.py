"""ShoalConfig: has the workers of Ray Train's TorchTrainer join a run of Shoal."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import ray
from ray.train._internal.utils import get_address_and_port
from ray.train.backend import Backend
from ray.train.torch import TorchConfig
from ray.train.torch.config import TorchConfigContextManager

from shoal.api.attachment import current
from shoal.core.catalogue import check_word, split_options
from shoal.launch.environment import Place
from shoal.strategies import STRATEGIES


@dataclass
class ShoalConfig(TorchConfig):  # type: ignore[misc]
    """The `torch_config` of a TorchTrainer whose train function calls `shoal.attach()`.

    The fields are the options of `shoal run`. The last workers of the trainer are the strategy's servers, so
    `ScalingConfig(num_workers=5)` with "asgd" trains with four. `torch.distributed` is not initialised.
    """

    strategy: str | None = None
    strategy_options: dict[str, Any] = field(default_factory=dict)
    codec: str | None = None
    transport: str = "gloo"
    collective: str = "auto"
    servers: int = 1
    checkpoint: str | None = None
    every: int | None = None
    timeout: float = 300.0

    def __post_init__(self) -> None:
        check_word("transport", self.transport, ["gloo"])
        if self.strategy is not None:
            STRATEGIES.read(self.strategy, **self.strategy_options)
            self.strategy, options = split_options(self.strategy)
            self.strategy_options = {**options, **self.strategy_options}
        elif self.strategy_options:
            raise ValueError("strategy_options belong to a strategy; name it with strategy=")

    @property
    def backend_cls(self) -> type[Backend]:
        """What sets the workers up."""
        return _ShoalBackend

    @property
    def train_func_context(self) -> type[TorchConfigContextManager]:
        """What surrounds the train function in each worker."""
        return _Joined

    def place(self, rank: int, nodes: int) -> Place:
        """The place of a worker of the trainer, which then joins as under torchrun."""
        return Place(
            rank,
            nodes,
            launched="torchrun",
            transport=self.transport,
            servers=self.servers,
            strategy=self.strategy,
            strategy_options={name: str(value) for name, value in self.strategy_options.items()},
            codec=self.codec,
            collective=self.collective,
            checkpoint=self.checkpoint,
            every=self.every,
            timeout=self.timeout,
        )


class _Joined(TorchConfigContextManager):  # type: ignore[misc]
    """Finishes the run when the train function returns; ends that of a server, which never returns."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        attachment = current()
        if kind is not None and issubclass(kind, SystemExit):  # attach() in a server, when training is over
            return isinstance(error, SystemExit) and error.code in (None, 0)
        if attachment is not None:
            if kind is None:
                attachment.finish()
            else:
                attachment.abandon()
        return False


class _ShoalBackend(Backend):  # type: ignore[misc]
    """Tells every worker of the trainer its place, and where all meet."""

    share_cuda_visible_devices = True  # as Ray's own for torch: ray.train.torch.get_device() counts on it

    def on_start(self, worker_group: Any, backend_config: ShoalConfig) -> None:
        host, port = worker_group.execute_single(0, get_address_and_port)
        homes = worker_group.execute(_node_id)
        local, seen = Counter(homes), Counter[str]()
        nodes = len(homes)
        told = []
        for rank, home in enumerate(homes):
            variables = {
                **backend_config.place(rank, nodes).to_environment(),
                "MASTER_ADDR": host,
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "WORLD_SIZE": str(nodes),
                "LOCAL_RANK": str(seen[home]),
                "LOCAL_WORLD_SIZE": str(local[home]),
            }
            seen[home] += 1
            told.append(worker_group.execute_single_async(rank, _set, variables))
        ray.get(told)


def _node_id() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _set(variables: dict[str, str]) -> None:
    os.environ.update(variables)
