"""Changes of labels: at other elements, classes by name, and targets of regression with their statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from diffnet.data.arrays import array_states, counted_vertices
from diffnet.data.feature_names import MASK_PREFIX, ArrayStatistics, mask_of
from diffnet.data.folders.files import listing
from diffnet.data.labeled import UNLABELED, DataError, LabeledMesh, LabeledMeshes, LabelsAt, TargetsAt
from diffnet.data.places import changed_rows, places_of
from diffnet.data.stored import StoredMeshes, remembered, with_change
from diffnet.geometry import Mesh, edges_of_faces, mesh_edges
from diffnet.geometry.elements.elements import file_edges, majority, on_polygons, on_triangles
from diffnet.geometry.mesh.normalize import normalized_length
from diffnet.geometry.options import Scale, counts_all

if TYPE_CHECKING:
    from torch import Tensor


def labels_at(
    labels: Any, faces: Any, *, source: LabelsAt, target: LabelsAt, num_vertices: int | None = None
) -> NDArray[np.int64]:
    """Convert labels between the vertices, edges and faces of a mesh.

    labels: (V,), (E,) or (F,) integers at the source. Negative ones are unlabeled and don't count. Edges are in the
        order of `diffnet.geometry.mesh_edges`.
    faces: (F, 3) vertex indices
    num_vertices: V. By default the number of labels at the vertices, else one more than the largest index in the faces.

    An element of the target gets the most frequent label of the source's elements that touch it: the corners of a face,
    the ends of an edge, the faces at an edge or a vertex, the edges at a vertex, the sides of a face. Of equally
    frequent labels, it gets the smallest. An element that no labeled one touches is UNLABELED.

    Returns (V,), (E,) or (F,) int64. Raises ValueError for arrays of other shapes or types, and for a number of labels
    that does not fit.

    >>> faces = [[0, 1, 2], [2, 1, 3]]
    >>> labels_at([5, 5, 7, 7], faces, source="vertices", target="faces").tolist()
    [5, 7]
    >>> labels_at([3, 1], faces, source="faces", target="vertices").tolist()  # vertices 1 and 2 touch both
    [3, 1, 1, 1]
    """
    for name, place in (("source", source), ("target", target)):
        if place not in get_args(LabelsAt):
            raise ValueError(f"{name} should be one of {', '.join(get_args(LabelsAt))}, got {place!r}")
    f, values = np.asarray(faces), np.asarray(labels)
    f = f.reshape(0, 3).astype(np.int64) if f.size == 0 else f
    if f.ndim != 2 or f.shape[1] != 3 or f.dtype.kind not in "iu":
        raise ValueError(f"faces should be integers of shape (F, 3), got {f.dtype} of shape {f.shape}")
    f = f.astype(np.int64)
    if values.ndim != 1 or (values.size > 0 and values.dtype.kind not in "iu"):
        raise ValueError(f"labels should be integers of shape (N,), got {values.dtype} of shape {values.shape}")
    values = np.where(values < 0, UNLABELED, values).astype(np.int64)
    count = num_vertices if num_vertices is not None else len(values) if source == "vertices" else None
    count = int(f.max(initial=-1)) + 1 if count is None else count
    if len(f) and not (f.min() >= 0 and f.max() < count):
        raise ValueError(f"faces should have indices from 0 to {count - 1}, got {f.min()} to {f.max()}")
    edges = mesh_edges(f)
    sizes = {"vertices": count, "edges": len(edges), "faces": len(f)}
    if len(values) != sizes[source]:
        raise ValueError(f"{len(values)} labels, but the mesh has {sizes[source]} {source}")
    if source == target:
        return values
    parts = f if "faces" in (source, target) else edges
    parts = parts if "vertices" in (source, target) else edges_of_faces(f)
    first, second = parts.reshape(-1), np.repeat(np.arange(len(parts)), parts.shape[1])
    rank = ("vertices", "edges", "faces").index
    if rank(source) > rank(target):
        first, second = second, first
    return majority(values, first, second, sizes[target])


def with_labels_at(data: LabeledMeshes, target: LabelsAt) -> LabeledMeshes:
    """The data set with its labels at other elements, see `labels_at`. Soft labels are left out.

    Raises DataError for a point cloud, which has neither edges nor faces, and for a set with one label per mesh.
    """
    source = data.labels_at
    if target == source:
        return data
    if source == "meshes" or isinstance(source, tuple):
        raise DataError(f"the set has one label for each mesh, which can't become labels at {target}")

    change = partial(_converted, source=source, target=target)
    return data.with_parts(lambda part: with_change(part, change, "labels_at", source, target), labels_at=target)


def _converted(item: LabeledMesh, source: LabelsAt, target: LabelsAt) -> LabeledMesh:
    mesh = item.mesh
    if mesh.is_point_cloud:
        raise DataError(f"{mesh.name}: a point cloud has labels at vertices only, not at {target}. Leave it out")
    labels = labels_at(item.labels, mesh.faces, source=source, target=target, num_vertices=len(mesh.verts))
    if mesh.has_polygons and "faces" in (source, target):  # each polygon votes once, and so do its corners and sides
        elements = mesh.faces if "vertices" in (source, target) else edges_of_faces(mesh.faces)
        places, polygons = np.unique(np.stack([elements.reshape(-1), np.repeat(mesh.polygons, 3)]), axis=1)
        if target == "faces":
            labels = majority(item.labels, places, polygons, mesh.polygon_count)[mesh.polygons]
        else:
            labels = majority(on_polygons(mesh, item.labels), polygons, places, len(labels))
    if target == "edges":
        labels = on_triangles(mesh, labels[file_edges(mesh)], target)  # cuts are unlabeled
    return replace(item, labels=labels, accepted=None)


def rows_of_file(mesh: Mesh, values: NDArray[Any], at: TargetsAt) -> NDArray[Any]:
    """Labels or targets at triangles as those at the faces of the file. Those at other places stay."""
    if not mesh.has_polygons:
        return values
    return changed_rows(  # type: ignore[no-any-return]
        values, len(mesh.verts), at, lambda part, place: on_polygons(mesh, part) if place == "faces" else part
    )


def labels_on_surface(data: LabeledMeshes, scale: Scale, features: str) -> LabeledMeshes:
    """The data set without labels and targets at elements that don't count, see `counted_elements`."""
    at, mask = data.labels_at, mask_of(features)
    if at == "meshes" or all_count(at, features, scale):
        return data
    features = "xyz" if mask is None else f"{MASK_PREFIX}{mask}"  # no other own array matters
    change = partial(_on_surface, at=at, scale=scale, features=features)
    about = [] if mask is None else [at, scale, mask]
    return data.with_parts(lambda part: with_change(part, change, "on surface", *about, *array_states(part, features)))


def all_count(at: TargetsAt, features: str, scale: Scale) -> bool:
    """Whether all elements of every mesh count, see `counted_elements`."""
    return mask_of(features) is None and ("vertices" not in places_of(at) or counts_all(scale))


def counted_elements(
    mesh: Mesh, at: TargetsAt, features: str, scale: Scale, arrays: Mapping[str, Any] | None = None
) -> NDArray[np.bool_]:
    """Which vertices (V,), triangles (F,) or edges (E,) count, see `counted_vertices`; or all rows of `rows_at`.

    Triangles and edges count if all of their vertices do; the triangles of a polygon, if those of the polygon do.
    """
    if isinstance(at, tuple):
        return np.concatenate([counted_elements(mesh, place, features, scale, arrays) for place in places_of(at)])
    if at == "meshes":
        return np.ones(1, bool)
    counts = counted_vertices(mesh, features, scale, arrays)
    if at == "vertices":
        return counts
    counts = np.asarray(counts[mesh.faces if at == "faces" else mesh_edges(mesh.faces)].all(1))
    if at == "faces" and mesh.has_polygons:
        counts = (np.bincount(mesh.polygons, ~counts, mesh.polygon_count) == 0)[mesh.polygons]
    return counts


def _on_surface(item: LabeledMesh, at: TargetsAt, scale: Scale, features: str) -> LabeledMesh:
    counts = counted_elements(item.mesh, at, features, scale, item.arrays)
    if counts.all():
        return item
    labels = item.labels.copy()
    labels[~counts] = np.nan if labels.dtype.kind == "f" else UNLABELED
    return replace(item, labels=labels)


def relative_lengths(items: Sequence[LabeledMesh], columns: Sequence[int], scale: Scale) -> Sequence[LabeledMesh]:
    """The meshes with some columns of their targets, which are lengths, in units of the normalized meshes.

    scale: how positions are normalized, see `normalize_positions`
    """
    if not columns:
        return items
    return with_change(items, partial(_relative, columns=columns, scale=scale), "lengths", list(columns), scale)


def _relative(item: LabeledMesh, columns: Sequence[int], scale: Scale) -> LabeledMesh:
    return replace(item, labels=item.labels / length_factors(item.mesh, columns, scale, item.labels.shape[1]))


def length_factors(mesh: Mesh, columns: Sequence[int], scale: Scale, count: int) -> NDArray[np.float64]:
    """What `relative_lengths` divides each of `count` columns by, (C,)."""
    factors = np.ones(count)
    if columns:
        factors[list(columns)] = normalized_length(mesh, scale)
    return factors


def target_statistics(
    items: Sequence[LabeledMesh],
    names: Sequence[str],
    jobs: int | None = None,
    of: Literal["targets", "conditions"] = "targets",
    vectors: int = 0,
) -> ArrayStatistics:
    """Mean and standard deviation of each column of the targets over the training meshes. NaN doesn't count.

    names: of the columns, for messages
    of: or of the conditions, of which each mesh has one row
    jobs: see `remembered`. Each mesh is read once, and only its sums are kept.
    vectors: so many vectors are the first columns, see `ArrayStatistics`

    The standard deviation of a constant column is given as 1. Raises DataError for targets of another shape than
    (N, C), for a column that is NaN everywhere, and for an infinite target.
    """
    work, about = partial(_moments, names=list(names), of=of), (f"{of.removesuffix('s')} moments", list(names))
    sums = np.array(remembered(work, items, *about, jobs=jobs))
    counts, origins, means, squares = sums.astype(np.float64).transpose(1, 0, 2)  # (N, C) each
    for i, name in enumerate(names):
        if not counts[:, i].any():
            raise DataError(f"the column {name!r} is missing (NaN) in all training meshes")
    # Sums of numbers far from 0 lose their differences.
    origin = np.where(counts > 0, origins, np.inf).min(0)
    total = counts.sum(0)
    with np.errstate(invalid="ignore"):
        shifted = np.where(counts > 0, means + (origins - origin), 0)
    mean = (counts * shifted).sum(0) / total
    variance = (squares + counts * (shifted - mean) ** 2).sum(0) / total
    std = np.sqrt(np.maximum(variance, 0))
    mean, std = origin + mean, np.where(std > 1e-12 * np.abs(origin), std, 1.0)
    for first in range(0, 3 * vectors, 3):  # a vector keeps its direction
        part = slice(first, first + 3)
        size = np.sqrt((np.maximum(variance[part], 0) + mean[part] ** 2).mean())
        mean[part], std[part] = 0, size if size > 0 else 1
    return {"mean": mean.tolist(), "std": std.tolist()}


def _moments(item: LabeledMesh, names: Sequence[str], of: Literal["targets", "conditions"]) -> list[list[float]]:
    """For each column: the count, the smallest target, the mean above it, and the sum of squares about the mean."""
    values = item.labels if of == "targets" else item.conditions[None]
    if np.ndim(values) != 2 or np.shape(values)[1] != len(names):
        raise DataError(f"{item.name}: {of} should have shape (N, {len(names)}), got {np.shape(values)}")
    rows = np.asarray(values, np.float64)
    for i, name in enumerate(names):
        if np.isinf(rows[:, i]).any():
            raise DataError(f"{item.name}: the column {name!r} has an infinite target; targets should be finite or NaN")
    mask = ~np.isnan(rows)
    counts = mask.sum(0)
    origin = np.where(counts > 0, np.where(mask, rows, np.inf).min(0, initial=np.inf), 0)
    above = np.where(mask, rows - origin, 0)
    mean = above.sum(0) / np.maximum(counts, 1)
    squares = (np.where(mask, above - mean, 0) ** 2).sum(0)
    return [counts.tolist(), origin.tolist(), mean.tolist(), squares.tolist()]


def standardized_targets(items: Sequence[LabeledMesh], statistics: ArrayStatistics) -> Sequence[LabeledMesh]:
    """The meshes with targets (N, C) float32 at mean 0 and standard deviation 1 over the training set."""
    return with_change(items, partial(_standardized, "labels", statistics), "standardized", statistics)


def standardized_conditions(items: Sequence[LabeledMesh], statistics: ArrayStatistics) -> Sequence[LabeledMesh]:
    """The meshes with conditions at mean 0 and standard deviation 1 over the training meshes."""
    return with_change(items, partial(_standardized, "conditions", statistics), "conditions", statistics)


def _standardized(field: str, statistics: ArrayStatistics, item: LabeledMesh) -> LabeledMesh:
    values: dict[str, Any] = {field: standardized(getattr(item, field), statistics)}
    return replace(item, **values)


def standardized(values: NDArray[Any], statistics: ArrayStatistics) -> NDArray[np.float32]:
    """Numbers (…, C) at mean 0 and standard deviation 1, float32."""
    mean, std = np.array(statistics["mean"]), np.array(statistics["std"])
    return ((values - mean) / std).astype(np.float32)


def original_targets(values: Tensor, statistics: ArrayStatistics, factors: NDArray[np.float64] | None = None) -> Tensor:
    """Standardized targets as the original numbers, (N, C) float64 on the CPU.

    factors: (C,), of `length_factors`, or None for targets that are no lengths
    """
    import torch  # processes that change labels don't need it

    mean, std = (torch.tensor(statistics[name], dtype=torch.float64) for name in ("mean", "std"))  # type: ignore[literal-required]
    values = values.detach().to("cpu", torch.float64) * std + mean
    return values if factors is None else values * torch.from_numpy(factors)


def with_columns(data: LabeledMeshes, names: Sequence[str]) -> LabeledMeshes:
    """The data set with the columns of another set or network, matched by name.

    Raises DataError for a column that the set lacks.
    """
    missing = [name for name in names if name not in data.label_names]
    if missing:
        raise DataError(
            f"the set has no column {missing[0]!r}; its columns are {', '.join(data.label_names)}. Columns of targets "
            "are matched by name"
        )
    order = [data.label_names.index(name) for name in names]
    change, at = partial(_in_order, order=order), data.labels_at
    at = tuple(at[i] for i in order) if isinstance(at, tuple) else at
    return data.with_parts(
        lambda part: with_change(part, change, "columns", order), label_names=list(names), labels_at=at
    )


def _in_order(item: LabeledMesh, order: Sequence[int]) -> LabeledMesh:
    return replace(item, labels=item.labels[:, order])


def with_label_names(data: LabeledMeshes, names: Sequence[str]) -> LabeledMeshes:
    """The data set with the classes of another set or network, matched by name.

    names: the names of the classes, in the order of the new numbers, such as `label_names` of a checkpoint

    A test set may lack some classes. Raises DataError for a class that occurs in the labels, but not in `names`.
    """
    old, names = list(data.label_names), list(names)
    change = partial(_renumbered, old=old, names=names, leave_out=False)
    return data.with_parts(
        lambda part: with_change(part, change, "names", old, names), label_names=names, label_numbers=None
    )


def _renumbered(item: LabeledMesh, old: Sequence[str], names: Sequence[str], leave_out: bool) -> LabeledMesh:
    """The labels by the places of their names. leave_out: whether others become UNLABELED"""
    place = {name: i for i, name in enumerate(names)}
    other = UNLABELED if leave_out else len(names)
    new = np.array([place.get(name, other) for name in old] + [UNLABELED], np.int64)
    labels = np.asarray(new[np.where(item.labels < 0, UNLABELED, item.labels)])
    unknown = np.flatnonzero(labels == len(names))
    if len(unknown):
        raise DataError(
            f"{item.mesh.name}: the label {old[item.labels.flat[unknown[0]]]!r} is none of the "
            f"{len(names)} known classes ({listing(names, 8)}). Labels are matched by name; "
            "label_names.txt in the folder of the meshes names their values"
        )
    accepted = item.accepted
    if accepted is not None:
        columns = [old.index(name) if name in old else -1 for name in names]
        accepted = np.pad(accepted, ((0, 0), (0, 1)))[:, columns]  # the last, of new classes, which are never right
    return replace(item, labels=labels, accepted=accepted)


def chosen_classes(given: Sequence[str], names: Sequence[str], numbers: Sequence[int] | None = None) -> tuple[str, ...]:
    """The names of classes that are given by name, or by number. A name counts first.

    numbers: of the classes in label files, from 0 by default

    Raises DataError for a class that is neither.

    >>> chosen_classes(["leg", "0"], ["arm", "leg"])
    ('leg', 'arm')
    """
    by_number = dict(zip(map(str, range(len(names)) if numbers is None else numbers), names, strict=True))
    others = [name for name in given if name not in names and name not in by_number]
    if others:
        named = f"a name ({listing(names, 8)}) or a number ({listing(by_number, 8)})"
        raise DataError(f"there is no class {others[0]!r}. Give {named}")
    return tuple(name if name in names else by_number[name] for name in given)


def without_classes(data: LabeledMeshes, names: Sequence[str]) -> LabeledMeshes:
    """The data set without some classes. Their elements become UNLABELED, and other classes keep their order.

    names: of the classes; those that the set doesn't have are ignored

    Meshes that have one label are left out with their class. Raises DataError if no class or no test mesh is left.
    """
    gone = [i for i, name in enumerate(data.label_names) if name in names]
    if not gone:
        return data
    rest = [name for name in data.label_names if name not in names]
    numbers = data.label_numbers and [number for i, number in enumerate(data.label_numbers) if i not in gone]
    if not rest:
        raise DataError("all classes are ignored; at least one should be left")
    old = data.label_names
    change = partial(_renumbered, old=old, names=rest, leave_out=True)
    if data.labels_at == "meshes":
        counted_classes = [i for i, name in enumerate(old) if name in rest]
        data = data.with_parts(lambda part: _of_classes(part, counted_classes))
        if not len(data.test):
            raise DataError("all test meshes belong to ignored classes")
    return data.with_parts(
        lambda part: with_change(part, change, "without", old, rest), label_names=rest, label_numbers=numbers
    )


def _of_classes(items: Sequence[LabeledMesh], classes: Sequence[int]) -> Sequence[LabeledMesh]:
    """The meshes whose label is one of these classes."""
    if isinstance(items, StoredMeshes):
        labels = items.mesh_labels
        assert labels is not None, "each mesh has one label, which the index knows"
        return items.take(np.flatnonzero(np.isin(labels, classes)))
    return [item for item in items if int(item.labels.flat[0]) in classes]
