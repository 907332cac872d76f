"""Hugging Face transformers: `ShoalTrainer(model, args, train_dataset=..., strategy="diloco")`."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from shoal.api.shard import count_samples, dealt_loader
from shoal.core.codec import Codec
from shoal.integrations.workers import Workers, missing
from shoal.replicas.wrapped import tell_rank, undress, unwrap_optimizer
from shoal.vocabulary.strategy import Strategy

try:
    from transformers import Trainer, TrainingArguments
except ImportError as error:
    raise missing("huggingface", "transformers and accelerate") from error


class ShoalTraining:
    """Makes a class of Trainers train on many workers: `class MyTrainer(ShoalTraining, SFTTrainer)`.

    `strategy` is a word or an object, as in shoal.attach(). Each worker trains on its share of the training
    data. Evaluation data is read whole by every worker, as in a single process. The common model is
    evaluated, and worker 0 alone saves it.
    """

    workers: Workers

    def __init__(
        self,
        *args: Any,
        strategy: Strategy | str | None = None,
        codec: Codec | str | None = None,
        **kwargs: Any,
    ) -> None:
        self.workers = Workers("transformers", strategy, codec, {})
        for given in (*args, *kwargs.values()):  # first: Trainer would ask for distributed training instead
            if isinstance(given, TrainingArguments):
                check_arguments(given, self.workers.size)
        super().__init__(*args, **kwargs)
        trainer: Any = self
        check_arguments(trainer.args, self.workers.size)  # those that it makes where none are given
        tell_rank(self.workers.rank)

    def get_train_dataloader(self) -> DataLoader[Any]:
        """This worker's share of the training data."""
        trainer: Any = self
        whole: DataLoader[Any] = super().get_train_dataloader()  # type: ignore[misc]
        if self.workers.size == 1:
            return whole
        plain, dress = undress(whole)
        seed = trainer.args.seed if trainer.args.data_seed is None else trainer.args.data_seed
        return dress(dealt_loader(plain, self.workers.seat, seed))

    def get_total_train_batch_size(self, args: Any) -> int:
        """That of all workers."""
        own: int = super().get_total_train_batch_size(args)  # type: ignore[misc]
        return own * self.workers.size

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> Any:
        trainer: Any = self
        prepared = super()._prepare_for_training(  # type: ignore[misc]
            max_steps, train_dataloader, resume_from_checkpoint
        )
        if resume_from_checkpoint is not None:
            self.workers.check_can_resume([unwrap_optimizer(trainer.optimizer)])
        self.workers.attach(trainer.model, [trainer.optimizer])
        return prepared

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Count what the gradient is of: the items of all its batches where the loss is their mean."""
        trainer: Any = self
        if self.workers.training is not None:
            if num_items_in_batch is None:
                self.workers.training.saw(count_samples(inputs))
            elif trainer.accelerator.sync_gradients:  # the last of the batches that are accumulated
                self.workers.training.saw(int(num_items_in_batch))
        return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the common model, on all data."""
        with self.workers.common_model():
            return super().evaluate(*args, **kwargs)  # type: ignore[misc]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """All workers take worker 0's metrics while they train, as they decide by them to save or to stop."""
        output = super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]
        if self.workers.training is None:
            return output
        return output._replace(metrics=self.workers.meeting.broadcast(output.metrics))

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict with the common model, on all data."""
        with self.workers.common_model():
            return super().predict(*args, **kwargs)  # type: ignore[misc]

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the common model, at worker 0."""
        if self.workers.is_first:
            with self.workers.common_model():
                super().save_model(*args, **kwargs)  # type: ignore[misc]

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        trainer: Any = self
        if self.workers.is_first:
            self.workers.warn_of_state([unwrap_optimizer(trainer.optimizer)])
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
        best = self.workers.meeting.broadcast(
            trainer.state.best_model_checkpoint
        )  # and all wait for the files
        trainer.state.best_model_checkpoint = best

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.workers.finish()  # before the weights of the best checkpoint are loaded
        return super()._finalize_training(*args, **kwargs)  # type: ignore[misc]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train, and leave the trained model in the model of every worker."""
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        except BaseException:
            self.workers.abandon()
            raise


class ShoalTrainer(ShoalTraining, Trainer):
    """A Trainer of transformers on the workers that `shoal run` started; a single one with plain `python`."""


def check_arguments(args: Any, workers: int) -> None:
    """Raise ValueError for arguments with which Trainer would do something else, or nothing."""
    if workers == 1:
        return
    if args.world_size > 1:
        raise ValueError(
            f"transformers runs {args.world_size} processes itself, and would put DDP on top; "
            f"start the script with `shoal run -n {workers}` instead of torchrun or accelerate launch"
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"transformers would spread each worker over {args.n_gpu} GPUs; let each worker see one, by "
            "CUDA_VISIBLE_DEVICES"
        )
    if args.auto_find_batch_size:
        raise ValueError(
            "auto_find_batch_size=True may start training anew at one worker only; set the batch size"
        )
    if args.deepspeed or args.fsdp:
        raise ValueError("DeepSpeed and FSDP divide the model, and Shoal's workers each have a whole one")
