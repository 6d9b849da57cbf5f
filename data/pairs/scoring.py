"""Geodesic errors of predicted correspondences, and of their left-right flips."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diffnet.data.pairs.shapes import MeshPairs, PairShape, Truth
from diffnet.geometry import Mesh, Prediction, geodesic_errors_of_all, mean_error

Floats = NDArray[np.float64]

FLIP_SAMPLE = 300  # correspondences that decide whether a map exchanges left and right


@dataclass(frozen=True)
class PairErrors:
    """The errors of one predicted map, see `geodesic_errors`.

    errors: (N,) float64, of all true correspondences of the pair
    flipped: whether the map is closer to the mirrored truth, where left and right are exchanged
    unflipped: (N,) the errors to the closer of the two truths; `errors` if the map is not flipped
    floor: the mean error of the nearest vertices, below which no map to vertices can come; 0 if the truth is vertices
    """

    errors: Floats
    flipped: bool
    unflipped: Floats
    floor: float


def pair_errors(
    data: MeshPairs,
    pairs: Sequence[tuple[PairShape, PairShape]],
    predicted: Sequence[ArrayLike],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    jobs: int | None = None,
) -> list[PairErrors]:
    """Measure predicted maps of pairs of meshes.

    pairs: the meshes (first, second) of each pair
    predicted: (V,) integers for each pair: for each vertex of the first mesh, a vertex of the second
    cache_dir, jobs: see `geodesic_errors_of_all`

    Raises ValueError for a pair without truth, and for a map with another number of vertices than the first mesh.
    """
    maps = [_map(first, own) for (first, _), own in zip(pairs, predicted, strict=True)]
    truths = [_known(data.truth(first, second), first, second) for first, second in pairs]
    mirrored = [data.mirrored_truth(first, second) for first, second in pairs]

    def measure(questions: Sequence[tuple[Mesh, NDArray[np.int64], Any]]) -> list[Floats]:
        return geodesic_errors_of_all([Prediction(*question) for question in questions], cache_dir=cache_dir, jobs=jobs)

    errors = measure(
        [
            (pair[1].mesh, own[truth.vertices], truth.points)
            for pair, own, truth in zip(pairs, maps, truths, strict=True)
        ]
    )
    floors = measure(
        [
            (second.mesh, truth.nearest_vertices(second.mesh), truth.points)
            for (_, second), truth in zip(pairs, truths, strict=True)
        ]
    )
    # A few distances decide. They are far, which takes longest, unless the map is flipped.
    symmetric = [i for i, truth in enumerate(mirrored) if truth is not None]
    flipped = []
    samples = measure([_sampled(pairs[i][1].mesh, maps[i], mirrored[i]) for i in symmetric])
    for i, sample in zip(symmetric, samples, strict=True):
        own = errors[i][_sample(len(truths[i].vertices))]
        if mean_error(sample) < mean_error(own):
            flipped.append(i)
    others = dict(zip(flipped, measure([_whole(pairs[i][1].mesh, maps[i], mirrored[i]) for i in flipped]), strict=True))
    return [PairErrors(own, i in others, others.get(i, own), mean_error(floors[i])) for i, own in enumerate(errors)]


def _map(first: PairShape, predicted: ArrayLike) -> NDArray[np.int64]:
    given: Any = predicted
    array = np.asarray(given.detach().cpu() if hasattr(given, "detach") else given)
    if array.shape != (len(first.mesh.verts),) or array.dtype.kind not in "iu":
        raise ValueError(
            f"{first.name}: a predicted map should be integers of shape ({len(first.mesh.verts)},), one for each "
            f"vertex, got {array.dtype} of shape {array.shape}"
        )
    return array.astype(np.int64)


def _known(truth: Truth | None, first: PairShape, second: PairShape) -> Truth:
    if truth is None:
        raise ValueError(f"the true correspondences of {first.name} and {second.name} are not known")
    return truth


def _sample(count: int) -> NDArray[np.int64]:
    return np.unique(np.linspace(0, count - 1, min(count, FLIP_SAMPLE)).astype(np.int64))


def _whole(mesh: Mesh, own: NDArray[np.int64], truth: Truth | None) -> tuple[Mesh, NDArray[np.int64], Any]:
    assert truth is not None
    return mesh, own[truth.vertices], truth.points


def _sampled(mesh: Mesh, own: NDArray[np.int64], truth: Truth | None) -> tuple[Mesh, NDArray[np.int64], Any]:
    assert truth is not None
    some = _sample(len(truth.vertices))
    return mesh, own[truth.vertices[some]], truth.points[some]
