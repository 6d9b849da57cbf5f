"""Labelled meshes, before any preprocessing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from diffnet.geometry import Mesh

LabelsAt: TypeAlias = Literal["vertices", "faces", "edges"]

UNLABELED = -1


class DataError(ValueError):
    """A data set can't be used. The message names the file and says what is wrong with it."""


@dataclass(frozen=True)
class LabeledMesh:
    """One mesh of a data set.

    labels: (V,), (F,) or (E,) int64, class indices into the set's `label_names`; UNLABELED elements count neither in
        training nor in a score. Edges are numbered as `diffnet.geometry.mesh_edges` does.
    """

    name: str
    mesh: Mesh
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class LabeledMeshes:
    """A data set in its two parts, with the meaning of its labels."""

    train: list[LabeledMesh]
    test: list[LabeledMesh]
    label_names: list[str]
    labels_at: LabelsAt
