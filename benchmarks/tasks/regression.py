"""R² of `diffnet train regression` on unseen figures: mean curvature at the vertices, and volume of the mesh.

    python -m diffnet.benchmarks.tasks.regression --out FOLDER [--seeds 0 1 2] [--epochs N] [--meshes N] [options]

It writes generated closed figures as files, and trains on them with `diffnet train`. FOLDER gets
regression.csv, with one row for each target and seed, and all runs. Other options are those of
`diffnet train regression`, for both targets. --figures FOLDER keeps the figures and the cache for several measurements.

curvature: mean curvature of the implicit surface times the distance of the farthest vertex from the mean of the
    vertices, at the vertices. Targets are clipped at the 1st and the 99th percentile of the training set. The features
    are xyz+normals.
volume: that of the mesh at normalized positions. The features are xyz+normals+log-hks.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diffnet.benchmarks.harness.results import write_csv
from diffnet.benchmarks.tasks.programs import argument_parser, results, run_diffnet
from diffnet.data import LabeledMesh, LabeledMeshes, available_cores, curved_figure
from diffnet.data.synthetic.dataset import FINE
from diffnet.geometry import Mesh, normalize_positions
from diffnet.geometry.processes import WorkerPool
from diffnet.viz import write_ply

FIRST_TEST = 1_000_000  # seed of the first test figure
TESTS = 64
TARGETS = ("curvature", "volume")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argument_parser(__doc__)
    parser.add_argument("--epochs", type=int, help="of both targets; by default, those of the command")
    parser.add_argument("--meshes", type=int, default=600, help="training figures")
    parser.add_argument("--tests", type=int, default=TESTS, help="test figures")
    parser.add_argument("--figures", type=Path, help="folder of the figures and the cache; by default, in --out")
    parser.add_argument(
        "--vertices", type=int, nargs=2, default=list(FINE), help="smallest and largest number of a figure"
    )
    parser.add_argument("--only", choices=TARGETS, nargs="+", default=list(TARGETS), help="of the targets")
    given, options = parser.parse_known_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    kept = given.figures or given.out / "figures"
    figures = write_figures(kept / "set", given.meshes, given.tests, tuple(given.vertices))
    rows = []
    for target in given.only:
        for seed in given.seeds:
            started = time.perf_counter()
            run = given.out / f"{target}-{seed}"
            epochs = [] if given.epochs is None else ["--epochs", str(given.epochs)]
            train(target, figures, run, kept / "cache", seed, [*epochs, *options])
            found = results(run)
            names = ("train_meshes", "test_meshes", "preprocessing_seconds", "training_seconds")
            rows.append(
                {
                    "target": target,
                    "seed": seed,
                    **{name: found["columns"][0][name] for name in ("r2", "mae", "rmse")},
                    **{name: found[name] for name in names},
                    "epochs": found["options"]["epochs"],
                    "command_seconds": round(time.perf_counter() - started, 2),
                }
            )
    write_csv(given.out / "regression.csv", rows)
    for target in given.only:
        scores = [float(row["r2"]) for row in rows if row["target"] == target]
        print(f"{target}: R² {np.mean(scores):.4f}, from {min(scores):.4f} to {max(scores):.4f}")
    print(f"wrote {given.out / 'regression.csv'}")


def train(target: str, figures: Path, run: Path, cache: Path, seed: int, options: Sequence[str]) -> None:
    """Run `diffnet train regression`. Raises CalledProcessError if it fails."""
    if target == "curvature":
        own = ["--data", figures, "--targets", "file:curvature", "--features", "xyz+normals"]
    else:
        own = ["--data", figures / "targets.csv", "--features", "xyz+normals+log-hks"]
    common = ["--out", run, "--cache", cache, "--seed", seed, *options]
    run_diffnet("train", "regression", *own, *common)


def write_figures(folder: Path, train: int, test: int, vertices: tuple[int, int]) -> Path:
    """Write figures as a user would have them, on all cores. Returns the folder.

    `train/` and `test/` have NAME.ply and NAME.curvature.npy for each figure. `targets.csv` has the volumes and splits.
    """
    made = folder / "targets.csv"
    count = {"train": train, "test": test}
    if made.is_file() and made.read_text().count("\n") == 1 + train + test:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    for name in count:
        (folder / name).mkdir(parents=True)
    started = time.perf_counter()
    seeds = {"train": range(train), "test": range(FIRST_TEST, FIRST_TEST + test)}
    with WorkerPool(available_cores(), 1) as pool:
        calls = [
            (part, pool.submit(write_figure, folder / part, seed, vertices)) for part in count for seed in seeds[part]
        ]
        found = [(part, *call.result()) for part, call in calls]
    bounds = clip_bounds(values for part, _, _, values in found if part == "train")
    lines = ["file,volume,split"]
    for part, name, volume, values in found:
        np.save(folder / part / f"{name}.curvature.npy", values.clip(*bounds))
        lines.append(f"{part}/{name}.ply,{volume!r},{part}")
    made.write_text("\n".join(lines) + "\n")
    print(f"{train + test} figures in {time.perf_counter() - started:.0f} s", flush=True)
    return folder


def write_figure(folder: Path, seed: int, vertices: tuple[int, int]) -> tuple[str, float, NDArray[np.float64]]:
    """Write one figure. Returns its name, its volume at normalized positions, and its targets (V,)."""
    item = curved_figure(seed, vertices=vertices)
    write_ply(folder / f"{item.name}.ply", item.mesh)
    return item.name, volume_of(item.mesh), item.labels[:, 0]


def target_set(target: str, meshes: int, vertices: tuple[int, int] = FINE) -> LabeledMeshes:
    """The first training figures with one of the TARGETS. There are no test figures.

    meshes: number of figures
    vertices: smallest and largest number of vertices of a figure
    """
    items = _training_figures(meshes, vertices)
    if target == "curvature":
        bounds = clip_bounds(item.labels for item in items)
        clipped = [replace(item, labels=item.labels.clip(*bounds)) for item in items]
        return LabeledMeshes(clipped, [], [target], "vertices")
    whole = [replace(item, labels=np.array([[volume_of(item.mesh)]])) for item in items]
    return LabeledMeshes(whole, [], [target], "meshes")


@lru_cache(maxsize=1)  # both targets have the same figures
def _training_figures(meshes: int, vertices: tuple[int, int]) -> list[LabeledMesh]:
    with WorkerPool(available_cores(), 1) as pool:
        calls = [pool.submit(partial(curved_figure, vertices=vertices), seed) for seed in range(meshes)]
        return [call.result() for call in calls]


def clip_bounds(targets: Iterable[NDArray[np.float64]]) -> NDArray[np.float64]:
    """The 1st and the 99th percentile (2,) of the curvature of all training figures."""
    return np.asarray(np.percentile(np.concatenate(list(targets)), [1, 99]), np.float64)


def volume_of(mesh: Mesh) -> float:
    """The volume that a closed mesh encloses at normalized positions."""
    a, b, c = normalize_positions(mesh.verts)[mesh.faces].transpose(1, 0, 2)
    return float((a * np.cross(b, c)).sum() / 6)


if __name__ == "__main__":
    main()
