"""What `shoal manifest` prints fits the schemas of its cluster, and trains when it is run."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ports import free_port
from shoal.cli import app
from shoal.manifests.yaml_text import to_yaml

yaml = pytest.importorskip("yaml", reason="needs PyYAML; install with: pip install pyyaml")
jsonschema = pytest.importorskip("jsonschema", reason="needs it; install with: pip install jsonschema")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests/launch/slurm_loop.py"
SERVED = ("-n", "2", "--strategy", "asgd", "--image", "registry.example/train:1")
ALL = ("--gpus", "1", "--cpus", "4", "--memory", "8Gi", "--checkpoint", "/ckpt", "--every", "100")
EXAMPLES = [
    (kind, *options, "train.py", "--lr", "0.1")
    for kind in ("jobset", "trainjob")
    for options in (
        ("-n", "8", "--strategy", "bmuf", "--strategy.period", "16", "--image", "IMAGE"),
        (*SERVED, *ALL),
        (*SERVED, *ALL, "--transport", "grpc", "--secret", "shoal-tls"),
        (*SERVED, "--transport", "grpc", "--insecure"),
    )
]


def printed(*words: str) -> str:
    result = CliRunner().invoke(app, ["manifest", *words])
    assert result.exit_code == 0, result.stderr
    return result.stdout


def documents(*words: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(printed(*words)))


def refusal(*words: str) -> str:
    result = CliRunner().invoke(app, ["manifest", *words])
    assert result.exit_code == 2
    return result.stderr.replace("\n", " ")


def problems(document: dict[str, Any]) -> list[str]:
    schemas = json.loads(Path(__file__).with_name("schemas.json").read_text())["schemas"]
    checker = jsonschema.Draft202012Validator(schemas[document["kind"]])
    return [error.message for error in checker.iter_errors(document)]


@pytest.mark.parametrize("words", EXAMPLES, ids=lambda words: " ".join(words[:-3]))
def test_manifests_fit_the_published_schemas(words):
    for document in documents(*words):
        assert problems(document) == []


def test_a_misspelt_field_and_a_wrong_type_would_be_noticed():
    (good,) = documents(*EXAMPLES[0])
    good["spec"]["network"]["enableDnsHostnames"] = True
    good["spec"]["replicatedJobs"][0]["replicas"] = "1"
    found = problems(good)
    assert len(found) == 2 and "enableDnsHostnames" in "".join(found)


def test_a_value_reads_back_as_it_was_written():
    values = {"a": ["yes", "0.1", "x: y", "- z", "", "#", 'say "$@"', "*", "é", 3, True, None, [], {}]}
    assert yaml.safe_load(to_yaml(values)) == values


def test_a_server_needs_no_gpu():
    (whole,) = documents("jobset", *SERVED, *ALL, "train.py")
    workers, servers = (
        job["template"]["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
        for job in whole["spec"]["replicatedJobs"]
    )
    assert "nvidia.com/gpu" in workers and "nvidia.com/gpu" not in servers


def test_the_batch_script_in_the_examples_is_what_is_printed():
    example = ROOT / "examples/slurm.sbatch"
    first, command, *rest = example.read_text().splitlines(keepends=True)
    words = shlex.split(command.removeprefix("# "))
    assert words[:3] == ["shoal", "manifest", "slurm"]
    assert printed(*words[2:]) == first + "".join(rest)
    assert subprocess.run(["bash", "-n", str(example)], check=False).returncode == 0


def test_a_batch_script_quotes_the_words_of_the_script():
    assert "train.py --title 'two words'" in printed("slurm", "-n", "2", "train.py", "--title", "two words")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("slurm",), "name the script to run"),
        (("jobset", "train.py"), "pods need --image"),
        (("jobset", "--image", "I", "--checkpoint", "ckpt", "train.py"), "give an absolute path"),
        (("jobset", "--image", "I", "--transport", "grpc", "train.py"), "needs --secret NAME, or --insecure"),
        (("jobset", "--image", "I", "--secret", "s", "train.py"), "--secret belongs to --transport grpc"),
        (("slurm", "--transport", "grpc", "train.py"), "grpc between hosts needs TLS and a token"),
        (("slurm", "--strategy", "bmfu", "train.py"), "bmuf"),
        (("slurm", "--transport", "mpi", "train.py"), "transport 'mpi'"),
        (("slurm", "--name", "My job", "train.py"), "--name 'My job'"),
        (("slurm", "--every", "3", "train.py"), "add --checkpoint DIR"),
    ],
)
def test_what_could_not_run_is_refused_in_a_sentence(words, sentence):
    assert sentence in refusal(*words)


# Run as the pods would run it, but on loopback


def pods_of(document: dict[str, Any], port: int) -> list[tuple[list[str], dict[str, str]]]:
    """The command and the variables of every pod, as the operator of the cluster would set them."""
    spec = document["spec"]
    if document["kind"] == "TrainJob":
        trainer, nodes = spec["trainer"], spec["trainer"]["numNodes"]
        shared = {
            "PET_NNODES": str(nodes),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(port),
        }
        return [(trainer["command"], {**shared, "PET_NODE_RANK": str(rank)}) for rank in range(nodes)]
    found = []
    for job in spec["replicatedJobs"]:
        container = job["template"]["spec"]["template"]["spec"]["containers"][0]
        variables = {entry["name"]: entry["value"] for entry in container["env"]}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        found += [
            (container["command"], {**variables, "JOB_COMPLETION_INDEX": str(index)})
            for index in range(job["template"]["spec"]["completions"])
        ]
    return found


@pytest.fixture
def programs(warm_programs, tmp_path: Path) -> dict[str, str]:
    """An environment in which `shoal` and `torchrun` are those under test."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, module in (("shoal", "shoal"), ("torchrun", "torch.distributed.run")):
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        (folder / name).chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("jobset", ()),
        pytest.param("trainjob", (), marks=pytest.mark.soak),
        pytest.param("jobset", ("--transport", "grpc", "--insecure"), marks=pytest.mark.soak),
    ],
)
def test_the_commands_of_the_pods_train_two_workers_with_a_server(kind, options, programs):
    *_, whole = documents(kind, *SERVED, *options, str(SCRIPT), "--steps", "10")
    if options:  # the names of pods are only known in the cluster
        text = (
            json.dumps(whole)
            .replace("-0-$JOB_COMPLETION_INDEX.shoal", "")
            .replace("0.0.0.0:50051", "127.0.0.1")
        )
        whole = json.loads(
            text.replace("--advertise shoal-servers", "").replace("--advertise shoal-workers", "")
        )
    pods = [
        subprocess.Popen(
            command,
            env={**programs, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command, variables in pods_of(whole, free_port())
    ]
    assert len(pods) == 3
    try:
        said = [pod.communicate(timeout=380) for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
            pod.communicate()
    assert [pod.returncode for pod in pods] == [0, 0, 0], said
    lines = sorted(line for out, _ in said for line in out.splitlines() if " of 2 has " in line)
    assert [line[:13] for line in lines] == ["worker 0 of 2", "worker 1 of 2"]
    assert len({line.split()[-1] for line in lines}) == 1  # both have the server's model
