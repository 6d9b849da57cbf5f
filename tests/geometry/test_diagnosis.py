"""The description of meshes and of their faults."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import trimesh

from diffnet.geometry import diagnose, load_mesh

CORNERS = [[0.0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]]


def test_diagnosis_of_a_sphere(sphere: trimesh.Trimesh) -> None:
    found = diagnose(load_mesh(sphere))
    assert found.faults == []
    assert (found.vertices, found.faces, found.edges) == (642, 1280, 1920)
    assert (found.components, found.euler, found.boundary_edges) == (1, 2, 0)
    assert found.area == pytest.approx(sphere.area)


def test_diagnosis_of_an_open_surface(plane: tuple[np.ndarray, np.ndarray]) -> None:
    found = diagnose(load_mesh(plane))
    assert found.faults == []
    assert (found.boundary_edges, found.euler) == (40, 1)


TRIANGLES = [[0, 1, 2], [0, 2, 3]]
SQUARE = [[0.0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]]


@pytest.mark.parametrize(
    ("verts", "faces", "field", "count"),
    [
        (SQUARE, [*TRIANGLES, [0, 2, 4], [3, 2, 5], [6, 2, 3]], "non_manifold_edges", 2),
        (SQUARE, [[0, 1, 2], [0, 3, 2]], "misoriented_edges", 1),
        (SQUARE, [*TRIANGLES, [1, 1, 2], [3, 3, 3]], "degenerate_faces", 2),
        (SQUARE, [[0, 1, 2], [0, 2, 6], [3, 0, 7]], "zero_area_faces", 1),
        (SQUARE, [*TRIANGLES, [2, 1, 0], [1, 2, 0], [3, 0, 2]], "duplicate_faces", 3),
        (SQUARE, [[0, 1, 2]], "unreferenced_vertices", 1),
        ([*SQUARE, SQUARE[1], SQUARE[1]], [*TRIANGLES, [4, 5, 3]], "coincident_vertices", 2),
        ([*SQUARE, *np.array(SQUARE) + 5], [*TRIANGLES, [4, 5, 6]], "components", 2),
    ],
)
def test_diagnosis_counts(verts: Any, faces: Any, field: str, count: int) -> None:
    extra = [[0.5, 0.5, 1.0], [0.5, 0.5, -1], [0.5, 0.5, 0], [-1, 0.5, 0]]  # vertices 4 to 7
    verts = [*verts, *extra][: max(len(verts), np.max(faces) + 1)]
    found = diagnose(load_mesh((verts, faces)))
    assert getattr(found, field) == count
    clean = diagnose(load_mesh((SQUARE, TRIANGLES)))
    assert getattr(clean, field) == (1 if field == "components" else 0)
    if field != "components":
        assert any(fault.endswith(f": {count}") for fault in found.faults)


def test_diagnosis_of_a_point_cloud() -> None:
    found = diagnose(load_mesh(([*CORNERS, CORNERS[0]], None)))
    assert (found.vertices, found.faces, found.edges, found.components, found.euler, found.area) == (6, 0, 0, 0, 0, 0)
    assert found.faults == ["vertices at the position of another: 1"]


def test_diagnosis_of_a_triangle_soup(sphere: trimesh.Trimesh) -> None:
    """Each face has its own three vertices. Two spheres are left if they are joined."""
    both = trimesh.util.concatenate([sphere, sphere.copy().apply_translation([5, 0, 0])])
    corners = np.array(both.vertices)[both.faces]
    found = diagnose(load_mesh((corners.reshape(-1, 3), np.arange(3 * 2560).reshape(-1, 3))))
    assert (found.components, found.joined_components, found.coincident_vertices) == (2560, 2, 3 * 2560 - 2 * 642)
    assert "components, of 2560, that joining these vertices would leave: 2" in found.faults
    connected = diagnose(load_mesh(both))
    assert (connected.components, connected.joined_components) == (2, 2)
    assert connected.faults == []
    # Joining two copies of one sphere is possible, too, although no face is separate.
    twice = diagnose(load_mesh(trimesh.util.concatenate([sphere, sphere])))
    assert (twice.components, twice.joined_components) == (2, 1)
