"""Help, lists and wrong arguments are answered without importing torch or numpy, which takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import contextlib, io, json, sys
from typer.main import get_command
from shoal.cli import app

command = get_command(app)
for line in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            command(line.split(), prog_name="shoal")
        except SystemExit as end:
            code = end.code or 0
    heavy = sorted({"torch", "numpy"} & {*sys.modules})
    print(json.dumps([code, heavy, out.getvalue(), err.getvalue()]))
"""

ANSWERED = [
    "",
    "--help",
    "--version",
    "compare --help",
    "run --help",
    "join --help",
    "reproduce --help",
    "search --help",
    "list --help",
    "doctor --help",
    "demo --help",
    "split --help",
    "runs --help",
    "report --help",
    "runs --runs {tmp}",
    "list",
    "list strategies",
    "list --json",
    "list tasks studies",
    "list methods",
]
REFUSED = {
    "comapre": "Did you mean 'compare'?",
    "demo --network 3": "has no known unit",
    "split mnsit": "unknown task 'mnsit'. Did you mean 'mnist'?",
    "split shakespeare:layer=3": "task 'shakespeare' has no option 'layer'",
    "search --task shakespeare:layer=3": "task 'shakespeare' has no option 'layer'",
    "plan --task digits --strategies ,": "--strategies names none",
    "split digits --network 3": "has no known unit",
    "split digits --memory 3": "'3' is not a size of memory; write it as 16GB",
    "split digits --memory 3GB,3GB,3GB": "--memory names 3 devices, and there are 2 stages",
    "split digits --input 4x4": "--input is for the model of a script, and task 'digits' has data of its own",
    "split nothing.py:model": "there is no script nothing.py",
    "split nothing.py": "nothing.py needs the name of its model: nothing.py:model",
    "compare --epohcs 3": "No such option: --epohcs",
    "compare --strategies bmfu": "unknown strategy 'bmfu'. Did you mean 'bmuf'?",
    "compare --strategies ,": "--strategies names none",
    "compare --strategies sync,sync": "--strategies names 'sync' twice",
    "compare --strategies local,bmuf --strategy.perod 8": (
        "none of local, bmuf has an option 'perod'. Did you mean 'period'?"
    ),
    "compare --strategies sync,local:perod=8": "strategy 'local' has no option 'perod'. Did you mean",
    "compare --strategies local:period=8,sync,local:period=8": "--strategies names 'local:period=8' twice",
    "plan --task digits --strategies local:period=x": "strategy 'local': period='x' should be a whole number",
    "compare --strategy.period --sim": "--strategy.period needs a value",
    "compare --strategies bmuf --strategy.period x": "period='x' should be a whole number",
    "compare --strategies bmuf --strategy.period 0": "strategy 'bmuf': period=0 must be at least 1",
    "compare --strategies eamsgd --strategy.momentum 2": "momentum=2.0 must be at least 0 and below 1",
    "compare --strategies dpsgd --strategy.topology rnig": "unknown topology 'rnig'. Did you mean 'ring'?",
    "compare --strategies dpsgd --strategy.topology one_peer": "has edges that lead one way only",
    "compare --task digit": "unknown task 'digit'. Did you mean 'digits'?",
    "compare --codec fp61": "unknown codec 'fp61'. Did you mean 'fp16'?",
    "compare --codec top_k:densty=0.1": "codec 'top_k' has no option 'densty'. Did you mean 'density'?",
    "compare --codec top_k:density=x": "density='x' should be a number",
    "compare --codec top_k:density=2": "codec 'top_k': density=2.0 should be above 0",
    "compare --codec ternary:feedback=twice": "feedback='twice' should be one of none, residual, double",
    "compare --transport gloop": "unknown transport 'gloop'. Did you mean 'gloo'?",
    "compare --transport mpi": "transport 'mpi' joins the processes that mpiexec has started",
    "compare --collective rings": "unknown collective 'rings'. Did you mean 'ring'?",
    "compare --durability disk": "unknown durability 'disk'",
    "compare --durability journal --transport sim": "transport 'sim' keeps no journal",
    "compare -n four": "--workers 'four' is not a number",
    "compare -n 0": "--workers 0: a run needs at least 1 worker",
    "compare --epochs 0": "--epochs 0: a run needs at least 1 epoch",
    "compare --epochs x": "'--epochs'",
    "compare --batch 0": "--batch 0: a batch holds at least 1 sample",
    "compare --lr -1": "--lr -1: the learning rate must be positive",
    "compare --threads 0": "--threads 0: a process computes with at least 1 thread",
    "compare --servers 0": "'--servers'",
    "compare --timeout 0": "'--timeout'",
    "compare --grow-batch 2x10": "is not a factor and an epoch, as in 2@10",
    "compare --crew 4x500": "is not a number of workers and a step, as in 4@500",
    "compare --crew 4@0,2@500": "a crew grows; name more workers each time",
    "compare --largest-batch 64": "largest_batch=64 belongs to a batch that grows",
    "compare --network 1Gbit": "--network describes virtual time; add --sim",
    "compare --sim --network 1Gbot": "'1Gbot' in network '1Gbot' has no known unit",
    "compare --sim --compute fast": "'fast' is not a number with a unit",
    "compare --every 5": "add --checkpoint DIR",
    "compare --every 0 --checkpoint {tmp}/saved": "'--every'",
    "compare --checkpoint {file}": "train.py is not a folder",
    "compare --json {tmp}": "is a folder; name a file in it",
    "compare --json {file}/out.json": "train.py is not a folder",
    "compare --report {file}/out.html": "train.py is not a folder",
    "compare --json {tmp}/out --report {tmp}/out": "they need a file each",
    "compare --runs {file}": "train.py is not a folder",
    "compare --log cvs": "unknown logger 'cvs'. Did you mean 'csv'?",
    "compare --log csv:{file}": "train.py is not a folder",
    "run --log tensorbord:runs {file}": "unknown logger 'tensorbord'. Did you mean 'tensorboard'?",
    "runs --sort acuracy": "unknown column 'acuracy'. Did you mean 'accuracy'?",
    "runs --runs {tmp}/nowhere": "--runs: there is no folder",
    "runs --runs none": "keeps no runs; name a folder",
    "report": "name the runs, as in: shoal report last",
    "report last --runs {tmp}": "there is no run in",
    "report {file}.json": "No such file or directory",
    "run": "name the script to run",
    "run nowhere.py": "there is no script 'nowhere.py'",
    "run -n 0 {file}": "-n 0: a run needs at least 1 worker",
    "run {file} --strategy esagd": "unknown strategy 'esagd'. Did you mean 'easgd'?",
    "run {file} --strategy easgd --strategy.perod 3": "Did you mean 'period'?",
    "run {file} --strategy easgd --strategy.rate 2": "strategy 'easgd': rate=2.0 must be at least 0",
    "run --strategy.period 3 {file}": "name it with --strategy",
    "run {file} --codec fp61": "unknown codec 'fp61'. Did you mean 'fp16'?",
    "run --transport sim {file}": "unknown transport 'sim'",
    "run --collective rings {file}": "unknown collective 'rings'",
    "run --servers 2 {file}": "--servers 2 belongs to a strategy with a server",
    "run --listen 0.0.0.0 {file}": "--listen belongs to --transport grpc",
    "run --hosts a {file}": "'a' has no number of workers; write --hosts as NAME:WORKERS",
    "run --hosts a:2,b:2 -n 3 {file}": "-n 3 does not fit --hosts a:2,b:2, which has 4; omit -n",
    "run --hosts a:2,b:2 --transport mpi {file}": "transport 'mpi' joins the processes that mpiexec",
    "run --hosts a:2 --key {file} {file}": "--key does not go with --hosts",
    "run --port 5000 {file}": "--port belongs to --hosts",
    "run --balance {file}": "a script's loop owns its loader",
    "reproduce bmuf-wre": "unknown study 'bmuf-wre'. Did you mean 'bmuf-wer'?",
    "reproduce bmuf-wer:seed=3": "study 'bmuf-wer' has no option 'seed'. Did you mean 'seeds'?",
    "reproduce bmuf-wer:seeds=x": "seeds='x' should be a whole number",
    "search": "what is searched? Name it: --vary",
    "search --vary lr": "--vary 'lr' should be NAME=RANGE",
    "search --vary lr=log": "lr: 'log' is no range",
    "search --vary lr=3..1": "lr: 3..1 is no range: the first number must be below the second",
    "search --vary architecture=layer": "unknown architecture 'layer'. Did you mean 'layers'?",
    "search --vary lr=0..1 --method pbd": "unknown method 'pbd'. Did you mean 'pbt'?",
    "search --vary lr=0..1 --method pbt:popluation=3": "Did you mean 'population'?",
    "search --vary lr=0..1 --method pbt:population=0": "method 'pbt': population=0 must be at least 1",
    "search --vary lr=0..1 --method hierarchical": "method 'hierarchical' evolves cells of motifs",
    "search --vary lr=0..1 --method evolution --epochs 20": "epochs=20 ends with the first generation of",
    "search --vary architecture=layers --method pso": "an architecture is none",
    "search --vary lr=0..1 --task digit": "unknown task 'digit'. Did you mean 'digits'?",
    "search --vary lr=0..1 --strategy bmfu": "unknown strategy 'bmfu'. Did you mean 'bmuf'?",
    "search --vary lr=0..1 --strategy bmuf:perod=3": "has no option 'perod'. Did you mean 'period'?",
    "search --vary lr=0..1 --metric acuracy": "unknown metric 'acuracy'. Did you mean 'accuracy'?",
    "search --vary lr=0..1 --transport sim": "unknown transport 'sim'. Known: processes, gloo, grpc.",
    "search --vary lr=0..1 --epochs 0": "--epochs 0 must be at least 1",
    "search --vary lr=0..1 --held-out 1": "--held-out 1 is a share of the training set",
    "search --space {file}.toml": "--space: cannot read",
    "search --vary lr=0..1 --resume --folder {tmp}": "to resume; leave --resume out",
    "list tsaks": "unknown kind 'tsaks'. Did you mean 'tasks'?",
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What the command line says to each line, all of them in one process that has not imported torch."""
    tmp = tmp_path_factory.mktemp("quick")
    (tmp / "train.py").touch()
    lines = [*ANSWERED, *REFUSED]
    typed = [line.format(tmp=tmp, file=tmp / "train.py") for line in lines]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=json.dumps(typed), capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(lines, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("line", ANSWERED)
def test_a_question_is_answered_without_torch(answers, line):
    code, heavy, out, err = answers[line]
    assert (code, heavy, err) == (0, [], "")
    assert out.strip()


@pytest.mark.parametrize("line", REFUSED)
def test_a_wrong_argument_is_refused_without_torch(answers, line):
    code, heavy, out, err = answers[line]
    assert REFUSED[line] in err
    assert err.startswith("shoal: ") and err.count("\n") == 1
    assert (code, heavy, out) == (2, [], "")


@pytest.mark.parametrize("line", ["--help", "compare --help", "run --help", "reproduce --help"])
def test_help_documents_the_exit_codes(answers, line):
    _, _, out, _ = answers[line]
    said = "Exit codes: 2 for usage errors, 1 for runtime failures, 130 for Ctrl-C, 143 for SIGTERM."
    assert said in " ".join(out.split())
