"""`shoal manifest slurm | jobset | trainjob`: prints the file that starts a run on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import typer

from shoal.cli.checkpoint_options import check_checkpoint
from shoal.cli.command import DOTTED, PASSED, Servers, check_servers
from shoal.cli.run import check_strategy, check_words
from shoal.core.catalogue import check_word
from shoal.manifests.batch_script import batch_script
from shoal.manifests.cluster_run import ClusterRun
from shoal.manifests.jobset import jobset
from shoal.manifests.trainjob import trainjob
from shoal.manifests.yaml_text import to_yaml
from shoal.strategies import STRATEGIES

CLUSTER = "The cluster"

Script = Annotated[str, typer.Argument(metavar="SCRIPT", help="The script, as the cluster finds it.")]
Arguments = Annotated[list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Arguments of the script.")]
Workers = Annotated[int, typer.Option("-n", "--workers", min=1, help="Workers to start.")]
StrategyWord = Annotated[
    str | None, typer.Option(metavar="WORD", help="As in shoal run.", show_default="the script's own")
]
CodecText = Annotated[str | None, typer.Option(metavar="WORD", help="As in shoal run.")]
TransportWord = Annotated[str, typer.Option(metavar="WORD", help="gloo or grpc.")]
Checkpoint = Annotated[
    str | None,
    typer.Option(
        metavar="DIR", help="Save checkpoints in this folder, which all machines share, and resume."
    ),
]
EverySteps = Annotated[
    int | None, typer.Option("--every", min=1, metavar="STEPS", help="Steps between two checkpoints.")
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="grpc without TLS and token, on a network you trust.")
]
Name = Annotated[str, typer.Option(help="Name of the job.", rich_help_panel=CLUSTER)]
Gpus = Annotated[int, typer.Option(min=0, help="GPUs of each worker.", rich_help_panel=CLUSTER)]
Cpus = Annotated[int | None, typer.Option(min=1, help="Cores of each process.", rich_help_panel=CLUSTER)]
Grace = Annotated[
    int,
    typer.Option(
        min=1, metavar="SECONDS", help="Time to save a checkpoint before the end.", rich_help_panel=CLUSTER
    ),
]
Image = Annotated[
    str | None, typer.Option(help="Container image with Shoal and your script.", rich_help_panel=CLUSTER)
]
Secret = Annotated[
    str | None,
    typer.Option(help="Secret with tls.crt, tls.key, ca.crt and token, for grpc.", rich_help_panel=CLUSTER),
]
PodMemory = Annotated[
    str | None,
    typer.Option(metavar="AMOUNT", help="Memory of each process, such as 8Gi.", rich_help_panel=CLUSTER),
]


def slurm(
    ctx: typer.Context,
    script: Script = "",
    arguments: Arguments = None,
    workers: Workers = 1,
    strategy: StrategyWord = None,
    codec: CodecText = None,
    transport: TransportWord = "gloo",
    servers: Servers = 1,
    checkpoint: Checkpoint = None,
    every: EverySteps = None,
    insecure: Insecure = False,
    name: Name = "shoal",
    gpus: Gpus = 0,
    cpus: Cpus = None,
    hosts: Annotated[
        int | None, typer.Option(min=1, help="Hosts to spread over.", rich_help_panel=CLUSTER)
    ] = None,
    time: Annotated[
        str | None, typer.Option(help="Time limit, such as 04:00:00.", rich_help_panel=CLUSTER)
    ] = None,
    grace: Grace = 120,
) -> None:
    """Print a batch script, for: sbatch FILE."""
    if transport == "grpc" and not insecure:
        raise ValueError(
            "grpc between hosts needs TLS and a token. With --insecure the script does without, on a network "
            "you trust; for TLS replace that word in it by --certificate, --key, --authority and --token-file"
        )
    own = {"hosts": hosts, "time": time}
    flag = ("--insecure",) if insecure else ()
    run = describe(
        ctx, script, arguments, workers, strategy, codec, transport, servers, checkpoint, every, insecure,
        options=flag, name=name, gpus=gpus, cpus=cpus, grace_seconds=grace, **own,
    )  # fmt: skip
    print(batch_script(run), end="")


def pods_command(make: Callable[[ClusterRun], Sequence[Any]], grace_seconds: int) -> Callable[..., None]:
    """The command that prints the documents which `make` makes for Kubernetes."""

    def show(
        ctx: typer.Context,
        script: Script = "",
        arguments: Arguments = None,
        workers: Workers = 1,
        strategy: StrategyWord = None,
        codec: CodecText = None,
        transport: TransportWord = "gloo",
        servers: Servers = 1,
        checkpoint: Checkpoint = None,
        every: EverySteps = None,
        insecure: Insecure = False,
        name: Name = "shoal",
        image: Image = None,
        secret: Secret = None,
        gpus: Gpus = 0,
        cpus: Cpus = None,
        memory: PodMemory = None,
        grace: Grace = grace_seconds,
    ) -> None:
        check_pods(image, secret, transport, checkpoint, insecure)
        run = describe(
            ctx, script, arguments, workers, strategy, codec, transport, servers, checkpoint, every, insecure,
            name=name, image=image, secret=secret, gpus=gpus, cpus=cpus, memory=memory, grace_seconds=grace,
        )  # fmt: skip
        print("---\n".join(map(to_yaml, make(run))), end="")

    return show


COMMANDS = {
    "slurm": (slurm, "Print a batch script, for: sbatch FILE."),
    "jobset": (pods_command(jobset, 120), "Print a JobSet for Kubernetes, for: kubectl apply -f FILE."),
    "trainjob": (
        pods_command(trainjob, 30),
        "Print a TrainJob for Kubeflow Trainer, for: kubectl apply -f FILE.",
    ),
}
"""What each word prints, and the help that says so."""


def describe(
    ctx: typer.Context,
    script: str,
    arguments: list[str] | None,
    workers: int,
    strategy: str | None,
    codec: str | None,
    transport: str,
    servers: int,
    checkpoint: str | None,
    every: int | None,
    insecure: bool,
    options: tuple[str, ...] = (),
    **cluster: Any,
) -> ClusterRun:
    """The run that is asked for. Raises ValueError for what `shoal run` would refuse on the cluster."""
    words = [*([script] if script else []), *(arguments or []), *ctx.meta[PASSED]]
    if not words:
        raise ValueError(f"name the script to run, as in: shoal manifest {ctx.info_name} -n 4 train.py")
    check_word("transport", transport, ["gloo", "grpc"])
    strategy, dotted = check_strategy(strategy, ctx.meta[DOTTED], servers)
    check_words(codec, transport, "auto", "memory")
    if insecure and transport != "grpc":
        raise ValueError("--insecure belongs to --transport grpc")
    check_checkpoint(None if checkpoint is None else Path(checkpoint), every, is_here=False)
    given = {
        "--strategy": strategy,
        **{f"--strategy.{name}": value for name, value in dotted.items()},
        "--codec": codec,
        "--transport": None if transport == "gloo" else transport,
        "--servers": None if servers == 1 else str(servers),
        "--checkpoint": checkpoint,
        "--every": None if every is None else str(every),
    }
    told = [word for option, value in given.items() if value is not None for word in (option, value)]
    return ClusterRun(
        script=words[0],
        arguments=tuple(words[1:]),
        options=(*told, *options),
        workers=workers,
        servers=count_servers(strategy, dotted, servers),
        transport=transport,
        checkpoint=checkpoint,
        **cluster,
    )


def count_servers(strategy: str | None, options: Mapping[str, str], servers: int) -> int:
    """The server processes of the strategy."""
    if strategy is None:
        return 0
    made = STRATEGIES.make(strategy, **options)  # imports torch
    check_servers(strategy, made.servers, servers)
    return made.servers * servers


def check_pods(
    image: str | None, secret: str | None, transport: str, checkpoint: str | None, insecure: bool
) -> None:
    """Raise ValueError for what pods cannot be made of."""
    if image is None:
        raise ValueError("pods need --image, a container image with Shoal and your script in it")
    if transport == "grpc" and (secret is None) != insecure:
        raise ValueError("grpc between pods needs --secret NAME, or --insecure on a network you trust")
    if transport != "grpc" and secret is not None:
        raise ValueError("--secret belongs to --transport grpc")
    if checkpoint is not None and not PurePosixPath(checkpoint).is_absolute():
        raise ValueError(f"--checkpoint {checkpoint}: a volume is mounted there, so give an absolute path")
