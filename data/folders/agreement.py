"""Whether the labels of a set fit the order of the elements of its meshes."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from diffnet.data.labeled import LabeledMesh, LabeledMeshes, LabelsAt
from diffnet.data.stored import remembered, some_of
from diffnet.geometry import Mesh, mesh_edges

MIN_AGREEMENT = 0.1  # agreement above chance, as a share of the most that is possible
LOOKED_AT = 25  # meshes
MIN_DIFFERENT = 50.0  # neighbors with different labels that chance would give; fewer decide nothing


class Agreement(NamedTuple):
    """The labels of neighboring elements of a mesh.

    pairs: the number of neighbors that both have a label
    share: the share of these with the same label
    chance: this share for the same labels in random order
    """

    pairs: int
    share: float
    chance: float

    @property
    def is_chance(self) -> bool:
        """Whether neighbors agree hardly more often than by chance."""
        differ = 1 - self.chance
        return self.pairs * differ >= MIN_DIFFERENT and self.share - self.chance < MIN_AGREEMENT * differ


def agreement(mesh: Mesh, labels: NDArray[np.int64], at: LabelsAt) -> Agreement:
    """How often neighbors have the same label. Vertices are neighbors along sides of faces, others if they share one.

    labels: (V,), (F,) or (E,), negative where unlabeled

    Not all neighbors are counted: each face or edge at a vertex is compared with one of them.
    """
    if at == "vertices":
        pairs = mesh.faces[:, [0, 1, 1, 2, 2, 0]].reshape(-1, 2)
    else:
        rows = mesh.faces if at == "faces" else mesh_edges(mesh.faces)
        corners, owner = rows.reshape(-1), np.repeat(np.arange(len(rows)), rows.shape[1])
        one = np.zeros(len(mesh.verts), np.int64)
        one[corners] = owner  # the last write to a vertex wins
        pairs = np.stack([owner, one[corners]], 1)
    classes = labels[pairs[pairs[:, 0] != pairs[:, 1]]]
    classes = classes[(classes >= 0).all(1)]
    if not len(classes):
        return Agreement(0, 1.0, 1.0)
    frequencies = np.bincount(classes.reshape(-1)) / classes.size
    return Agreement(len(classes), float((classes[:, 0] == classes[:, 1]).mean()), float(frequencies @ frequencies))


def warn_of_scattered_labels(data: LabeledMeshes, root: Path) -> None:
    """Warn once of meshes whose neighboring elements agree hardly more often than by chance.

    Of large sets, up to LOOKED_AT meshes of each part are looked at. The cache remembers those of stored sets.
    """
    at = data.labels_at
    if at == "meshes":
        return
    shuffled, count = [], 0
    for part in (data.train, data.validation, data.test):
        items = some_of(part, LOOKED_AT)
        rows = remembered(partial(_agreement_of, at=at), items, "agreement", at, jobs=1)
        each = enumerate(map(Agreement._make, rows))
        shuffled += [(items[i].mesh.name, numbers) for i, numbers in each if numbers.is_chance]
        count += len(items)
    if shuffled:
        name, numbers = shuffled[0]
        share, chance = (f"{100 * value:.1f} %" for value in (numbers.share, numbers.chance))
        warnings.warn(
            f"{root}: the labels of {len(shuffled)} of {count} meshes look shuffled. In {name}, {share} of "
            f"neighboring {at} have the same label, and {chance} would by chance. Labels should be in the "
            f"order of the {at} in the mesh file",
            stacklevel=4,
        )


def _agreement_of(item: LabeledMesh, at: LabelsAt) -> Agreement:
    return agreement(item.mesh, item.labels, at)
