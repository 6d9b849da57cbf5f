"""Pictures with values, legends and arrows; drawing surfaces, and the colors of labels."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from PIL import Image
from refusals import refused

from diffnet.geometry import MeshError, mesh_edges, precompute
from diffnet.viz import COLOR_MAPS, UNLABELED_COLOR, View, label_colors, picture
from diffnet.viz.fields import make_field
from diffnet.viz.palette import color_table, colorize, make_scale, ticks
from diffnet.viz.pictures import Legend, label_legend, legend_image, short_names
from diffnet.viz.render import ARROW_COLOR, BACKGROUND, draw, paint
from diffnet.viz.shapes import vector_arrows
from diffnet.viz.surface import Surface, corner_normals, default_view, surface_of

SQUARE = ([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]], [[0, 1, 2], [0, 2, 3]])


def sphere(radius: float = 1.0, center: Any = (0, 0, 0), subdivisions: int = 3) -> tuple[np.ndarray, np.ndarray]:
    mesh = trimesh.creation.icosphere(subdivisions=subdivisions, radius=radius)
    return np.asarray(mesh.vertices) + center, np.asarray(mesh.faces)


def flat(mesh: Any, size: tuple[int, int] = (60, 60), **given: Any) -> np.ndarray:
    """The pixels of a picture from the front without a legend. A flat surface has one brightness."""
    return picture(mesh, size=size, view=(0, 0), legend=False, **given).pixels.astype(int)


LOW, HIGH = [68, 1, 84], [253, 231, 37]  # the ends of viridis


def hue(rgb: Any) -> np.ndarray:
    """Colors (..., 3) without their brightness."""
    rgb = np.asarray(rgb, float)
    return rgb / np.linalg.norm(rgb, axis=-1, keepdims=True)


def has_hues(image: np.ndarray, colors: dict[tuple[int, int], Any]) -> None:
    """The pixels at rows and columns have the hues of colors."""
    for place, color in colors.items():
        np.testing.assert_allclose(hue(image[place]), hue(color), atol=0.02)


def test_scalars_at_vertices_are_blended_before_they_are_colored() -> None:
    image = flat(SQUARE, scalars=[0.0, 1.0, 1.0, 0.0], size=(100, 100))
    for column in (10, 30, 50, 75, 90):
        expected = color_table("viridis")[round(255 * ((column + 0.5 - 5) / 90))]
        assert np.abs(hue(image[40, column]) - hue(expected)).max() < 0.03, column


def test_scalars_at_faces_and_edges_are_not_blended() -> None:
    image = flat(SQUARE, scalars=[0.0, 1.0])
    assert len(np.unique(image[10:50, 10:50].reshape(-1, 3), axis=0)) < 80  # two colors, and one border
    has_hues(image, {(45, 50): LOW, (15, 10): HIGH})
    edges = mesh_edges(np.array(SQUARE[1])).tolist()
    at_edges = flat(SQUARE, scalars=[float(edge == [0, 1]) for edge in edges])
    has_hues(at_edges, {(54, 30): HIGH, (30, 30): LOW})


def test_nan_is_gray_and_leaves_its_neighbors_alone() -> None:
    image = flat(SQUARE, scalars=[np.nan, 1.0, 1.0, 1.0], range=(0, 1))
    has_hues(image, {(54, 6): UNLABELED_COLOR, (30, 45): HIGH, (20, 30): HIGH})
    ends = flat(SQUARE, scalars=[-np.inf, 1e300], at="faces", range=(0, 1))
    has_hues(ends, {(45, 50): LOW, (15, 10): HIGH})
    has_hues(flat(SQUARE, scalars=[np.nan] * 4), {(30, 30): UNLABELED_COLOR})


def test_colors() -> None:
    given = np.array([[255, 0, 0], [0, 0, 255], [0, 0, 255], [255, 0, 0]])
    image = flat(SQUARE, colors=given)
    np.testing.assert_array_equal(image, flat(SQUARE, colors=given / 255))
    np.testing.assert_array_equal(image, flat(SQUARE, colors=np.c_[given, [9, 9, 9, 9]].astype(np.uint8)))
    middle = hue(image[30, 30])
    assert middle[0] == pytest.approx(middle[2], abs=0.05)  # blended
    has_hues(flat(SQUARE, colors=np.full((2, 3), np.nan)), {(30, 30): UNLABELED_COLOR})


def test_labels_and_unlabeled() -> None:
    image = flat(SQUARE, labels=[-3, 2])
    has_hues(image, {(45, 50): UNLABELED_COLOR, (15, 10): label_colors(3)[2]})
    np.testing.assert_array_equal(flat(SQUARE, labels=[True, False]), flat(SQUARE, labels=[1, 0]))
    flat(SQUARE, labels=[0, 10**12])  # colors repeat
    assert colorize([]).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32])
def test_tensors(dtype: torch.dtype) -> None:
    given = torch.tensor([0, 1, 2, 4], dtype=dtype)
    scalars = given.requires_grad_() if dtype.is_floating_point else given
    np.testing.assert_array_equal(flat(SQUARE, scalars=scalars), flat(SQUARE, scalars=[0, 1, 2, 4]))


def test_every_kind_of_mesh(tmp_path: Path) -> None:
    verts, faces = sphere(subdivisions=2)
    height = verts[:, 1]
    expected = flat((verts, faces), scalars=height)
    trimesh.Trimesh(verts, faces, process=False).export(tmp_path / "ball.ply")
    tensors = (torch.tensor(verts), torch.tensor(faces))
    sources = [tensors, trimesh.Trimesh(verts, faces, process=False), SimpleNamespace(vertices=verts, faces=faces)]
    for source in sources:
        np.testing.assert_array_equal(flat(source, scalars=height), expected)
    read = flat(str(tmp_path / "ball.ply"), scalars=height)  # the file has single precision
    assert (read != expected).any(-1).mean() < 0.02
    cloud = flat((verts, None), scalars=height)
    assert (cloud != BACKGROUND).any(-1).mean() > 0.2
    assert (cloud != flat((verts, None))).any()


def test_tangent_vectors() -> None:
    verts, faces = sphere(subdivisions=2)
    operators = precompute((verts, faces), k=4)
    tangent = torch.tensor([[1.0, 2.0]]).expand(len(verts), 2)
    frames = operators.frames.numpy()
    arrows = vector_arrows(surface_of((verts, faces)), tangent, operators)
    expected = vector_arrows(surface_of((verts, faces)), frames[:, 0] + 2 * frames[:, 1])
    np.testing.assert_allclose(arrows.verts, expected.verts, atol=1e-6)
    image = flat((verts, faces), vectors=tangent, frames=operators)
    np.testing.assert_array_equal(image, flat((verts, faces), vectors=tangent, frames=operators.frames))
    refused(MeshError, "operators hold no vertices", picture, operators)


def test_arrows() -> None:
    verts, faces = sphere(subdivisions=4)
    surface = surface_of((verts, faces))
    arrows = vector_arrows(surface, np.cross(verts, [0, 0, 1.0]))
    count = len(arrows.verts) // 24
    assert 100 < count <= 400
    starts = arrows.verts.reshape(count, 4, 6, 3)[:, 0].mean(axis=1)
    tips = arrows.verts.reshape(count, 4, 6, 3)[:, 3].mean(axis=1)
    assert np.linalg.norm(starts[:, None] - verts, axis=-1).min(1).max() < 1e-12
    np.testing.assert_allclose(np.cross(tips - starts, np.cross(starts, [0, 0, 1.0])), np.zeros((count, 3)), atol=1e-12)
    image = flat(SQUARE, size=(120, 120), vectors=[[0, 0, 0], [0.1, 0, 0], [np.nan, 0, 0], [0, 0, 0]])
    assert (image.max(-1) < 1.3 * max(ARROW_COLOR)).sum() > 20
    none = flat(SQUARE, size=(120, 120), vectors=np.zeros((2, 3)))
    np.testing.assert_array_equal(none, flat(SQUARE, size=(120, 120)))
    assert (flat((verts, None), vectors=verts) != flat((verts, None))).any()


def test_arrows_are_not_cut_off() -> None:
    verts, faces = sphere(subdivisions=2)
    image = picture((verts, faces), vectors=verts, size=(150, 150)).pixels
    border = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
    np.testing.assert_array_equal(border, np.broadcast_to(BACKGROUND, border.shape))


def test_several_shapes_share_one_scale() -> None:
    verts, faces = sphere(subdivisions=2)
    meshes = [(verts, faces)] * 5
    several = picture(meshes, scalars=[verts[:, 1] * i for i in range(5)], titles=list("abcde"), size=(50, 40)).pixels
    assert several.shape[0] > 2 * 40  # two rows, with titles
    assert several.shape[1] > 4 * 50  # four columns, and the color bar
    plain = picture(meshes, size=(50, 40)).pixels
    assert plain.shape == (80, 200, 3)
    np.testing.assert_array_equal(plain[40:, 50:], np.broadcast_to(BACKGROUND, (40, 150, 3)))
    fields = {"labels": [[0, 1], None], "colors": [None, np.zeros((len(verts), 3))]}
    assert picture([SQUARE, (verts, None)], **fields, size=(50, 40)).pixels.shape[1] > 100


def test_legends() -> None:
    verts, faces = sphere(subdivisions=1)
    size = (200, 160)
    labels = np.arange(len(verts)) % 3 - 1
    with_names = picture((verts, faces), labels=labels, label_names=["one", "two"], size=size).pixels
    assert with_names.shape[1] > 230
    side = with_names[:, 200:].reshape(-1, 3)
    for color in (*label_colors(2), UNLABELED_COLOR):
        assert (side == color).all(-1).sum() > 50
    legend = label_legend("heading", np.arange(-1, 300), ["zero", "one"])
    assert [name for name, _ in legend.entries[:3]] == ["zero", "one", "2"]
    assert legend.entries[-1] == ("unlabeled", UNLABELED_COLOR)
    assert legend_image(legend, 200, 12, BACKGROUND).height == 200  # the last line tells how many are left out
    bar = picture((verts, faces), scalars={"height (m)": verts[:, 1]}, size=size).pixels
    shown = {tuple(color) for color in bar[:, 200:].reshape(-1, 3).tolist()}
    assert len(shown & {tuple(color) for color in color_table("viridis").tolist()}) > 40
    assert picture((verts, faces), scalars=verts[:, 1], size=size, legend=False).pixels.shape == (160, 200, 3)


def test_a_picture_is_saved_and_shown(tmp_path: Path) -> None:
    shown = picture(SQUARE, size=(40, 30))
    assert repr(shown) == "Picture(40 × 30 pixels)"
    content = shown._repr_png_()  # the method that notebooks call
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(content))), shown.pixels)
    shown.save(tmp_path / "a.png")
    np.testing.assert_array_equal(np.asarray(Image.open(tmp_path / "a.png")), np.asarray(shown))
    shown.save(tmp_path / "a.JPG")
    assert Image.open(tmp_path / "a.JPG").size == (40, 30)
    for name in ("a", "a.xyz"):
        refused(ValueError, "unknown format", shown.save, tmp_path / name)


def test_views() -> None:
    verts, faces = sphere(subdivisions=2)
    mesh = (verts * [1, 2, 3], faces)
    chosen = picture(mesh, size=(60, 60), view=(20, 30)).pixels
    np.testing.assert_array_equal(chosen, picture(mesh, size=(60, 60), view=View("z", 20, 30)).pixels)
    assert (chosen != picture(mesh, size=(60, 60), view=View("y", 20, 30)).pixels).any()
    assert (chosen != picture(mesh, size=(60, 60)).pixels).any()


@pytest.mark.parametrize("name", [*COLOR_MAPS, "magma"])
def test_color_maps_are_those_of_matplotlib(name: str) -> None:
    import matplotlib

    color_map = matplotlib.colormaps[name]
    np.testing.assert_array_equal(color_table(name), color_table(color_map))
    assert np.abs(color_table(name) - color_map(np.linspace(0, 1, 256))[:, :3] * 255).max() <= 0.5


def test_scales() -> None:
    assert make_scale(np.array([1.0, np.nan, 3, np.inf]))[:2] == (1, 3)
    assert make_scale(np.array([-1.0, 3]), "coolwarm")[:2] == (-3, 3)
    assert make_scale(np.array([2, 2 + 1e-9]))[:2] == pytest.approx((1, 3))  # a constant and rounding errors
    assert make_scale(np.array([np.nan]))[:2] == (-1, 1)
    shares = make_scale(np.zeros(1), range=(0, 2)).shares(np.array([-1.0, 1, 9, np.inf, np.nan]))
    np.testing.assert_array_equal(shares, [0, 0.5, 1, 1, np.nan])


def test_ticks() -> None:
    assert [text for _, text in ticks(0, 1)] == ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]
    assert [text for _, text in ticks(-3e-7, 3e-7)][:2] == ["-3e-07", "-2e-07"]
    assert [text for _, text in ticks(1e6, 1.2e6)] == ["1.00e+06", "1.05e+06", "1.10e+06", "1.15e+06", "1.20e+06"]
    sizes = 10.0 ** np.arange(-9, 11).repeat(10)
    for low, high in np.random.default_rng(0).normal(size=(200, 2)) * sizes[:, None]:
        low, high = sorted((low, high))
        found = ticks(low, high)
        assert 3 <= len(found) <= 9
        assert all(low - 1e-9 * (high - low) <= number <= high + 1e-9 * (high - low) for number, _ in found)
        assert len({text for _, text in found}) == len(found)
        np.testing.assert_allclose([float(text) for _, text in found], [n for n, _ in found], atol=1e-6 * (high - low))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"labels": [0, 1, 2]}, "labels: 3 values do not fit 4 vertices, 2 faces or 5 edges"),
        ({"scalars": {"height": [0.0] * 7}}, "height: 7 values do not fit 4 vertices"),
        ({"scalars": [0.0] * 4, "at": "faces"}, "scalars: 4 values do not fit 2 faces"),
        ({"labels": [0] * 4, "at": "edges"}, "4 values do not fit 5 edges"),
        ({"scalars": [0.0] * 4, "at": "corners"}, "at should be vertices, faces or edges, got 'corners'"),
        ({"scalars": np.zeros((4, 2))}, r"scalars should have shape \(N,\), shape is \(4, 2\)"),
        ({"scalars": [1j] * 4}, "real numbers, dtype is complex128"),
        ({"labels": [0.0] * 4}, "labels should be integers, dtype is float64"),
        ({"colors": [0.0] * 4}, r"colors should have shape \(N, 3\), shape is \(4,\)"),
        ({"colors": np.full((4, 3), 255.0)}, "from 0 to 1, but run from 0 to 255"),
        ({"colors": np.full((4, 3), 256)}, "from 0 to 255, but run from 0 to 256"),
        ({"colors": np.full((4, 3), np.inf)}, "from 0 to 1, but run from 0 to inf"),
        ({"colors": np.full((3, 3), 0)}, "colors: 3 values do not fit 4 vertices"),
        ({"labels": [0] * 4, "scalars": [0.0] * 4}, "shows one field of each shape, got labels, scalars"),
        ({"vectors": np.zeros((4, 4))}, r"vectors: expected shape \(N, 3\)"),
        ({"vectors": np.zeros((3, 3))}, "vectors: 3 values do not fit 4 vertices"),
        ({"vectors": np.zeros((5, 3))}, "vectors: 5 vectors at edges"),
        ({"vectors": np.zeros((4, 2))}, "need frames"),
        ({"vectors": np.zeros((2, 2)), "frames": np.zeros((4, 3, 3))}, "2 tangent vectors do not fit 4 vertices"),
        ({"vectors": np.zeros((4, 2)), "frames": np.zeros((2, 3, 3))}, r"\(4, 3, 3\), shape is \(2, 3, 3\)"),
        ({"scalars": [0.0] * 4, "color_map": "rainbows"}, "unknown color_map 'rainbows', expected one of viridis, "),
        ({"scalars": [0.0] * 4, "color_map": 3}, "a name or a function, got int"),
        ({"scalars": [0.0] * 4, "color_map": lambda x: x}, r"got values of shape \(256,\)"),
        ({"scalars": [0.0] * 4, "range": (1, 1)}, r"increasing finite numbers, got \(1, 1\)"),
        ({"scalars": [0.0] * 4, "range": 3}, "two numbers"),
        ({"titles": ["a", "b"]}, "2 titles do not fit 1 shape"),
        ({"size": (0, 5)}, "at least 1 × 1"),
    ],
)
def test_arguments_that_do_not_fit_are_named(given: dict[str, Any], message: str) -> None:
    refused(ValueError, message, picture, SQUARE, **given)


def test_lists_that_do_not_fit_are_named() -> None:
    refused(ValueError, "labels: a list of 1 does not fit 2 meshes", picture, [SQUARE, SQUARE], labels=[[0] * 4])
    with pytest.raises(ValueError, match="scalars: for a list of 2 meshes, expected a list, got ndarray"):
        picture([SQUARE, SQUARE], scalars=np.zeros((2, 4)))
    refused(ValueError, "a point cloud has no faces", picture, (SQUARE[0], None), labels=[0] * 4, at="faces")
    with pytest.raises(ValueError, match="5 values do not fit 4 points"):
        make_field("labels", "labels", [0] * 5, surface_of((SQUARE[0], None)))
    refused(MeshError, "got int 3", picture, 3)
    refused(MeshError, r"face 0 is \[0, 1, 7\]", picture, (np.eye(3), [[0, 1, 7]]))


def test_pictures_load_no_pytorch_and_labels_no_matplotlib() -> None:
    code = """import sys
from diffnet import viz
mesh = ([[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[0, 1, 2]])
viz.picture(mesh, labels={'x': [0, 1, 2]}, titles='a')._repr_png_()
print('matplotlib' in sys.modules)
viz.page(mesh, scalars=[0, 1, 2])
print('torch' in sys.modules)"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\nFalse\n"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["upper_jaw_left", "upper_jaw_right", "gum"], ["uppe…_left", "uppe…right", "gum"]),
        (["left_first_surface", "left_second_surface"], ["…first_su…", "…second_s…"]),
        (["a" * 30, "a" * 30], ["aaaa…aaaaa"] * 2),  # equal names stay equal
        (["", "a"], ["", "a"]),
    ],
)
def test_long_names_differ_where_they_are_cut(names: list[str], expected: list[str]) -> None:
    assert short_names(names, lambda text: len(text) <= 10) == expected


def test_titles_and_legends_of_long_names_differ() -> None:
    """Names that differ at the end only."""
    names = [f"{'surface of a body part ' * 3}{side}" for side in ("left", "right")]
    one, two = (label_legend("", np.array([i]), names) for i in (0, 1))
    colors = [(name, (0, 0, 0)) for name, _ in (*one.entries, *two.entries)]
    images = [np.asarray(legend_image(Legend("", [each]), 40, 12, BACKGROUND)) for each in colors]
    assert not np.array_equal(*images)
    verts, faces = np.eye(3), np.array([[0, 1, 2]])
    shown = picture([(verts, faces)] * 2, titles=names, size=(200, 100), legend=False).pixels
    assert not np.array_equal(shown[:20, :200], shown[:20, 200:])


# ---- drawing surfaces, and the colors of labels ----


RED, BLUE = np.array([[220, 30, 30], [30, 60, 220]], np.uint8)
COLORS = np.stack([RED, BLUE])


def render(
    verts: Any, faces: Any, labels: Any, *, size: Any, at: str = "vertices", view: Any = None, colors: Any = None
) -> np.ndarray:
    corners = np.asarray([] if faces is None else faces, np.int64).reshape(-1, 3)
    surface = Surface(np.asarray(verts, np.float64), corners)
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


def test_a_shaded_sphere_fills_its_disk_and_nothing_else() -> None:
    verts, faces = sphere()
    image = render(verts, faces, np.zeros(len(verts), int), size=(200, 160))
    assert image.shape == (160, 200, 3)
    assert image.dtype == np.uint8
    y, x = np.mgrid[:160, :200] + 0.5
    away = np.hypot(x - 100, y - 80) / 72  # the margin is 5 % of the height on each side
    assert covered(image)[away < 0.96].all()
    assert not covered(image)[away > 1.03].any()
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
    image = render([[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[0, 1, 2]], [0, 1, 2], size=(90, 90), view=(0, 0))
    hues, pure = hue(image[covered(image)]), hue(label_colors(3))
    closest = np.abs(hues[:, None] - pure).max(-1).min(1)
    assert (closest < 0.02).mean() > 0.9  # the rest are antialiased borders, one pixel wide
    assert all((np.abs(hues - one).max(-1) < 0.02).mean() > 0.2 for one in pure)
    assert np.abs(hue(image[70, 15]) - pure[0]).max() < 0.02  # near corner 0


def test_labels_at_faces_and_edges() -> None:
    verts, faces = np.array(SQUARE[0], float), np.array(SQUARE[1])
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


def test_no_gaps_between_triangles() -> None:
    """A square cut into long slivers is filled, also where their sides pass through the centers of samples."""
    ends = np.concatenate([np.linspace(0, 1, 241), np.random.default_rng(0).uniform(0, 1, 300)])
    x, n = np.sort(ends), len(ends)
    verts = np.concatenate([np.stack([x, np.full(n, y), np.zeros(n)], axis=1) for y in (0, 1)])
    i = np.arange(n - 1)
    faces = np.concatenate([np.stack([i, i + 1, i + n], axis=1), np.stack([i + 1, i + 1 + n, i + n], axis=1)])
    image = render(verts, faces, np.zeros(len(verts), int), size=(80, 80), view=(0, 0))
    assert len(np.unique(image[5:75, 5:75].reshape(-1, 3), axis=0)) == 1


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
    one, other = (render(verts, own, np.zeros(len(verts), int), size=(80, 80)) for own in (faces, faces[:, ::-1]))
    assert np.abs(one.astype(int) - other).max() <= 1


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
    for azimuth, red in ((0, True), (-90, False)):
        image = render(verts, faces, [0, 1], at="faces", size=(80, 80), view=(azimuth, 0), colors=COLORS)
        assert (is_red(image).any(), is_blue(image).any()) == (red, not red)


def test_smooth_and_sharp_normals() -> None:
    verts, faces = sphere()
    assert np.abs(corner_normals(verts, faces) - verts[faces]).max() < 0.02
    box = trimesh.creation.box()
    normals = corner_normals(np.asarray(box.vertices), np.asarray(box.faces))
    np.testing.assert_allclose(normals, np.repeat(box.face_normals[:, None], 3, axis=1), atol=1e-9)


def test_colors_are_distinct_and_stable() -> None:
    many = label_colors(600)
    assert len(np.unique(many, axis=0)) == 600
    np.testing.assert_array_equal(many[:7], label_colors(7))
    assert np.abs(label_colors(10)[:, None].astype(int) - UNLABELED_COLOR).max(-1).min() > 40
    assert label_colors(3000).shape == (3000, 3)
