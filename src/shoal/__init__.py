"""Shoal trains one PyTorch model on many workers; how they are kept together is one word.

api           run(), attach(), epochs(), shard(), minimize(), comm_hook(), split()
core          what everything else is made of: Codec, Task, Transport, Message
vocabulary    Strategy, and the verbs of its Node
engine        what makes those verbs work
strategies    one paper, one file          codecs       one idea, one file
collectives   how an average is formed     topologies   who talks to whom
transports    how bytes move               sim          virtual time
replicas      a model at one worker        runs         one run: plan, processes, result
launch        who starts the nodes         storage      checkpoints, journals
programs      built-in models and tasks    studies      published tables, made again
pipelines     a model cut into stages
records       what a run leaves behind     loggers      TensorBoard, W&B, MLflow, CSV
report        tables, charts, progress     cli          the command line
demo          what Shoal is good for       testing      checks for a strategy, codec or transport of yours
integrations  inside Lightning, transformers and Keras
lbfgs         L-BFGS whose vectors are at servers
search        over many models: run(task, space, "pbt")
planning      which strategy, period, codec and number of workers: plan(task, workers)

A public name is imported on first use, so that `shoal --help` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.api.attach import attach
    from shoal.api.attachment import Attachment
    from shoal.api.ddp import comm_hook
    from shoal.api.epochs import epochs
    from shoal.api.minimize import minimize
    from shoal.api.run import run
    from shoal.api.shard import shard
    from shoal.api.split import split
    from shoal.codecs.halves.codec import FP16 as fp16  # written like a function: codec=fp16()
    from shoal.core.codec import Codec
    from shoal.core.errors import (
        CheckpointError,
        DataMissing,
        Deadlock,
        Diverged,
        Interrupted,
        PeerLost,
        ShoalError,
        Unavailable,
        WorkerFailed,
    )
    from shoal.core.identity import SERVER
    from shoal.core.task import Data, Task
    from shoal.core.transport import Message, Transport
    from shoal.launch.join import Access
    from shoal.loggers.logger import Logger
    from shoal.planning.planner import plan
    from shoal.runs.result import Result
    from shoal.sim import Compute, Faults, Network
    from shoal.strategies.bmuf import BMUF
    from shoal.strategies.diloco import DiLoCo
    from shoal.strategies.downpour import Downpour
    from shoal.strategies.easgd import EASGD
    from shoal.strategies.local import Local
    from shoal.strategies.single import Single
    from shoal.strategies.sync import Sync
    from shoal.vocabulary.node import Node
    from shoal.vocabulary.strategy import Strategy

_HOMES = {
    "Access": "shoal.launch.join:Access",
    "Attachment": "shoal.api.attachment:Attachment",
    "BMUF": "shoal.strategies.bmuf:BMUF",
    "CheckpointError": "shoal.core.errors:CheckpointError",
    "Codec": "shoal.core.codec:Codec",
    "Compute": "shoal.sim:Compute",
    "Data": "shoal.core.task:Data",
    "DataMissing": "shoal.core.errors:DataMissing",
    "Deadlock": "shoal.core.errors:Deadlock",
    "DiLoCo": "shoal.strategies.diloco:DiLoCo",
    "Diverged": "shoal.core.errors:Diverged",
    "Downpour": "shoal.strategies.downpour:Downpour",
    "EASGD": "shoal.strategies.easgd:EASGD",
    "Faults": "shoal.sim:Faults",
    "Interrupted": "shoal.core.errors:Interrupted",
    "Local": "shoal.strategies.local:Local",
    "Logger": "shoal.loggers.logger:Logger",
    "Message": "shoal.core.transport:Message",
    "Network": "shoal.sim:Network",
    "Node": "shoal.vocabulary.node:Node",
    "PeerLost": "shoal.core.errors:PeerLost",
    "Result": "shoal.runs.result:Result",
    "SERVER": "shoal.core.identity:SERVER",
    "ShoalError": "shoal.core.errors:ShoalError",
    "Single": "shoal.strategies.single:Single",
    "Strategy": "shoal.vocabulary.strategy:Strategy",
    "Sync": "shoal.strategies.sync:Sync",
    "Task": "shoal.core.task:Task",
    "Transport": "shoal.core.transport:Transport",
    "Unavailable": "shoal.core.errors:Unavailable",
    "WorkerFailed": "shoal.core.errors:WorkerFailed",
    "attach": "shoal.api.attach:attach",
    "comm_hook": "shoal.api.ddp:comm_hook",
    "epochs": "shoal.api.epochs:epochs",
    "fp16": "shoal.codecs.halves.codec:FP16",
    "minimize": "shoal.api.minimize:minimize",
    "plan": "shoal.planning.planner:plan",
    "run": "shoal.api.run:run",
    "shard": "shoal.api.shard:shard",
    "split": "shoal.api.split:split",
}
"""The module that defines each public name, and what it is called there."""

_ROOMS = ("codecs", "programs", "search", "sim", "strategies", "studies", "topologies")
"""Packages that `import shoal` is enough for, as in shoal.strategies.SSP(bound=0)."""

__all__ = [
    "Access",
    "Attachment",
    "BMUF",
    "CheckpointError",
    "Codec",
    "Compute",
    "Data",
    "DataMissing",
    "Deadlock",
    "DiLoCo",
    "Diverged",
    "Downpour",
    "EASGD",
    "Faults",
    "Interrupted",
    "Local",
    "Logger",
    "Message",
    "Network",
    "Node",
    "PeerLost",
    "Result",
    "SERVER",
    "ShoalError",
    "Single",
    "Strategy",
    "Sync",
    "Task",
    "Transport",
    "Unavailable",
    "WorkerFailed",
    "attach",
    "comm_hook",
    "epochs",
    "fp16",
    "minimize",
    "plan",
    "run",
    "shard",
    "split",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("shoal")
    if name in _ROOMS:
        return import_module(f"shoal.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    module, _, original = _HOMES[name].partition(":")
    value = globals()[name] = getattr(import_module(module), original)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS, "__version__"})
