"""Data sets on disk: every layout, every split, and one test for each kind of fault."""

import gzip
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refusals import refused
from set_files import FAN, MIXED, TETRAHEDRON, Shape, by_name, names, parts, same_items, write

from diffnet.data import LAYOUTS, load_dataset, load_targets
from diffnet.data.arrays import own_arrays
from diffnet.data.labeled import UNLABELED, DataError
from diffnet.data.numbers import read_labels
from diffnet.geometry import MeshError, load_mesh, mesh_edges
from diffnet.geometry.elements.elements import on_polygons

RNA = Path(__file__).resolve().parents[3] / "shared" / "data" / "rna"

RNA_SET = {
    "off/1K73_B.off": FAN,
    "off/1N8R_B.off": TETRAHEDRON,
    "off/2J28_9.off": FAN,
    "labels/1K73_B.txt": [-1, 0, 258, 3, 3],
    "labels/1N8R_B.txt": [5, 5, 6, 7],
    "labels/2J28_9.txt": [0, 0, 0, 0, 0],
    "train.txt": "2J28_9.off\n1K73_B.off",
    "test.txt": "1N8R_B.off",
}


@pytest.mark.parametrize("layout", ["rna", "auto"])
def test_rna_makes_minus_one_the_first_of_260_classes(tmp_path: Path, layout: str) -> None:
    data = load_dataset(write(tmp_path, RNA_SET), layout)
    assert parts(data) == (["2J28_9", "1K73_B"], [], ["1N8R_B"])  # the list's order
    assert (data.labels_at, data.label_names) == ("vertices", [str(i) for i in range(-1, 259)])
    assert data.label_numbers == list(range(-1, 259))
    assert data.train[1].labels.tolist() == [0, 1, 259, 4, 4]
    assert data.train[1].labels.dtype == np.int64


def test_auto_reads_rna_folders_without_pdb_names_as_folder(tmp_path: Path) -> None:
    labels = {"labels/a.txt": [-1, 0, 1, 1, 1], "labels/b.txt": [0, 0, 0, 0, 0]}
    files = {"off/a.off": FAN, "off/b.off": FAN, **labels, "train.txt": "b.off", "test.txt": "a.off"}
    data = load_dataset(write(tmp_path, files))
    assert data.label_names == ["0", "1"]
    assert data.test[0].labels.tolist() == [UNLABELED, 0, 1, 1, 1]
    assert len(load_dataset(tmp_path, "rna").label_names) == 260
    (tmp_path / "test.txt").unlink()
    refused(DataError, r"there is train\.txt but no test\.txt", load_dataset, tmp_path, "rna")


def test_real_rna_surfaces(tmp_path: Path) -> None:
    if not RNA.is_dir():
        pytest.skip(f"the RNA surfaces are not at {RNA}")
    train, test = (RNA / "train.txt").read_text().split()[:2], (RNA / "test.txt").read_text().split()[:1]
    for name in train + test:
        for folder, suffix in (("off", ".off"), ("labels", ".txt")):
            (tmp_path / folder).mkdir(exist_ok=True)
            file = Path(folder, name).with_suffix(suffix)
            os.symlink(RNA / file, tmp_path / file)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # labels of neighbors agree
        data = load_dataset(write(tmp_path, {"train.txt": train, "test.txt": test}))
    assert [item.name + ".off" for item in data.train + data.test] == train + test
    assert len(data.label_names) == 260
    for item in data.train + data.test:
        stored = np.loadtxt(RNA / "labels" / f"{item.name}.txt", dtype=np.int64)
        assert len(item.mesh.verts) > 1000
        np.testing.assert_array_equal([int(data.label_names[i]) for i in item.labels], stored)


MESHCNN_SET = {
    "train/shrec__2.obj": FAN,
    "train/shrec__10.obj": FAN,
    "test/shrec__1.OBJ": TETRAHEDRON,
    "seg/shrec__2.eseg": "".join(f"{i:.18e}\n" for i in (1, 1, 2, 2, 8, 8, 8)),
    "seg/shrec__10.eseg": [1, 1, 1, 1, 1, 1, -1],
    "seg/shrec__1.eseg": [8, 8, 8, 1, 1, 1],
    "sseg/shrec__1.seseg": "0 0.5 0 0 0 0 0 0.5\n" * 3 + "1 0 0 0 0 0 0 0\n" * 3,
}


@pytest.mark.parametrize("layout", ["meshcnn", "auto"])
def test_meshcnn_labels_edges_in_the_published_numbering(tmp_path: Path, layout: str) -> None:
    data = load_dataset(write(tmp_path, MESHCNN_SET), layout)
    assert parts(data) == (["shrec__2", "shrec__10"], [], ["shrec__1"])  # natural order
    assert (data.labels_at, data.label_names) == ("edges", ["1", "2", "8"])
    assert [item.labels.tolist() for item in data.train] == [[0, 0, 1, 1, 2, 2, 2], [0] * 6 + [UNLABELED]]
    assert len(data.test[0].labels) == len(mesh_edges(data.test[0].mesh.faces)) == 6
    accepted = np.array([[False, True, True]] * 3 + [[True, False, False]] * 3)  # classes 1, 2 and 8
    np.testing.assert_array_equal(data.test[0].accepted, accepted)
    assert data.train[0].accepted is None


def test_meshcnn_soft_labels_of_a_set_without_its_training_part(tmp_path: Path) -> None:
    """The smallest label of all files numbers the columns, as in MeshCNN."""
    write(tmp_path, {**MESHCNN_SET, "train/shrec__2.obj": "broken", "seg/shrec__1.eseg": [8, 8, 8, 2, 2, 2]})
    data = load_dataset(tmp_path, needs_train=False)
    assert data.label_names == ["2", "8"]
    np.testing.assert_array_equal(data.test[0].accepted, [[True, True]] * 3 + [[False, False]] * 3)
    write(tmp_path, {"label_names.txt": "a\nb\nc\n"})
    named = load_dataset(tmp_path, needs_train=False)
    assert (named.label_names, named.label_numbers) == (["a", "b", "c"], [1, 2, 8])
    assert named.test[0].labels.tolist() == [2, 2, 2, 1, 1, 1]
    np.testing.assert_array_equal(named.test[0].accepted, [[False, True, True]] * 3 + [[True, False, False]] * 3)


@pytest.mark.parametrize("layout", ["coseg", "auto"])
def test_coseg(tmp_path: Path, layout: str) -> None:
    files = {f"shapes/{i}.off": FAN for i in range(1, 6)} | {f"gt/{i}.seg": "1\n2\n2\n" for i in range(1, 6)}
    data = load_dataset(write(tmp_path, files), layout)
    assert (len(data.train), len(data.test)) == (4, 1)
    assert (data.labels_at, data.label_names) == ("faces", ["1", "2"])
    assert all(item.labels.tolist() == [0, 1, 1] for item in data.train + data.test)
    write(tmp_path, {"train.txt": "2\n1.off\n", "test.txt": "5\n"})
    assert parts(load_dataset(tmp_path, layout)) == (["2", "1"], [], ["5"])
    (tmp_path / "gt/5.seg").write_text("1\n2\n")
    refused(DataError, r"5\.seg: 2 labels, but .*5\.off has 3 faces", load_dataset, tmp_path, layout)
    (tmp_path / "gt/5.seg").unlink()
    refused(DataError, r"no labels \(\.seg\) for 5\.off", load_dataset, tmp_path, layout)


@pytest.mark.parametrize("layout", ["princeton", "auto"])
@pytest.mark.parametrize(("meshes", "segs"), [("", ""), ("off/", "seg/"), ("", "seg/"), ("off/", "off/")])
def test_princeton_labels_faces(tmp_path: Path, layout: str, meshes: str, segs: str) -> None:
    files = {f"{meshes}{i}.off": FAN for i in (1, 2, 10)} | {f"{segs}{i}.seg": [0, i, 3] for i in (1, 2, 10)}
    data = load_dataset(write(tmp_path, files), layout, test_fraction=0.01)
    assert (len(data.train), len(data.test)) == (2, 1)
    assert (data.labels_at, data.label_names) == ("faces", ["0", "1", "2", "3", "10"])
    assert by_name(data) == {"1": [0, 1, 3], "2": [0, 2, 3], "10": [0, 4, 3]}


def test_princeton_is_divided_by_lists_and_subfolders(tmp_path: Path) -> None:
    labels = {f"{i}.seg": [i, i, i] for i in range(4)}
    listed = write(tmp_path / "listed", {f"{i}.off": FAN for i in range(4)} | labels)
    write(listed, {"train.txt": "3.off\n\n1.OFF\n", "test.txt": "0.off\r\n"})
    assert parts(load_dataset(listed)) == (["3", "1"], [], ["0"])
    parted = {"train/a.off": FAN, "train/a.seg": [1, 1, 1], "test/b.off": FAN, "seg/b.seg": [2, 2, 2]}
    data = load_dataset(write(tmp_path / "parted", parted))
    assert parts(data) == (["a"], [], ["b"])
    assert data.test[0].labels.tolist() == [1, 1, 1]


def pair(first: tuple[Shape, list[int]], second: tuple[Shape, list[int]], **more: object) -> dict[str, object]:
    """Two meshes a and b with the labels given for each."""
    (mesh_a, labels_a), (mesh_b, labels_b) = first, second
    return {"a.off": mesh_a, "a.txt": labels_a, "b.off": mesh_b, "b.txt": labels_b, **more}


FORMATS = {
    "a.OFF": FAN,
    "b.STL": FAN,
    "c.obj": FAN,
    "labels/a.TXT": [0, 0, 0],
    "labels/b.npy": np.array([0.0, 1.0, 1.0], np.float32),
    "labels/c.seg": "0 1\n\n1.0",
    ".d.off": "not a mesh",
    "._a.txt": "not a label",
    "README.txt": "words",
}
EQUAL = TETRAHEDRON, [0, 1, 1, 0]
NUMBERS = {f"{name}_labels.txt": "1 1 2" for name in "ab"}
FOUR = [0, 1, 2, 3]
READ: dict[str, tuple[dict[str, Any], list[str], dict[str, list[int]]]] = {
    "vertices by the count": (
        pair((FAN, [7, 7, -3, 2, 2]), (FAN, [2, 2, 2, 2, 40])),
        ["vertices", "2", "7", "40"],
        {"a": [1, 1, UNLABELED, 0, 0], "b": [0, 0, 0, 0, 2]},
    ),
    "polygons, and their triangles": (
        pair((MIXED, [0, 1, 2]), (MIXED, [0, 0, 1, 2, 2])),
        ["faces", "0", "1", "2"],
        {"a": [0, 0, 1, 2, 2], "b": [0, 0, 1, 2, 2]},
    ),
    "vertices by another file": (pair(EQUAL, (FAN, [0, 1, 1, 1, 1])), ["vertices", "0", "1"], {}),
    "faces by another file": (pair(EQUAL, (FAN, [0, 1, 1])), ["faces", "0", "1"], {}),
    "faces of princeton": (
        {"1.off": TETRAHEDRON, "2.off": TETRAHEDRON, "1.seg": FOUR, "2.seg": FOUR},
        ["faces", *map(str, FOUR)],
        {},
    ),
    "formats in any case": (FORMATS, ["faces", "0", "1"], {"a": [0, 0, 0], "b": [0, 1, 1], "c": [0, 1, 1]}),
    "names in the order of the values": (
        pair((FAN, [9, 4, 4]), (FAN, [-1, 4, 9]), **{"label_names.txt": "arm\nleg\n"}),
        ["faces", "arm", "leg"],
        {"a": [1, 0, 0], "b": [UNLABELED, 0, 1]},
    ),
    "parts of polygons": (
        {"a.off": MIXED, "a_labels.txt": "x\n2 3\n", "b.off": FAN, "b_labels.txt": "x\n1 2\ny\n3"},
        ["faces", "x", "y"],
        {"a": [UNLABELED, UNLABELED, 0, 0, 0], "b": [0, 0, 1]},
    ),
    "numbers in place of parts": (
        {"a.off": FAN, "b.off": FAN, **NUMBERS},
        ["faces", "1", "2"],
        {"a": [0, 0, 1], "b": [0, 0, 1]},
    ),
    "a mesh with the name of a list": ({"a_labels.off": FAN, "b_labels.off": FAN, **NUMBERS}, ["faces", "1", "2"], {}),
}


@pytest.mark.parametrize("case", READ)
def test_elements_classes_and_labels(tmp_path: Path, case: str) -> None:
    files, (at, *classes), labels = READ[case]
    data = load_dataset(write(tmp_path, files))
    assert (data.labels_at, data.label_names) == (at, classes)
    assert not labels or by_name(data) == labels


@pytest.mark.parametrize(
    "labels", ["train/{}.txt", "train/labels/{}.txt", "labels/{}.txt"], ids=["beside", "below", "root"]
)
def test_folder_with_train_and_test_subfolders(tmp_path: Path, labels: str) -> None:
    files = {"train/a2.off": FAN, "train/a10.off": FAN, "test/b.off": FAN, "labels/b.txt": [0, 0, 0]}
    files |= {labels.format(name): [1, 1, 1] for name in ("a2", "a10")}
    assert parts(load_dataset(write(tmp_path, files))) == (["a2", "a10"], [], ["b"])


def test_folder_with_lists_leaves_out_other_meshes(tmp_path: Path) -> None:
    files = {f"meshes/{i}.off": FAN for i in range(5)} | {f"labels/{i}.txt": [i, i, i] for i in range(5)}
    data = load_dataset(write(tmp_path, {**files, "train.txt": "4.off\n2.off", "test.txt": "3.off\n"}))
    assert (parts(data), data.label_names) == ((["4", "2"], [], ["3"]), ["2", "3", "4"])


def test_random_split_is_seeded_sized_and_complete(tmp_path: Path) -> None:
    files = {f"{i}.off": FAN for i in range(12)} | {f"{i}.txt": [0, 0, 1] for i in range(12)}
    write(tmp_path, files)
    first, again, other = (load_dataset(tmp_path, test_fraction=0.25, seed=seed) for seed in (1, 1, 2))
    assert names(first.test) == names(again.test) != names(other.test)
    assert len(first.test) == 3
    assert sorted(names(first.train + first.test), key=int) == [str(i) for i in range(12)]
    assert names(first.train) == sorted(names(first.train), key=int)
    assert len(load_dataset(tmp_path, test_fraction=0.999).train) == 1
    assert len(load_dataset(tmp_path, test_fraction=0.001).test) == 1


def test_a_single_class_is_refused(tmp_path: Path) -> None:
    write(tmp_path, pair((FAN, [-1, 1, 1]), (FAN, [1, -1, -1])))
    with pytest.raises(DataError, match=r"'1' is the only class; .* at least 2\. A negative label means unlabeled"):
        load_dataset(tmp_path)
    assert len(load_dataset(tmp_path, needs_train=False).test) == 2


FOLDER_SET = {
    "train/a.OBJ": FAN,
    "train/labels/a.txt": [0, 0, 1, 1, 1],
    "test/b.c.off": TETRAHEDRON,
    "test/b.c.npy": np.array([0, 0, 1, 1]),
}
TEETH_SET = {
    "upper/p1/p1_upper.obj": FAN,
    "upper/p1/p1_upper.json": '{"jaw": "upper", "labels": [0, 0, 11, 11, 21], "instances": [0, 0, 1, 1, 2]}',
    "lower/p2/p2_lower.obj": TETRAHEDRON,
    "lower/p2/p2_lower.json": '{"labels": [0, 0, 21, 48.0]}',
}
SEG_SET = {"off/a.off": FAN, "off/b.off": TETRAHEDRON, "seg/a.seg": [0, 0, 1], "seg/b.seg": [0, 0, 1, 1]}
GOOD = pair((FAN, [0, 0, 1]), (FAN, [0, 1, 1]))
SOFT = "sseg/shrec__1.seseg"
SEVEN = {"off/b.off": MIXED, "seg/b.seg": [0] * 7}


@pytest.mark.parametrize(
    ("good", "changes", "message"),
    [
        (RNA_SET, {"labels/1N8R_B.txt": [5, 5, -2, 7]}, r"1N8R_B\.txt: label -2 of vertex 2 "),
        (RNA_SET, {"labels/1N8R_B.txt": [5, 5, 259, 7]}, r"1N8R_B\.txt: label 259 of vertex 2 "),
        (RNA_SET, {"labels/1N8R_B.txt": [5, 5, 5]}, r"1N8R_B\.txt: 3 labels, but .*1N8R_B\.off has 4 vertices"),
        (RNA_SET, {"labels/2J28_9.txt": None}, r"no labels .*2J28_9\.off"),
        (MESHCNN_SET, {SOFT: "1 0\n0 1\n"}, r"shrec__1\.seseg: 2 lines, but .* has 6 edges"),
        (
            MESHCNN_SET,
            {SOFT: "1 0\n" * 6},
            r"1\.seseg: 2 numbers in a line, for the labels from 1 on, but the label 8 occ",
        ),
        (MESHCNN_SET, {SOFT: "1 0\n1\n"}, r"shrec__1\.seseg, line 2: 1 column, but the lines before have 2"),
        (MESHCNN_SET, {SOFT: "1 x\n"}, r"shrec__1\.seseg, line 1: 'x' is not a number"),
        (MESHCNN_SET, {SOFT: "1 1_0\n"}, r"shrec__1\.seseg, line 1: '1_0' is not a number"),
        (MESHCNN_SET, {SOFT: "1 0\n0 nan\n"}, r"shrec__1\.seseg: shares should be at least 0, row 1 is \[0\.0, nan\]"),
        (MESHCNN_SET, {SOFT: "1 -1\n"}, r"shrec__1\.seseg: shares should be at least 0, row 0 is \[1\.0, -1\.0\]"),
        (MESHCNN_SET, {SOFT: "\n"}, r"shrec__1\.seseg: there are no numbers in the file"),
        (MESHCNN_SET, {"seg/shrec__1.eseg": [1] * 4}, r"shrec__1\.eseg: 4 labels, but .*shrec__1\.OBJ has 6 edges"),
        (MESHCNN_SET, {"seg/shrec__10.eseg": None}, r"no labels \(\.eseg\) for shrec__10\.obj"),
        (SEG_SET, SEVEN, r"b\.seg: 7 labels, .*b\.off has 3 faces \(5 triangles\)"),
        (GOOD, pair(EQUAL, EQUAL), r"4 labels fit .* 4 vertices and 4 faces"),
        (GOOD, {"a.txt": [0, 0, 0, 0]}, r"a\.txt: 4 labels, but .*a\.off has 5 vertices and 3 faces"),
        (GOOD, {"b.txt": [0] * 5}, r"b\.txt labels vertices, but .*a\.txt labels faces"),
        (GOOD, {"a.txt": [-1] * 3, "b.txt": [-1] * 3}, r"every label is negative"),
        (GOOD, {"label_names.txt": "a\nb\nc\n", "a.txt": [9, 4, 4], "b.txt": [-1, 4, 9]}, r"3 names for 2 .* \(4, 9\)"),
        (GOOD, {"b.off": None, "b.txt": None}, r"bad: 1 mesh .* at least 2"),
        (GOOD, {"c.off": FAN}, r"no labels .* for c\.off"),
        (GOOD, {"c.txt": [0, 0, 0]}, r"labels without a mesh: c\.txt"),
        (GOOD, {"labels/c.npy": np.zeros(3)}, r"labels without a mesh: labels/c\.npy"),
        (GOOD, {"labels/a.txt": [0, 0, 0]}, r"a\.off: more than one label file: .*a\.txt, .*labels/a\.txt"),
        (GOOD, {"a.obj": FAN}, r"'a' occurs twice, as .*a\.o(bj|ff) in t.* and as .*a\.o(bj|ff) in t"),
        (GOOD, {"train.txt": "a.off", "test.txt": "b.off\nc.off"}, r"test\.txt: no mesh in .* for c\.off"),
        (GOOD, {"train.txt": "a.off\nb.off", "test.txt": "b.off"}, r"'b' occurs twice, .*off in train .*off in test"),
        (GOOD, {"train.txt": "a.off\na.off", "test.txt": "b.off"}, r"'a' occurs twice, .* in train .* in train"),
        (GOOD, {"train.txt": "a.off", "test.txt": " \n"}, r"test\.txt: the file is empty"),
        (GOOD, {"train.txt": "a.off"}, r"there is train\.txt but no test\.txt"),
        (GOOD, {"test.txt": "a.off"}, r"there is test\.txt but no train\.txt"),
        (GOOD, {"train/c.off": FAN}, r"there is train but no test"),
        (GOOD, {"train/c.off": FAN, "test/c.txt": [0, 0, 0]}, r"no meshes in test"),
        (GOOD, {"test/c.off": FAN, "train/c.txt": [0, 0, 0]}, r"no meshes in train"),
        (GOOD, {"train/c.off": FAN, "test/c.off": FAN}, r"'c' occurs twice, .*c\.off in train .*c\.off in test"),
    ],
)
def test_faults_of_files(tmp_path: Path, good: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    assert load_dataset(write(tmp_path / "good", good)).train
    write(tmp_path / "bad", good | changes)
    refused(DataError, message, load_dataset, tmp_path / "bad")


def test_notes_beside_meshes_are_no_labels(tmp_path: Path) -> None:
    notes = "scanned in May\nby two people\n"
    expected = by_name(load_dataset(write(tmp_path / "good", GOOD)))
    write(tmp_path / "notes", {**GOOD, "notes.txt": notes, "labels/more.txt": ""})
    data = load_dataset(tmp_path / "notes")
    assert by_name(data) == expected
    assert data.left_out == ("files without labels and without a mesh: notes.txt, labels/more.txt",)
    # A label file with a mistyped name has labels, so it is no note.
    write(tmp_path / "typo", {**GOOD, "notes.txt": notes, "aa.txt": [0, 0, 1]})
    message = r"labels without a mesh: aa\.txt\. Add the mesh, or move these files elsewhere"
    refused(DataError, message, load_dataset, tmp_path / "typo")
    (tmp_path / "typo" / "a.txt").unlink()
    refused(DataError, r"no labels .* for a\.off", load_dataset, tmp_path / "typo")


def test_a_bad_mesh_is_named(tmp_path: Path) -> None:
    write(tmp_path, {**GOOD, "b.off": "OFF\n1 0 0\n0 0 nan\n"})
    refused(MeshError, r"b\.off", load_dataset, tmp_path)


def compress(root: Path, pattern: str) -> None:
    """Replace files by .gz files."""
    for file in sorted(root.glob(pattern)):
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()


@pytest.mark.parametrize(
    ("files", "pattern"),
    [
        (RNA_SET, "off/*"),
        (MESHCNN_SET, "t*/*"),
        (SEG_SET, "off/*"),
        (FOLDER_SET, "t*/[ab]*.[oO]*"),
        (RNA_SET, "labels/*"),
        (MESHCNN_SET, "seg/*"),
        (SEG_SET, "seg/*"),
        (FOLDER_SET, "t*/*.npy"),
        (FOLDER_SET, "train/labels/*"),
        ({**RNA_SET, "train.txt": "2J28_9.off.gz\n1K73_B.off", "test.txt": "1N8R_B.off.gz"}, "off/*"),
    ],
)
def test_compressed_files_are_found_like_others(tmp_path: Path, files: dict[str, object], pattern: str) -> None:
    plain = write(tmp_path / "plain", RNA_SET if files.get("test.txt") == "1N8R_B.off.gz" else files)
    expected = load_dataset(plain)
    compress(write(tmp_path / "packed", files), pattern)
    assert list(tmp_path.rglob("*.gz"))
    data = load_dataset(tmp_path / "packed")
    assert (data.label_names, data.labels_at) == (expected.label_names, expected.labels_at)
    same_items([*data.train, *data.test], [*expected.train, *expected.test])


@pytest.mark.parametrize("suffix", [".vtp", ".vtu", ".vtk"])
def test_arrays_of_vtk_files_by_name(tmp_path: Path, suffix: str) -> None:
    """They are labels, targets and features, as properties of PLY files are. A polygon has one value."""
    pyvista = pytest.importorskip("pyvista", reason="the package is not installed: pip install 'diffnet[pyvista]'")
    for name, part in {"a": [0, 1, 1], "b": [1, 0, 0]}.items():
        data = pyvista.PolyData(np.array(MIXED[0], float), np.concatenate([[len(face), *face] for face in MIXED[1]]))
        data.cell_data["zone"], data["heat"] = np.array(part, np.int8), np.arange(7.0)
        (data.cast_to_unstructured_grid() if suffix == ".vtu" else data).save(tmp_path / f"{name}{suffix}")
    for source in ("auto", "file:zone"):  # the only array of whole numbers
        labeled = load_dataset(tmp_path, labels=source)
        assert labeled.labels_at == "faces"
        for item in labeled.train + labeled.test:
            np.testing.assert_array_equal(item.mesh.verts, MIXED[0])
            assert item.labels.tolist() == np.repeat([0, 1, 1] if item.name == "a" else [1, 0, 0], [2, 1, 2]).tolist()
    targets = load_targets(tmp_path, "file:zone")
    rows = {item.name: on_polygons(item.mesh, item.labels)[:, 0].tolist() for item in targets.train + targets.test}
    assert rows == {"a": [0, 1, 1], "b": [1, 0, 0]}
    assert own_arrays(load_mesh(tmp_path / f"a{suffix}"), "file:heat")["heat"][:, 0].tolist() == [*range(7)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_mesh_with_and_without_gz(tmp_path: Path, layout: str) -> None:
    coseg = {"shapes/a.off": FAN, "gt/a.seg": [0, 0, 1]}
    known = {"rna": RNA_SET, "meshcnn": MESHCNN_SET, "princeton": SEG_SET, "teeth": TEETH_SET, "coseg": coseg}
    files = known.get(layout, FOLDER_SET)
    write(tmp_path, files)
    mesh = tmp_path / next(iter(files))
    mesh.with_name(f"{mesh.name}.gz").write_bytes(gzip.compress(mesh.read_bytes()))
    with pytest.raises(DataError, match=f"{mesh.parent}: {mesh.name} and {mesh.name}.gz are the same mesh") as e:
        load_dataset(tmp_path, layout)
    assert "\n" not in str(e.value)


EXTREMES = [-(2**63), 2**63 - 1, 2**53 + 1]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("1\n2\n\n-3", [1, 2, -3]),
        (" 1 2\t+3\r\n", [1, 2, 3]),
        ("1.000e+00 2. -0.0", [1, 2, 0]),
        ("\ufeff5", [5]),
        (EXTREMES, EXTREMES),
        (np.array(EXTREMES), EXTREMES),
        (np.array([False, True]), [0, 1]),
        (np.array([[3], [-1]]), [3, -1]),
        *((np.array([0, 3, 100], dtype), [0, 3, 100]) for dtype in ("i1", "u1", "i8", "u8", "f2", "f8", ">i4")),
    ],
)
def test_label_files(tmp_path: Path, content: Any, expected: list[int]) -> None:
    name = "a.npy" if isinstance(content, np.ndarray) else "a.txt"
    labels = read_labels(write(tmp_path, {name: content}) / name)
    assert labels.tolist() == expected
    assert labels.dtype == np.int64


TOO_LARGE = [str(2**63), "1e19", "9" * 400, "9" * 5000]


@pytest.mark.parametrize(
    "token",
    ["head", "1.5", "nan", "inf", "-inf", "1_0", "\u0661", "0x1", "1,", *TOO_LARGE],
    ids=lambda token: token[:8],
)
def test_text_that_is_not_a_label(tmp_path: Path, token: str) -> None:
    (tmp_path / "a.txt").write_text(f"1\n\n2 {token}\n3", encoding="utf-8")
    refused(DataError, rf"a\.txt, line 3: '{token[:40]}' is not a whole number", read_labels, tmp_path / "a.txt")


def test_the_limit_of_compressed_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"0\n" * 2000))
    assert len(read_labels(tmp_path / "a.txt.gz")) == 2000
    monkeypatch.setenv("DIFFNET_MAX_UNPACKED_GIB", "1e-6")
    refused(DataError, r"a\.txt\.gz: .* 1e-06 GiB.*DIFFNET_MAX_UNPACKED_GIB", read_labels, tmp_path / "a.txt.gz")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([0, 1.5]), r"row 1 is 1\.5"),
        (np.array([0, 1, np.nan]), r"row 2 is nan"),
        (np.array([-np.inf], np.float16), r"row 0 is -inf"),
        (np.array([2.0**63]), r"row 0 is 9\.22"),
        (np.array([2**63], np.uint64), r"row 0 is 9223372036854775808"),
        (np.zeros((3, 2)), r"shape is \(3, 2\)"),
        (np.array(3), r"shape is \(\)"),
        (np.array(["1", "2"]), r"dtype is <U1"),
        (np.array([1, 2], object), r"not a NumPy array of numbers"),
        (np.zeros(0, np.int64), r"no labels in the file"),
    ],
)
def test_arrays_that_are_not_labels(tmp_path: Path, array: np.ndarray, message: str) -> None:
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    refused(DataError, rf"a\.npy: .*{message}", read_labels, tmp_path / "a.npy")


def test_files_that_are_not_label_files(tmp_path: Path) -> None:
    for name in ("a.txt.gz", "a.npy.gz"):
        (tmp_path / name).write_bytes(b"not compressed")
        refused(DataError, f"{name}: not a gzip file, or a damaged one", read_labels, tmp_path / name)
    contents = {"words.npy": b"1\n2\n", "cut.npy": b"", "zip.npy": b"PK\x03\x04 cut off"}
    contents |= {"empty.txt": b"\n \n", "binary.txt": b"\xff\xfe\x00\x01"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    np.save(tmp_path / "header.npy", np.zeros(3, np.int64))
    (tmp_path / "header.npy").write_bytes((tmp_path / "header.npy").read_bytes().replace(b"(3,)", b"(3,("))
    with (tmp_path / "archive.npy").open("wb") as file:
        np.savez(file, labels=np.zeros(3))
    for name in (*contents, "header.npy", "archive.npy", "absent.npy", "absent.txt"):
        refused(DataError, name.replace(".", r"\."), read_labels, tmp_path / name)


@pytest.mark.parametrize(
    ("folder", "arguments", "message"),
    [
        ("nowhere", {}, "nowhere: no such folder"),
        (".", {"layout": "shapenet"}, f"layout should be one of {', '.join(LAYOUTS)}, got 'shapenet'"),
        *((".", {"test_fraction": wrong}, "test_fraction should be between 0 and 1") for wrong in (0.0, 1.0, np.nan)),
    ],
)
def test_bad_arguments(tmp_path: Path, folder: str, arguments: dict[str, Any], message: str) -> None:
    refused(DataError, message, load_dataset, tmp_path / folder, **arguments)


def test_folder_without_a_data_set_names_every_layout(tmp_path: Path) -> None:
    write(tmp_path, {"notes.md": "words"})
    with pytest.raises(DataError, match=rf"{tmp_path.name}: no data set found") as caught:
        load_dataset(tmp_path)
    assert all(layout in str(caught.value) for layout in LAYOUTS if layout != "auto")


@pytest.mark.parametrize("name", ["b.off", "b.txt"])
def test_link_to_a_missing_file(tmp_path: Path, name: str) -> None:
    write(tmp_path, pair((FAN, [0, 1, 0]), (FAN, [0, 1, 1])))
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to(tmp_path / "nowhere")
    refused(DataError, rf"{name}: this link points to a file that is missing", load_dataset, tmp_path)
