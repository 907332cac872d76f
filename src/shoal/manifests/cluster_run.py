"""ClusterRun: a run of a script on a cluster, as all manifests need to know it."""

from __future__ import annotations

import re
from dataclasses import dataclass

INTERRUPTED = 130
"""The exit code of `shoal run` when it was asked to stop and all workers have saved a checkpoint."""


@dataclass(frozen=True)
class ClusterRun:
    """`shoal run` with `options`, for `script` and its `arguments`, on so many workers and servers.

    `gpus`, `cpus` and `memory` are those of a worker. `grace_seconds` are the seconds between the request to
    stop and the end.
    """

    script: str
    arguments: tuple[str, ...] = ()
    options: tuple[str, ...] = ()  # of `shoal run`
    workers: int = 1
    servers: int = 0
    name: str = "shoal"
    transport: str = "gloo"
    checkpoint: str | None = None
    image: str | None = None
    secret: str | None = None  # of Kubernetes, with TLS files and a token
    gpus: int = 0
    cpus: int | None = None
    memory: str | None = None
    hosts: int | None = None
    time: str | None = None
    grace_seconds: int = 120

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", self.name):
            raise ValueError(
                f"--name {self.name!r}: take 1 to 40 lower-case letters, digits and hyphens; "
                "host names are made of it, so the first is a letter"
            )

    @property
    def nodes(self) -> int:
        """Processes of the run. The last ones are the servers."""
        return self.workers + self.servers

    def command(self) -> list[str]:
        """The words of `shoal run`."""
        return ["shoal", "run", *self.options, self.script, *self.arguments]

    def command_after(self, word: str) -> list[str]:
        """The arguments of a shell's -c that runs `shoal run` with "$@": its name, then all after `word`."""
        words = self.command()
        return ["shoal", *words[words.index(word) + 1 :]]
