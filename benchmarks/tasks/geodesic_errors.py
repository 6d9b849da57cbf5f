"""Time and accuracy of geodesic errors: all pairs of the test meshes of a set.

    python -m diffnet.benchmarks.tasks.geodesic_errors --out FOLDER [--data FOLDER] [--seeds 0 1 2] [--jobs N]

Predicted are the true vertices with noise: 4 % of √area in each coordinate, and one vertex in twenty at random. Times
are those of an evaluation with an empty cache and with a filled one. The exact distances of 1,000 samples come from the
algorithm of Mitchell, Mount and Papadimitriou (1987), `pip install pygeodesic`. FOLDER gets geodesic_errors.csv, with
one row for each seed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from diffnet.benchmarks.harness.results import write_csv
from diffnet.benchmarks.tasks.programs import argument_parser
from diffnet.data import BODY_MAPS, MeshPairs, available_cores, load_pairs
from diffnet.geometry import Mesh, Prediction, geodesic_errors_of_all, mean_error
from diffnet.geometry.processes import WorkerPool

NOISE, RANDOM, SAMPLES = 0.04, 0.05, 1000


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argument_parser(__doc__)
    parser.add_argument("--data", type=Path, default=BODY_MAPS, help="a set for `load_pairs`; by default, bodies")
    parser.add_argument("--jobs", type=int, default=available_cores())
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    data = load_pairs(options.data, needs_train=False)
    rows = [measure(data, seed, options.jobs) for seed in options.seeds]
    write_csv(options.out / "geodesic_errors.csv", rows)


def measure(data: MeshPairs, seed: int, jobs: int) -> dict[str, float]:
    """One row of the table."""
    predictions = predict(data, np.random.default_rng(seed))
    with TemporaryDirectory() as cache:
        times = []
        for _ in range(2):
            start = time.perf_counter()
            errors = geodesic_errors_of_all(predictions, cache_dir=cache, jobs=jobs)
            times.append(time.perf_counter() - start)
    every = np.concatenate(errors)
    sample = np.random.default_rng(seed).choice(len(every), SAMPLES, replace=False)
    exact = exact_errors(predictions, sample, jobs)
    return {
        "seed": seed,
        "jobs": jobs,
        "pairs": len(predictions),
        "vertices": len(every) // len(predictions),
        "seconds": round(times[0], 2),
        "seconds_from_cache": round(times[1], 2),
        "mean_error_x100": round(100 * mean_error(every), 4),
        "sampled_mean_error_x100": round(100 * mean_error(every[sample]), 4),
        "exact_mean_error_x100": round(100 * mean_error(exact), 4),
    }


def predict(data: MeshPairs, rng: np.random.Generator) -> list[Prediction]:
    """Noisy predictions of all pairs of test meshes."""
    predictions = []
    for first, second in combinations(data.test, 2):
        truth = data.truth(first, second)
        assert truth is not None
        mesh, labels = second.mesh, truth.points
        noisy = mesh.verts[labels] + NOISE * np.sqrt(area(mesh)) * rng.normal(size=(len(labels), 3))
        predicted = cKDTree(mesh.verts).query(noisy)[1]
        anywhere = rng.random(len(labels)) < RANDOM
        predicted[anywhere] = rng.integers(0, len(mesh.verts), anywhere.sum())
        predictions.append(Prediction(mesh, predicted, labels))
    return predictions


def area(mesh: Mesh) -> float:
    """The area of all triangles."""
    a, b, c = mesh.verts[mesh.faces].transpose(1, 0, 2)
    return float(np.linalg.norm(np.cross(b - a, c - a), axis=1).sum() / 2)


def exact_errors(predictions: Sequence[Prediction], chosen: NDArray[np.int64], jobs: int) -> NDArray[np.float64]:
    """The exact errors of some vertices, by their numbers in all predictions together."""
    ends = np.cumsum([len(prediction.predicted) for prediction in predictions])
    which = np.searchsorted(ends, chosen, side="right")
    with WorkerPool(jobs, 1) as pool:
        futures = []
        for i, vertex in zip(which, chosen, strict=True):
            mesh, predicted, labels = predictions[i]
            place = vertex - (ends[i] - len(predicted))
            futures.append(pool.submit(exact_error, mesh, int(predicted[place]), int(labels[place])))
        return np.array([future.result() for future in futures])


def exact_error(mesh: Mesh, start: int, end: int) -> float:
    """The exact distance of two vertices / √area."""
    from pygeodesic import geodesic  # only this measurement needs it

    if start == end:
        return 0.0
    distance = geodesic.PyGeodesicAlgorithmExact(mesh.verts, mesh.faces).geodesicDistance(start, end)[0]
    return float(distance / np.sqrt(area(mesh)))


if __name__ == "__main__":
    main()
