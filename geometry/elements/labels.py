"""Labels of elements: with smooth boundaries, by a conditional random field, and their connected parts (instances)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diffnet.geometry.elements.elements import ElementsAt, border_lengths, element_areas
from diffnet.geometry.errors import MeshError
from diffnet.geometry.mesh.mesh import Mesh, mesh_edges

if TYPE_CHECKING:
    import scipy.sparse

LEAST_AREA = 1e-3
_MAX_STEPS = 100  # at most
MAX_WEIGHT = 1e30  # beyond, products overflow single precision
_MAX_CHANGE = 1e-3  # of probabilities, at which the steps end


class Instances(NamedTuple):
    """The connected parts of labels, see `label_instances`.

    numbers: (N,) int64, the instance of each element from 0, or −1 for none; with a background from 1, or 0 for none
    labels: (N,) int64, the labels, in which small parts have taken the label around them
    """

    numbers: NDArray[np.int64]
    labels: NDArray[np.int64]


def label_instances(
    mesh: Mesh,
    labels: Any,
    *,
    at: ElementsAt = "vertices",
    least_area: float = LEAST_AREA,
    background: int | None = None,
) -> Instances:
    """Divide the elements of each label into connected parts.

    Elements with the same label are connected if they are neighbors: vertices by an edge, faces by a common edge, edges
    by a common face. Elements at the same position are neighbors, too, where `joined_vertices` joins vertices. A part
    of less than the least area takes the label around it, that of the larger neighbors with which it has the longest
    border. A small part without a larger neighbor, such as debris of a scan, keeps its label and belongs to no
    instance. So do unlabeled elements (negative labels), and vertices without faces.

    labels: (N,) integers, a label for each element
    at: the elements: "vertices", "faces" (triangles, or the faces of the file) or "edges"
    least_area: share of the area of the mesh, from 0 to 1
    background: a label whose elements belong to no instance, such as gum around teeth

    Instances are numbered by label, and those of a label from the largest to the smallest.

    Raises MeshError for a point cloud and for edges of polygons, TypeError for labels that are no integers, and
    ValueError for another shape and for a share out of range.

    >>> from diffnet.geometry import make_mesh
    >>> strip = make_mesh([[i // 2, i % 2, 0] for i in range(12)], [[i, i + 1, i + 2] for i in range(10)])
    >>> label_instances(strip, [0, 0, 0, 1, 0, 0, 5, 5, 0, 0], at="faces", least_area=0.2)
    Instances(numbers=array([0, 0, 0, 0, 0, 0, 2, 2, 1, 1]), labels=array([0, 0, 0, 0, 0, 0, 5, 5, 0, 0]))
    """
    import scipy.sparse  # the command line loads this module

    if mesh.is_point_cloud:
        raise MeshError(f"{mesh.name}: a point cloud has no neighbors that connect instances")
    _check_edges(mesh, at)
    if not 0 <= least_area <= 1:
        raise ValueError(f"least_area should be from 0 to 1, got {least_area}")
    array = np.asarray(labels)
    per_polygon = at == "faces" and array.shape == (mesh.polygon_count,)
    areas = element_areas(mesh, at, per_polygon)
    if array.dtype.kind not in "iu":
        raise TypeError(f"labels should be integers, dtype is {array.dtype}")
    if array.shape != areas.shape:
        raise ValueError(f"labels should have shape {areas.shape}, one for each of {at}, shape is {array.shape}")
    new, values = array.astype(np.int64), np.unique(array)
    borders = scipy.sparse.coo_array(_borders(mesh, at, per_polygon))
    first, second = borders.coords
    while True:
        same = new[first] == new[second]
        inside = scipy.sparse.csr_array((borders.data[same], (first[same], second[same])), borders.shape)
        count, part = scipy.sparse.csgraph.connected_components(inside, directed=False)
        label_of = np.empty(count, np.int64)
        label_of[part] = new
        area = np.bincount(part, areas, count)
        stays = (area >= least_area * areas.sum()) & (area > 0) & (label_of >= 0)
        # For each small part, the length of its border to the larger ones of each label.
        outside = ~stays[part[first]] & stays[part[second]] & (new[first] >= 0)
        ends = part[first[outside]], np.searchsorted(values, new[second[outside]])
        around = scipy.sparse.csr_array((borders.data[outside], ends), (count, len(values)))
        parts = np.flatnonzero(np.diff(around.indptr))
        if not len(parts):
            break
        label_of[parts] = values[around[parts].argmax(axis=1)]
        new = label_of[part]
    none = -1 if background is None else 0
    order = np.flatnonzero(stays if background is None else stays & (label_of != background))
    order = order[np.lexsort((-area[order], label_of[order]))]
    number_of = np.full(count, none)
    number_of[order] = np.arange(len(order)) + none + 1
    return Instances(number_of[part], new)


def _check_edges(mesh: Mesh, at: ElementsAt) -> None:
    """Raises MeshError for edges of polygons. The cuts of a polygon would part its sides."""
    if at == "edges" and mesh.has_polygons:
        raise MeshError(f"{mesh.name}: neighbors of edges are known in triangles only, and its faces have more corners")


def _borders(mesh: Mesh, at: ElementsAt, per_polygon: bool) -> scipy.sparse.csr_array:
    """`border_lengths` with a tiny length between elements at the same position, and instead of 0."""
    import scipy.sparse

    from diffnet.geometry.discretize.coincident import joined_vertices

    joined = joined_vertices(mesh)
    borders = border_lengths(replace(mesh, faces=joined[mesh.faces]) if at == "faces" else mesh, at, per_polygon)
    tiny = 1e-9 * (float(borders.data.max(initial=0)) or 1.0)
    borders.data = np.maximum(borders.data, tiny)
    if at == "faces" or (joined == np.arange(len(joined))).all():
        return borders
    place = joined
    if at == "edges":
        place = np.unique(np.sort(joined[mesh_edges(mesh.faces)], axis=1), axis=0, return_inverse=True)[1].reshape(-1)
    here = scipy.sparse.csr_array((np.full(len(place), tiny), (np.arange(len(place)), place)))
    return scipy.sparse.csr_array(borders + here @ (here.T / tiny))


def smooth_boundaries(
    mesh: Mesh, probabilities: Any, *, at: ElementsAt = "vertices", weight: float = 1.0
) -> NDArray[np.int64]:
    """Labels that follow probabilities and have short boundaries.

    They approximately minimize the energy Σᵢ aᵢ (−log pᵢ(lᵢ)) + weight · Σᵢⱼ bᵢⱼ [lᵢ ≠ lⱼ]. The area aᵢ of an element
    and the length bᵢⱼ of the border between two elements are divided by their means over the mesh, so the energy
    doesn't depend on the size of the mesh. The mean-field approximation of this conditional random field is iterated
    from the probabilities until it changes by less than 0.001.

    probabilities: (N, C) numbers ≥ 0, of each class at each element
    at: the elements: "vertices", "faces" (triangles, or the faces of the file) or "edges"
    weight: from 0 to 1e30. 0 gives the most likely labels. Larger values give shorter boundaries.

    Returns (N,) int64. The result is the same in every run. Raises MeshError for a point cloud and for edges of
    polygons, ValueError for another shape, for probabilities that are negative or not finite, and for a weight that is
    out of range.

    Source: Krähenbühl and Koltun 2011, Efficient inference in fully connected CRFs with Gaussian edge potentials; here
    only neighbors are connected.

    >>> from diffnet.geometry import load_mesh
    >>> strip = load_mesh(([[i // 2, i % 2, 0] for i in range(8)], [[i, i + 1, i + 2] for i in range(6)]))
    >>> likely = np.array([0.9, 0.9, 0.4, 0.9, 0.9, 0.9])
    >>> smooth_boundaries(strip, np.stack([likely, 1 - likely], axis=1), at="faces").tolist()
    [0, 0, 0, 0, 0, 0]
    """
    from scipy.special import softmax  # the command line loads this module

    p = np.asarray(probabilities, np.float64)
    if mesh.is_point_cloud:
        raise MeshError(f"{mesh.name}: a point cloud has no boundaries to smooth")
    _check_edges(mesh, at)
    if not 0 <= weight <= MAX_WEIGHT:
        raise ValueError(f"weight should be from 0 to {MAX_WEIGHT:g}, got {weight}")
    per_polygon = at == "faces" and len(p) == mesh.polygon_count
    areas = element_areas(mesh, at, per_polygon)
    if p.ndim != 2 or len(p) != len(areas) or p.shape[1] == 0:
        raise ValueError(
            f"probabilities should have shape ({len(areas)}, C), one row for each of {at}, shape is {p.shape}"
        )
    if not (np.isfinite(p).all() and (p >= 0).all()):
        raise ValueError("probabilities should be finite and at least 0")
    borders = border_lengths(mesh, at, per_polygon)
    costs = (-np.log(np.maximum(p, 1e-12)) * (areas / max(areas.mean(), 1e-300))[:, None]).astype(np.float32)
    strength = weight * borders / max(float(borders.data.mean()) if borders.nnz else 0.0, 1e-300)
    strength = strength.astype(np.float32)  # twice as fast as float64
    shares = softmax(-costs, axis=1)
    for _ in range(_MAX_STEPS):
        # Neighbors attract with their shares. Half of each step keeps regions from swapping their labels in turn.
        new = (shares + softmax(strength @ shares - costs, axis=1)) / 2
        change, shares = float(np.abs(new - shares).max(initial=0.0)), new
        if change < _MAX_CHANGE:
            break
    # An element without area and neighbors has equal shares.
    lone = (areas == 0) & (np.diff(strength.indptr) == 0)
    return np.where(lone, p.argmax(axis=1), shares.argmax(axis=1)).astype(np.int64)
