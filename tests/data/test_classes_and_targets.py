"""`load_targets` with the statistics of targets, `load_classes`, and the generated classes."""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import trimesh
from refusals import refused
from set_files import names, parts, write

from diffnet.data import (
    DataError,
    LabeledMesh,
    LabeledMeshes,
    check_target_statistics,
    index_classes,
    index_targets,
    load_classes,
    load_targets,
    original_targets,
    shapes,
    standardized_targets,
    target_statistics,
    with_columns,
)
from diffnet.data.folders import index
from diffnet.data.shapes import LIMBS
from diffnet.geometry import make_mesh, mesh_edges
from diffnet.geometry.errors import OptionError
from diffnet.viz import write_ply

BALL = trimesh.creation.icosphere(1)  # 42 vertices, 80 faces, 120 edges
SIZES = {"vertices": 42, "faces": 80, "edges": 120}


def put(path: Path, mesh: trimesh.Trimesh = BALL) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    mesh.export(path)


def three(root: Path, at: str = "vertices", name: str = "t") -> list[np.ndarray]:
    """Three meshes with arrays of two columns."""
    arrays = [np.random.default_rng(i).normal(size=(SIZES[at], 2)) for i in range(3)]
    for i, array in enumerate(arrays):
        put(root / f"m{i}.ply")
        np.save(root / f"m{i}.{name}.npy", array)
    return arrays


@pytest.mark.parametrize("at", list(SIZES))
def test_the_number_of_rows_decides_where_targets_are(at: str, tmp_path: Path) -> None:
    arrays = three(tmp_path, at)
    data = load_targets(tmp_path, "file:t", seed=1)
    assert (data.labels_at, data.label_names) == (at, ["t_0", "t_1"])
    assert (len(data.train), len(data.test)) == (2, 1)
    for item in (*data.train, *data.test):
        np.testing.assert_array_equal(item.labels, arrays[int(item.name[1:])])
    assert len(mesh_edges(data.test[0].mesh.faces)) == SIZES["edges"]


def test_forms_and_places_of_files(tmp_path: Path) -> None:
    """Text with blanks or commas, a table with names, an array in a folder, and gzip. All have the same numbers."""
    values = np.random.default_rng(0).normal(size=(42, 2)).round(3)
    values[5, 1] = np.nan
    for i in range(5):
        put(tmp_path / f"m{i}.obj")
    (tmp_path / "t").mkdir()
    np.savetxt(tmp_path / "m0.t.txt", values)
    np.savetxt(tmp_path / "m1.t.txt", values, delimiter=", ")
    np.savetxt(tmp_path / "m2.t.csv", values, delimiter=",")
    np.save(tmp_path / "t" / "m3.npy", values)
    (tmp_path / "m4.t.txt.gz").write_bytes(gzip.compress((tmp_path / "m0.t.txt").read_bytes()))
    data = load_targets(tmp_path, "file:t")
    for item in (*data.train, *data.test):
        np.testing.assert_array_equal(item.labels, values)
    for i in range(5):
        rows = "\n".join(f"{u}, {'' if np.isnan(v) else v}" for u, v in values)
        for old in (*tmp_path.glob("m*.t.*"), tmp_path / "t" / f"m{i}.npy"):
            old.unlink(missing_ok=True)
        (tmp_path / "t" / f"m{i}.csv").write_text(f"u,mean v\n{rows}\n")
    data = load_targets(tmp_path, "file:t")
    assert data.label_names == ["u", "mean v"]
    np.testing.assert_array_equal(data.test[0].labels, values)


@pytest.mark.parametrize("at", ["vertices", "faces"])
def test_properties_of_ply_files(at: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(2, SIZES[at]))
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        mesh = make_mesh(BALL.vertices, BALL.faces)
        write_ply(tmp_path / part / f"{part}.ply", mesh, scalars={"u": values[0], "v": values[1]}, at=at)
    data = load_targets(tmp_path, "file:v+file:u")
    assert (data.labels_at, data.label_names) == (at, ["v", "u"])
    np.testing.assert_array_equal(data.test[0].labels, values[::-1].T)
    assert [item.name for item in data.test] == ["test"]


def test_lists_divide_the_set_and_an_evaluation_needs_test_meshes_alone(tmp_path: Path) -> None:
    three(tmp_path)
    (tmp_path / "test.txt").write_text("m1")
    assert parts(load_targets(tmp_path, "file:t", needs_train=False)) == ([], [], ["m1"])
    (tmp_path / "train.txt").write_text("m2.ply\n")
    assert names(load_targets(tmp_path, "file:t").train) == ["m2"]


def test_tables_of_whole_meshes(tmp_path: Path) -> None:
    for i in range(5):
        put(tmp_path / "meshes" / f"m{i}.off")
    table = tmp_path / "targets.csv"
    rows = [f"meshes/m{i}.off,{i},{'' if i == 2 else 0.5}\n" for i in range(5)]
    table.write_text("file, volume,area\n" + "".join(rows))
    data = load_targets(tmp_path)
    assert (data.labels_at, data.label_names, len(data.train), len(data.test)) == ("meshes", ["volume", "area"], 4, 1)
    found = {item.name: item.labels for item in (*data.train, *data.test)}
    np.testing.assert_array_equal(found["meshes/m2.off"], [[2, np.nan]])
    assert len(load_targets(table, needs_train=False).test) == 5
    other = tmp_path / "other.csv"
    other.write_text("file,volume,split\nmeshes/m0.off,1,train\nmeshes/m1.off,2,test\n")
    assert names(load_targets(other).test) == ["meshes/m1.off"]


WITH_INFINITY = np.zeros((42, 2))
WITH_INFINITY[3, 1] = -np.inf


@pytest.mark.parametrize("classes", [True, False])
def test_folders_divide_the_rows_of_a_table(tmp_path: Path, classes: bool) -> None:
    """They may have more words, and stand below others. A table with a split column doesn't need them."""
    files = [f"a/{part}/{i}.ply" for part in ("my_train", "my_test") for i in range(2)]
    for file in files:
        put(tmp_path / file)
    put(tmp_path / "a" / "m.ply")
    table = tmp_path / ("labels.csv" if classes else "targets.csv")

    def load(rows: Sequence[str], **options: Any) -> LabeledMeshes:
        table.write_text("\n".join(["file,label" if classes else "file,volume", *rows]))
        return (load_classes if classes else load_targets)(tmp_path, **options)

    rows = [f"{file},{i % 2}" for i, file in enumerate(files)]
    data = load(rows)
    assert (parts(data), data.source) == ((files[:2], [], files[2:]), "by the folders of the meshes")
    assert names(load(rows, needs_train=False).test) == files[2:]
    message = r"tell train and test, but not of \S*a/m.ply; add a column split"
    refused(DataError, message, load, [*rows, "a/m.ply,1"])
    put(tmp_path / "b" / "m.ply")
    rest = [*(row for row in rows if "test" not in row), "a/m.ply,1", "b/m.ply,0"]
    assert load(rest).source == "at random, seed 0"


HEADER = "targets.csv: the first line should be file,COLUMN,… or file,COLUMN,…,split, got "


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m1.t.npy", np.zeros((41, 2)), r"m1.t.npy: 41 rows, but .*m1.ply has 42 vertices, 80 faces and 120 edges"),
        ("m1.t.npy", np.zeros((80, 2)), r"m0.t.npy has targets at vertices, but .*m1.t.npy has targets at faces"),
        ("m1.t.npy", np.zeros((42, 3)), r"m1.t.npy: 3 columns, but .*m0.t.npy has 2"),
        ("m1.t.npy", np.zeros((42, 2, 2)), r"m1.t.npy: expected rows of numbers, .* got shape \(42, 2, 2\)"),
        ("m1.t.npy", np.zeros((0, 2)), r"m1.t.npy: there are no numbers in the file"),
        ("m1.t.npy", np.array(["a"] * 42), r"m1.t.npy: targets should be numbers, dtype is <U1"),
        ("m1.t.npy", WITH_INFINITY, r"m1.t.npy: row 3 has -inf; targets should be below 1e\+30, or nan"),
        ("m1.t.npy", "text", r"m1.t.npy: the file is not a NumPy array of numbers"),
        ("m1.t.npy", "PK\x03\x04 cut off", r"m1.t.npy: the file is not a NumPy array of numbers"),
        ("m1.t.npy", None, r"m1.ply: no targets for file:t. Expected one of .*m1.t, .* with .npy, .txt or .csv"),
        ("m1.t.txt", "1 2\n3 x\n", r"m1.t.txt, line 2: 'x' is not a number"),
        ("m1.t.txt", "1 2\n3\n", r"m1.t.txt, line 2: 1 column, but the lines before have 2"),
        ("m1.t.txt", "1 2\n1_0 2\n", r"m1.t.txt, line 2: '1_0' is not a number"),
        ("m1.t.txt", "1 2\n\u0661 2\n", r"m1.t.txt, line 2: '\u0661' is not a number"),
        ("m1.t.txt", "1 inf\n", r"m1.t.txt, line 1: 'inf' is too large"),
        ("m1.t.txt", "\n\n", r"m1.t.txt: there are no numbers in the file"),
        ("m1.t.csv", "u,v\n1,\n2,w\n", r"m1.t.csv, line 3: 'w' is not a number"),
        ("m1.t.csv", "u,u\n1,2\n", r"m1.t.csv: two columns are called 'u'"),
        ("m1.t.csv", "u,v\n" + "1,2\n" * 42, r"m1.t.csv: the columns are \['u', 'v'\], but those of .*m0.t.npy are"),
        ("m0.t.txt", "1 2\n", r"m0.ply: more than one file for file:t: .*m0.t.npy, .*m0.t.txt. Keep one of them"),
        ("targets.csv", "", f"{HEADER}''"),
        ("targets.csv", "m0.ply,1\nm1.ply,2", f"{HEADER}'m0.ply,1'"),
        ("targets.csv", "file,split\nm0.ply,train", HEADER),
        ("targets.csv", "file,a\n", r"targets.csv: there are no meshes in the table"),
        ("targets.csv", "file,a,a\nm0.ply,1,2", r"targets.csv: two columns are called 'a'"),
        ("targets.csv", "file,a,\nm0.ply,1,2", r"targets.csv: column 2 has no name"),
        ("targets.csv", "file,a\nm0.ply,1\nm1.ply,x", r"targets.csv, line 3, column a: 'x' is not a number"),
        ("targets.csv", "file,a\nm0.ply,1\nm1.ply,inf", r"targets.csv, line 3, column a: 'inf' is too large"),
        ("targets.csv", "file,a\nm0.ply,1\nm1.ply", r"targets.csv, line 3: 1 cells, but the first line has 2"),
        ("targets.csv", "file,a\nm0.ply,1\nm9.ply,1", r"targets.csv, line 3: .*m9.ply: no such file"),
        ("targets.csv", "file,a\nm0.ply,1\nm0.ply,1", r"targets.csv, line 3: m0.ply is in line 2, too"),
        ("targets.csv", "file,a,split\nm0.ply,1,train\nm1.ply,1,", r"line 3: either all lines or none should have"),
        ("targets.csv", "file,a,split\nm0.ply,1,train\nm1.ply,1,train", r"targets.csv: there are no test meshes"),
        ("targets.csv", "file,a,b\nm0.ply,1,\nm1.ply,1,nan", r"the column 'b' is missing \(NaN\) in all training mes"),
    ],
)
def test_bad_files_give_one_line_that_names_the_place(name: str, content: Any, message: str, tmp_path: Path) -> None:
    three(tmp_path)
    (tmp_path / "m1.t.npy").unlink()
    write(tmp_path, {name: content})
    with pytest.raises(DataError, match=message) as raised:
        load_targets(tmp_path, None if name == "targets.csv" else "file:t")
    assert len(str(raised.value).splitlines()) == 1


def test_missing_targets_and_wrong_names(tmp_path: Path) -> None:
    three(tmp_path)
    refused(DataError, r"no table. Expected targets.csv .* file,COLUMN, or --targets file:", load_targets, tmp_path)
    refused(DataError, r"none: no such folder or table", load_targets, tmp_path / "none")
    with pytest.raises(DataError, match=r"m0.ply: a folder or a table is needed for the targets file:t"):
        load_targets(tmp_path / "m0.ply", "file:t")
    refused(DataError, r"no table. Expected .* columns file,t, or --targets file:t for", load_targets, tmp_path, "t")
    for wrong in ("file:t+xyz", "file:", "scalar:t", "file:t+displacement:t"):
        with pytest.raises(
            OptionError, match=r"targets should be file:NAME, vector:NAME, .* or table:COLUMN, one or several joined"
        ):
            load_targets(tmp_path, wrong)


CASES = "note,speed,file,drag,split\na,30,m0.ply,1,train\nb,50,m1.ply,2,train\nc,70,m2.ply,3,test\n"


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
@pytest.mark.parametrize("targets", ["drag", "file:t"])
def test_conditions_are_columns_of_the_table(suffix: str, targets: str, tmp_path: Path) -> None:
    """Other columns are ignored. The cache recognizes other conditions."""
    arrays, table = three(tmp_path), tmp_path / f"cases{suffix}"
    table.write_text(CASES.replace(",", "\t" if suffix == ".tsv" else ","))
    keys = []
    for data in (
        load_targets(table, targets, conditions="speed"),
        index_targets(table, tmp_path / "cache", targets, conditions="speed", jobs=1),
        index_targets(table, tmp_path / "cache", targets, conditions="drag" if ":" in targets else None, jobs=1),
    ):
        keys.append(getattr(data.train, "key", None))
        assert data.label_names == (["drag"] if targets == "drag" else ["t_0", "t_1"])
        np.testing.assert_array_equal(data.test[0].labels, [[3]] if targets == "drag" else arrays[2])
        if data.condition_names == ("speed",):
            assert [item.conditions.tolist() for item in (*data.train, *data.test)] == [[30], [50], [70]]
            assert target_statistics(data.train, ["speed"], 1, of="conditions") == {"mean": [40], "std": [10]}
    assert keys[1] != keys[2]


@pytest.mark.parametrize(
    ("content", "targets", "conditions", "message"),
    [
        (CASES, "lift", "speed", "no column 'lift'; the columns are note, speed, file, drag, split"),
        (CASES.replace("a,", "a.vtk,"), "drag", "yaw", "no column 'yaw'; the columns are note, speed"),
        (CASES, "drag", "drag", "the column 'drag' can't be a target and a condition"),
        (CASES.replace("50", ""), "drag", "speed", "line 3: the condition speed is missing"),
        (CASES, "drag", "speed,", "conditions should be different names separated by commas, got 'speed,'"),
    ],
)
def test_bad_conditions(content: str, targets: str, conditions: str, message: str, tmp_path: Path) -> None:
    three(tmp_path)
    write(tmp_path, {"targets.csv": content})
    refused((DataError, OptionError), message, load_targets, tmp_path, targets, conditions=conditions)


def test_conditions_in_field_data(tmp_path: Path) -> None:
    """They are those that no table has. The index reads them once."""
    pyvista = pytest.importorskip("pyvista")
    ball = pyvista.Icosphere(nsub=1)
    for i in range(3):
        ball["t"], ball.field_data["yaw"], ball.field_data["speed"] = np.full((42, 2), i), [-i], [30 + 20 * i]
        ball.save(tmp_path / f"m{i}.vtp")
    part = {f"{part}.txt": names for part, names in (("train", ["m0", "m1"]), ("test", ["m2"]))}
    write(tmp_path, part)
    indexed = partial(index_targets, tmp_path, tmp_path / "cache", "file:t", conditions="speed,yaw", jobs=1)
    sets = [load_targets(tmp_path, "file:t", conditions="speed,yaw"), indexed()]
    with patch.object(index, "read_fields", side_effect=AssertionError):
        sets.append(indexed())
    lines = ["file,yaw,drag,split", "m0.vtp,5,1,train", "m1.vtp,6,2,train", "m2.vtp,7,3,test"]
    write(tmp_path, {"targets.csv": "\n".join(lines)})
    sets.append(load_targets(tmp_path, "drag", conditions="speed,yaw"))
    for data, yaws in zip(sets, ([0, -1, -2], [0, -1, -2], [0, -1, -2], [5, 6, 7]), strict=True):
        conditions = [item.conditions.tolist() for item in (*data.train, *data.test)]
        assert conditions == [[30 + 20 * i, yaw] for i, yaw in enumerate(yaws)]
    message = r"m0.vtp: the condition 'age' is no column of a table, and .* file, which has yaw, speed"
    refused(DataError, message, load_targets, tmp_path, "file:t", conditions="age")


def test_statistics_leave_missing_targets_out(tmp_path: Path) -> None:
    columns = np.array([[1.0, 5, np.nan], [3, 5, 2], [np.nan, 5, 4]])
    mesh = make_mesh(np.eye(3), [[0, 1, 2]])
    item = LabeledMesh("a", mesh, columns)
    statistics = target_statistics([item], ["u", "v", "w"])
    assert statistics == {"mean": [2, 5, 3], "std": [1, 1, 1]}
    assert check_target_statistics(statistics, 3) == statistics
    (scaled,) = standardized_targets([item], statistics)
    assert scaled.labels.dtype == np.float32
    np.testing.assert_array_equal(scaled.labels, [[-1, 0, np.nan], [1, 0, -1], [np.nan, 0, 1]])
    np.testing.assert_array_equal(original_targets(torch.tensor(scaled.labels), statistics), columns)
    with pytest.raises(DataError, match=r"the column 'v' is missing \(NaN\) in all training meshes"):
        target_statistics([LabeledMesh("a", mesh, np.array([[1.0, np.nan]]))], ["u", "v"])
    with pytest.raises(DataError, match=r"a: the column 'u' has an infinite target"):
        target_statistics([LabeledMesh("a", mesh, np.array([[np.inf]]))], ["u"])
    with pytest.raises(DataError, match=r"a: targets should have shape \(N, 1\), got \(3,\)"):
        target_statistics([LabeledMesh("a", mesh, np.zeros(3))], ["u"])
    for wrong in (None, {"mean": [0.0], "std": [0.0]}, {"mean": [0.0, 1.0], "std": [1.0, 1.0]}):
        refused(OptionError, "the statistics of the targets should be", check_target_statistics, wrong, 1)
    data = with_columns(LabeledMeshes([], [item], ["u", "v", "w"], "vertices"), ["w", "u"])
    np.testing.assert_array_equal(data.test[0].labels, columns[:, [2, 0]])
    with pytest.raises(DataError, match=r"the set has no column 'x'; its columns are u, v, w"):
        with_columns(LabeledMeshes([], [item], ["u", "v", "w"], "vertices"), ["x"])


def place(path: Path, suffix: str = ".obj") -> Path:
    put(path.with_suffix(suffix), trimesh.creation.icosphere(0))
    return path


def labels(items: Sequence[LabeledMesh]) -> list[int]:
    assert all(item.labels.shape == () and item.labels.dtype == np.int64 for item in items)
    return [int(item.labels) for item in items]


@pytest.mark.parametrize("form", ["{label}/{part}/{i}", "{part}/{label}/{i}"])
def test_folders_with_parts(tmp_path: Path, form: str) -> None:
    for label in ("cat", "dog"):
        for part, count in (("train", 3), ("test", 2)):
            for i in range(count):
                place(tmp_path / form.format(label=label, part=part, i=i), ".ply" if i else ".off")
    data = load_classes(tmp_path)
    assert (data.label_names, data.labels_at) == (["cat", "dog"], "meshes")
    assert sorted(names(data.train)) == [f"{label}/{i}" for label in ("cat", "dog") for i in range(3)]
    assert (labels(data.train), labels(data.test)) == ([0, 0, 0, 1, 1, 1], [0, 0, 1, 1])
    scored = load_classes(tmp_path, needs_train=False)
    assert (scored.train, names(scored.test)) == ([], names(data.test))
    for folder in ("train", "cat/train", "dog/train"):
        shutil.rmtree(tmp_path / folder, ignore_errors=True)
    scored = load_classes(tmp_path, needs_train=False)
    assert (scored.train, names(scored.test)) == ([], names(data.test))
    refused(DataError, "class 'cat' has no train mesh", load_classes, tmp_path)


def test_names_of_folders_that_are_not_text(tmp_path: Path) -> None:
    """Files and charts can't hold such names, so classes have text instead."""
    for label in (b"cat", b"dog\xff"):
        for i in range(2):
            place(tmp_path / os.fsdecode(label) / f"m{i}")
    assert load_classes(tmp_path).label_names == ["cat", "dog\\udcff"]


def test_a_random_part_of_each_class_is_for_testing(tmp_path: Path) -> None:
    for label, count in (("a", 10), ("b", 3)):
        for i in range(count):
            place(tmp_path / label / f"m{i}")
    data = load_classes(tmp_path, seed=1)
    assert (labels(data.test), len(data.train)) == ([0, 0, 1], 10)
    assert names(load_classes(tmp_path, seed=1).test) == names(data.test)
    assert len({tuple(names(load_classes(tmp_path, seed=seed).test)) for seed in range(5)}) > 1
    assert len(load_classes(tmp_path, needs_train=False).test) == 13


@pytest.mark.parametrize("header", ["", "file,label\n"])
def test_tables(tmp_path: Path, header: str) -> None:
    for i in range(4):
        place(tmp_path / "meshes" / f"m{i}")
    table = tmp_path / "labels.csv"
    table.write_text(header + "\n\n".join(f'meshes/m{i}.obj,"{"yx"[i % 2]}"' for i in range(4)))
    for source in (tmp_path, table):
        data = load_classes(source)
        assert data.label_names == ["x", "y"]
        assert sorted(names(data.train + data.test)) == [f"meshes/m{i}.obj" for i in range(4)]
    rows = [f"meshes/m{i}.obj,{i % 2},{'train' if i < 2 else 'test'}\n" for i in range(4)]
    table.write_text("file,label,split\n" + "".join(rows))
    data = load_classes(table)
    assert (labels(data.train), labels(data.test)) == ([0, 1], [0, 1])
    assert names(load_classes(table, needs_train=False).test) == ["meshes/m2.obj", "meshes/m3.obj"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("a.obj", r"labels.csv, line 1: expected file,label or file,label,split; got 'a.obj'"),
        ("file,label\na.obj,1\nb.obj,2,3,4", r"labels.csv, line 3: expected"),
        ("a.obj,1,eval", r"line 1: the split should be train, val or test, got 'eval'"),
        ("none.obj,1", r"line 1: .*none.obj: no such file"),
        ("labels.csv,1", r"line 1: labels.csv is no mesh"),
        ("a.obj,1\na.obj,2", r"line 2: a.obj is in line 1, too"),
        ("a.obj,1\nb.obj,2,train", r"line 2: either all lines or none should have a split"),
        ("file,label", r"labels.csv: there are no meshes in the table"),
        ("a.obj,1\nb.obj,1", r"'1' is the only class"),
        ("a.obj,1\nb.obj,2", r"class '1' has no test mesh: it has 1 mesh$"),
        ("a.obj,1,train\nb.obj,2,test", r"class '1' has no test mesh"),
        ('a.obj,"1', r"labels.csv: not a table"),
    ],
)
def test_faults_of_tables(tmp_path: Path, lines: str, message: str) -> None:
    for name in "ab":
        place(tmp_path / name)
    (tmp_path / "labels.csv").write_text(lines)
    refused(DataError, message, load_classes, tmp_path)


def test_faults_of_folders(tmp_path: Path) -> None:
    refused(DataError, "none: no such folder or table", load_classes, tmp_path / "none")
    refused(DataError, "no classes found", load_classes, tmp_path)
    place(tmp_path / "a" / "train" / "m")
    place(tmp_path / "a" / "test" / "m2")
    refused(DataError, "'a' is the only class", load_classes, tmp_path)
    (tmp_path / "b").mkdir()
    refused(DataError, r"b: no meshes .* in this class", load_classes, tmp_path)
    place(tmp_path / "b" / "m")
    refused(DataError, r"a has train/ or test/, and .*b has none", load_classes, tmp_path)
    (tmp_path / "b" / "m.obj").unlink()
    place(tmp_path / "b" / "train" / "m")
    refused(DataError, "class 'b' has no test mesh: it has 1 mesh", load_classes, tmp_path)
    assert len(index_classes(tmp_path, tmp_path / "cache", ignored=["b"]).train) == 2


def test_meshes_beside_folders_are_named(tmp_path: Path) -> None:
    for name in ("cat/1", "cat/2", "dog/1", "dog/2"):
        place(tmp_path / "flat" / name)
        place(tmp_path / "parted" / name[:3] / "train" / "m")
        place(tmp_path / "parted" / name[:3] / "test" / "n")
        place(tmp_path / "above" / "train" / name)
        place(tmp_path / "above" / "test" / name)
    for kind in ("flat", "parted", "above"):
        assert not load_classes(tmp_path / kind).left_out
    for folder, kind in (("flat", "flat"), ("parted", "parted"), ("parted/dog", "parted"), ("above/test", "above")):
        stray = place(tmp_path / folder / "stray").with_suffix(".obj")
        data = load_classes(tmp_path / kind)
        assert data.left_out == (f"meshes in {stray.parent}, whose subfolders have the meshes of the set: stray.obj",)
        assert not any("stray" in name for name in names(data.train + data.test))
        stray.unlink()


def test_the_generated_classes() -> None:
    data = shapes(classes=4, train=2, test=1, seed=5)
    assert data.label_names == [f"plain+club+bead+{kind}" for kind in ("fork", "thick", "cone", "twin")]
    assert (labels(data.train), labels(data.test)) == ([0, 0, 1, 1, 2, 2, 3, 3], [0, 1, 2, 3])
    holes = []
    for item in data.train:
        surface = trimesh.Trimesh(item.mesh.verts, item.mesh.faces, process=False)
        assert 600 < len(item.mesh.verts) < 2000
        assert surface.body_count == 1
        assert surface.is_winding_consistent
        holes.append(2 - surface.euler_number)
        assert surface.is_watertight == (not holes[-1])
        assert holes[-1] or surface.volume > 0
    assert set(holes) == {0, 1, 2}
    again = shapes(classes=2, train=1, test=1, seed=5).train[1]
    np.testing.assert_array_equal(again.mesh.verts, data.train[2].mesh.verts)
    other = shapes(classes=2, train=1, test=1, seed=6).train[1]
    assert other.mesh.verts.shape != again.mesh.verts.shape or not np.array_equal(other.mesh.verts, again.mesh.verts)
    assert len(shapes(35, 1, 1).label_names) == len(set(combinations(LIMBS, 4)))
    for wrong in ({"classes": 1}, {"classes": 36}, {"train": 0}, {"seed": -1}):
        refused(ValueError, f"{next(iter(wrong))} should be", shapes, **wrong)
