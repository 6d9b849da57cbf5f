"""Data sets with one label for each mesh: folders of classes, tables, and the generated one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import trimesh
from refusals import refused
from set_files import names

from diffnet.data import DataError, LabeledMesh, load_classes, shapes
from diffnet.data.shapes import LIMBS


def write(path: Path, suffix: str = ".obj") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    trimesh.creation.icosphere(0).export(path.with_suffix(suffix))
    return path


def labels(items: Sequence[LabeledMesh]) -> list[int]:
    assert all(item.labels.shape == () and item.labels.dtype == np.int64 for item in items)
    return [int(item.labels) for item in items]


@pytest.mark.parametrize("form", ["{label}/{part}/{i}", "{part}/{label}/{i}"])
def test_folders_with_parts(tmp_path: Path, form: str) -> None:
    for label in ("cat", "dog"):
        for part, count in (("train", 3), ("test", 2)):
            for i in range(count):
                write(tmp_path / form.format(label=label, part=part, i=i), ".ply" if i else ".off")
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
            write(tmp_path / os.fsdecode(label) / f"m{i}")
    assert load_classes(tmp_path).label_names == ["cat", "dog\\udcff"]


def test_a_random_part_of_each_class_is_for_testing(tmp_path: Path) -> None:
    for label, count in (("a", 10), ("b", 3)):
        for i in range(count):
            write(tmp_path / label / f"m{i}")
    data = load_classes(tmp_path, seed=1)
    assert (labels(data.test), len(data.train)) == ([0, 0, 1], 10)
    assert names(load_classes(tmp_path, seed=1).test) == names(data.test)
    assert len({tuple(names(load_classes(tmp_path, seed=seed).test)) for seed in range(5)}) > 1
    assert len(load_classes(tmp_path, needs_train=False).test) == 13


@pytest.mark.parametrize("header", ["", "file,label\n"])
def test_tables(tmp_path: Path, header: str) -> None:
    for i in range(4):
        write(tmp_path / "meshes" / f"m{i}")
    table = tmp_path / "labels.csv"
    table.write_text(header + "\n\n".join(f'meshes/m{i}.obj,"{"yx"[i % 2]}"' for i in range(4)))
    for place in (tmp_path, table):
        data = load_classes(place)
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
        write(tmp_path / name)
    (tmp_path / "labels.csv").write_text(lines)
    refused(DataError, message, load_classes, tmp_path)


def test_faults_of_folders(tmp_path: Path) -> None:
    refused(DataError, "none: no such folder or table", load_classes, tmp_path / "none")
    refused(DataError, "no classes found", load_classes, tmp_path)
    write(tmp_path / "a" / "train" / "m")
    write(tmp_path / "a" / "test" / "m2")
    refused(DataError, "'a' is the only class", load_classes, tmp_path)
    (tmp_path / "b").mkdir()
    refused(DataError, r"b: no meshes .* in this class", load_classes, tmp_path)
    write(tmp_path / "b" / "m")
    refused(DataError, r"a has train/ or test/, and .*b has none", load_classes, tmp_path)
    (tmp_path / "b" / "m.obj").unlink()
    write(tmp_path / "b" / "train" / "m")
    refused(DataError, "class 'b' has no test mesh", load_classes, tmp_path)


def test_meshes_beside_folders_are_named(tmp_path: Path) -> None:
    for name in ("cat/1", "cat/2", "dog/1", "dog/2"):
        write(tmp_path / "flat" / name)
        write(tmp_path / "parted" / name[:3] / "train" / "m")
        write(tmp_path / "parted" / name[:3] / "test" / "n")
        write(tmp_path / "above" / "train" / name)
        write(tmp_path / "above" / "test" / name)
    for kind in ("flat", "parted", "above"):
        assert not load_classes(tmp_path / kind).left_out
    for folder, kind in (("flat", "flat"), ("parted", "parted"), ("parted/dog", "parted"), ("above/test", "above")):
        stray = write(tmp_path / folder / "stray").with_suffix(".obj")
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
