"""What is saved of a user's own loop between two steps, and how its run is told from another."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor, nn

from shoal.core.codec import Codec
from shoal.core.vector import named_weights
from shoal.engine.engine import Engine
from shoal.launch.between_steps import BetweenSteps
from shoal.launch.control import Control
from shoal.launch.environment import Place
from shoal.launch.worker_group import GroupNumbers
from shoal.replicas.attached import AttachedReplica
from shoal.runs.curve import holds_solution
from shoal.storage.checkpoint import OWN_LOOP, Checkpoints
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Strategy


def saves_of(
    place: Place,
    strategy: Strategy,
    codec: Codec,
    control: Control,
    model: nn.Module,
    replica: AttachedReplica,
) -> BetweenSteps:
    """The hook that saves checkpoints of the node at `place`, if there are any, and stops it."""
    saved, in_group = None, GroupNumbers(place) if place.group > 1 else None
    if place.checkpoint is not None:
        config = {
            "strategy": repr(strategy),
            "codec": repr(codec),
            "workers": len(place.identity(strategy).first_workers),
            "servers": place.servers,
            "parameters": replica.x.numel(),
            **({} if place.group == 1 else {"group": place.group}),
        }
        position = None if place.group == 1 else place.position
        may_change = strategy.is_elastic and place.group == 1 and place.store_connection is None
        bound = None if may_change else OWN_LOOP
        processes = place.first_nodes * place.group
        saved = Checkpoints(place.checkpoint, config, processes, position=position, bound=bound)
    weights = partial(_weights, strategy, model, replica)
    solution = partial(_solution, strategy)
    return BetweenSteps(
        control,
        saved,
        place.every,
        weights,
        in_group,
        solution=solution,
        may_deal=lambda: replica.passes.is_dealt,
    )


def _solution(strategy: Strategy, engine: Engine) -> Tensor:
    """The common model, as far as a worker knows it."""
    return strategy.solution(Node(engine))


def _weights(
    strategy: Strategy, model: nn.Module, replica: AttachedReplica, engine: Engine
) -> Mapping[str, Tensor] | None:
    """The solution by the names of the model's parameters, at a node that holds all of it; else None."""
    cut = engine.identity.shards > 1 or replica.in_group
    if cut or not holds_solution(strategy, engine):
        return None
    return named_weights(model, _solution(strategy, engine), replica.parameters)
