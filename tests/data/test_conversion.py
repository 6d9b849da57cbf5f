"""Labels at vertices, edges and faces from each other, and classes by name."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import trimesh

from diffnet.data import (
    UNLABELED,
    DataError,
    LabeledMesh,
    LabeledMeshes,
    chosen_classes,
    labels_at,
    with_label_names,
    with_labels_at,
    without_classes,
)
from diffnet.geometry import Mesh, make_mesh, mesh_edges

PLACES = ("vertices", "edges", "faces")


def touching(faces: np.ndarray, count: int) -> dict[tuple[str, str], list[list[int]]]:
    """For each pair of places, the elements of the first that touch each element of the second."""
    edges = mesh_edges(faces)
    own = {
        "vertices": [{i} for i in range(count)],
        "edges": [set(edge) for edge in edges.tolist()],
        "faces": [set(face) for face in faces.tolist()],
    }
    return {
        (a, b): [[i for i, x in enumerate(own[a]) if x <= y or y <= x] for y in own[b]] for a in PLACES for b in PLACES
    }


@pytest.mark.parametrize("source", PLACES)
@pytest.mark.parametrize("target", PLACES)
def test_each_element_gets_the_most_frequent_label(source: str, target: str) -> None:
    ball = trimesh.creation.icosphere(1)
    faces, count = np.asarray(ball.faces[:50]), len(ball.vertices) + 2  # with a boundary and unused vertices
    rng = np.random.default_rng(0)
    sizes = {"vertices": count, "edges": len(mesh_edges(faces)), "faces": len(faces)}
    labels = rng.integers(-2, 4, sizes[source]) * 2**40  # far apart
    found = labels_at(labels, faces, source=source, target=target, num_vertices=count)
    assert found.dtype == np.int64
    assert len(found) == sizes[target]
    for label, elements in zip(found.tolist(), touching(faces, count)[source, target], strict=True):
        votes = Counter(value for value in labels[elements].tolist() if value >= 0)
        most = max(votes.values(), default=0)
        assert label == min((value for value in votes if votes[value] == most), default=UNLABELED)
    assert (found == UNLABELED).any()


def test_a_mesh_without_faces_and_without_labels() -> None:
    assert labels_at([3, -5], [], source="vertices", target="vertices").tolist() == [3, UNLABELED]
    assert labels_at([3, 4], [], source="vertices", target="faces").tolist() == []
    assert labels_at([], [], source="faces", target="vertices", num_vertices=2).tolist() == [UNLABELED] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"labels": [1, 2]}, "2 labels, but the mesh has 1 faces"),
        ({"labels": [1.5]}, "labels should be integers of shape (N,), got float64 of shape (1,)"),
        ({"labels": [[1]]}, "got int64 of shape (1, 1)"),
        ({"faces": [[0, 1]]}, "faces should be integers of shape (F, 3), got int64 of shape (1, 2)"),
        ({"num_vertices": 2}, "faces should have indices from 0 to 1, got 0 to 2"),
        ({"source": "corners"}, "source should be one of vertices, faces, edges, got 'corners'"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    good = {"labels": [1], "faces": [[0, 1, 2]], "source": "faces", "target": "vertices"}
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the whole message is compared
        labels_at(**{**good, **arguments})
    assert message in str(caught.value)


SQUARE = make_mesh([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 1, 0]], [[0, 1, 2], [0, 2, 3]], name="square")


def data_set(mesh: Mesh = SQUARE) -> LabeledMeshes:
    item = LabeledMesh("square", mesh, np.array([0, 1, 1, UNLABELED]))
    return LabeledMeshes([item], [item], ["arm", "leg"], "vertices", [11, 12])


def test_a_set_at_other_elements() -> None:
    data = with_labels_at(data_set(), "faces")
    assert (data.labels_at, data.label_numbers) == ("faces", [11, 12])
    assert [item.labels.tolist() for item in (*data.train, *data.test)] == [[1, 0], [1, 0]]
    assert with_labels_at(data, "faces") is data
    with pytest.raises(DataError, match="points: a point cloud has labels at vertices only, not at faces"):
        with_labels_at(data_set(make_mesh(SQUARE.verts, None, name="points")), "faces")


def test_classes_are_matched_by_name() -> None:
    data = with_label_names(data_set(), ["head", "leg", "arm"])
    assert (data.label_names, data.test[0].labels.tolist()) == (["head", "leg", "arm"], [2, 1, 1, UNLABELED])
    with pytest.raises(DataError, match=r"square: the label 'leg' is none of the 2 known classes \(head, arm\)"):
        with_label_names(data_set(), ["head", "arm"])


def test_a_set_without_some_classes() -> None:
    item = LabeledMesh("m", SQUARE, np.array([2, 1, 0, UNLABELED]), accepted=np.eye(4, 3, dtype=bool))
    data = LabeledMeshes([item], [item], ["arm", "leg", "head"], "vertices", [11, 12, 13])
    found = without_classes(data, ["leg", "tail"])
    assert (found.label_names, found.label_numbers) == (["arm", "head"], [11, 13])
    assert found.test[0].labels.tolist() == [1, UNLABELED, 0, UNLABELED]
    assert found.test[0].accepted.tolist() == [[True, False], [False, False], [False, True], [False, False]]
    assert without_classes(data, []) is data
    with pytest.raises(DataError, match="all classes are ignored"):
        without_classes(data, data.label_names)
    named = with_label_names(found, ["head", "tail", "arm"]).test[0]
    assert named.labels.tolist() == [0, UNLABELED, 2, UNLABELED]
    assert named.accepted[0].tolist() == [False, False, True]
    assert with_labels_at(found, "faces").test[0].accepted is None


def test_meshes_of_an_ignored_class_are_left_out() -> None:
    items = [LabeledMesh(str(label), SQUARE, np.array(label)) for label in range(3)]
    data = LabeledMeshes(items, items, ["a", "b", "c"], "meshes")
    found = without_classes(data, ["b"])
    assert [int(item.labels) for item in found.test] == [0, 1]
    assert [item.name for item in found.train] == ["0", "2"]
    with pytest.raises(DataError, match="all test meshes belong to ignored classes"):
        without_classes(LabeledMeshes(items, items[:1], data.label_names, "meshes"), ["a"])


def test_classes_by_name_or_number() -> None:
    assert chosen_classes(["1", "-1"], ["-1", "0", "1"]) == ("1", "-1")
    with pytest.raises(DataError, match=r"no class '3'. Give a name \(arm, leg\) or a number from 0 to 1"):
        chosen_classes(["3"], ["arm", "leg"])
