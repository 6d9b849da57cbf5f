"""Colored PLY files with labels and scalars."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import plyfile
import pytest
import torch
import trimesh

from diffnet.geometry import load_mesh, mesh_edges
from diffnet.viz import write_ply
from diffnet.viz.palette import colorize


def ply_element(path: Path, element: str) -> np.ndarray | None:
    """The columns of one element of a PLY file, from a parser of its own."""
    head, body = Path(path).read_bytes().split(b"end_header\n", 1)
    types = {"double": "<f8", "float": "<f4", "int": "<i4", "uchar": "u1"}
    for block in head.decode("ascii").split("element ")[1:]:
        name, count, *lines = block.replace("\n", " \n ").split(" ", 2)
        fields = []
        for line in lines[0].split("\n"):
            match line.split():
                case ["property", "list", _, kind, field]:
                    fields += [("count", "u1"), (field, types[kind], 3)]
                case ["property", kind, field]:
                    fields.append((field, types[kind]))
        dtype = np.dtype(fields)
        table = np.frombuffer(body, dtype, int(count))
        body = body[dtype.itemsize * int(count) :]
        if name == element:
            assert not (element == "face" and body), "bytes are left over"
            return table
    return None


@pytest.mark.parametrize("at", ["vertices", "faces", "edges", "points"])
def test_ply_round_trip(tmp_path: Path, at: str) -> None:
    ball = trimesh.creation.icosphere(subdivisions=1)
    verts, faces = np.asarray(ball.vertices), np.asarray(ball.faces)
    count = {"vertices": len(verts), "faces": len(faces), "edges": len(mesh_edges(faces)), "points": len(verts)}[at]
    labels = np.random.default_rng(0).integers(-1, 300, count)
    path = tmp_path / "out.ply"
    write_ply(path, (verts, None if at == "points" else faces), labels=labels, at=None if at == "points" else at)
    assert [p.name for p in tmp_path.iterdir()] == ["out.ply"]

    table = ply_element(path, "face" if at == "faces" else "vertex")
    if at == "edges":
        labels = table["label"]
    np.testing.assert_array_equal(table["label"], labels)
    np.testing.assert_array_equal(np.stack([table[c] for c in ("red", "green", "blue")], 1), colorize(labels))

    again = load_mesh(path)
    np.testing.assert_array_equal(again.verts, verts)
    np.testing.assert_array_equal(again.faces, np.zeros((0, 3)) if at == "points" else faces)
    loaded = trimesh.load(path, process=False)
    colors = (
        loaded.colors if at == "points" else loaded.visual.face_colors if at == "faces" else loaded.visual.vertex_colors
    )
    np.testing.assert_array_equal(colors[:, :3], colorize(labels))


def test_ply_of_edges_takes_the_most_frequent_label(tmp_path: Path) -> None:
    faces = np.array([[0, 1, 2], [0, 2, 3]])  # edges 01 12 02 23 03
    for labels, expected in (([5, 2, 5, 2, 7], [5, 2, 2, 2]), ([-1, -1, -1, 4, 9], [9, -1, 4, 4])):
        write_ply(tmp_path / "out.ply", (np.eye(5, 3), faces), labels=labels, at="edges")
        assert ply_element(tmp_path / "out.ply", "vertex")["label"].tolist() == [*expected, -1]


def test_names_and_numbers_of_labels(tmp_path: Path) -> None:
    path, faces = tmp_path / "out.ply", np.array([[0, 1, 2], [0, 2, 3]])
    labels = [0, 2, -1, 1]
    given = {"label_names": ["arm", "Fuß\n links", "13"], "label_numbers": [11, -5, 13]}
    write_ply(path, (np.eye(4, 3), faces), labels=labels, **given)
    found = plyfile.PlyData.read(path)
    assert found.comments == ["label 11 arm", r"label -5 Fu\xdf links"]
    assert found["vertex"]["label"].tolist() == [11, 13, -1, -5]
    assert found["vertex"]["label_index"].tolist() == labels
    colors = np.stack([found["vertex"][name] for name in ("red", "green", "blue")], 1)
    np.testing.assert_array_equal(colors, colorize(labels))
    write_ply(path, (np.eye(4, 3), faces), labels=labels, label_numbers=[0, 2**40, -(2**40)])
    assert plyfile.PlyData.read(path)["vertex"]["label"].tolist() == [0, -(2**40), -1, 2**40]
    for wrong, message in (
        ({"label_numbers": [1, 2]}, "the label 2 needs 3 numbers, got 2"),
        ({"label_numbers": [1, 2, 3], "label_names": ["a"]}, "1 names for 3 label_numbers"),
        ({"label_numbers": [1, 2, 2**60]}, "is beyond 2^53"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            write_ply(path, (np.eye(4, 3), faces), labels=labels, **wrong)


def test_scalars_and_colors_read_back(tmp_path: Path) -> None:
    ball = trimesh.creation.icosphere(subdivisions=1)
    path = tmp_path / "out.ply"
    rng = np.random.default_rng(0)
    curvature, area = rng.normal(size=42), rng.normal(size=80).astype(np.float32)
    curvature[3] = np.nan
    colors = rng.integers(0, 256, (42, 3))
    scalars = {"curvature": curvature, "area": area, "low": torch.tensor(curvature, dtype=torch.bfloat16)}
    write_ply(path, ball, labels=np.arange(42), scalars=scalars, colors=colors)
    verts, faces = ply_element(path, "vertex"), ply_element(path, "face")
    np.testing.assert_array_equal(verts["curvature"], curvature)
    np.testing.assert_array_equal(verts["low"], torch.tensor(curvature).bfloat16().float().numpy())
    np.testing.assert_array_equal(verts["label"], np.arange(42))
    np.testing.assert_array_equal(np.stack([verts[c] for c in ("red", "green", "blue")], 1), colors)
    np.testing.assert_array_equal(faces["area"], area)
    assert (verts.dtype["curvature"], verts.dtype["low"], faces.dtype["area"]) == ("<f8", "<f4", "<f4")
    read = plyfile.PlyData.read(path)  # another reader
    np.testing.assert_array_equal(read["vertex"]["curvature"], curvature)
    np.testing.assert_array_equal(read["face"]["area"], area)
    np.testing.assert_array_equal(load_mesh(path).verts, ball.vertices)


def test_a_mesh_without_values_is_written(tmp_path: Path) -> None:
    ball = trimesh.creation.icosphere(subdivisions=1)
    write_ply(tmp_path / "out.ply", ball)
    again = load_mesh(tmp_path / "out.ply")
    np.testing.assert_array_equal(again.verts, ball.vertices)
    np.testing.assert_array_equal(again.faces, ball.faces)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"labels": [0] * 3}, "labels: 3 values do not fit 42 vertices, 80 faces or 120 edges"),
        ({"scalars": {"height (m)": np.zeros(42)}}, r"the name 'height \(m\)' can't be used"),
        ({"scalars": {"x": np.zeros(42)}}, "the name 'x' can't be used"),
        ({"scalars": {"height": np.zeros(41)}}, "height: 41 values do not fit"),
        ({"scalars": {"height": np.zeros(120)}}, "height: a PLY file has no edges"),
        ({"colors": np.zeros((42, 2))}, "colors should have shape"),
        ({"labels": np.zeros(80, int), "at": "vertices"}, "80 values do not fit 42 vertices"),
    ],
)
def test_values_that_do_not_fit_are_named(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_ply(tmp_path / "out.ply", trimesh.creation.icosphere(subdivisions=1), **given)
    assert not list(tmp_path.iterdir())


def test_only_ply_files_are_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"out\.obj: the file is written in PLY format"):
        write_ply(tmp_path / "out.obj", (np.eye(3), None))
    assert not list(tmp_path.iterdir())


def test_large_scalars_are_written_as_they_are(tmp_path: Path) -> None:
    given = np.array([1e300, -np.inf, np.nan])
    write_ply(tmp_path / "out.ply", (np.eye(3), None), scalars={"large": given})
    np.testing.assert_array_equal(ply_element(tmp_path / "out.ply", "vertex")["large"], given)
