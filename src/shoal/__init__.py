"""Shoal trains one PyTorch model on many workers; how they are kept together is one word.

core          the vocabulary: Strategy, Node, Transport, Codec, Task
strategies    one paper, one file          codecs       one idea, one file
collectives   how an average is formed     sim          virtual time
transports    how bytes move               launch       who starts the nodes
tasks         built-in data and models     report       what a person sees
train.py      run()                        attachment.py, sharding.py   attach(), shard()
minimizing.py minimize()                   ddp.py       comm_hook()
testing       for those who write a strategy, a codec or a transport of their own
"""

from importlib.metadata import version

from shoal.api.attach import Attachment, attach
from shoal.api.ddp import comm_hook
from shoal.api.minimize import minimize
from shoal.api.run import run
from shoal.api.shard import shard
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
from shoal.runs.result import Result
from shoal.sim import Compute, Faults, Network
from shoal.strategies.bmuf import BMUF
from shoal.strategies.diloco import DiLoCo
from shoal.strategies.downpour import Downpour
from shoal.strategies.easgd import EAMSGD, EASGD
from shoal.strategies.local import Local
from shoal.strategies.single import Single
from shoal.strategies.sync import Sync
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Strategy

__version__ = version("shoal")

__all__ = [
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
    "EAMSGD",
    "EASGD",
    "Faults",
    "Interrupted",
    "Local",
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
    "fp16",
    "minimize",
    "run",
    "shard",
]
