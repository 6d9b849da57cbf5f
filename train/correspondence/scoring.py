"""Scores of predicted functional maps on the test pairs of a set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from diffnet.data import MeshPairs, PairErrors, PairSample, pair_errors
from diffnet.train.correspondence.maps import point_map_of
from diffnet.train.options import TrainOptions


@dataclass(frozen=True)
class ScoredPairs:
    """The test pairs of a set with their predicted maps.

    maps: for each test pair, a vertex of its second mesh for each vertex of its first mesh, (V,) int64
    errors: of each test pair; empty if the true correspondences are not known
    """

    data: MeshPairs
    maps: Sequence[NDArray[np.int64]]
    errors: Sequence[PairErrors]


def score_pairs(
    data: MeshPairs,
    maps: Sequence[Tensor],
    samples: Sequence[PairSample],
    options: TrainOptions,
    device: torch.device,
    *,
    cache_dir: Path,
    jobs: int | None,
    console: Console,
) -> ScoredPairs:
    """Turn functional maps into maps of points, and measure these if the true correspondences are known.

    maps: (1, K, K) for each test pair
    samples: the test pairs
    options: `method` and `zoomout` of `point_map_of`
    cache_dir, jobs: see `geodesic_errors_of_all`
    """
    point_maps = []
    for c, pair in zip(maps, samples, strict=True):
        a, b = pair.a.operators.to(device), pair.b.operators.to(device)
        point_maps.append(point_map_of(c, a, b, options.method, options.zoomout).cpu().numpy())
    if not data.is_supervised:
        return ScoredPairs(data, point_maps, ())
    shapes = [(data.test[i], data.test[j]) for i, j in data.test_pairs]
    with console.status("geodesic distances"):
        errors = pair_errors(data, shapes, point_maps, cache_dir=cache_dir, jobs=jobs)
    return ScoredPairs(data, point_maps, errors)
