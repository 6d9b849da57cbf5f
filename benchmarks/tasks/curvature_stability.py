"""How much features of curvature depend on the triangulation: values on several meshes of one surface.

    python -m diffnet.benchmarks.tasks.curvature_stability --out FOLDER --meshes FILE…

Each surface is decimated to 15,000, 3,000 and 750 vertices. The first mesh also gets noise: 25 % of an edge in each
coordinate. Values at the vertices of the other meshes are compared with those at the nearest vertices of the first, at
128 eigenpairs. FOLDER gets curvature_stability.csv, with one row for each surface, mesh, feature and channel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from diffnet.benchmarks.harness.results import write_csv
from diffnet.benchmarks.tasks.programs import argument_parser
from diffnet.data import Preprocessing, input_features, prepare
from diffnet.geometry import Mesh, decimate, load_mesh
from diffnet.train.inference.mesh_changes import noisy

FEATURES = ("curvature", "diffused-curvature")
COUNTS = (15000, 3000, 750)
NOISE = 0.25


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argument_parser(__doc__)
    parser.add_argument("--meshes", type=Path, nargs="+", required=True)
    options = parser.parse_args(arguments)
    rows = [row for path in options.meshes for row in compare(load_mesh(path))]
    options.out.mkdir(parents=True, exist_ok=True)
    write_csv(options.out / "curvature_stability.csv", rows)
    for feature in FEATURES:
        for mesh in (*map(str, COUNTS[1:]), "noise"):
            same = [row for row in rows if (row["feature"], row["mesh"]) == (feature, mesh)]
            r2, correlation = (np.mean([row[name] for row in same]) for name in ("r2", "correlation"))
            print(f"{feature} {mesh}: R² {r2:.3f}, correlation {correlation:.3f}, over all surfaces and channels")


def compare(surface: Mesh, counts: Sequence[int] = COUNTS) -> Iterator[dict[str, Any]]:
    """The rows of a surface. counts: vertices of the meshes, the first is what the others are compared with"""
    first, *others = (decimate(surface, 2 * count) for count in counts)
    meshes = {str(count): mesh for count, mesh in zip(counts[1:], others, strict=True)}
    meshes["noise"] = noisy(first, np.random.default_rng(0), NOISE)[0]
    expected = values(first)
    for name, mesh in meshes.items():
        near = np.arange(len(mesh.verts)) if name == "noise" else cKDTree(first.verts).query(mesh.verts)[1]
        for feature, columns in values(mesh).items():
            for channel, (column, true) in enumerate(zip(columns.T, expected[feature][near].T, strict=True)):
                yield {
                    **{"surface": Path(surface.name).stem, "mesh": name, "feature": feature, "channel": channel},
                    "r2": round(float(1 - ((column - true) ** 2).sum() / ((true - true.mean()) ** 2).sum()), 4),
                    "correlation": round(float(np.corrcoef(column, true)[0, 1]), 4),
                }


def values(mesh: Mesh) -> dict[str, NDArray[np.float64]]:
    """The values (V, C) of each feature."""
    prepared = prepare(mesh, Preprocessing(k=128))
    return {feature: input_features(*prepared, feature).double().numpy() for feature in FEATURES}


if __name__ == "__main__":
    main()
