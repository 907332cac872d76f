"""Greedy layer-wise pretraining and fine-tuning as scikit-learn estimators (Hinton et al. 2006).

Every stage is a run of its own, under any strategy, codec and transport: first an RBM for each layer, trained
on the features of the layers below, then the whole net as a perceptron.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from shoal.api.belief_rows import Array, Labelled, Rows, digest_of, matrix, rows_of
from shoal.api.run import run
from shoal.core.codec import Codec
from shoal.core.growth import Growth
from shoal.core.seeds import derive
from shoal.core.task import Data, Task
from shoal.programs.models.belief_network import BeliefNet, perceptron
from shoal.programs.models.pretraining import Momentum, Pretraining
from shoal.programs.models.rbm import RBM
from shoal.replicas.batches import steps_per_epoch
from shoal.runs.result import Result
from shoal.strategies import STRATEGIES
from shoal.vocabulary.strategy import Strategy

UP = ("mean", "sample")


@dataclass(frozen=True)
class Stage:
    """One of the runs of a `fit`: that of an RBM, or the fine-tuning."""

    name: str
    result: Result
    seconds: float  # of real time, even if the run's own time is virtual

    def record(self) -> dict[str, Any]:
        """The figures as plain values."""
        return {**self.result.record(), "seconds": self.seconds}


@dataclass(kw_only=True, eq=False)
class _Learner:
    """The settings of both estimators: how an RBM learns, and how a run is distributed.

    `transport="sim"` runs all workers in this process. "processes" gives each its own process; your script
    then needs `if __name__ == "__main__"`. Pass further options of `shoal.run` in `options`. `on_progress` is
    called as in `shoal.run`, with the name of the stage in each event, and `on_stage` after each stage.
    With `checkpoint`, a `fit` that was stopped resumes when you call it again with the same arguments.
    """

    steps: int = 1
    chains: int = 0
    positive: str = "probability"
    units: str = "binary"
    lr: float = 0.1
    batch: int = 100
    epochs: int = 10
    momentum: float = 0.9
    first_momentum: float = 0.5
    first_epochs: int = 5
    decay: float = 2e-4
    strategy: Strategy | str = "sync"
    workers: int = 1
    codec: Codec | str | None = None
    transport: str = "sim"
    device: str = "cpu"
    seed: int = 0
    checkpoint: str | Path | None = None
    every: int | None = None
    options: Mapping[str, Any] | None = None
    on_progress: Callable[[dict[str, Any]], None] | None = field(default=None, repr=False)
    on_stage: Callable[[Stage], None] | None = field(default=None, repr=False)

    _estimator_type: ClassVar[str]

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """All settings by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}

    def set_params(self: _Self, **params: Any) -> _Self:
        """Change settings. Raises ValueError for an unknown name."""
        known = self.get_params()
        for name, value in params.items():
            if name not in known:
                raise ValueError(f"{type(self).__name__} has no setting {name!r}; it has {', '.join(known)}")
            setattr(self, name, value)
        return self

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "stages_")

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import ClassifierTags, Tags, TargetTags, TransformerTags  # only scikit-learn asks

        tags = Tags(self._estimator_type, TargetTags(required=False), transformer_tags=TransformerTags())
        if self._estimator_type == "classifier":
            tags.classifier_tags = ClassifierTags()
        return tags

    def _pretrain(
        self, level: int, hidden: int, rows: Rows, below: RBM | None = None, up: str = "mean"
    ) -> RBM:
        """Train one RBM on these rows. Its visible bias starts as the hidden bias of `below`, if given."""
        visible = rows.x.shape[1]
        settings = Pretraining(
            units=self.units if level == 1 else "binary",
            steps=self.steps,
            chains=self.chains,
            positive=self.positive,
            lr=self.lr,
            batch=self.batch,
            optimizer=Momentum(
                self.momentum, self.first_momentum, self._first_steps(len(rows.x)), self.decay
            ),
        )
        bias = None if below is None else tuple(below.bias.tolist())
        augment = drawn if level > 1 and up == "sample" else None
        task = settings.task(visible, hidden, rows.unlabelled, bias, augment)
        seed = derive(self.seed, "layer", level)
        model = self._run(f"layer {level}", replace(task, data_mark=rows.mark), self.epochs, seed)
        assert isinstance(model, RBM)
        return model

    def _run(self, name: str, task: Task, epochs: int, seed: int) -> nn.Module:
        """Run one stage. Returns its model on the CPU, in evaluation mode."""
        folder = None if self.checkpoint is None else Path(self.checkpoint) / name.replace(" ", "-")
        tell, began = self.on_progress, monotonic()
        result = run(
            task.on(self.device),
            self.strategy,
            workers=self.workers,
            codec=self.codec,
            transport=self.transport,
            epochs=epochs,
            seed=seed,
            checkpoint=folder,
            every=self.every,
            on_progress=None if tell is None else lambda event: tell({**event, "stage": name}),
            **(self.options or {}),
        )
        assert result.model is not None
        stage = Stage(name, result, monotonic() - began)
        self.stages_.append(stage)
        if self.on_stage is not None:
            self.on_stage(stage)
        return result.model.cpu().eval()

    @property
    def _algorithm(self) -> Strategy:
        return STRATEGIES.read(self.strategy) if isinstance(self.strategy, str) else self.strategy

    def _first_steps(self, samples: int) -> int:
        """How many steps an optimizer takes in the epochs of the first momentum."""
        options = self.options or {}
        if options.get("crew") and self.first_epochs:
            raise ValueError(
                "the steps of first_epochs are those of one crew: with crew, take first_epochs=0"
            )
        growth = Growth.parse(options.get("grow_batch"), options.get("largest_batch"))
        batches = [growth.batch(self.batch, epoch) for epoch in range(self.first_epochs)]
        steps = sum(steps_per_epoch(samples, batch, self.workers) for batch in batches)
        return round(steps * self._algorithm.optimizer_steps(self.workers))

    def _begin(self) -> None:
        if self._algorithm.independent:
            raise ValueError(f"strategy {self.strategy!r} ends with several models, not one RBM; take 'sync'")
        self.stages_: list[Stage] = []

    def _apply(self, model: Callable[[Tensor], Tensor], x: Any) -> Array:
        with torch.no_grad():
            return model(torch.from_numpy(matrix(x))).numpy()


_Self = TypeVar("_Self", bound=_Learner)


@dataclass(kw_only=True, eq=False)
class RBMTransformer(_Learner):
    """An RBM whose hidden units are features. After `fit`, `rbm_` is the module and `stages_` has the run."""

    hidden: int = 256

    _estimator_type: ClassVar[str] = "transformer"

    def fit(self, x: Any, y: Any = None, test_x: Any = None) -> RBMTransformer:
        """Learn from rows; labels are ignored. The metrics are measured on the test rows, if you pass any."""
        self._begin()
        self.rbm_ = self._pretrain(1, self.hidden, rows_of(x, test_x))
        return self

    def transform(self, x: Any) -> Array:
        """P(h = 1 | v) for each row."""
        return self._apply(self.rbm_.hidden, x)

    def fit_transform(self, x: Any, y: Any = None) -> Array:
        """Learn from rows, and return their features."""
        return self.fit(x).transform(x)

    def inverse_transform(self, features: Any) -> Array:
        """The mean of v given h, for each row."""
        return self._apply(self.rbm_.visible, features)

    def score(self, x: Any, y: Any = None) -> float:
        """The mean pseudo-log-likelihood of rows; for Gaussian units the negative reconstruction error."""
        measured = self._apply(self.rbm_.measure, x).mean(axis=0)
        return float(measured[2] if self.units == "binary" else -measured[0])


@dataclass(kw_only=True, eq=False)
class DBNClassifier(_Learner):
    """A deep belief network.

    After `fit`, `net_` is the pretrained stack, `model_` the fine-tuned net, and `stages_` has the runs.
    Each RBM learns from the means of the layer below, or with `up="sample"` from bits drawn from them anew at
    every visit of a row. `units` is the kind of the input units; all others are binary. With `share_bias` the
    visible bias of an RBM starts as the hidden bias of the layer below, and replaces it after the stage;
    without, every RBM has its own.
    `finetune` epochs of back-propagation follow, with `dropout` of the hidden units and `input_dropout`;
    `finetune_lower="3@20,3@30"` divides the learning rate by 3 after 20 epochs and again after 30.
    """

    layers: Sequence[int] = (500, 500, 2000)
    share_bias: bool = False
    up: str = "mean"
    finetune: int = 30
    finetune_lr: float = 0.1
    finetune_batch: int = 100
    finetune_momentum: float = 0.9
    finetune_decay: float = 0.0
    finetune_lower: str | None = None
    dropout: float = 0.0
    input_dropout: float = 0.0

    _estimator_type: ClassVar[str] = "classifier"

    def fit(self, x: Any, y: Any = None, test_x: Any = None, test_y: Any = None) -> DBNClassifier:
        """Pretrain, and fine-tune if there are labels. The test set is only evaluated."""
        self._check()
        rows = rows_of(x, test_x)
        self._begin()
        self.__dict__.pop("model_", None)  # of an earlier fit
        self.net_ = self._stack(rows)
        if y is not None and self.finetune:
            self.classes_, numbers = np.unique(np.asarray(y), return_inverse=True)
            self._finetune(Labelled(rows, numbers.astype(np.int64), self._numbers(test_y)))
        return self

    def transform(self, x: Any) -> Array:
        """The means of the top layer of the pretrained net, for each row."""
        return self._apply(self.net_, x)

    def fit_transform(self, x: Any, y: Any = None) -> Array:
        """Learn from rows, and return their features."""
        return self.fit(x, y).transform(x)

    def predict_proba(self, x: Any) -> Array:
        """The probability of each class in `classes_`, for each row. Raises ValueError if not fine-tuned."""
        if not hasattr(self, "model_"):
            raise ValueError("this net was only pretrained; call fit(x, y) with labels, and finetune above 0")
        return self._apply(lambda rows: self.model_(rows).softmax(dim=1), x)

    def predict(self, x: Any) -> Array:
        """The most probable class of each row."""
        number = self.predict_proba(x).argmax(axis=1)
        chosen: Array = self.classes_[number]
        return chosen

    def score(self, x: Any, y: Any) -> float:
        """The fraction of rows whose class is right."""
        return float((self.predict(x) == np.asarray(y)).mean())

    def _check(self) -> None:
        if not self.layers:
            raise ValueError("layers=(): a deep belief network has at least one hidden layer, as (500,)")
        if self.up not in UP:
            raise ValueError(
                f"up={self.up!r}: a layer learns from the {' or the '.join(UP)} of the one below"
            )

    def _stack(self, rows: Rows) -> BeliefNet:
        rbms: list[RBM] = []
        for level, hidden in enumerate(self.layers, start=1):
            below = rbms[-1] if self.share_bias and rbms else None
            rbms.append(self._pretrain(level, hidden, rows, below, self.up))
            if below is not None:
                BeliefNet(rbms).share(level - 1)
            if level < len(self.layers):
                rows = rows.through(rbms[-1], self.device)
        return BeliefNet(rbms)

    def _finetune(self, labelled: Labelled) -> None:
        task = finetuning(
            self.net_,
            len(self.classes_),
            labelled.data,
            self.dropout,
            self.input_dropout,
            optimizer=Momentum(self.finetune_momentum, decay=self.finetune_decay),
            lr=self.finetune_lr,
            batch=self.finetune_batch,
            growth=Growth.parse(self.finetune_lower, self.finetune_batch if self.finetune_lower else None),
            data_mark=digest_of(labelled.y, labelled.rows.mark),
        )
        self.model_ = self._run("fine-tuning", task, self.finetune, derive(self.seed, "fine-tuning"))

    def _numbers(self, test_y: Any) -> Array:
        """The indices in `classes_` of the test rows' labels."""
        given = np.asarray([] if test_y is None else test_y)
        if not np.isin(given, self.classes_).all():
            raise ValueError("test_y has classes that y does not have; leave their rows out of the test set")
        return np.searchsorted(self.classes_, given).astype(np.int64)


def unrolled(
    sizes: Sequence[int], dropout: float, input_dropout: float, weights: dict[str, Array]
) -> nn.Module:
    """A perceptron that starts with these weights; the output layer is random."""
    net = perceptron(sizes, dropout, input_dropout)
    net.load_state_dict({name: torch.from_numpy(w) for name, w in weights.items()}, strict=False)
    return net


def finetuning(
    net: BeliefNet,
    classes: int,
    data: Callable[[], Data],
    dropout: float = 0.0,
    input_dropout: float = 0.0,
    **settings: Any,
) -> Task:
    """The task that trains the net as a perceptron on classes; `settings` are those of `Task`."""
    sizes = [*net.sizes, classes]
    weights = {name: weight.numpy() for name, weight in net.weights().items()}
    name = "dbn " + "-".join(map(str, sizes)) + f", dropout {dropout:g}, {input_dropout:g}"
    return Task(name, partial(unrolled, sizes, dropout, input_dropout, weights), data, **settings)


def drawn(means: Tensor) -> Tensor:
    """Draw random bits with these means."""
    return torch.bernoulli(means)
