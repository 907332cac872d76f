"""`shoal split`: cut a model into the stages of a pipeline and see its steps before renting machines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.outcome import JsonFile, Outcome, ReportFile
from shoal.core.catalogue import nearest
from shoal.programs.tasks import TASKS
from shoal.sim.models import Network, byte_count

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.pipelines.layer_costs import MakeOptimizer


def split(
    what: Annotated[
        str,
        typer.Argument(
            metavar="TASK|SCRIPT:MODEL",
            help="A task (see: shoal list tasks) with options, as in shakespeare:layers=8; or a script and a "
            "model in it, or a function that makes one: train.py:model.",
        ),
    ],
    stages: Annotated[int, typer.Option(min=1, help="Stages, one on each device.")] = 2,
    microbatches: Annotated[
        int | None,
        typer.Option(min=1, help="Parts of the batch.", show_default="4 for each stage, or fewer"),
    ] = None,
    network: Annotated[
        str, typer.Option(metavar="LINKS", help="Bandwidth and latency between the devices.")
    ] = "1Gbit,100us",
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Of each device: 16GB, or several: 8GB,16GB.", show_default="unlimited"
        ),
    ] = None,
    chunks: Annotated[int, typer.Option(min=1, help="Stages of interleaved 1F1B on each device.")] = 2,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1, help="Samples of a step, for a task.", show_default="the task's own for each stage"
        ),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            "--input",
            metavar="SHAPE",
            help="The shape of a batch for the model of a script: 64x3x32x32.",
            show_default="the script's own example_input",
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            metavar="WORD",
            help="A class of torch.optim, for the memory of its state: adam.",
            show_default="the task's own, or SGD",
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Torch threads to measure with.", show_default="torch's own")
    ] = None,
    json: JsonFile = None,
    report: ReportFile = None,
) -> None:
    """Cut a model into stages, and simulate a step with each schedule.

    Measures every layer here, balances the stages, compares GPipe, 1F1B and
    interleaved 1F1B with data parallelism on the same devices.
    """
    Network.parse(network)
    sizes = memory.split(",") if memory else []
    for size in sizes:
        byte_count(size)
    if len(sizes) not in (0, 1, stages):
        raise ValueError(f"--memory names {len(sizes)} devices, and there are {stages} stages")
    check_model(what, batch, shape)
    Outcome(json, report)
    propose_split(
        what,
        (batch, stages, shape, optimizer),
        {
            "stages": stages,
            "microbatches": microbatches,
            "network": network,
            "memory": (sizes if len(sizes) > 1 else sizes[0]) if sizes else None,
            "chunks": chunks,
        },
        threads,
        (json, report),
    )


def check_model(what: str, batch: int | None, shape: str | None) -> None:
    """Raise ValueError for a task or script that is not there, or an option that belongs to the other."""
    path, colon, name = what.rpartition(":")
    if not path.endswith(".py"):
        if what.endswith(".py"):
            raise ValueError(f"{what} needs the name of its model: {what}:model")
        TASKS.check_text(what)
        if shape is not None:
            raise ValueError(f"--input is for the model of a script, and task {what!r} has data of its own")
        return
    if not Path(path).is_file():
        raise ValueError(f"there is no script {path}")
    if not colon or not name.isidentifier():
        raise ValueError(f"{what!r}: write the script and the name of a model in it, as in train.py:model")
    if batch is not None:
        raise ValueError(f"--batch is for a task; {path} has its batch in --input or example_input")
    if shape is not None:
        read_shape(shape)


def read_shape(text: str) -> list[int]:
    """The numbers of a shape such as 64x3x32x32."""
    words = text.lower().split("x")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"--input {text!r} is not a shape; write the batch first, as in 64x3x32x32")
    return [int(word) for word in words]


def propose_split(
    what: str,
    chosen: tuple[int | None, int, str | None, str | None],
    options: dict[str, Any],
    threads: int | None,
    files: tuple[Path | None, Path | None],
) -> None:
    """Measure, print and write the files."""
    import torch
    from rich.console import Console

    from shoal.api.split import split as propose
    from shoal.pipelines.split_page import split_page
    from shoal.pipelines.split_tables import show_split
    from shoal.report.files import plain, write_whole

    if threads is not None:
        torch.set_num_threads(threads)
    batch, stages, shape, optimizer = chosen
    path, _, name = what.rpartition(":")
    if path.endswith(".py"):
        title, (model, example, own) = name, from_script(path, name, shape)
    else:
        title, (model, example, own) = what, from_task(what, batch, stages)
    found = propose(model, example, optimizer=named_optimizer(optimizer) or own, **options)
    console = Console(highlight=False)
    show_split(found.proposal, console)
    json, report = files
    if report is not None:
        write_whole(report, split_page(found.proposal, title))
        console.print(f"\nreport: {report}", markup=False, soft_wrap=True)
    if json is not None:
        import json as encoder

        write_whole(json, encoder.dumps(plain(found.record()), indent=1, allow_nan=False) + "\n")
        console.print(f"json: {json}", markup=False, soft_wrap=True)


def from_task(word: str, batch: int | None, stages: int) -> tuple[nn.Module, Tensor, MakeOptimizer]:
    """Model, batch and optimizer of a task."""
    from functools import partial

    task = TASKS.read(word)
    data, wanted = task.data().x, batch or task.batch * stages
    if len(data) < wanted:
        raise ValueError(f"--batch {wanted}: task {word!r} has {len(data)} samples")
    return task.model(), data[:wanted], partial(task.optimizer, lr=task.lr)


def from_script(path: str, name: str, shape: str | None) -> tuple[nn.Module, Tensor, MakeOptimizer]:
    """Model and example of a script, which runs without its `if __name__ == "__main__"`."""
    import runpy
    import sys

    import torch

    sys.path.insert(0, str(Path(path).resolve().parent))
    names = runpy.run_path(path, run_name="shoal_split")
    if name not in names:
        known = [key for key, value in names.items() if isinstance(value, torch.nn.Module)]
        raise ValueError(f"{path} has no model {name!r}. {nearest(name, known)}")
    model, example = names[name], names.get("example_input")
    if not isinstance(model, torch.nn.Module):
        model = model() if callable(model) else model
    if not isinstance(model, torch.nn.Module):
        raise ValueError(
            f"{name} of {path} is a {type(model).__name__}, not a model or a function that makes one"
        )
    if shape is not None:
        example = torch.randn(read_shape(shape))
    elif callable(example) and not isinstance(example, torch.Tensor):
        example = example()
    if not isinstance(example, torch.Tensor):
        raise ValueError(f"give the shape of a batch, --input 64x784, or a tensor example_input in {path}")
    return model, example, torch.optim.SGD


def named_optimizer(name: str | None) -> MakeOptimizer | None:
    """An optimizer class of torch, whatever the case of its letters."""
    if name is None:
        return None
    import torch

    known: dict[str, MakeOptimizer] = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and key != "Optimizer"
    }
    if name.lower() not in known:
        raise ValueError(f"unknown optimizer {name!r} of torch.optim. {nearest(name, known)}")
    return known[name.lower()]
