"""Pictures of classified meshes for a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from diffnet.train.metrics import percent
from diffnet.train.report.charts import class_name
from diffnet.viz.palette import colorize
from diffnet.viz.render import draw, paint, png_bytes
from diffnet.viz.surface import make_surface

PICTURE_SIZE = (300, 260)  # width and height in pixels


class ClassifiedMesh(NamedTuple):
    """The prediction and the truth of one mesh or point cloud.

    verts: (V, 3); faces: (F, 3), None or empty for a point cloud
    prediction, truth: classes; a negative truth is unknown
    probability: of the prediction, from 0 to 1
    """

    name: str
    verts: Any
    faces: Any
    prediction: int
    truth: int
    probability: float


def picture_of(row: ClassifiedMesh) -> bytes:
    """The mesh in the color of its predicted class, as the content of a PNG file."""
    surface = make_surface(row.verts, row.faces)
    labels = np.full(len(surface.verts), row.prediction)
    return png_bytes(paint(draw(surface, "vertices", PICTURE_SIZE), colorize(labels)))


def caption_of(row: ClassifiedMesh, label_names: Sequence[str]) -> tuple[str, str]:
    """The prediction with its probability, and the truth if the prediction is wrong."""
    predicted = f"{class_name(label_names, row.prediction)}, {percent(row.probability, 0)}"
    if row.truth < 0:
        return predicted, "unlabeled"
    if row.truth == row.prediction:
        return predicted, ""
    return predicted, f"✗ truth: {class_name(label_names, row.truth)}"
