"""Soft labels of the segmentation sets of MeshCNN (Hanocka et al. 2019): a share of each class at each edge."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from diffnet.data.folders.files import label_files, pair_labels
from diffnet.data.folders.numbers import read_columns, read_labels
from diffnet.data.labeled import DataError, LabeledMesh, LabeledMeshes
from diffnet.data.stored import with_change
from diffnet.geometry.mesh.mesh import mesh_stem

D = TypeVar("D", bound=LabeledMeshes)


def with_soft_labels(data: D, meshes: list[Path], root: Path) -> D:
    """The data set with the classes that `sseg/NAME.seseg` allows at each edge of the test meshes.

    A class is allowed if its share is above 0. Training uses the hard labels alone.

    meshes: the files of the test meshes, in the order of the data

    As in MeshCNN, column i of a file is the label i + m, where m is the smallest label ≥ 0 in all files of `seg/`.
    Raises DataError, which names the file, if a mesh has no such file, for another number of lines than edges, and if a
    label has no column.
    """
    values = np.concatenate([read_labels(file) for file in label_files(root / "seg", (".eseg",))])
    smallest = int(values[values >= 0].min())
    files = {
        mesh_stem(mesh): str(file)
        for mesh, file in zip(meshes, pair_labels(meshes, [root / "sseg"], (".seseg",)), strict=True)
    }
    numbers = [int(number) for number in data.label_numbers or ()]
    change = partial(_softened, files=files, numbers=numbers, smallest=smallest)
    contents = [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files.values()]
    return replace(data, test=with_change(data.test, change, "soft labels", numbers, smallest, contents))


def _softened(item: LabeledMesh, files: Mapping[str, str], numbers: Sequence[int], smallest: int) -> LabeledMesh:
    file = Path(files[item.name])
    columns = np.array(numbers) - smallest
    shares = read_columns(file).values
    if len(bad := np.flatnonzero(~(shares >= 0).all(1))):
        raise DataError(f"{file}: shares should be at least 0, row {bad[0]} is {shares[bad[0]].tolist()}")
    if len(shares) != len(item.labels):
        raise DataError(f"{file}: {len(shares)} lines, but {item.mesh.name} has {len(item.labels)} edges")
    unlisted = [i for i in np.unique(item.labels) if i >= 0 and not 0 <= columns[i] < shares.shape[1]]
    if unlisted:
        raise DataError(
            f"{file}: {shares.shape[1]} numbers in a line, for the labels from {smallest} on, but the label "
            f"{numbers[unlisted[0]]} occurs"
        )
    known = (columns >= 0) & (columns < shares.shape[1])
    return replace(item, accepted=(shares > 0)[:, np.where(known, columns, 0)] & known)
