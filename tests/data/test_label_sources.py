"""Labels as people store them, with each kind of fault; in another order; at other elements; and of some classes."""

from __future__ import annotations

import gzip
import json
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trimesh
from jaws import jaw, write_jaws
from set_files import FAN, by_name, write, write_ply

from diffnet.data import (
    BODIES,
    UNLABELED,
    DataError,
    LabeledMesh,
    LabeledMeshes,
    LabelsAt,
    chosen_classes,
    labels_at,
    load_dataset,
    load_pairs,
    load_targets,
    own_arrays,
    with_label_names,
    with_labels_at,
    without_classes,
)
from diffnet.data.folders.sets import agreement
from diffnet.data.folders.sources import read_source
from diffnet.geometry import Mesh, load_mesh, make_mesh, mesh_edges

QUADS = ([(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0), (2, 0, 0), (2, 1, 0)], [(0, 1, 2, 3), (1, 4, 5, 2)])
RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def rgb(colors: Sequence[Sequence[int]]) -> list[tuple[str, np.ndarray]]:
    return [(name, np.array(colors, np.uint8)[:, i]) for i, name in enumerate(("red", "green", "blue"))]


def refusal(root: Path, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        load_dataset(root, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


PARTS = {
    "1.off": FAN,
    "1_labels.txt": "Upper Arm\n1 3\n\nHead\n2\n",
    "2.off": FAN,
    "2_labels.txt": "part10\n1\nHead\r\n3 \nHead\n\t3\n",
}


@pytest.mark.parametrize("folder", ["", "labels/"])
def test_lists_of_parts(tmp_path: Path, folder: str) -> None:
    files = {folder + name if "_labels" in name else name: text for name, text in PARTS.items()}
    data = load_dataset(write(tmp_path, files))
    assert (data.labels_at, data.label_names) == ("faces", ["Head", "part10", "Upper Arm"])
    assert data.label_numbers is None
    assert by_name(data) == {"1": [2, 0, 2], "2": [1, UNLABELED, 0]}
    write(tmp_path, {"label_names.txt": "Upper Arm\nTail\nHead\npart10\n"})
    assert by_name(load_dataset(tmp_path)) == {"1": [0, 2, 0], "2": [3, UNLABELED, 2]}
    (tmp_path / "label_names.txt").write_text("Head\npart10\n")
    assert "1_labels.txt: the label 'Upper Arm' is not in" in refusal(tmp_path)
    (tmp_path / "label_names.txt").write_text("Head\nUpper Arm\nHead\npart10\n")
    assert "label_names.txt: two classes are called 'Head'" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("head\n1 2\narm\n2 3\n", "1_labels.txt: face 2 is in two parts, 'head' and 'arm'"),
        ("head\n1 4\n", "1_labels.txt: there is no face 4, "),
        ("head\n1 1_0\n", "1_labels.txt, line 2: expected the numbers of the faces of 'head', got '1 1_0'"),
        ("head\n0 1\n", "1_labels.txt, line 2: faces are numbered from 1, got 0"),
        ("head\n1 2\n\narm\n", "1_labels.txt, line 4: part 'arm' has no line of faces after its name"),
        ("head\narm\n", "1_labels.txt, line 2: expected the numbers of the faces of 'head', got 'arm'"),
        ("", "1_labels.txt: there are no labels in the file"),
    ],
)
def test_bad_lists_of_parts(tmp_path: Path, content: str, message: str) -> None:
    assert message in refusal(write(tmp_path, {**PARTS, "1_labels.txt": content}))


def test_names_and_numbers_do_not_mix(tmp_path: Path) -> None:
    write(tmp_path, {**PARTS, "2_labels.txt": "1 2 2"})
    text = refusal(tmp_path)
    assert "1_labels.txt has labels by names" in text
    assert "2_labels.txt has numbers: a set can have only one" in text


TEETH = {
    "upper/p1/p1_upper.obj": FAN,
    "upper/p1/p1_upper.json": json.dumps({"labels": [0, 11, 11.0, 21, 0], "instances": [0, 1, 1, 2, 0]}),
    "lower/p2/p2_lower.obj": FAN,
    "lower/p2/p2_lower.json": json.dumps({"labels": [0, 0, 31, -1, 0]}),
}


@pytest.mark.parametrize("layout", ["auto", "teeth"])
def test_teeth_in_subfolders(tmp_path: Path, layout: str) -> None:
    data = load_dataset(write(tmp_path, TEETH), layout)
    assert (data.labels_at, data.label_names) == ("vertices", ["0", "11", "21", "31"])
    assert data.label_numbers == [0, 11, 21, 31]
    assert by_name(data) == {"p1_upper": [0, 1, 1, 2, 0], "p2_lower": [0, 0, 3, UNLABELED, 0]}
    write(tmp_path, {"train.txt": "p2_lower\n", "test.txt": "p1_upper.obj"})
    assert [item.name for item in load_dataset(tmp_path, layout).train] == ["p2_lower"]
    (tmp_path / "upper/p1/p1_upper.json").unlink()
    assert f"{tmp_path / 'upper/p1'}: no labels (.json) for p1_upper.obj" in refusal(tmp_path, layout=layout)


def test_json_beside_meshes(tmp_path: Path) -> None:
    files = {name.rsplit("/", 1)[1]: text for name, text in TEETH.items()}
    data = load_dataset(write(tmp_path, {**files, "about.json": "{}"}))  # a file of its own is no label file
    assert by_name(data)["p1_upper"] == [0, 1, 1, 2, 0]
    other = tmp_path / "p1_upper.json"
    (tmp_path / "p2_lower.txt").write_text("5 5 5 5 5")  # comes before JSON, which may describe the mesh
    assert load_dataset(tmp_path).label_names == ["0", "5", "11", "21"]
    (tmp_path / "p2_lower.txt").unlink()
    for content, message in (
        ("{", "the file is not JSON"),
        ("[1, 2]", "2 labels, but "),
        ("{}", 'expected an object with a list "labels"'),
        ('{"labels": []}', 'expected an object with a list "labels"'),
        ('{"labels": [1, 2, 2.5, 1, 1]}', "label 2 is '2.5', which is not a whole number"),
        ('{"labels": [1, 2, "x", 1, 1]}', "label 2 is 'x'"),
        ('{"labels": [1, 2, NaN, 1, 1]}', "label 2 is 'nan'"),
        ('{"labels": [1, 2, true, 1, 1]}', "label 2 is 'True'"),
        ('{"labels": [1, 2]}', "2 labels, but "),
    ):
        other.write_text(content)
        text = refusal(tmp_path)
        assert text.startswith(f"{other}: ")
        assert message in text


def test_tables_of_labels(tmp_path: Path) -> None:
    """A table holds labels if its first column is called label. Other tables belong to something else."""
    files = {
        "a.off": FAN,
        "a.csv": '\ufeff label ,name\n"3",x\n7,"y, z"\n3,x\n',
        "b.off": FAN,
        "b.csv": "label\n7\n\n7\n-1\n",
    }
    data = load_dataset(write(tmp_path, {**files, "labels.csv": "file,label\na.off,1\n", "notes.csv": "\x80"}))
    assert (data.labels_at, data.label_names, data.label_numbers) == ("faces", ["3", "7"], [3, 7])
    assert by_name(data) == {"a": [0, 1, 0], "b": [1, 1, UNLABELED]}
    for content, message in (
        ("label\n7\n7.5\n1\n", "b.csv, line 3: '7.5' is not a whole number"),
        ("label\n", "b.csv: there are no labels in the file"),
        ("quality\n7\n7\n7\n", "no labels (.txt, .npy, .seg, .csv, .json, .label.gii) for b.off"),
        ("3,4\n", "no labels (.txt, .npy, .seg, .csv, .json, .label.gii) for b.off"),
        ("", "no labels (.txt, .npy, .seg, .csv, .json, .label.gii) for b.off"),
    ):
        (tmp_path / "b.csv").write_text(content)
        assert message in refusal(tmp_path)
    (tmp_path / "b.csv").write_text("7\n7\n-1\n")
    assert by_name(load_dataset(tmp_path)) == {"a": [0, 1, 0], "b": [1, 1, UNLABELED]}
    (tmp_path / "b.csv").unlink()
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(b"name,Label\n,7\n,7\n,-1\n"))
    assert by_name(load_dataset(tmp_path)) == {"a": [0, 1, 0], "b": [1, 1, UNLABELED]}
    (tmp_path / "b.csv.gz").write_bytes(b"label\n7\n")
    assert "no labels (.txt, .npy, .seg, .csv, .json, .label.gii) for b.off" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("header", "source"),
    [("file,labels", "auto"), ("file,age,raters", "raters"), ("file", "file:raters")],
)
@pytest.mark.parametrize("split", [False, True])
def test_tables_of_meshes_with_label_files(tmp_path: Path, header: str, source: str, split: bool) -> None:
    labels = {"a": [0, 1, 0], "b": [1, 1, -1]}
    write(tmp_path, {f"scans/{name}.off": FAN for name in labels})
    write(tmp_path, {f"raters/{name}.txt": values for name, values in labels.items()})
    write(tmp_path, {"label_names.txt": "low\nhigh"})
    lines = [header + ",split" * split]
    for name in labels:
        cells = {"file": f"scans/{name}.off", "age": "3", "labels": f"raters/{name}.txt"}
        cells["raters"] = cells["labels"]
        row = [cells[column] for column in header.split(",")] + ["test" if name == "a" else "train"] * split
        lines.append(",".join(row))
    table = tmp_path / "set.tsv"
    table.write_text("\n".join(lines).replace(",", "\t"))
    data = load_dataset(table, labels=source)
    assert by_name(data) == {f"scans/{name}.off": values for name, values in labels.items()}
    assert (data.label_names, data.labels_at) == (["low", "high"], "faces")
    assert data.source == "by the table set.tsv" if split else data.source.startswith("at random")
    test = load_dataset(table, labels=source, needs_train=False)
    assert len(test.test) == (1 if split else 2)
    assert not test.train


def test_faults_of_tables_of_meshes(tmp_path: Path) -> None:
    write(tmp_path, {"a.off": FAN, "b.off": FAN, "set.csv": "file,labels\na.off,a.txt\nb.off,b.txt\n"})
    assert refusal(tmp_path / "set.csv").endswith(".txt: no such file")
    assert "there is no column 'x'; the columns are file, labels" in refusal(tmp_path / "set.csv", labels="x")
    assert "set.csv: no such folder" in refusal(tmp_path / "set.csv", layout="teeth")


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("name", ["label", "Class", "segment"])
def test_properties_of_vertices(tmp_path: Path, name: str, text: bool) -> None:
    for stem, values in (("a", [7, 7, -1, 2, 2]), ("b", [2, 2, 2, 40, 2])):
        write_ply(tmp_path / f"{stem}.ply", [("quality", np.zeros(5, "f4")), (name, np.array(values, "i4"))], text=text)
    data = load_dataset(tmp_path)
    assert (data.labels_at, data.label_names) == ("vertices", ["2", "7", "40"])
    assert by_name(data) == {"a": [1, 1, UNLABELED, 0, 0], "b": [0, 0, 0, 2, 0]}


def test_properties_of_faces(tmp_path: Path) -> None:
    for stem, values in (("train/a", [1, 2, 2]), ("test/b", [3, 3, 1])):
        write_ply(tmp_path / f"{stem}.ply", rgb([RED] * 5), [("labels", np.array(values, "f8"))])
    packed = tmp_path / "test/b.ply"
    packed.with_name("b.ply.gz").write_bytes(gzip.compress(packed.read_bytes()))
    packed.unlink()
    data = load_dataset(tmp_path)
    assert data.labels_at == "faces"  # properties come before colors
    assert by_name(data) == {"a": [0, 1, 1], "b": [2, 2, 0]}
    assert load_dataset(tmp_path, labels_at="vertices").train[0].labels.tolist() == [1, 0, 0, 1, 1]


def test_bad_properties(tmp_path: Path) -> None:
    good = np.zeros(5, "i4")
    write_ply(tmp_path / "b.ply", [("label", good)])
    path = tmp_path / "a.ply"
    write_ply(path, [("label", np.array([1, 2, 2.5, 1, np.nan]))])
    assert refusal(tmp_path).startswith(f"{path}: the property 'label' should be whole numbers, row 2 is 2.5")
    write_ply(path, [("label", good)], [("class", np.zeros(3, "u1"))])
    assert (
        f"{path}: more than one property could be the labels: 'label' of the vertices, 'class' of the faces"
        in refusal(tmp_path)
    )
    write_ply(path, [], [("label", np.zeros(3, "u1"))])
    assert f"{tmp_path / 'b.ply'} labels vertices, but {path} labels faces" in refusal(tmp_path)
    write_ply(path, rgb([RED] * 5))
    assert f"{path} has labels by colors, but {tmp_path / 'b.ply'} has the property 'label'" in refusal(tmp_path)
    write_ply(path)
    assert refusal(tmp_path).startswith(
        f"{path}: no labels. Expected a label file beside the mesh, a property of a PLY"
    )


def test_colors_are_labels(tmp_path: Path) -> None:
    write_ply(tmp_path / "a.ply", rgb([RED, RED, GREEN, BLUE, BLUE]))
    rows = [" ".join(map(str, (*v, *c, 255))) for v, c in zip(FAN[0], [BLUE, RED, RED, RED, RED], strict=True)]
    (tmp_path / "b.off").write_text("COFF\n5 3 0\n" + "\n".join(rows) + "\n3 0 1 2\n3 0 2 3\n3 0 3 4\n")
    rows = [" ".join(map(str, ("v", *v, 0, 1.0, 0))) for v in FAN[0]]
    (tmp_path / "c.obj").write_text("\n".join(rows) + "\nf 1 2 3\nf 1 3 4\nf 1 4 5\n")
    data = load_dataset(tmp_path)
    assert (data.labels_at, data.label_names) == ("vertices", ["#0000ff", "#00ff00", "#ff0000"])
    assert by_name(data) == {"a": [2, 2, 1, 0, 0], "b": [0, 2, 2, 2, 2], "c": [1] * 5}
    (tmp_path / "label_names.txt").write_text("#FF0000 upper arm\n#00ff00 leg\n#0000ff head\n")
    data = load_dataset(tmp_path)
    assert data.label_names == ["upper arm", "leg", "head"]
    assert data.label_numbers is None
    assert by_name(data)["a"] == [0, 0, 1, 2, 2]
    (tmp_path / "label_names.txt").write_text("#ff0000 arm\n#0000ff head\n")
    assert "the label '#00ff00' is not in" in refusal(tmp_path)
    (tmp_path / "label_names.txt").write_text("arm\nleg\nhead\n")
    assert "each line should be another color and a name, such as '#ff0000 arm', got 'arm'" in refusal(tmp_path)
    (tmp_path / "label_names.txt").write_text("#ff0000 arm\n#00ff00 leg\n#0000ff arm\n")
    assert "label_names.txt: two classes are called 'arm'" in refusal(tmp_path)
    for stem in "ab":
        write_ply(tmp_path / "faces" / f"{stem}.ply", face=rgb([RED, GREEN, RED]))
    data = load_dataset(tmp_path / "faces")
    assert (data.labels_at, by_name(data)) == ("faces", {"a": [1, 0, 1], "b": [1, 0, 1]})


def test_too_many_colors(tmp_path: Path) -> None:
    def points(name: str, first: int) -> None:
        rows = [f"v {i} 0 0 {(first + i) / 255} 0 0" for i in range(60)]
        (tmp_path / name).write_text("\n".join(rows) + "\n")

    points("a.obj", 0)
    points("b.obj", 4)
    assert load_dataset(tmp_path).label_names[-1] == "#3f0000"  # 64 colors
    points("b.obj", 5)
    assert "the set has 65 distinct colors. Colors can be labels if there are at most 64" in refusal(tmp_path)
    rows = [f"v {i} 0 0 {i / 255} 0 0" for i in range(65)]
    (tmp_path / "b.obj").write_text("\n".join(rows) + "\n")
    assert refusal(tmp_path).startswith(f"{tmp_path / 'b.obj'}: 65 distinct colors of vertices")


def test_label_files_come_before_the_meshes_own(tmp_path: Path) -> None:
    for stem in "ab":
        write_ply(tmp_path / f"{stem}.ply", [("label", np.arange(5, dtype="i4"))])
        (tmp_path / f"{stem}.txt").write_text("1 1 1 1 3")
    assert load_dataset(tmp_path).label_names == ["1", "3"]
    np.save(tmp_path / "a.quality.npy", np.zeros(5))  # a feature
    assert load_dataset(tmp_path).label_names == ["1", "3"]
    (tmp_path / "b.txt").unlink()
    assert "no labels (.txt, .npy, .seg, .csv, .json, .label.gii) for b.ply" in refusal(tmp_path)
    assert read_source(tmp_path / "b.ply").values.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"1.off": FAN, "1.txt": "1 2 2", "2.off": FAN, "2.txt": "1 1 2", "test.txt": "2\n"}, ["2"]),
        ({"test/2.off": FAN, "test/2.txt": "1 1 2"}, ["2"]),
        ({"1.off": FAN, "1.txt": "1 2 2", "2.off": FAN, "2.txt": "1 1 2"}, ["1", "2"]),
        ({"1.off": FAN, "1.seg": "1 2 2"}, ["1"]),
        ({"test/1.obj": FAN, "seg/1.eseg": "1 2 2 2 2 2 2"}, ["1"]),
        ({"off/1K73_B.off": FAN, "labels/1K73_B.txt": "1 2 2 2 -1", "test.txt": "1K73_B.off"}, ["1K73_B"]),
        (TEETH, ["p1_upper", "p2_lower"]),
    ],
)
def test_a_set_without_a_training_part(tmp_path: Path, files: dict[str, Any], expected: list[str]) -> None:
    data = load_dataset(write(tmp_path, files), needs_train=False)
    assert data.train == []
    assert sorted(item.name for item in data.test) == expected
    if "off/1K73_B.off" in files:
        assert len(data.label_names) == 260
    if len(expected) < 2:
        refusal(tmp_path)


@pytest.mark.parametrize(
    "files",
    [
        {"train/1.off": "broken", "test/2.off": FAN, "test/2.txt": "6 6 6"},
        {"train/1.off": "broken", "test/2.off": FAN, "labels/1.txt": "5 5", "labels/2.txt": "6 6 6"},
        {"off/1.off": "broken", "off/2.off": FAN, "labels/2.txt": "6 6 6", "train.txt": "3", "test.txt": "2"},
        {"shapes/1.off": "broken", "shapes/2.off": FAN, "gt/2.seg": "6 6 6", "train.txt": "1", "test.txt": "2"},
    ],
)
def test_a_training_part_is_not_read_for_an_evaluation(tmp_path: Path, files: dict[str, Any]) -> None:
    data = load_dataset(write(tmp_path, files), needs_train=False)
    assert (data.train, data.label_names, by_name(data)) == ([], ["6"], {"2": [0, 0, 0]})


def test_names_count_the_labels_of_the_training_part(tmp_path: Path) -> None:
    files = {"train/1.off": FAN, "train/1.txt": "5 5 6", "test/2.off": FAN, "test/2.txt": "6 6 6"}
    data = load_dataset(write(tmp_path, {**files, "label_names.txt": "arm\nleg\n"}), needs_train=False)
    assert (data.label_names, by_name(data)) == (["arm", "leg"], {"2": [1, 1, 1]})
    write(tmp_path, {"train/1.off": "broken"})
    assert by_name(load_dataset(tmp_path, needs_train=False)) == {"2": [1, 1, 1]}
    # There may be more names than values.
    write(tmp_path / "more", {"test/1.off": FAN, "test/1.txt": "0 2 2", "label_names.txt": "arm\nleg\nhead\n"})
    data = load_dataset(tmp_path / "more", needs_train=False)
    assert (data.label_names, by_name(data)) == (["arm", "leg", "head"], {"1": [0, 2, 2]})


def test_a_test_part_is_needed(tmp_path: Path) -> None:
    assert "there is train but no test" in refusal(write(tmp_path / "x", {"train/1.off": FAN}), needs_train=False)
    assert "no meshes in test" in refusal(write(tmp_path / "y", {"test/1.txt": "1", "1.off": FAN}), needs_train=False)


def own_feature(root: Path) -> Any:
    return own_arrays(load_mesh(root / "jaw0.stl"), "file:t")


@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("jaw{}.json", load_dataset),
        ("jaw{}.txt", load_dataset),
        ("jaw{}.t.npy", lambda root: load_targets(root, "file:t")),
        ("jaw{}.t.npy", own_feature),
        ("jaw{}.vts", lambda root: load_pairs(root, base="0")),
        ("jaw{}_jaw0.txt", lambda root: load_pairs(root, base="0")),
    ],
)
def test_values_at_vertices_beside_stl_are_refused(name: str, load: Callable[[Path], Any], tmp_path: Path) -> None:
    for seed in range(4):
        jaw(seed).write(tmp_path / f"jaw{seed}.stl")
        mesh = load_mesh(tmp_path / f"jaw{seed}.stl")
        values, file = np.arange(len(mesh.verts)) % 5, tmp_path / name.format(seed)
        if file.suffix == ".npy":
            np.save(file, values)
        else:
            file.write_text(
                f'{{"labels": {values.tolist()}}}' if file.suffix == ".json" else "\n".join(map(str, values))
            )
    message = r"the order of the vertices of .*\.stl, but an STL file has no order of vertices"
    with pytest.raises(DataError, match=message):
        load(tmp_path)


@pytest.mark.filterwarnings("error")
def test_labels_at_faces_beside_stl_are_read(tmp_path: Path) -> None:
    write_jaws(tmp_path, 3, ".stl", "faces")
    data = load_dataset(tmp_path)
    assert (data.labels_at, len(data.label_names)) == ("faces", 15)
    one = jaw(0)
    expected = labels_at(one.labels, one.faces, source="vertices", target="faces")
    found = next(item for item in [*data.train, *data.test] if item.name == "jaw0")
    assert [data.label_names[label] for label in found.labels] == list(map(str, expected))


@pytest.mark.parametrize("at", ["vertices", "faces"])
@pytest.mark.parametrize("suffix", [".ply", ".obj"])
def test_shuffled_labels_are_named_once(at: LabelsAt, suffix: str, tmp_path: Path) -> None:
    write_jaws(tmp_path, 4, suffix, at, shuffled=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_dataset(tmp_path)
    (message,) = [str(each.message) for each in caught]
    assert "the labels of 4 of 4 meshes look shuffled. In " in message
    assert f"neighboring {at} have the same label, and " in message
    assert Path(str(caught[0].filename)).name == Path(__file__).name


@pytest.fixture(scope="module")
def good() -> list[tuple[Mesh, np.ndarray]]:
    """A body and two jaws, with labels at vertices."""
    jaws = [(make_mesh(one.verts, one.faces), one.labels) for one in (jaw(0), jaw(1, lower=True))]
    whole = load_dataset(BODIES, labels_at="vertices").train[0]
    return [(whole.mesh, whole.labels), *jaws]


@pytest.mark.parametrize("at", ["vertices", "edges", "faces"])
def test_agreement_of_good_and_of_shuffled_labels(at: LabelsAt, good: list[tuple[Mesh, np.ndarray]]) -> None:
    rng = np.random.default_rng(0)
    for mesh, labels in good:
        own = labels_at(labels, mesh.faces, source="vertices", target=at)
        fine, broken = agreement(mesh, own, at), agreement(mesh, rng.permutation(own), at)
        assert not fine.is_chance
        assert broken.is_chance
        assert (fine.share - fine.chance) / (1 - fine.chance) > 0.4
        assert broken.share == pytest.approx(broken.chance, abs=0.05)
        assert not agreement(mesh, np.zeros_like(own), at).is_chance  # a single class
        assert agreement(mesh, np.full_like(own, -1), at).pairs == 0


def test_agreement_by_hand() -> None:
    """Two faces with a common side. The sides 0-1 … of each face count, and so the common one counts twice."""
    mesh = make_mesh([[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0]], [[0, 1, 2], [2, 1, 3]])
    found = agreement(mesh, np.array([0, 0, 1, -1]), "vertices")  # the sides 01, 12, 20 and 21
    assert (found.pairs, found.share) == (4, 0.25)
    assert found.chance == pytest.approx((5 / 8) ** 2 + (3 / 8) ** 2)
    assert agreement(mesh, np.array([4, 7]), "faces") == (2, 0.0, 0.5)


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
    with pytest.raises(DataError, match=r"no class '3'. Give a name \(arm, leg\) or a number \(0, 1\)"):
        chosen_classes(["3"], ["arm", "leg"])
    assert chosen_classes(["1", "leg"], ["arm", "leg"], [1, 7]) == ("arm", "leg")
    with pytest.raises(DataError, match=r"no class '0'. Give a name \(arm, leg\) or a number \(1, 7\)"):
        chosen_classes(["0"], ["arm", "leg"], [1, 7])
