"""The content of a record: a mesh with its labels, and the operators of this mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffnet.data.feature_names import array_names
from diffnet.data.labeled import LabeledMesh, TargetsAt
from diffnet.data.options import Preprocessing
from diffnet.geometry import Mesh
from diffnet.geometry.errors import OptionError
from diffnet.geometry.options import Options, chosen_scale
from diffnet.geometry.store.cache import FORMAT as ENTRY_FORMAT, Arrays

FORMAT = 3  # increase when older versions would misread shards
AS_THEY_ARE = 2  # the last format in whose operators surfaces that are inside out stay so
OPTIONS = ("k", "laplacian", "basis", "join", "operators", "normalize")  # of `Preprocessing`, that decide operators
ARRAY = "array."  # before the names of own arrays


@dataclass(frozen=True)
class Settings:
    """What the records of a set have in common. JSON holds it.

    options: the options that decide the operators, by name
    arrays: the names of the own arrays
    label_names, labels_at, label_numbers: see `LabeledMeshes`. Without labels, there are no names.
    has_targets: whether labels are numbers, for regression
    entry_format: the format of the operators, which is that of cache entries
    """

    options: dict[str, Any]
    arrays: list[str]
    label_names: list[str]
    labels_at: TargetsAt
    label_numbers: list[int] | None
    has_targets: bool
    entry_format: int = ENTRY_FORMAT
    format: int = FORMAT

    @classmethod
    def read(cls, about: Mapping[str, Any]) -> Settings:
        """Those in a file. Up to format 1, vertices of no face counted. Raises TypeError for other names."""
        settings = cls(**about)
        if settings.format != 1:
            return settings
        options = {**settings.options, "normalize": chosen_scale(settings.options.get("normalize"), "original")}
        return replace(settings, options=options, format=AS_THEY_ARE)

    def check(self) -> None:
        """Raises ValueError for values that `write_shards` doesn't write, and for those of another version."""
        for name, formats in (("format", (FORMAT, AS_THEY_ARE)), ("entry_format", (ENTRY_FORMAT,))):
            if (value := getattr(self, name)) not in formats:
                raise ValueError(f"another version of diffnet wrote it: its {name} is {value}, not {formats[0]}")
        if self.labels_at not in ("meshes", "vertices", "faces", "edges"):
            raise ValueError(f"its labels are at {self.labels_at!r}")
        Preprocessing(**self.options, features="xyz")

    @property
    def operators(self) -> Options:
        """The options of the operators."""
        return Options(**{name: value for name, value in self.options.items() if name != "normalize"})


def check_options(settings: Settings, root: str, options: Preprocessing) -> None:
    """Raises OptionError, which names both values, for options that don't fit those of the shards in a folder."""
    for name, stored in settings.options.items():
        if (value := getattr(options, name)) != stored:
            raise OptionError(
                f"{name} is {value}, and the shards in {root} were written with {stored}. Use {name}={stored}, on the "
                f"command line --{name} {stored}, or write shards with {value}"
            )
    for name in array_names(options.features):
        if name not in settings.arrays:
            features = ", ".join(f"file:{name}" for name in settings.arrays) or "no own arrays"
            raise OptionError(
                f"the features are {options.features}, and the shards in {root} have {features}. Write them with "
                f"--features {options.features}"
            )


def mesh_arrays(item: LabeledMesh, features: Mapping[str, NDArray[Any]]) -> Arrays:
    """The arrays of a mesh, of its labels and own arrays. Reading gives equal ones."""
    mesh, labels = item.mesh, np.asarray(item.labels)
    arrays: Arrays = {"verts": _exact(mesh.verts), "faces": mesh.faces.astype(np.int32)}
    arrays["labels"] = labels.astype(np.int32) if labels.dtype.kind in "iu" else _exact(labels)
    if mesh.has_polygons:
        arrays["polygons"] = mesh.polygons.astype(np.int32)
        arrays["polygon_count"] = np.array([mesh.polygon_count], np.int64)
        sides = {"sizes": mesh.sizes, "corners": mesh.corners}
        arrays |= {name: values.astype(np.int32) for name, values in sides.items() if values is not None}
    if mesh.normals is not None:
        arrays["normals"] = _exact(mesh.normals)
    if item.accepted is not None:
        arrays["accepted"] = item.accepted.astype(np.uint8)
    for name, values in features.items():
        arrays[ARRAY + name] = _exact(values)
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def labeled_mesh(arrays: Arrays, name: str, labels_at: TargetsAt) -> LabeledMesh:
    """The inverse of `mesh_arrays`."""
    faces = arrays["faces"].astype(np.int64)
    labels = arrays["labels"].astype(np.int64 if arrays["labels"].dtype == np.int32 else np.float64)
    polygons = arrays["polygons"].astype(np.int64) if "polygons" in arrays else np.arange(len(faces))
    count = int(arrays["polygon_count"][0]) if "polygons" in arrays else len(faces)
    normals = arrays["normals"].astype(np.float64) if "normals" in arrays else None
    sides: dict[str, Any] = {key: arrays[key].astype(np.int64) for key in ("sizes", "corners") if key in arrays}
    return LabeledMesh(
        name,
        Mesh(arrays["verts"].astype(np.float64), faces, polygons, count, name, normals, **sides),
        labels.reshape(()) if labels_at == "meshes" and labels.dtype == np.int64 else labels,
        {key[len(ARRAY) :]: array.astype(np.float64) for key, array in arrays.items() if key.startswith(ARRAY)},
        arrays["accepted"] > 0 if "accepted" in arrays else None,
    )


def check_mesh(arrays: Arrays, vertices: int, faces: int) -> None:
    """Raises ValueError for arrays of another mesh than that of the index. Damage is found by the checksum."""
    corners, expected = arrays["faces"], ((vertices, 3), (faces, 3))
    if (arrays["verts"].shape, corners.shape) != expected:
        raise ValueError(f"verts should be {expected[0]} and faces {expected[1]}")
    if corners.size and not 0 <= int(corners.min()) <= int(corners.max()) < vertices:
        raise ValueError(f"faces are not all from 0 to {vertices - 1}")


def _exact(values: NDArray[Any]) -> NDArray[Any]:
    """Numbers in single precision if this changes none, else in double precision."""
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
    return single if np.array_equal(single, values, equal_nan=True) else values.astype(np.float64)
