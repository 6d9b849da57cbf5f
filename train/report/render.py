"""Pictures of labeled surfaces, drawn in NumPy: no GPU, no display, no OpenGL."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diffnet.data.labeled import LabelsAt
from diffnet.geometry import mesh_edges
from diffnet.train.report.palette import colorize

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BACKGROUND = (250, 250, 251)
_OVERSAMPLE = 3  # samples per pixel and axis
_MARGIN = 0.05  # of the picture, on each side
_BATCH = 4_000_000  # samples drawn at once, which bounds the memory
_KEY_LIGHT = np.array([-0.45, 0.62, 0.64])
_FILL_LIGHT = np.array([0.80, 0.05, 0.60])


class View(NamedTuple):
    """Where the viewer stands. Angles are in degrees.

    up: the coordinate axis that points up in the picture, "y" or "z"
    azimuth: 0 looks from +z where y is up, from -y where z is up; it grows counterclockwise as seen from above
    elevation: height above the horizon, 90 looks straight down
    """

    up: str
    azimuth: float
    elevation: float


def render(
    verts: Any,
    faces: Any,
    labels: Any,
    *,
    at: LabelsAt = "vertices",
    size: tuple[int, int] = (600, 600),
    view: tuple[float, float] | None = None,
    colors: NDArray[np.uint8] | None = None,
) -> NDArray[np.uint8]:
    """A picture (H, W, 3) uint8 of a mesh or point cloud, each element in the color of its label.

    verts: (V, 3); faces: (F, 3), None or empty for a point cloud, which is drawn as small balls
    labels: (V,), (F,) or (E,) integers, according to `at`; edges are numbered as `mesh_edges` does. Negative labels are
        grey. Labels are never blended: a point of the surface has the label of the nearest corner or side of its
        triangle.
    size: width and height in pixels
    view: azimuth and elevation in degrees, see `View`; default: see `default_view`, which also chooses what is up
    colors: (n, 3) uint8, colors to use instead of `label_colors`

    Orthographic. Both sides of the surface are drawn. Triangles or points with NaN or infinite coordinates are left
    out; where nothing is left, the picture is empty. Raises ValueError where shapes don't fit.
    """
    verts, faces, labels = check_labeled(verts, faces, labels, at)
    width, height = size
    if width < 1 or height < 1:
        raise ValueError(f"the picture's size should be at least 1 × 1, is {width} × {height}")
    samples = (height * _OVERSAMPLE, width * _OVERSAMPLE)
    image = np.empty((samples[0] * samples[1], 3), np.uint8)
    image[:] = BACKGROUND
    points = shown_points(verts, faces)
    if len(points):
        chosen = default_view(points)
        if view is not None:
            chosen = View(chosen.up, *view)
        rotation = _rotation(chosen)
        screen, scale = _to_screen(verts, points, rotation, samples)
        if len(faces):
            drawn = _draw_faces(verts, faces, screen, rotation, labels, at, samples)
        else:
            drawn = _draw_points(screen, labels, samples, _ball_radius(points, rotation, scale))
        for pixels, normals, seen in drawn:
            image[pixels] = (colorize(seen, colors) * _shade(normals)[:, None]).clip(0, 255)
    blocks = image.reshape(height, _OVERSAMPLE, width, _OVERSAMPLE, 3)
    smooth: NDArray[np.uint8] = blocks.mean(axis=(1, 3)).round().astype(np.uint8)
    return smooth


def default_view(points: Any) -> View:
    """The view of points (N, 3), all finite, that `render` takes unless told otherwise.

    Up is y or z, whichever the points extend farther along (y where equal). The viewer stands where the points look
    widest, which is along the horizontal direction of least variance, then steps 15° aside and 15° up so that depth
    shows.
    """
    extent = np.ptp(points, axis=0)
    up = "z" if extent[2] > extent[1] else "y"
    right, _, front = _axes(up)
    flat = (points - points.mean(axis=0)) @ np.stack([right, front], axis=1)
    across, toward = np.linalg.eigh(flat.T @ flat)[1][:, 0]
    if across + toward < 0:  # of the two sides the one nearer to azimuths 0 and 90
        across, toward = -across, -toward
    return View(up, float(np.degrees(np.arctan2(across, toward))) + 15.0, 15.0)


def shown_points(verts: Floats, faces: Ints) -> Floats:
    """The points (N, 3) that a picture has to hold: finite ones and, on a mesh, those that a face uses."""
    if len(faces):
        verts = verts[np.unique(faces)]
    return verts[np.isfinite(verts).all(axis=1)]


def check_labeled(verts: Any, faces: Any, labels: Any, at: LabelsAt) -> tuple[Floats, Ints, Ints]:
    """The arguments as arrays (V, 3) float64, (F, 3) int64 and (N,) int64; ValueError where they don't fit together."""
    verts = np.asarray(verts, np.float64)
    if verts.ndim != 2 or verts.shape[1] != 3:
        raise ValueError(f"vertices should have shape (V, 3), shape is {verts.shape}")
    faces = np.zeros((0, 3), np.int64) if faces is None or len(faces) == 0 else np.asarray(faces, np.int64)
    if faces.ndim != 2 or faces.shape[1] != 3:
        raise ValueError(f"faces should have shape (F, 3), shape is {faces.shape}")
    if len(faces) and not (faces.min() >= 0 and faces.max() < len(verts)):
        raise ValueError(f"faces should index {len(verts)} vertices, but run from {faces.min()} to {faces.max()}")
    if at == "vertices":
        count = len(verts)
    elif at == "faces":
        count = len(faces)
    elif at == "edges":
        count = len(mesh_edges(faces))
    else:
        raise ValueError(f"labels are at vertices, faces or edges, not at {at!r}")
    if not len(faces) and at != "vertices":
        raise ValueError(f"a point cloud has no {at} to label")
    labels = np.asarray(labels)
    if labels.shape != (count,):
        raise ValueError(f"labels at {at} should have shape ({count},), shape is {labels.shape}")
    if not (np.issubdtype(labels.dtype, np.integer) or labels.dtype == bool):
        raise ValueError(f"labels should be integers, dtype is {labels.dtype}")
    return verts, faces, labels.astype(np.int64)


def face_elements(faces: Ints, at: LabelsAt) -> Ints:
    """For every face, the three elements (F, 3) int64 that color it.

    Those are its corners for labels at vertices, itself for labels at faces, and for labels at edges its sides, of
    which the k-th lies opposite its k-th corner.
    """
    if at == "vertices":
        return faces
    if at == "faces":
        return np.repeat(np.arange(len(faces))[:, None], 3, axis=1)
    edges = mesh_edges(faces)
    stride = int(faces.max(initial=0)) + 1
    keys = edges[:, 0] * stride + edges[:, 1]
    order = np.argsort(keys)
    sides = np.sort(faces[:, [[1, 2], [2, 0], [0, 1]]], axis=-1)
    found: Ints = order[np.searchsorted(keys, sides[..., 0] * stride + sides[..., 1], sorter=order)]
    return found


def corner_normals(verts: Floats, faces: Ints) -> Floats:
    """A unit normal (F, 3, 3) for every corner of every face.

    It is the mean over the faces at the vertex, weighted by their angles there, or the face's own normal where that
    lies far from the mean (at a sharp edge, or where neighbors disagree on which side is out). Faces without area have
    0.
    """
    corners = verts[faces]
    along = _unit(np.roll(corners, -1, axis=1) - corners)
    angles = np.arccos((along * -np.roll(along, 1, axis=1)).sum(-1).clip(-1, 1))
    own = _unit(np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0]))[:, None]
    weighted = (own * angles[..., None]).reshape(-1, 3)
    mean = np.zeros_like(verts)
    for i in range(3):
        mean[:, i] = np.bincount(faces.ravel(), weighted[:, i], len(verts))
    smooth = _unit(mean)[faces]
    return np.where((smooth * own).sum(-1, keepdims=True) > 0.6, smooth, own)


def _unit(vectors: Floats) -> Floats:
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    unit: Floats = np.divide(vectors, length, out=np.zeros_like(vectors), where=length > 0)
    return unit


def _axes(up: str) -> tuple[Floats, Floats, Floats]:
    """The directions right, up and toward the viewer at azimuth and elevation 0."""
    x, y, z = np.eye(3)
    return (x, y, z) if up == "y" else (x, z, -y)


def _rotation(view: View) -> Floats:
    """The picture's directions right, up and toward the viewer, as the rows of (3, 3)."""
    right, up, front = _axes(view.up)
    a, e = np.radians(view.azimuth), np.radians(view.elevation)
    ahead = np.sin(a) * right + np.cos(a) * front
    across = np.cos(a) * right - np.sin(a) * front
    toward = np.cos(e) * ahead + np.sin(e) * up
    return np.stack([across, np.cross(toward, across), toward])


def _to_screen(verts: Floats, points: Floats, rotation: Floats, samples: tuple[int, int]) -> tuple[Floats, float]:
    """(V, 3) x to the right, y down, depth away from the viewer, in samples, and how many samples a unit has."""
    turned = points @ rotation.T
    low, high = turned.min(axis=0), turned.max(axis=0)
    height, width = samples
    # A single point, or points in line behind each other, would be magnified without end.
    extent = np.maximum(high - low, 1e-6 * np.abs(turned).max() + 1e-30)
    scale = float(min(width / extent[0], height / extent[1]) * (1 - 2 * _MARGIN))
    middle = (verts @ rotation.T - (low + high) / 2) * scale
    return middle * [1, -1, -1] + [width / 2, height / 2, 0], scale


def _draw_faces(
    verts: Floats,
    faces: Ints,
    screen: Floats,
    rotation: Floats,
    labels: Ints,
    at: LabelsAt,
    samples: tuple[int, int],
) -> Iterator[tuple[Ints, Floats, Ints]]:
    """Batches of covered samples (N,), with the surface's normals (N, 3) toward the viewer and labels (N,) there."""
    elements = face_elements(faces, at)
    finite = np.isfinite(screen[faces]).all(axis=(1, 2))
    faces, elements = faces[finite], elements[finite]
    triangles = screen[faces]
    normals = corner_normals(verts, faces) @ rotation.T
    corners = verts[faces]
    sides = np.linalg.norm(np.roll(corners, -2, axis=1) - np.roll(corners, -1, axis=1), axis=-1)
    for pixels, owner in _nearest_faces(triangles, samples).visible():
        weights = _barycentric(triangles[owner], pixels, samples[1])
        normal = _unit((normals[owner] * weights[..., None]).sum(axis=1))
        normal *= np.where(normal[:, 2:] < 0, -1.0, 1.0)
        if at == "edges":
            # The distance to a side is its corner's weight times a height, and heights are as 1 / side.
            nearest = (weights / np.maximum(sides, 1e-300)[owner]).argmin(axis=1)
        else:
            nearest = weights.argmax(axis=1)
        yield pixels, normal, labels[elements[owner, nearest]]


def _nearest_faces(triangles: Floats, samples: tuple[int, int]) -> _DepthBuffer:
    """The triangles (F, 3, 3) on the screen, drawn over each other.

    Triangles are cut into rows and rows into samples, so the work is proportional to what is covered, however thin the
    triangles are.
    """
    nearest = _DepthBuffer(triangles[..., 2], samples)
    first = _first_center(triangles[..., 1].min(axis=1), samples[0])
    rows = _first_center(triangles[..., 1].max(axis=1), samples[0]) - first
    slopes = _depth_slopes(triangles)
    near, far = triangles[..., 2].min(axis=1), triangles[..., 2].max(axis=1)
    for part in _batches(rows, _BATCH // 4):
        face, step = _spread(rows[part])
        face += part.start
        y = first[face] + step
        left, right = _crossings(triangles[face], y + 0.5)
        corner = triangles[face, 0]
        # The depth at the row's left end, x = 0; it is taken from a corner because edge-on planes are steep.
        depth = corner[:, 2] + (y + 0.5 - corner[:, 1]) * slopes[face, 1] + (0.5 - corner[:, 0]) * slopes[face, 0]
        start = _first_center(left, samples[1])
        counts = np.maximum(_first_center(right, samples[1]) - start, 0)
        for columns in _batches(counts, _BATCH):
            row, step = _spread(counts[columns])
            row += columns.start
            x = start[row] + step
            owner = face[row]
            at = (depth[row] + slopes[owner, 0] * x).clip(near[owner], far[owner])
            nearest.put(y[row] * samples[1] + x, at, owner)
    return nearest


def _crossings(triangles: Floats, y: NDArray[np.floating[Any]]) -> tuple[Floats, Floats]:
    """Where the horizontal lines y (N,) enter and leave the triangles (N, 3, 3)."""
    ends = np.roll(triangles, -1, axis=1)
    # Half-open, so that a line through a vertex meets exactly two sides.
    meets = (triangles[..., 1] <= y[:, None]) != (ends[..., 1] <= y[:, None])
    rise = np.where(meets, ends[..., 1] - triangles[..., 1], 1.0)
    x = triangles[..., 0] + (y[:, None] - triangles[..., 1]) / rise * (ends[..., 0] - triangles[..., 0])
    return np.where(meets, x, np.inf).min(axis=1), np.where(meets, x, -np.inf).max(axis=1)


def _depth_slopes(triangles: Floats) -> Floats:
    """How fast depth grows along x and y (F, 2) in each triangle's plane, 0 where that is seen edge-on."""
    b, c = triangles[:, 1] - triangles[:, 0], triangles[:, 2] - triangles[:, 0]
    area = b[:, 0] * c[:, 1] - b[:, 1] * c[:, 0]
    area[area == 0] = np.inf
    slopes = np.stack([b[:, 2] * c[:, 1] - b[:, 1] * c[:, 2], b[:, 0] * c[:, 2] - b[:, 2] * c[:, 0]], axis=1)
    return slopes / area[:, None]


def _barycentric(triangles: Floats, pixels: Ints, width: int) -> Floats:
    """The weights (N, 3) of the corners at the samples' centers, none negative."""
    at = np.stack([pixels % width, pixels // width], axis=1) + 0.5
    to = triangles[..., :2] - at[:, None]
    after, last = np.roll(to, -1, axis=1), np.roll(to, -2, axis=1)
    opposite = after[..., 0] * last[..., 1] - after[..., 1] * last[..., 0]
    weights = np.maximum(opposite * np.sign(opposite.sum(axis=1, keepdims=True)), 0)
    total = weights.sum(axis=1, keepdims=True)
    shares: Floats = np.divide(weights, total, out=np.full_like(weights, 1 / 3), where=total > 0)
    return shares


def _ball_radius(points: Floats, rotation: Floats, scale: float) -> float:
    """In samples: about half the distance of neighbors, were the points spread evenly over what they cover."""
    extent = np.ptp(points @ rotation[:2].T, axis=0) * scale
    even = 0.75 * np.sqrt(extent[0] * extent[1] / len(points))
    return float(np.clip(even, 1.2 * _OVERSAMPLE, 12.0 * _OVERSAMPLE))


def _draw_points(
    screen: Floats, labels: Ints, samples: tuple[int, int], radius: float
) -> Iterator[tuple[Ints, Floats, Ints]]:
    """As `_draw_faces`, for balls of a radius in samples around the points."""
    finite = np.isfinite(screen).all(axis=1)
    screen, labels = screen[finite], labels[finite]
    nearest = _DepthBuffer(screen[:, 2] - [[radius], [0.0]], samples)
    reach = np.arange(-int(np.ceil(radius)), int(np.ceil(radius)) + 1)
    dy, dx = (grid.ravel() for grid in np.meshgrid(reach, reach, indexing="ij"))
    for part in _batches(np.full(len(screen), len(dx)), _BATCH):
        center = screen[part]
        x, y = np.floor(center[:, :1]).astype(int) + dx, np.floor(center[:, 1:2]).astype(int) + dy
        away = (x + 0.5 - center[:, :1]) ** 2 + (y + 0.5 - center[:, 1:2]) ** 2
        inside = (away < radius**2) & (x >= 0) & (x < samples[1]) & (y >= 0) & (y < samples[0])
        point = np.nonzero(inside)[0]
        depth = center[point, 2] - np.sqrt(radius**2 - away[inside])
        nearest.put((y * samples[1] + x)[inside], depth, point + part.start)
    for pixels, owner in nearest.visible():
        place = np.stack([pixels % samples[1], pixels // samples[1]], axis=1) + 0.5
        offset = (place - screen[owner, :2]) / radius
        toward = np.sqrt(np.maximum(1 - (offset**2).sum(axis=1), 0))
        yield pixels, np.stack([offset[:, 0], -offset[:, 1], toward], axis=1), labels[owner]


def _shade(normals: Floats) -> Floats:
    """Brightness (N,) of a surface with normals (N, 3) in view: two lights, ambient, and darker toward the outline."""
    key = np.maximum(normals @ (_KEY_LIGHT / np.linalg.norm(_KEY_LIGHT)), 0)
    fill = np.maximum(normals @ (_FILL_LIGHT / np.linalg.norm(_FILL_LIGHT)), 0)
    facing = normals[:, 2].clip(0, 1)
    brightness: Floats = (0.48 + 0.52 * key + 0.18 * fill) * (1 - 0.45 * (1 - facing) ** 3)
    return brightness


class _DepthBuffer:
    """For every sample of a picture, the nearest thing drawn there."""

    def __init__(self, depths: Floats, samples: tuple[int, int]) -> None:
        self._low = float(depths.min(initial=0.0))
        self._steps = (2**30 - 1) / max(float(depths.max(initial=0.0)) - self._low, 1.0)
        # Depth in the upper half of an integer, the thing in the lower: one minimum finds both, and ties are decided.
        self._keys = np.full(samples[0] * samples[1], np.iinfo(np.int64).max)

    def put(self, pixels: Ints, depth: Floats, things: Ints) -> None:
        """Draw things (N,), numbered below 2³², at samples (N,) and depths (N,) within those given at the start."""
        np.minimum.at(self._keys, pixels, (((depth - self._low) * self._steps).astype(np.int64) << 32) | things)

    def visible(self) -> Iterator[tuple[Ints, Ints]]:
        """Batches of the samples (N,) where anything was drawn, and what is nearest there (N,)."""
        pixels = np.flatnonzero(self._keys != np.iinfo(np.int64).max)
        for start in range(0, len(pixels), _BATCH // 8):
            part = pixels[start : start + _BATCH // 8]
            yield part, self._keys[part] & 0xFFFFFFFF


def _first_center(edge: Floats, limit: int) -> Ints:
    """The first of the samples 0 … limit - 1 whose center isn't before an edge; limit where there is none."""
    return np.ceil(edge - 0.5).clip(0, limit).astype(np.int64)


def _batches(sizes: Ints, limit: int) -> Iterator[slice]:
    """Slices over things of given sizes (N,) that hold about `limit` in sum, or a single thing."""
    group = (np.cumsum(sizes) - sizes) // limit
    bounds = [0, *(np.flatnonzero(np.diff(group)) + 1).tolist(), len(sizes)]
    for start, stop in pairwise(bounds):
        yield slice(start, stop)


def _spread(counts: Ints) -> tuple[Ints, Ints]:
    """For counts (N,), of each counted item its owner and its number there: [2, 1] gives [0, 0, 1] and [0, 1, 0]."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
