"""One rank of a pipeline over gloo: gradients of splits beside those of the whole model.

    python pipeline_ranks.py FOLDER RANK RANKS

Leaves what it found in FOLDER/RANK.json.
"""

import json
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional as F

import shoal
from shoal.core.task import sequence_loss
from shoal.programs.models.language import LanguageModel, Sizes

BATCH, MICROBATCHES = 8, 4


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(
        *(layer for _ in range(4) for layer in (nn.Linear(12, 12), nn.Tanh())), nn.Linear(12, 3)
    )


def transformer():
    torch.manual_seed(0)
    return LanguageModel(Sizes(symbols=11, context=6, width=8, layers=3)).double()


def data(words):
    generator = torch.Generator().manual_seed(1)
    if words:
        both = torch.randint(11, (2, BATCH, 6), generator=generator)
        return both[0], both[1]
    return torch.randn(BATCH, 12, generator=generator).double(), torch.randint(
        3, (BATCH,), generator=generator
    )


def whole(model, x, y, loss):
    """The loss and gradients without a pipeline."""
    value = loss(model(x), y)
    names, parameters = zip(*model.named_parameters(), strict=True)
    return float(value), dict(zip(names, torch.autograd.grad(value, parameters), strict=True))


def apart(gradients, modules):
    """The largest difference, and how many parameters were compared."""
    pairs = [(p.grad, gradients[name]) for module in modules for name, p in module.named_parameters()]
    return max(float((a - b).abs().max()) for a, b in pairs), len(pairs)


def compare(model, x, y, loss, word):
    loss_alone, gradients = whole(model, x, y, loss)
    if dist.get_rank() and isinstance(model, LanguageModel):
        with torch.no_grad():
            model.embedding.weight.zero_()  # the copy of process 0 counts
    split = shoal.split(model, x, stages=2, microbatches=MICROBATCHES)
    pipeline = split.pipeline(loss, word)
    value = pipeline.step(x, y)
    passes = watch(pipeline.schedule._stage) if word in ("gpipe", "1f1b") else None
    value = pipeline.step(x, y)  # gradients of the first step are dropped
    difference, compared = apart(gradients, pipeline.modules)
    return {
        "difference": difference,
        "compared": compared,
        "parameters": len(gradients),
        "loss": value,
        "loss alone": loss_alone,
        "bounds": pipeline.bounds,
        "passes": passes,
    }


def watch(stage):
    """A list that gets (kind, microbatch, start, end) of every pass of the stage from now on."""
    passes = []

    def timed(kind, method):
        def call(microbatch, *args, **extra):
            began = time.monotonic()
            out = method(microbatch, *args, **extra)
            passes.append((kind, microbatch, began, time.monotonic()))
            return out

        return call

    stage.forward_one_chunk = timed("forward", stage.forward_one_chunk)
    stage.backward_one_chunk = timed("backward", stage.backward_one_chunk)
    return passes


def by_hand(model, x, y, loss):
    """The stages of a split in a schedule that the user makes; cuts must not depend on the process here."""
    _, gradients = whole(model, x, y, loss)
    split = shoal.split(model, x, stages=2, microbatches=MICROBATCHES)
    rank = dist.get_rank()
    cut = [split.proposal.bounds]
    dist.broadcast_object_list(cut, src=0)
    module = split.proposal.chain.modules(cut[0])[rank]
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=loss)
    schedule.step(x) if rank == 0 else schedule.step(target=y, losses=[])
    return apart(gradients, [module])[0]


def other_sizes(model, x, y, loss, word):
    """The largest difference for batches that the microbatches do not divide, after one that they do."""
    split = shoal.split(model, x, stages=2, microbatches=MICROBATCHES)
    pipeline = split.pipeline(loss, word)
    found = []
    for samples in (BATCH, 6, 7, 1, BATCH):
        _, gradients = whole(model, x[:samples], y[:samples], loss)
        pipeline.step(x[:samples], y[:samples])
        found.append(apart(gradients, pipeline.modules)[0])
    return max(found)


def refused(y, loss):
    """What a step says of labels and a loss; None if nothing."""
    x = data(words=False)[0]
    split = shoal.split(mlp().double(), x, stages=2, microbatches=MICROBATCHES)
    try:
        split.pipeline(loss, "gpipe").step(x, y)
    except ValueError as error:
        return str(error)
    return None


def refusals():
    """Two samples of a microbatch; the batch has 8."""
    y = data(words=False)[1]
    few, whole, pairs = y.clone(), y.clone(), y.clone()
    few[3] = whole[:2] = pairs[::2] = -100
    weights = torch.tensor([1.0, 2.0, 5.0]).double()
    return {
        "one ignored": refused(few, F.cross_entropy),
        "a microbatch ignored": refused(whole, F.cross_entropy),
        "class weights": refused(y, partial(F.cross_entropy, weight=weights)),
        "sum": refused(y, partial(F.cross_entropy, reduction="sum")),
        "one of each pair ignored": refused(pairs, F.cross_entropy),
        "no number": refused(y, no_number),
    }


def no_number(out, y):
    return F.cross_entropy(out, y) * float("nan")


def twice():
    """The first and the third stage of four share a layer; with two processes they run in the same one."""
    torch.manual_seed(0)
    layer, *others = (nn.Linear(12, 12).double() for _ in range(3))
    return nn.Sequential(layer, others[0], layer, others[1])


def main(folder, rank, ranks):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks)
    x, y = data(words=False)
    told = {
        word: compare(mlp().double(), x, y, F.cross_entropy, word)
        for word in ("gpipe", "1f1b", "interleaved")
    }
    told["fastest"] = compare(mlp().double(), x, y, F.cross_entropy, None)
    told["tied"] = compare(transformer(), *data(words=True), sequence_loss, "1f1b")
    told["by hand"] = by_hand(mlp().double(), x, y, F.cross_entropy)
    told["twice"] = compare(twice(), x, y, F.cross_entropy, "interleaved")
    told["sizes"] = [
        other_sizes(mlp().double(), x, y, F.cross_entropy, word) for word in ("gpipe", "1f1b", "interleaved")
    ]
    told["refusals"] = refusals()
    (folder / f"{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
