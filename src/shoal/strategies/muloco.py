"""MuLoCo: DiLoCo whose inner steps of hidden matrices are Muon's (Thérien et al. 2025)."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from shoal.core.limits import above, at_least, between, one_of
from shoal.core.vector import Piece
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Sends, Strategy

SCALES = {"spectral": "original", "rms": "match_rms_adamw"}  # to torch's words
HEAD = re.compile(r"(?!multi_)(.*_)?head|classifier")


@dataclass(frozen=True)
class MuLoCo(Strategy):
    """Muon takes the steps of hidden matrices; the user's optimizer, with its rate, those of all others."""

    sends = Sends.DIFFERENCES
    ends_equal = True
    keeps_changes = False  # its momentum goes beyond them

    period: int = 30  # H: inner steps in a round
    rate: float = 0.9  # outer learning rate
    momentum: float = 0.8  # outer momentum
    warmup: int = 0  # first steps, averaged one by one
    inner_momentum: float = 0.95  # mu of Muon
    nesterov: bool = False  # Muon looks ahead along its momentum
    weight_decay: float = 0.1  # of hidden matrices
    scale: str = "spectral"  # of a step: sqrt(rows / columns); "rms": as long as AdamW's

    def __post_init__(self) -> None:
        at_least(1, period=self.period)
        at_least(0, warmup=self.warmup, weight_decay=self.weight_decay)
        above(0, rate=self.rate)
        between(0, 1, momentum=self.momentum, inner_momentum=self.inner_momentum)
        one_of(tuple(SCALES), scale=self.scale)

    @property
    def one_rate(self) -> bool:
        return True  # Muon's steps have that of the first group

    @property
    def mixes_steps(self) -> bool:
        return True  # Muon's momentum goes on under whichever optimizer steps

    @property
    def looks_at(self) -> str:
        return "all matrices of a model"

    def steps_per_update(self, workers: int) -> float:
        return workers * (1 - self.momentum) / self.rate  # outer momentum lengthens steps on a slope

    async def worker(self, w: Node) -> None:
        start = w.keep("start", w.x)  # theta: where every round begins
        velocity = w.keep("velocity", torch.zeros_like(w.x), shared=True)
        async for t in w.blocks(self.period, self.warmup, self._inner_step(w)):
            displacement = await w.mean(start - w.x)
            if t < self.warmup:
                start -= displacement
            else:
                velocity.mul_(self.momentum).add_(displacement)
                start.sub_(displacement.add(velocity, alpha=self.momentum), alpha=self.rate)
            w.x.copy_(start)

    def solution(self, node: Node) -> Tensor:
        return node.keep("start", node.x)

    def _inner_step(self, w: Node) -> Callable[[Tensor], None]:
        matrices = hidden_matrices(w.pieces)
        return HiddenSteps(self, w, matrices).descend if matrices else w.descend


def hidden_matrices(pieces: list[Piece]) -> list[Piece]:
    """The matrices of a model without embeddings and output layer, by the dotted parts of their names.

    Where no name says which the output layer is, it is the last matrix.
    """
    matrices = [piece for piece in pieces if len(piece.shape) == 2 and piece.whole]
    inner = [piece for piece in matrices if not piece.is_embedding]
    hidden = [piece for piece in inner if not _is_output(piece.name.split("."))]
    return hidden[:-1] if len(hidden) == len(inner) else hidden


def _is_output(parts: list[str]) -> bool:
    return parts[0] == "output" or any(map(HEAD.fullmatch, parts))  # a layer of a block may have an output


class HiddenSteps:
    """Steps of one worker: torch's Muon for these matrices, which are views on `x`, and its own optimizer."""

    def __init__(self, options: MuLoCo, w: Node, matrices: list[Piece]) -> None:
        self._w = w
        self._matrices = matrices
        self._views = [self._view(w.x, piece) for piece in matrices]
        # torch lengthens steps by sqrt(max(1, rows / columns)): this is the rest of sqrt(rows / columns)
        rest = [sqrt(min(1, rows / columns)) for rows, columns in (piece.shape for piece in matrices)]
        self._factors = rest if options.scale == "spectral" else [1.0] * len(matrices)
        self._muon = torch.optim.Muon(
            [
                {"params": [view], "weight_decay": options.weight_decay / factor}  # it decays by rate * decay
                for view, factor in zip(self._views, self._factors, strict=True)
            ],
            momentum=options.inner_momentum,
            nesterov=options.nesterov,
            adjust_lr_fn=SCALES[options.scale],
        )
        momentum = w.keep("muon", w.x.new_zeros(sum(piece.size for piece in matrices)))
        for view, part in zip(self._views, torch.split(momentum, [p.size for p in matrices]), strict=True):
            self._muon.state[view]["momentum_buffer"] = part.view_as(view)

    def descend(self, g: Tensor) -> None:
        """One step of both."""
        before = [view.clone() for view in self._views]
        lr = self._w.lr
        self._w.descend(g)
        for view, old, piece in zip(self._views, before, self._matrices, strict=True):
            view.copy_(old)
            view.grad = self._view(g, piece)
        if not g.any():  # mixed precision overflowed
            return
        for group, factor in zip(self._muon.param_groups, self._factors, strict=True):
            group["lr"] = lr * factor
        self._muon.step()  # type: ignore[no-untyped-call]

    @staticmethod
    def _view(v: Tensor, piece: Piece) -> Tensor:
        return v[piece.begin : piece.end].view(piece.shape)
