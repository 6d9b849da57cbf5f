"""Division of batches over ranks and passes."""

from __future__ import annotations

import csv

import numpy as np
import pytest
from rooms import ROOT

from diffnet.data import MeshBatches
from diffnet.train.batches import largest_part, own_parts
from diffnet.train.options import TrainOptions
from diffnet.train.place import Place

RESULTS = ROOT / "benchmarks" / "results" / "loops-h200" / "steps" / "train-step.csv"


def epoch_of(rng: np.random.Generator, count: int, limit: int) -> tuple[list[int], list[list[int]]]:
    lengths = [int(n) for n in rng.integers(2_000, 60_000, count)]
    return lengths, list(MeshBatches(lengths, meshes=limit, shuffle=True, seed=int(rng.integers(1000))))


@pytest.mark.parametrize(("world", "passes"), [(1, 3), (2, 1), (3, 2), (4, 1)])
def test_each_mesh_is_in_one_part(world: int, passes: int) -> None:
    lengths, batches = epoch_of(np.random.default_rng(0), 21, 5)  # the last batch has one mesh
    order = [i for batch in batches for i in batch]
    every = [own_parts(batches, lengths, Place(rank, world), passes) for rank in range(world)]
    _, most = largest_part(lengths, TrainOptions(batch_meshes=5), world * passes)
    first = 0
    for n, batch in enumerate(batches):
        parts = [part for own in every for part in own[n]]
        assert sorted(i for part in parts for i in part) == list(range(first, first + len(batch)))
        assert all(parts)
        assert all(len(own[n]) <= passes for own in every)
        assert max(sum(lengths[order[i]] for i in part) for part in parts) <= most
        first += len(batch)


@pytest.mark.parametrize("world", [2, 8])
def test_ranks_wait_little_for_another(world: int) -> None:
    """8 meshes a rank, a new order in each epoch. A step of a rank takes what was measured for as many vertices."""
    with RESULTS.open(newline="") as file:
        rows = [r for r in csv.DictReader(file) if (r["dtype"], r["peer"]) == ("bf16", "diffnet-command")]
    points = sorted((int(row["vertices"]), float(row["median_ms"])) for row in rows)
    (v0, t0), (v1, t1) = points[-2:]
    vertices, times = zip(*points, (1_000_000, t1 + (t1 - t0) * (1_000_000 - v1) / (v1 - v0)), strict=True)
    rng, lost = np.random.default_rng(0), []
    lengths = [int(n) for n in rng.integers(2_000, 60_000, 8 * world * 20)]
    batches = MeshBatches(lengths, meshes=8 * world, shuffle=True)
    for _ in range(10):
        every = list(batches)
        order = [i for batch in every for i in batch]
        shares = [own_parts(every, lengths, Place(rank, world), 1) for rank in range(world)]
        for step in zip(*shares, strict=True):
            loads = [sum(lengths[order[i]] for i in part) for (part,) in step]
            taken = np.interp(loads, vertices, times)
            lost.append(1 - taken.mean() / taken.max())
    assert np.mean(lost) < 0.01  # 0.5 % with 2 ranks and 0.7 % with 8
