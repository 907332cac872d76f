"""Search spaces from dicts, options and files; what is wrong in a file is named with its line."""

from __future__ import annotations

from random import Random

import pytest

from shoal.search.architectures import Cells, Layers
from shoal.search.ranges import Choice, Interval
from shoal.search.space import Space, read_space, read_space_file, read_space_options

TOML = """
# what to search
lr = "log 1e-4..1"
batch = [16, 32, 64]
strategy.period = "1..32"
architecture = "layers:most=2"
"""


def test_a_toml_file_and_a_json_file_give_the_same_space(tmp_path):
    pytest.importorskip("tomllib")
    (tmp_path / "s.toml").write_text(TOML)
    (tmp_path / "s.json").write_text(
        '{"lr": "log 1e-4..1", "batch": [16, 32, 64], "strategy.period": "1..32", '
        '"architecture": "layers:most=2"}'
    )
    first, second = read_space_file(tmp_path / "s.toml"), read_space_file(tmp_path / "s.json")
    assert dict(first) == dict(second)
    assert first["lr"] == Interval(1e-4, 1, log=True)
    assert first["strategy.period"] == Interval(1, 32, integer=True)
    assert first.architecture == Layers(most=2)
    assert list(first.placed) == ["lr", "batch", "strategy.period"]
    assert dict(Space(first.text())) == dict(first)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('lr = "log 1..0.1"\n', "line 1: lr: .* first number must be below"),
        (
            '# x\nlr = "log 1e-4..1"\nbatch = "many"\nmomentum = "0.9..x"\n',
            "line 4: momentum: .* not numbers",
        ),
        (
            'lr = "log 1e-4..1"\n\narchitecture = "layer"\n',
            "line 3: architecture: unknown architecture 'layer'",
        ),
        ('\narchitecture = "layers:mots=3"\n', "line 2: architecture: .* has no option 'mots'"),
        ("lr = log 1e-4..1\n", "is not TOML: .*line 1"),
        ("lr = 2000-01-01\n", "line 1: lr: .* is no range"),
        ("", "at least one hyper-parameter"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, text, why):
    pytest.importorskip("tomllib")
    path = tmp_path / "space.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=why):
        read_space_file(path)


def test_wrong_json_and_a_missing_file_are_refused(tmp_path):
    (tmp_path / "s.json").write_text('{"lr": }')
    with pytest.raises(ValueError, match="is not JSON"):
        read_space_file(tmp_path / "s.json")
    (tmp_path / "t.json").write_text("[1]")
    with pytest.raises(ValueError, match="table of names and ranges"):
        read_space_file(tmp_path / "t.json")
    with pytest.raises(ValueError, match="cannot read"):
        read_space_file(tmp_path / "none.toml")


def test_options_give_ranges_too():
    space = read_space(read_space_options(["lr=log 1e-4..1", "codec = none,fp16"]))
    assert space["codec"] == Choice(("none", "fp16"))
    with pytest.raises(ValueError, match="should be NAME=RANGE"):
        read_space_options(["lr"])
    with pytest.raises(ValueError, match="under the name 'architecture'"):
        Space({"model": Layers()})
    with pytest.raises(ValueError, match="under the name 'architecture'"):
        Space({"architecture": [1, 2]})


def test_a_mutation_changes_one_hyper_parameter():
    space = Space({"lr": (0.0, 1.0), "batch": [16, 32, 64], "architecture": Layers()})
    values = space.sample(Random(0))
    for k in range(30):
        child = space.mutate(values, Random(k))
        assert sum(child[name] != values[name] for name in space) == 1


def test_exploring_leaves_fixed_names_and_architectures_alone():
    space = Space({"lr": (0.1, 1.0), "codec": ["none", "fp16"], "architecture": Cells(mutations=3)})
    values = {**space.sample(Random(0)), "lr": 0.5}
    found = [space.explore(values, Random(k), ["codec"], 0.2, 0.0) for k in range(20)]
    assert {v["lr"] for v in found} == {0.6, 0.4}
    assert all(v["codec"] == values["codec"] and v["architecture"] == values["architecture"] for v in found)
    drawn = space.explore(values, Random(0), ["codec"], 0.2, 1.0)
    assert drawn["lr"] not in (0.5, 0.6, 0.4)
