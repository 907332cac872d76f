"""Probing: measures a task on this machine: its step, its optimizer, what codecs make of its vector."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shoal.codecs import CODECS
from shoal.core.codec import Codec
from shoal.core.sparse_vectors import SparseCodec
from shoal.core.task import Task
from shoal.core.vector import Piece, trainable
from shoal.planning.contenders import PLANNED
from shoal.planning.workload import UNCOMPRESSED, CodecCost, Workload
from shoal.replicas.module import build_model
from shoal.replicas.served import check_optimizer
from shoal.strategies import STRATEGIES

MOST_ELEMENTS = 1 << 20
"""Of the vector that is compressed to see how much shorter it gets."""

FEEDBACK_VECTORS = {"none": 0.0, "residual": 1.0, "double": 2.0}


def probe(task: Task, codecs: Sequence[str], seed: int = 0) -> Workload:
    """What is known of a task before it runs, but for its step."""
    data, model = task.data(), build_model(task, seed)
    parameters, layout = trainable(model)
    pieces = layout.pieces(0, layout.numel)
    return Workload(
        task.name,
        len(data.x),
        task.batch,
        layout.numel,
        parameters[0].element_size(),
        optimizer_vectors(model, task),
        codec_costs(codecs, layout.numel, pieces),
        connected_share(model),
        refused_by(task.optimizer([nn.Parameter(torch.zeros(2, 2))], lr=task.lr)),
    )


def refused_by(*optimizers: torch.optim.Optimizer) -> dict[str, str]:
    """The strategies that could not run one of these optimizers on several workers, and why."""
    found: dict[str, str] = {}
    for word in PLANNED:
        try:
            for optimizer in optimizers:
                check_optimizer(STRATEGIES.make(word), optimizer, workers=2, shards=1)
        except ValueError as error:
            found[word] = str(error)
    return found


def connected_share(model: nn.Module) -> float:
    """The share of the parameters that is in fully connected layers."""
    linear = [p for part in model.modules() if isinstance(part, nn.Linear) for p in part.parameters()]
    return sum(p.numel() for p in linear) / max(1, sum(p.numel() for p in model.parameters()))


def optimizer_vectors(model: nn.Module, task: Task) -> float:
    """How many vectors of the model's length its optimizer keeps after a step."""
    parameters = [p.detach().clone().requires_grad_() for p in model.parameters() if p.requires_grad]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer = task.optimizer(parameters, lr=task.lr)
    optimizer.step()
    kept = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return sum(v.numel() for v in kept if v.numel() > 1) / max(1, sum(p.numel() for p in parameters))


def codec_costs(words: Sequence[str], elements: int, pieces: Sequence[Piece]) -> dict[str, CodecCost]:
    """What each codec makes of a vector that consists of these pieces; "none" is always among them."""
    return {"none": UNCOMPRESSED} | {word: codec_cost(CODECS.read(word), elements, pieces) for word in words}


def codec_cost(codec: Codec, elements: int, pieces: Sequence[Piece]) -> CodecCost:
    """How much of a vector travels if this codec writes it."""
    kept = FEEDBACK_VECTORS[codec.feedback]
    if codec.needs_matrices:
        fitted = codec.fit(pieces)
        if fitted.exact:  # there is no matrix
            return CodecCost(reductions=1, kept=kept)
        matrices = fitted.matrices  # type: ignore[attr-defined]
        within = sum(matrix.rows * matrix.columns for matrix in matrices.each)
        sent = matrices.left_length + matrices.right_length + elements - within
        return CodecCost(sent / elements, 1.0, kept=kept, reductions=2 if codec.in_flight else 0)
    share = codec.share if isinstance(codec, SparseCodec) else None
    plain = codec.fit(())
    return CodecCost(_ratio(plain, elements), _ratio(plain.merged, elements), kept=kept, share=share)


def _ratio(codec: Codec, elements: int) -> float:
    """Bytes of a payload for each byte of normally distributed numbers."""
    v = torch.randn(min(elements, MOST_ELEMENTS), generator=torch.Generator().manual_seed(0))
    payload, _ = codec.encode(v, codec.init(v, 0))
    return sum(part.nbytes for part in payload) / v.nbytes
