"""Architectures as genotypes and as modules: mutations change one thing, merging follows the matrix."""

from __future__ import annotations

import json
from random import Random

import pytest
import torch

from shoal.search.architecture_models import Shapes, build_architecture, image_shape
from shoal.search.architectures import IDENTITY, NONE, PRIMITIVES, Cells, Layers, chain

DIGITS = Shapes((64,), 10)


def entries(genotype) -> list[int]:
    return [entry for level in genotype["levels"] for motif in level for row in motif for entry in row]


def test_without_mutations_cells_are_chains_of_identities():
    genotype = Cells(mutations=0, motifs=2, motif_nodes=3, cell_nodes=3).sample(Random(0))
    by_identity = [[NONE, IDENTITY, NONE], [NONE, NONE, IDENTITY], [NONE, NONE, NONE]]
    assert genotype["levels"][0] == [by_identity, by_identity]
    assert genotype["levels"][1] == [[[NONE, 0, NONE], [NONE, NONE, 0], [NONE, NONE, NONE]]]


def test_a_mutation_sets_one_edge_above_the_diagonal():
    space, rng = Cells(mutations=50), Random(1)
    genotype = space.sample(rng)
    for _ in range(200):
        child = space.mutate(genotype, rng)
        differ = [k for k, (a, b) in enumerate(zip(entries(genotype), entries(child), strict=True)) if a != b]
        assert len(differ) <= 1  # the same operation may be drawn again
        for level, below in zip(child["levels"], (len(PRIMITIVES), space.motifs), strict=True):
            for motif in level:
                for i, row in enumerate(motif):
                    assert all(NONE <= entry < below for entry in row)
                    assert all(entry == NONE for entry in row[: i + 1])
        genotype = child
    assert json.loads(json.dumps(genotype)) == genotype


def test_every_edge_can_be_reached_by_a_mutation():
    space = Cells(mutations=0, motifs=1, motif_nodes=3, cell_nodes=3)
    start, seen = space.sample(Random(0)), set()
    for k in range(2000):
        child = space.mutate(start, Random(k))
        seen |= {
            (n, b) for n, (a, b) in enumerate(zip(entries(start), entries(child), strict=True)) if a != b
        }
    # 3 pairs in the motif, 7 operations each but the present one; 3 pairs in the cell, 2 operations
    assert len(seen) == 3 * 6 + 3 * 1


def test_a_chain_of_identities_computes_what_its_stem_and_head_do():
    genotype = Cells(mutations=0, channels=4, cells=1).sample(Random(0))
    model, x = build_architecture(genotype, DIGITS), torch.randn(3, 64)
    wanted = model.head(torch.relu(model.stem(x.view(3, 1, 8, 8))).mean(dim=(-2, -1)))
    assert torch.equal(model(x), wanted)


def test_a_node_merges_its_edges_and_one_that_is_cut_off_gives_zeros():
    genotype = Cells(mutations=0, motifs=1, motif_nodes=3, cell_nodes=2, channels=2, cells=1).sample(
        Random(0)
    )
    (motif,) = genotype["levels"][0]
    motif[0][2] = IDENTITY  # the last node has two edges now: through the middle, and straight
    model, x = build_architecture(genotype, DIGITS), torch.randn(2, 64)
    inner = model.cells[0].edges["0-1"]
    stem = model.stem(x.view(2, 1, 8, 8))
    wanted = inner.merges["2"](torch.cat([stem, stem], dim=1))
    assert torch.allclose(model.cells[0](stem), wanted)
    motif[0][2] = motif[1][2] = NONE
    cut = build_architecture(genotype, DIGITS)
    assert torch.equal(cut.cells[0](stem), torch.zeros_like(stem))
    cut(x).sum().backward()
    assert all(p.grad is not None for p in cut.parameters())


@pytest.mark.parametrize("space", [Layers(most=4), Cells(motifs=2, motif_nodes=3, cell_nodes=3, channels=4)])
def test_whatever_is_drawn_and_mutated_trains(space):
    rng = Random(5)
    genotype = space.sample(rng)
    for _ in range(15):
        genotype = space.mutate(json.loads(json.dumps(genotype)), rng)
        model = build_architecture(genotype, DIGITS)
        out = model(torch.randn(4, 64))
        out.sum().backward()
        assert out.shape == (4, 10)
        assert all(p.grad is not None for p in model.parameters())


def test_layers_stay_within_their_limits_and_change_in_one_place():
    space, rng = Layers(most=3, widest=64), Random(2)
    genotype = space.sample(rng)
    for _ in range(200):
        child = space.mutate(genotype, rng)
        assert 1 <= len(child["layers"]) <= 3
        assert all(layer["width"] <= 64 for layer in child["layers"])
        if len(child["layers"]) == len(genotype["layers"]):
            pairs = zip(genotype["layers"], child["layers"], strict=True)
            assert sum(old[key] != new[key] for old, new in pairs for key in old) == 1
        genotype = child


def test_a_vector_is_an_image_if_its_length_is_a_square():
    assert image_shape((784,)) == (1, 28, 28)
    assert image_shape((3, 32, 16)) == (3, 32, 16)
    assert image_shape((5, 6)) == (1, 5, 6)
    with pytest.raises(ValueError, match="cells need images, and an example of this task is 50"):
        image_shape((50,))


def test_a_chain_has_one_edge_less_than_nodes():
    assert sum(entry != NONE for row in chain(5, 2) for entry in row) == 4
