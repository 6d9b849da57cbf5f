"""Labeled meshes, before any preprocessing."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from diffnet.geometry import Mesh
from diffnet.geometry.errors import DiffnetError

if TYPE_CHECKING:
    from diffnet.data.options import Preprocessing
    from diffnet.geometry import Operators

LabelsAt: TypeAlias = Literal["vertices", "faces", "edges"]
# In a set for classification, each mesh has one label. In a set for regression, each mesh may have its targets.
PlaceAt: TypeAlias = Literal[LabelsAt, "meshes"]
# Targets may also be at vertices, at faces and of meshes: a place for each column, see `data/places.py`.
TargetsAt: TypeAlias = PlaceAt | tuple[PlaceAt, ...]

UNLABELED = -1
Data = TypeVar("Data", bound="LabeledMeshes")


def counted(count: int, one: str, several: str) -> str:
    """A number with its noun in the singular or the plural.

    >>> counted(1, "mesh", "meshes"), counted(2, "mesh", "meshes")
    ('1 mesh', '2 meshes')
    """
    return f"{count} {one if count == 1 else several}"


class DataError(DiffnetError, ValueError):
    """A data set can't be used. The message names the file and the fault."""


@dataclass(frozen=True)
class LabeledMesh:
    """One mesh of a data set.

    labels: (V,), (F,) or (E,) int64, indices into the set's `label_names`. UNLABELED elements count neither in training
        nor in scores. Edges are in the order of `diffnet.geometry.mesh_edges`. In a set for classification, it is the
        one label of the mesh, () or (1,), see `Sample`. In a set for regression, labels are the targets, numbers
        (N, C), or (1, C) for a mesh. NaN is a missing target. For targets at several places, see `rows_at`.
    arrays: own features at the vertices, (V,) or (V, C), by the NAME of `file:NAME`. Those of a mesh from a file are
        found beside the file, see `own_arrays`.
    accepted: (N, C) bool, the classes that count as right at each labeled element in a published score, from soft
        labels; or None. See `soft_accuracy` in `train/metrics.py`.
    conditions: (C,) float64, the numbers of the mesh that `condition_names` of the set names; none by default
    label_file: the file of the labels at its elements, if there is one
    prepared: gives the mesh at normalized positions and its operators, as `prepare` does, for a mesh of `load_shards`;
        None if operators have to be computed
    """

    name: str
    mesh: Mesh
    labels: NDArray[Any]
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    accepted: NDArray[np.bool_] | None = None
    prepared: Callable[[Preprocessing], tuple[Mesh, Operators]] | None = None
    conditions: NDArray[Any] = field(default_factory=lambda: np.zeros(0))
    label_file: Path | None = None

    def __repr__(self) -> str:
        labels = np.asarray(self.labels)
        return f"LabeledMesh(name={self.name!r}, mesh={self.mesh}, labels={labels.shape} {labels.dtype})"


@dataclass(frozen=True)
class LabeledMeshes:
    """A data set: its training part, its test part, and the names and places of its labels.

    label_names: the names of the classes, or of the columns of the targets in a set for regression
    label_numbers: the number of each class in the label files, or None if these have no numbers
    validation: meshes by which training chooses an epoch, see the option `validation`
    condition_names: of the numbers of each mesh that a network takes besides its features
    source: what divides the meshes into these parts
    left_out: what of the files is not used, and why
    labels_from: what of the mesh files the labels are, such as the name of a property; empty for other files
    label_colors: the colors [red, green, blue] of classes by name, from 0 to 255, if the label files have some
    """

    train: Sequence[LabeledMesh]
    test: Sequence[LabeledMesh]
    label_names: list[str]
    labels_at: TargetsAt
    label_numbers: list[int] | None = None
    validation: Sequence[LabeledMesh] = field(default=(), kw_only=True)
    condition_names: tuple[str, ...] = field(default=(), kw_only=True)
    source: str = field(default="", kw_only=True)
    left_out: tuple[str, ...] = field(default=(), kw_only=True)
    labels_from: str = field(default="", kw_only=True)
    label_colors: Mapping[str, Sequence[int]] = field(default_factory=dict, kw_only=True)

    def with_parts(self: Data, change: Callable[[Sequence[LabeledMesh]], Sequence[LabeledMesh]], **more: Any) -> Data:
        """The data set with changed parts, and with other fields."""
        more |= {name: change(getattr(self, name)) for name in ("train", "validation", "test")}
        return replace(self, **more)

    def __repr__(self) -> str:
        validation = f"validation={counted(len(self.validation), 'mesh', 'meshes')}, " if len(self.validation) else ""
        return (
            f"LabeledMeshes(train={counted(len(self.train), 'mesh', 'meshes')}, {validation}"
            f"test={counted(len(self.test), 'mesh', 'meshes')}, "
            f"label_names={reprlib.repr(self.label_names)}, labels_at={self.labels_at!r})"
        )
