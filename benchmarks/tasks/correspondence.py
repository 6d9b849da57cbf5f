"""Geodesic errors of `diffnet train correspondence` on 50 pairs of unseen figures, beside those of nearest vertices.

    python -m diffnet.benchmarks.tasks.correspondence --out FOLDER [--seeds 0 1 2] [--only ROW…] [options]

It writes the generated pairs as files, and trains on them with `diffnet train`. FOLDER gets
correspondence.csv, with one line for each row and seed, and all runs. The column zoomout_x100 has the errors after
ZoomOut. Other options are those of `diffnet train correspondence`, for all rows. --figures FOLDER keeps the figures and
the cache for several measurements, and --bodies takes people with a front or animals instead.

supervised: from curvature, heat kernel signatures and the true correspondences
unsupervised: from wave kernel signatures, without correspondences
unsupervised-xyz: from positions, which training rotates at random, without correspondences. All figures, also those of
    the test, are rotated at random.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.spatial.transform import Rotation

from diffnet.benchmarks.harness.results import write_csv
from diffnet.benchmarks.tasks.programs import argument_parser, results, run_diffnet
from diffnet.data import MeshPairs, PairShape, figure_pairs, save_pairs
from diffnet.data.pairs.folders import TEMPLATE

ROWS: dict[str, tuple[str, ...]] = {
    "supervised": ("--method", "supervised"),
    "unsupervised": ("--method", "unsupervised"),
    "unsupervised-xyz": ("--method", "unsupervised", "--features", "xyz"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argument_parser(__doc__)
    parser.add_argument("--only", choices=tuple(ROWS), nargs="+", default=list(ROWS), help="of the rows")
    parser.add_argument("--train", type=int, default=80, help="training figures")
    parser.add_argument("--test", type=int, default=20, help="test figures, of which 50 pairs are matched")
    parser.add_argument("--figures", type=Path, help="folder of the figures and the cache; by default, in --out")
    parser.add_argument("--bodies", default="figures", help="figures, people or animals, see `data.figure_pairs`")
    given, options = parser.parse_known_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    kept = given.figures or given.out / "figures"
    kept = kept if given.bodies == "figures" else kept / given.bodies
    upright, turned = write_figures(kept, given.train, given.test, given.bodies)
    rows = []
    for row in given.only:
        data = turned if row == "unsupervised-xyz" else upright
        for seed in given.seeds:
            started = time.perf_counter()
            run = given.out / f"{row}-{seed}"
            same = ["--data", data, "--cache", kept / "cache"]
            run_diffnet("train", "correspondence", *same, "--out", run, "--seed", seed, *ROWS[row], *options)
            seconds = round(time.perf_counter() - started, 2)
            refined = given.out / f"{row}-{seed}-zoomout"
            run_diffnet("evaluate", *same, "--checkpoint", run / "last.pt", "--out", refined, "--zoomout")
            found, better = results(run), results(refined)
            own = {**scores(found), "zoomout_x100": better["mean_error_x100"], "command_seconds": seconds}
            rows.append({"row": row, "seed": seed, **own})
    write_csv(given.out / "correspondence.csv", rows)
    for row in given.only:
        errors = [line["mean_error_x100"] for line in rows if line["row"] == row]
        refined, floor = (
            np.mean([line[name] for line in rows if line["row"] == row]) for name in ("zoomout_x100", "floor_x100")
        )
        print(
            f"{row}: mean error ×100 {np.mean(errors):.3f}, from {min(errors):.3f} to {max(errors):.3f}; after ZoomOut "
            f"{refined:.3f}; nearest vertices {floor:.3f}"
        )
    print(f"wrote {given.out / 'correspondence.csv'}")


def scores(found: dict[str, Any]) -> dict[str, Any]:
    """The columns of a run, from the content of its results.json."""
    same = ("mean_error_x100", "flipped_pairs", "auc", "test_pairs", "train_pairs")
    return {
        **{name: found[name] for name in (*same, "preprocessing_seconds", "training_seconds")},
        "floor_x100": 100 * found["floor"],
        "unflipped_x100": 100 * found["unflipped_mean_error"],
        "epochs": found["options"]["epochs"],
    }


def write_figures(folder: Path, train: int, test: int, bodies: str = "figures") -> tuple[Path, Path]:
    """Write the generated pairs as files, upright and rotated at random, on all cores. Returns the two folders."""
    folders = folder / "upright", folder / "turned"
    data = None
    for target in folders:
        if (target / TEMPLATE).is_file() and (target / "pairs.txt").is_file():
            continue
        data = data or figure_pairs(train, test, bodies=bodies, cache_dir=folder / "cache")
        save_pairs(data if target.name == "upright" else rotated(data), target)
    return folders


def rotated(data: MeshPairs) -> MeshPairs:
    """The set with all meshes rotated at random. Template points in faces stay what they are."""

    def turned(shapes: Sequence[PairShape], part: int) -> list[PairShape]:
        rotations = Rotation.random(len(shapes), random_state=part)
        return [
            replace(shape, mesh=replace(shape.mesh, verts=rotation.apply(shape.mesh.verts)))
            for shape, rotation in zip(shapes, rotations, strict=True)
        ]

    return replace(data, train=turned(data.train, 0), test=turned(data.test, 1))


if __name__ == "__main__":
    main()
