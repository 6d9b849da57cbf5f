"""Drawing surfaces, and the colors of labels."""

from typing import Any

import numpy as np
import pytest
import trimesh

from diffnet.geometry import mesh_edges
from diffnet.viz.fields import make_field
from diffnet.viz.palette import UNLABELED_COLOR, colorize, label_colors
from diffnet.viz.render import BACKGROUND, draw, paint
from diffnet.viz.surface import corner_normals, face_elements, make_surface
from diffnet.viz.view import default_view

RED, BLUE = np.array([[220, 30, 30], [30, 60, 220]], np.uint8)
COLORS = np.stack([RED, BLUE])


def sphere(
    radius: float = 1.0, center: tuple[float, float, float] = (0, 0, 0), subdivisions: int = 3
) -> tuple[np.ndarray, np.ndarray]:
    mesh = trimesh.creation.icosphere(subdivisions=subdivisions, radius=radius)
    return np.asarray(mesh.vertices) + center, np.asarray(mesh.faces)


def render(
    verts: Any,
    faces: Any,
    labels: Any,
    *,
    at: str = "vertices",
    size: tuple[int, int] = (600, 600),
    view: tuple[float, float] | None = None,
    colors: np.ndarray | None = None,
) -> np.ndarray:
    surface = make_surface(verts, faces)
    labels = make_field("labels", "labels", labels, surface, at).values
    return paint(draw(surface, at, size, view), colorize(labels, colors))


def covered(image: np.ndarray) -> np.ndarray:
    return (image != BACKGROUND).any(axis=-1)


def is_red(image: np.ndarray) -> np.ndarray:
    rgb = image.astype(int)
    return (rgb[..., 0] > 2 * rgb[..., 2]) & covered(image)


def is_blue(image: np.ndarray) -> np.ndarray:
    rgb = image.astype(int)
    return (rgb[..., 2] > 2 * rgb[..., 0]) & covered(image)


def test_a_sphere_fills_its_disk_and_nothing_else() -> None:
    verts, faces = sphere()
    image = render(verts, faces, np.zeros(len(verts), int), size=(200, 160))
    assert image.shape == (160, 200, 3)
    assert image.dtype == np.uint8
    y, x = np.mgrid[:160, :200] + 0.5
    away = np.hypot(x - 100, y - 80) / 72  # the margin is 5 % of the height on each side
    assert covered(image)[away < 0.96].all()
    assert not covered(image)[away > 1.03].any()


def test_surfaces_are_shaded() -> None:
    verts, faces = sphere()
    brightness = render(verts, faces, np.zeros(len(verts), int), size=(100, 100)).sum(axis=-1)
    assert brightness[30, 35] > 1.15 * brightness[75, 50]  # the light comes from the upper left
    assert brightness[50, 50] > 1.15 * brightness[50, 7]  # darker toward the outline


@pytest.mark.parametrize(("toward", "seen"), [(-1.5, False), (1.5, True)])
@pytest.mark.parametrize("red_first", [True, False])
def test_hidden_surfaces_are_hidden(toward: float, seen: bool, red_first: bool) -> None:
    big, small = sphere(1.0), sphere(0.3, (toward, 0, 0))
    first, second = (small, big) if red_first else (big, small)
    verts = np.concatenate([first[0], second[0]])
    faces = np.concatenate([first[1], second[1] + len(first[0])])
    labels = np.repeat([0, 1] if red_first else [1, 0], [len(first[0]), len(second[0])])
    image = render(verts, faces, labels, size=(120, 120), view=(90, 0), colors=COLORS)
    assert is_red(image).any() == seen
    assert is_blue(image).any()


def test_labels_are_never_blended() -> None:
    # One large triangle with a different label at each corner.
    verts = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0]], float)
    image = render(verts, [[0, 1, 2]], [0, 1, 2], size=(90, 90), view=(0, 0))
    inner = image[covered(image)].astype(float)
    hues = inner / np.linalg.norm(inner, axis=1, keepdims=True)
    pure = label_colors(3) / np.linalg.norm(label_colors(3).astype(float), axis=1, keepdims=True)
    closest = np.abs(hues[:, None] - pure).max(-1).min(1)
    assert (closest < 0.02).mean() > 0.9  # the rest are antialiased borders, one pixel wide
    assert all((np.abs(hues - hue).max(-1) < 0.02).mean() > 0.2 for hue in pure)
    assert np.abs(image[70, 15] / np.linalg.norm(image[70, 15]) - pure[0]).max() < 0.02  # near corner 0


def test_labels_at_faces_and_edges() -> None:
    verts = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]], float)
    faces = np.array([[0, 1, 2], [0, 2, 3]])
    image = render(verts, faces, [0, 1], at="faces", size=(60, 60), view=(0, 0), colors=COLORS)
    assert is_red(image)[45, 50]
    assert is_blue(image)[15, 10]
    for k, edge in enumerate(mesh_edges(faces).tolist()):
        labels = np.ones(5, int)
        labels[k] = 0
        image = render(verts, faces, labels, at="edges", size=(60, 60), view=(0, 0), colors=COLORS)
        near = verts[edge].mean(axis=0) * 0.9 + [0.05, 0.05, 0]
        across, down = round(3 + 54 * near[0]), round(57 - 54 * near[1])
        assert is_red(image)[down, across], edge
        assert is_red(image).sum() == pytest.approx(54 * 54 * (0.41 if edge == [0, 2] else 0.147), rel=0.15)


@pytest.mark.parametrize("at", ["vertices", "faces", "edges"])
def test_pictures_of_several_labelings_share_a_drawing(at: str) -> None:
    verts, faces = sphere(subdivisions=2)
    count = {"vertices": len(verts), "faces": len(faces), "edges": len(mesh_edges(faces))}[at]
    drawing = draw(make_surface(verts, faces), at, (50, 40))
    for seed in range(2):
        labels = np.random.default_rng(seed).integers(-1, 9, count)
        expected = render(verts, faces, labels, at=at, size=(50, 40))
        np.testing.assert_array_equal(paint(drawing, colorize(labels)), expected)
    assert len(np.unique(paint(drawing, colorize(labels)).reshape(-1, 3), axis=0)) > 9


def test_no_gaps_between_triangles() -> None:
    """A square cut into long slivers is filled, also where their sides pass through the centers of samples."""
    ends = np.concatenate([np.linspace(0, 1, 241), np.random.default_rng(0).uniform(0, 1, 300)])
    x, n = np.sort(ends), len(ends)
    verts = np.concatenate([np.stack([x, np.full(n, y), np.zeros(n)], axis=1) for y in (0, 1)])
    i = np.arange(n - 1)
    faces = np.concatenate([np.stack([i, i + 1, i + n], axis=1), np.stack([i + 1, i + 1 + n, i + n], axis=1)])
    image = render(verts, faces, np.zeros(len(verts), int), size=(80, 80), view=(0, 0))
    assert len(np.unique(image[5:75, 5:75].reshape(-1, 3), axis=0)) == 1


def test_sides_of_faces_are_numbered_as_edges() -> None:
    _, faces = sphere(subdivisions=2)
    edges, sides = mesh_edges(faces), face_elements(faces, "edges")
    for k in range(3):
        expected = np.sort(np.delete(faces, k, axis=1), axis=1)
        np.testing.assert_array_equal(edges[sides[:, k]], expected)


def test_point_cloud() -> None:
    verts, _ = sphere(subdivisions=2)
    for faces in (None, [], np.zeros((0, 3), int)):
        image = render(verts, faces, (verts[:, 0] > 0).astype(int), size=(120, 120), view=(0, 0), colors=COLORS)
        assert 0.2 < covered(image).mean() < 0.75
        assert is_red(image)[:, :55].any()
        assert not is_red(image)[:, 72:].any()
        assert is_blue(image)[:, 65:].any()
    assert covered(render([[5, 5, 5]], None, [0], size=(40, 40))).sum() > 3


def test_degenerate_triangles_are_left_out() -> None:
    verts = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [np.nan, 0, 0], [9, 9, 9], [np.inf, 0, 0]])
    alone = render(verts[:3], [[0, 1, 2]], np.zeros(3, int), size=(50, 40))
    faces = [[0, 1, 2], [0, 1, 3], [0, 0, 0], [0, 0, 1], [1, 2, 5]]
    np.testing.assert_array_equal(render(verts, faces, np.zeros(6, int), size=(50, 40)), alone)
    assert not covered(render(verts, [[3, 3, 3]], np.zeros(6, int), size=(50, 40))).any()
    assert not covered(render(np.zeros((0, 3)), None, np.zeros(0, int), size=(50, 40))).any()
    render(verts, [[0, 0, 0]], [0], at="faces", size=(50, 40))
    render(verts, None, np.zeros(6, int), size=(50, 40))


def test_both_sides_are_lit_and_orientation_does_not_matter() -> None:
    verts, faces = sphere()
    flipped = faces[:, ::-1]
    labels = np.zeros(len(verts), int)
    image = render(verts, faces, labels, size=(80, 80)).astype(int)
    assert np.abs(image - render(verts, flipped, labels, size=(80, 80))).max() <= 1


def test_the_widest_side_faces_the_viewer() -> None:
    rng = np.random.default_rng(0)
    for extents, up in (((3, 2, 0.2), "y"), ((3, 0.2, 2), "z"), ((0.2, 3, 2), "y"), ((0.2, 2, 3), "z")):
        points = rng.uniform(-1, 1, (500, 3)) * extents
        view = default_view(points)
        assert view.up == up
        thin_is_ahead = extents[2 if up == "y" else 1] == 0.2
        assert view.azimuth == pytest.approx(15 if thin_is_ahead else 105, abs=3)
        image = render(points, None, np.zeros(500, int), size=(90, 90))
        rows, columns = np.nonzero(covered(image))
        tall = extents["xyz".index(up)] / max(extents[0], extents[1 if up == "z" else 2])
        assert np.ptp(rows) / np.ptp(columns) == pytest.approx(tall, rel=0.35)


def test_view_rotates_the_picture() -> None:
    verts = np.array([[0, 0, 0], [1, 0, 0], [0, 2, 0], [0, 0, 1]], float)
    faces = [[0, 1, 2], [0, 2, 3]]
    front = render(verts, faces, [0, 1], at="faces", size=(80, 80), view=(0, 0), colors=COLORS)
    side = render(verts, faces, [0, 1], at="faces", size=(80, 80), view=(-90, 0), colors=COLORS)
    assert is_red(front).any()
    assert not is_blue(front).any()
    assert is_blue(side).any()
    assert not is_red(side).any()


def test_smooth_and_sharp_normals() -> None:
    verts, faces = sphere()
    assert np.abs(corner_normals(verts, faces) - verts[faces]).max() < 0.02
    box = trimesh.creation.box()
    normals = corner_normals(np.asarray(box.vertices), np.asarray(box.faces))
    np.testing.assert_allclose(normals, np.repeat(box.face_normals[:, None], 3, axis=1), atol=1e-9)


def test_faces_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="index 3 vertices"):
        render(np.eye(3), [[0, 1, 7]], [0, 1, 2])


def test_colors_are_distinct_and_stable() -> None:
    many = label_colors(600)
    assert len(np.unique(many, axis=0)) == 600
    np.testing.assert_array_equal(many[:7], label_colors(7))
    assert np.abs(label_colors(10)[:, None].astype(int) - UNLABELED_COLOR).max(-1).min() > 40
    assert label_colors(3000).shape == (3000, 3)


def test_unlabeled_is_gray() -> None:
    np.testing.assert_array_equal(colorize([[-1, 2], [1, -5]])[[0, 1], [0, 1]], [UNLABELED_COLOR] * 2)
    np.testing.assert_array_equal(colorize([[-1, 2], [1, -5]])[0, 1], label_colors(3)[2])
    assert colorize([]).shape == (0, 3)
    assert colorize([-1]).tolist() == [list(UNLABELED_COLOR)]
