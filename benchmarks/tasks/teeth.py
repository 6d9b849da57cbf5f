"""The scores of the challenge 3DTeethSeg'22 (Ben-Hamadou et al. 2023) for predicted jaws.

    python -m diffnet.benchmarks.tasks.teeth PREDICTIONS DATA --out FOLDER

DATA is a folder of Teeth3DS: jaws NAME.obj, in subfolders of any depth, with NAME.json. PREDICTIONS has a file with the
path of each jaw to score and the extension .json, as `diffnet predict … --format json` writes it. FOLDER gets
teeth.csv, with a row for each jaw. The scores of a set are the means over its jaws.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

from diffnet.geometry import load_mesh
from diffnet.geometry.files import csv_text, make_folder, write_atomically

PENALTY = 5.0  # of a tooth without a partner, in sizes of the tooth
NAMES = "tla", "tsa", "tir"
NEAR = 0.5  # of an identified tooth, in sizes of the tooth


class TeethScores(NamedTuple):
    """Localization, segmentation and identification, from 0 to 1. 1 is perfect."""

    tla: float
    tsa: float
    tir: float


def teeth_scores(points: Any, truth: Any, predicted: Any, true_teeth: Any = None, teeth: Any = None) -> TeethScores:
    """The scores of one jaw, as the program of the challenge computes them.

    points: (V, 3)
    truth, predicted: (V,) FDI numbers of the teeth; gum is 0, and so is what is unlabeled, −1
    true_teeth, teeth: (V,) numbers of the single teeth of both, 0 for gum; by default the FDI numbers. A predicted
        tooth with several FDI numbers counts as gum.

    The size of a tooth is a vector, the root of the sum of the squared distances of its points from their center in
    each direction. True and predicted teeth are partners so that the sum of the distances of their centers is smallest.

    tla: exp(−d), where d is the mean distance of the centers of partners in sizes of the true tooth. A tooth without a
        partner counts as PENALTY times the length of its size.
    tsa: the share of the points that are rightly a tooth or gum
    tir: the share of partners at a distance below NEAR with the same number
    """
    points, truth, predicted = np.asarray(points, np.float64), np.asarray(truth), np.asarray(predicted)
    true_teeth, teeth = (
        np.maximum(each, 0)
        for each in (truth if true_teeth is None else true_teeth, predicted if teeth is None else teeth)
    )
    for tooth in np.unique(teeth[teeth != 0]):
        if len(np.unique(predicted[teeth == tooth])) > 1:
            teeth[teeth == tooth] = 0
    labels, centers, sizes = _teeth_of(points, truth, true_teeth)
    predicted_labels, predicted_centers, _ = _teeth_of(points, predicted, teeth)
    rows, columns = linear_sum_assignment(cdist(centers, predicted_centers))
    distances = np.linalg.norm((centers[rows] - predicted_centers[columns]) / sizes[rows], axis=1)
    alone = np.setdiff1d(np.arange(len(labels)), rows)
    total = distances.sum() + PENALTY * np.linalg.norm(sizes[alone], axis=1).sum()
    is_same = (distances < NEAR) & (labels[rows] == predicted_labels[columns])
    tsa = float(((true_teeth != 0) == (teeth != 0)).mean())
    return TeethScores(math.exp(-total / len(labels)), tsa, float(is_same.mean()) if len(is_same) else 0.0)


def _teeth_of(points: NDArray[Any], labels: NDArray[Any], teeth: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """The FDI numbers (T,), the centers (T, 3) and the sizes (T, 3) of the single teeth."""
    members = [points[teeth == tooth] for tooth in np.unique(teeth[teeth != 0])]
    numbers = [labels[teeth == tooth][0] for tooth in np.unique(teeth[teeth != 0])]
    centers = np.array([each.mean(0) for each in members]).reshape(-1, 3)
    sizes = [np.sqrt(((each - center) ** 2).sum(0)) for each, center in zip(members, centers, strict=True)]
    return np.array(numbers), centers, np.array(sizes).reshape(-1, 3)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("predictions", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    rows: list[list[Any]] = []
    for file in sorted(options.predictions.rglob("*.json")):
        jaw = options.data / file.relative_to(options.predictions)
        if not jaw.is_file():
            parser.error(f"{jaw}: there is no such file for {file}")
        true, predicted = (json.loads(each.read_text()) for each in (jaw, file))
        points = load_mesh(jaw.with_suffix(".obj")).verts
        instances = true.get("instances"), predicted.get("instances")
        scores = teeth_scores(points, true["labels"], predicted["labels"], *instances)
        rows.append([jaw.relative_to(options.data).with_suffix("").as_posix(), *scores])
    if not rows:
        parser.error(f"{options.predictions}: there are no predictions (.json)")
    make_folder(options.out)
    write_atomically(options.out / "teeth.csv", csv_text([["jaw", *NAMES], *rows]))
    means = np.mean([row[1:] for row in rows], axis=0)
    print(*(f"{name.upper()} {value:.4f}" for name, value in zip(NAMES, means, strict=True)), sep=", ")


if __name__ == "__main__":
    main()
