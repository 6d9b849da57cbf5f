"""Sets as other people store them: their lists, folders and labels, groups of scans, what a set says, built-in sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nibabel
import nibabel.freesurfer
import numpy as np
import pytest
import trimesh
from command import complaint, output
from refusals import refused
from runs import table_of
from set_files import names, parts, write_ply

from diffnet.benchmarks.bodies import pack
from diffnet.data import (
    BODIES,
    BODY_MAPS,
    DataError,
    LabeledMesh,
    LabeledMeshes,
    Preprocessing,
    index_dataset,
    index_targets,
    input_features,
    load_classes,
    load_dataset,
    load_pairs,
    load_shards,
    load_targets,
    own_arrays,
    write_shards,
)
from diffnet.data.conversion import labels_on_surface
from diffnet.data.feature_names import checked_mask
from diffnet.data.folders.division import groups_of
from diffnet.data.folders.rows import conditions_of
from diffnet.geometry import MeshError, load_mesh, make_mesh, precompute
from diffnet.geometry.discretize.coincident import open_edges
from diffnet.geometry.errors import OptionError
from diffnet.geometry.mesh.cortex import read_values, value_files, values_bytes
from diffnet.train.commands.mesh_files import find_meshes
from diffnet.train.options import TrainOptions
from diffnet.train.set_parts import with_held_out
from diffnet.train.tasks.segmentation import class_colors
from diffnet.train.tasks.task import NetworkInput
from diffnet.train.validation import held_out

pytestmark = pytest.mark.usefixtures("one_thread")

CASES = Path(__file__).resolve().parents[3] / "shared" / "data" / "cases"
SPHERE = trimesh.creation.icosphere(0)  # 12 vertices, 20 faces
LABELS = [0, 1] * 6
CORTEX = trimesh.creation.icosphere(2)
REGIONS = np.where(CORTEX.vertices[:, 0] > 0.8, -1, np.where(CORTEX.vertices[:, 2] > 0, 1, 2))
SMALL = ("--epochs", 1, "--k", 4, "--width", 4, "--blocks", 1, "--features", "log-hks", "--device", "cpu", "--jobs", 1)


def case(name: str) -> Path:
    if not (CASES / name).exists():
        pytest.skip(f"the small inputs are not at {CASES}")
    return CASES / name


def write(root: Path, *names: str, labels: Any = LABELS, suffix: str = ".txt", **texts: str) -> Path:
    """Write spheres with labels beside them (None for none), and texts: A__txt is the file A.txt."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        SPHERE.export(path.with_name(f"{path.name}.obj"))
        if suffix == ".json":
            path.with_name(f"{path.name}.json").write_text(json.dumps({"labels": labels}))
        elif labels is not None:
            path.with_name(path.name + suffix).write_text("\n".join(map(str, labels)))
    for name, text in texts.items():
        (root / name.replace("__", ".")).write_text(text)
    return root


def test_lists_with_more_words_in_their_names(tmp_path: Path) -> None:
    scans = [f"{jaw}/{p}/{p}_{jaw}" for p in ("A1", "A10", "B2") for jaw in ("upper", "lower")]
    write(tmp_path, *scans, suffix=".json", training_upper__txt="A1_upper\nB2_upper", testing_upper__txt="A10_upper")
    data = load_dataset(tmp_path)
    assert parts(data) == (["A1_upper", "B2_upper"], [], ["A10_upper"])
    assert data.source == "by the lists training_upper.txt, testing_upper.txt"
    assert data.left_out == ("3 meshes in no list: A1_lower, A10_lower, B2_lower",)
    write(tmp_path, training_lower__txt="A1_lower", testing_lower__txt="B2_lower\nA10_lower")
    both = ["A1_lower", "A1_upper", "B2_upper"], [], ["B2_lower", "A10_lower", "A10_upper"]
    assert parts(load_dataset(tmp_path)) == both
    write(tmp_path / "plain", "a", "b", "c", train__txt="a", test__txt="x\\b.OBJ", test_2__txt="a")
    plain = load_dataset(tmp_path / "plain")
    assert (parts(plain), plain.left_out) == ((["a"], [], ["b"]), ("1 mesh in no list: c", "other lists: test_2.txt"))
    write(tmp_path, testing_public__txt="A1_upper")
    with pytest.raises(DataError, match=r"'A1_upper' occurs twice, .* by the lists training_lower.txt, training_upper"):
        load_dataset(tmp_path)


def test_ids_of_patients_select_all_their_scans(tmp_path: Path) -> None:
    scans = [f"{p}_{jaw}" for p in ("A1", "A10", "B2") for jaw in ("upper", "lower")]
    write(tmp_path / "flat", *scans, public_training_set__txt="A1\nB2", private_testing_set__txt="A10")
    assert sorted(names(load_dataset(tmp_path / "flat").test)) == ["A10_lower", "A10_upper"]
    folders = [f"{scan[:-6]}/{scan}" for scan in scans]
    data = load_dataset(write(tmp_path / "folders", *folders, suffix=".json", train__txt="B2\nA10", test__txt="A1"))
    assert (names(data.test), len(data.train)) == (["A1_lower", "A1_upper"], 4)
    write(tmp_path / "flat", private_testing_set__txt="A10\nC3")
    refused(DataError, r"private_testing_set\.txt: no mesh in .* for C3", load_dataset, tmp_path / "flat")


@pytest.mark.parametrize(
    "folders", [("shapes_train", "shapes_test"), ("Training", "TestSet"), ("set-train", "set-testing")]
)
def test_folders_with_more_words_in_their_names(tmp_path: Path, folders: tuple[str, str]) -> None:
    first, second = folders
    write(tmp_path, *(f"{first}/{i}" for i in range(3)), *(f"{second}/{i}" for i in range(5, 7)), "stray")
    expected = ["0", "1", "2"], [], ["5", "6"]
    for data in (load_dataset(tmp_path), index_dataset(tmp_path, tmp_path / "cache", jobs=1)):
        assert parts(data) == expected
        assert data.left_out == (f"meshes beside the folders {first}, {second}: stray.obj",)
    pairs = load_pairs(tmp_path)
    assert ([s.name for s in pairs.train], [s.name for s in pairs.test]) == (expected[0], expected[2])
    for mesh in tmp_path.rglob("*.obj"):
        mesh.with_name(f"{mesh.stem}.y.txt").write_text("\n".join(map(str, LABELS)))
    assert parts(load_targets(tmp_path, "file:y")) == expected


def test_lists_divide_classes_and_tables(tmp_path: Path) -> None:
    meshes = [f"{label}/{label}_{i}" for label in ("cat", "dog") for i in range(4)]
    lists = {"m40_train__txt": "cat_0\ncat_1\ndog/dog_0", "m40_test__txt": "cat_3\ndog_3.off\ndog_2"}
    write(tmp_path, *meshes, labels=None, **(lists | {"m40_test__txt": "cat_3\ndog_3.obj\ndog_2"}))
    expected = ["cat/cat_0", "cat/cat_1", "dog/dog_0"], [], ["cat/cat_3", "dog/dog_3", "dog/dog_2"]
    assert parts(load_classes(tmp_path)) == expected
    table = "".join(f"{mesh}.obj,{i}\n" for i, mesh in enumerate(meshes))
    write(tmp_path, targets__csv=f"file,size\n{table}")
    assert [[name.removesuffix(".obj") for name in own] for own in parts(load_targets(tmp_path))] == list(expected)


def test_notes_and_labels_are_no_lists(tmp_path: Path) -> None:
    write(tmp_path, "arm_test", "arm_train", "latest", test_notes__txt="scanned in May\n")
    data = load_dataset(tmp_path)
    assert (len(data.train), data.source) == (2, "at random, seed 0")
    with pytest.raises(DataError, match=r"arm_test\.txt can't divide meshes of subfolders"):
        load_pairs(write(tmp_path / "above", "x/a", "y/b", arm_test__txt="a"))
    write(tmp_path, training_all__txt="arm_test\nlatest")
    refused(DataError, r"there is training_all\.txt but no test\.txt", load_dataset, tmp_path)


def test_lists_of_correspondences() -> None:
    data = load_pairs(case("29b_smal"))
    assert ([s.name for s in data.train], [s.name for s in data.test]) == (["s0", "s1"], ["s2", "s3", "s4"])
    assert data.source == "by the lists train_cat.txt, test_cat.txt"


def test_test_pairs_leave_the_other_meshes_for_training(tmp_path: Path) -> None:
    write(tmp_path, *"abcdef", labels=None, test_pairs__txt="b d\nd e\n")
    data = load_pairs(tmp_path)
    assert ([s.name for s in data.train], [s.name for s in data.test]) == (["a", "c", "f"], ["b", "d", "e"])
    assert (len(data.train_pairs), data.test_pairs) == (3, [(0, 1), (1, 2)])
    assert data.source == "by test_pairs.txt, whose meshes are for testing"
    write(tmp_path, all_pairs__txt="a b\nc d\ne f")
    with pytest.raises(DataError, match=r"no pairs .* of train meshes. This part has 0 meshes"):
        load_pairs(tmp_path, tmp_path / "all_pairs.txt")


def test_meshes_for_validation(tmp_path: Path) -> None:
    data = index_dataset(case("15_train_val_test_seg"), tmp_path, jobs=1)
    assert parts(data) == (["a0", "a1", "a2"], ["a3"], ["a4"])
    joined, numbers = with_held_out(data, TrainOptions())
    assert (names(joined.train), numbers, len(joined.validation)) == (["a0", "a1", "a2", "a3"], [3], 0)
    message = r"^validation is 0.2, but the set has 1 mesh for validation; .* train, val, te"
    refused(OptionError, message, with_held_out, data, TrainOptions(validation=0.2))
    assert parts(load_dataset(case("15_train_val_test_seg"), needs_train=False)) == ([], [], ["a4"])
    assert not write_shards(data, tmp_path / "shards", Preprocessing(k=4), tmp_path, jobs=1)
    again = load_shards(tmp_path / "shards")
    assert parts(again) == parts(data)
    np.testing.assert_array_equal(again.validation[0].labels, data.validation[0].labels)
    assert parts(load_shards(tmp_path / "shards", needs_train=False)) == ([], [], ["a4"])


@pytest.mark.parametrize("layout", ["meshcnn", "princeton", "teeth"])
def test_layouts_with_meshes_for_validation(tmp_path: Path, layout: str) -> None:
    places = {"train": "ab", "val": "c", "test": "d"}
    inside = "/{0}/{0}" if layout == "teeth" else "/{0}"
    meshes = [part + inside.format(name) for part, own in places.items() for name in own]
    if layout == "teeth":
        write(tmp_path, *meshes, suffix=".json")
    elif layout == "princeton":
        write(tmp_path, *meshes, labels=[0, 1] * 10, suffix=".seg")
    else:
        write(tmp_path, *meshes, labels=None)
        (tmp_path / "seg").mkdir()
        for name in "abcd":
            (tmp_path / "seg" / f"{name}.eseg").write_text("0\n1\n" * 15)
    data = load_dataset(tmp_path)
    assert data.labels_at == {"meshcnn": "edges", "princeton": "faces", "teeth": "vertices"}[layout]
    assert parts(data) == (["a", "b"], ["c"], ["d"])
    assert parts(load_dataset(tmp_path, layout, needs_train=False)) == ([], [], ["d"])


@pytest.mark.parametrize("name", ["15b_train_val_test_cls", "15c_class_train_val_test"])
def test_classes_with_meshes_for_validation(name: str) -> None:
    data = load_classes(case(name))
    assert data.label_names == ["cat", "dog"]
    train = [f"{c}/{c}{i}" for c in ("cat", "dog") for i in range(3)]
    assert parts(data) == (train, ["cat/cat3", "dog/dog3"], ["cat/cat4", "dog/dog4"])


def test_a_class_may_be_called_test(tmp_path: Path) -> None:
    write(tmp_path, *(f"{label}/{i}" for label in ("test", "train", "test_tube") for i in range(4)), labels=None)
    assert load_classes(tmp_path).label_names == ["test", "test_tube", "train"]


def test_lists_and_tables_with_meshes_for_validation(tmp_path: Path) -> None:
    write(tmp_path, *"abcd", train__txt="a", val__txt="d\nc", test__txt="b")
    assert parts(load_dataset(tmp_path)) == (["a"], ["d", "c"], ["b"])
    split = ["train", "Validation", "dev", "testing"]
    rows = [f"{name}.obj,{i % 2},{own}" for i, (name, own) in enumerate(zip("abcd", split, strict=True))]
    table = tmp_path / "sizes.csv"
    table.write_text("\n".join(["file,size,split", *rows]))
    for data in (load_targets(table), index_targets(table, tmp_path / "cache", jobs=1)):
        assert parts(data) == (["a.obj"], ["b.obj", "c.obj"], ["d.obj"])
    write(tmp_path / "pairs", "train/a", "train/b", "val/c", "test/d", "test/e", labels=None)
    assert load_pairs(tmp_path / "pairs").left_out == ("meshes for validation, which pairs don't have: c",)


def test_lists_name_meshes_with_spaces(tmp_path: Path) -> None:
    """Also lists with a further word in their name. A note is no list."""
    write(tmp_path, "case 1", "case 2", "case 3", train_x__txt="case 1\ncase 3.obj", test_x__txt="case 2")
    assert parts(load_dataset(tmp_path)) == (["case 1", "case 3"], [], ["case 2"])
    for part in ("train", "test"):
        (tmp_path / f"{part}_x.txt").write_text("these are not here")
    assert load_dataset(tmp_path).source == "at random, seed 0"


def test_linked_folders_are_read_once_by_all(tmp_path: Path) -> None:
    write(tmp_path / "store", "a/surface", "b/deep/surface")
    write(tmp_path / "set", "c/surface", "d/surface")
    for name in "ab":
        (tmp_path / "set" / name).symlink_to(tmp_path / "store" / name)
    (tmp_path / "set" / "a" / "loop").symlink_to(tmp_path / "set")
    (tmp_path / "set" / "up").symlink_to(tmp_path)
    found = load_dataset(tmp_path / "set")
    every = ["a/surface", "b/deep/surface", "c/surface", "d/surface"]
    assert sorted(names([*found.train, *found.test])) == every
    meshes = find_meshes([tmp_path / "set"])
    assert [str(mesh.relative_to(tmp_path / "set").with_suffix("")) for mesh in meshes] == every


def test_labels_in_one_column(tmp_path: Path) -> None:
    """Whole numbers in any form. A missing one is named, because all that follow would move up."""
    write(tmp_path, "a", "b", labels=[f"{label:e}" for label in LABELS], suffix=".csv")
    assert load_dataset(tmp_path).train[0].labels.tolist() == LABELS
    (tmp_path / "a.csv").write_text("vertex,label\n" + "".join(f"{i},{'' if i == 4 else i % 2}\n" for i in range(12)))
    refused(DataError, r"a.csv, line 6: there is no label; -1 stands for none", load_dataset, tmp_path)


def test_a_mesh_is_in_a_table_once(tmp_path: Path) -> None:
    write(tmp_path, "a", "b", t__csv="file,x\na.obj,1\nb.obj,2\nc/../a.obj,3", labels=None)
    (tmp_path / "c").mkdir()
    refused(DataError, r"line 4: c/../a.obj is in line 2, too", load_targets, tmp_path / "t.csv")
    (tmp_path / "t.csv").write_text("file,x\na.obj,1\nb.obj,2")
    table = str(tmp_path / "t.csv")
    for texts in (["x=1", "x=2"], [table, table], ["x=1", table]):
        refused(OptionError, "twice|no condition that others", conditions_of, [tmp_path / "a.obj"], texts, ["x"])


def test_labels_that_other_label_files_number_otherwise(tmp_path: Path) -> None:
    """Labels match by name, and numbers that contradict are named. `--ignore` takes the number in label files."""
    few, many = tmp_path / "few", tmp_path / "many"
    write(few, "a", "b", labels=[1, 2] * 6, label_names__txt="arm\nleg\nhead")
    write(many, "a", "b", "c", labels=[1, 2, 3] * 4, label_names__txt="arm\nleg\nhead")
    run = ("train", "segmentation", "--data", many, *SMALL, "--cache", tmp_path / "cache")
    output(*run, "--out", tmp_path / "run")
    scored = ["evaluate", "--checkpoint", tmp_path / "run", "--data", few, "--device", "cpu", "--jobs", 1]
    with pytest.warns(UserWarning, match="'arm' is 0 in these label files, and 1 in those of the training"):
        output(*scored, "--cache", tmp_path / "cache", "--out", tmp_path / "scores")
    output(*[*scored[:-5], many, *scored[-4:]], "--cache", tmp_path / "cache", "--out", tmp_path / "same")
    assert "names: 2 is leg, 3 is head" in output(*run, "--out", tmp_path / "ignored", "--ignore", 1)


def test_groups_stay_together(tmp_path: Path) -> None:
    scans = [f"p{p}_{i}" for p in range(6) for i in range(1 + p % 3)]
    write(tmp_path / "flat", *scans)
    write(tmp_path / "classes", *(f"{'ab'[i % 2]}/{scan}" for i, scan in enumerate(scans)), labels=None)
    for seed in range(5):
        options: dict[str, Any] = {"group_by": r"(p\d)_", "seed": seed}
        found = [load_dataset(tmp_path / "flat", **options), load_classes(tmp_path / "classes", **options)]
        found.append(index_dataset(tmp_path / "flat", tmp_path / "cache", jobs=1, **options))
        pairs = load_pairs(tmp_path / "flat", **options)
        divided = [(names(data.train), names(data.test)) for data in found]
        divided.append(([s.name for s in pairs.train], [s.name for s in pairs.test]))
        for train, test in divided:
            assert len(train) + len(test) == len(scans)
            assert 1 <= len(test) <= 4
            assert not {name.split("/")[-1][:2] for name in train} & {name.split("/")[-1][:2] for name in test}
        held = {scans[i][:2] for i in held_out(scans, TrainOptions(validation=0.3, **options))}
        assert held
        assert sum(scan[:2] in held for scan in scans) == len(held_out(scans, TrainOptions(validation=0.3, **options)))
    assert found[0].source == r"at random by 6 groups of '(p\\d)_', seed 4"


def test_a_group_is_the_whole_match_without_groups_in_the_pattern() -> None:
    assert groups_of(["ab1", "ab2", "cd1", "x"], "^[a-d]+") == ["ab", "ab", "cd", 3]
    assert groups_of(["a", "b"], None) == [0, 1]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(p", r"group_by should be a regular expression, got '\(p': "),
        ("^q", r"group_by is '\^q', which matches none of the names, such as 'p1'"),
        ("^p", r"group_by is '\^p', by which all 2 meshes are in one group, 'p'"),
    ],
)
def test_patterns_that_make_no_groups(tmp_path: Path, pattern: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        load_dataset(write(tmp_path, "p1", "p2"), group_by=TrainOptions(group_by=pattern).group_by)


def test_groups_need_a_random_division(tmp_path: Path) -> None:
    data = load_dataset(write(tmp_path, "train/p1", "test/p2"), group_by="p")
    message = r"group_by is 'p', but nothing is divided at random: .* by the folders train, t"
    refused(OptionError, message, with_held_out, data, TrainOptions(group_by="p"))


def test_scalars_beside_paint(tmp_path: Path) -> None:
    assert load_dataset(case("06_cloudcompare_scalar")).label_names == ["0", "1"]
    message = r"a0\.ply: both the colors and the property 'scalar_label' of the vertices could"
    refused(DataError, message, load_dataset, case("06b_scalar_label_and_paint"))
    header = "ply\nformat ascii 1.0\nelement vertex 4\n" + "".join(f"property float {x}\n" for x in "xyz")
    header += "".join(f"property uchar {c}\n" for c in ("red", "green", "blue")) + "property float {}\n"
    header += "element face 1\nproperty list uchar int vertex_indices\nend_header\n"
    rows = [f"{i % 2} {i // 2} 0 {50 * (i % 2)} 0 0 {{}}\n" for i in range(4)]
    for name, values, is_refused in (
        ("scalar_Classification", [2, 5, 5, 6], True),
        ("gt_class", [0, 0, 1, 1], True),
        ("scalar_curvature", [0.5, 1, 2, 0], False),
        ("quality", [0, 1, 1, 0], False),
    ):
        text = header.format(name) + "".join(row.format(x) for row, x in zip(rows, values, strict=True)) + "3 0 1 2\n"
        for mesh in "ab":
            write(tmp_path, **{f"{mesh}__ply": text})
        if is_refused:
            refused(DataError, f"the colors and the property '{name}'", load_dataset, tmp_path)
        else:
            assert load_dataset(tmp_path).label_names == ["#000000", "#320000"]


@pytest.mark.parametrize(
    ("name", "source", "at", "classes", "labels_from"),
    [
        ("06_cloudcompare_scalar", "auto", "vertices", "01", "the property 'scalar_label' of the vertices"),
        ("06b_scalar_label_and_paint", "file:scalar_label", "vertices", "01", "the property 'scalar_label' of the"),
        ("06b_scalar_label_and_paint", "colors", "vertices", ["#5a5a5a", "#c8c8c8"], "colors"),
        ("07_object_id", "auto", "faces", "01", "the property 'object_id' of the faces"),
        ("08_subdivnet_json", "auto", "faces", "01", ""),
        ("24b_json_faces", "auto", "faces", "01", ""),
        ("24c_json_list", "auto", "vertices", "01", ""),
        ("12_obj_groups", "groups", "faces", ["lower", "upper"], "groups"),
        ("12_obj_groups", "materials", "faces", ["lower", "upper"], "materials"),
        ("11_off_face_colours", "colors", "faces", ["#0000ff", "#ff0000"], "colors"),
        ("16_case_folders", "auto", "vertices", "01", ""),
        ("37_scannet", "auto", "vertices", "12", ""),
        ("37b_scannet_flat", "auto", "vertices", "12", ""),
    ],
)
def test_labels_as_others_keep_them(
    name: str, source: str, at: str, classes: Any, labels_from: str, tmp_path: Path
) -> None:
    data = load_dataset(case(name), labels=source)
    assert (data.labels_at, data.label_names) == (at, [*classes])
    assert data.labels_from.startswith(labels_from)
    assert bool(data.labels_from) == bool(labels_from)
    indexed = index_dataset(case(name), tmp_path, labels=source)
    np.testing.assert_array_equal(indexed.train[0].labels, data.train[0].labels)
    assert np.bincount(data.train[0].labels).min() > 0


def test_labels_by_name_of_a_property(tmp_path: Path) -> None:
    """The only property with whole numbers holds the labels. Of several, one is named."""
    mesh = trimesh.creation.icosphere(1)
    iface, chain = (mesh.vertices[:, 2] > 0).astype("u1"), (mesh.vertices[:, 0] > 0).astype("i4")
    for i in range(2):
        charge, numbers = ("charge", mesh.vertices[:, 1].astype("f4")), ("atom", np.arange(42, dtype="i4"))
        write_ply(tmp_path / f"p{i}.ply", [("iface", iface), charge, numbers], mesh=(mesh.vertices, mesh.faces))
    data = load_dataset(tmp_path)
    assert data.labels_from == "the property 'iface' of the vertices"
    np.testing.assert_array_equal(data.train[0].labels, iface)
    write_ply(tmp_path / "p0.ply", [("iface", iface), ("chain", chain), charge], mesh=(mesh.vertices, mesh.faces))
    several = "p0.ply: more .* could be the labels: 'iface' of the vertices, 'chain' of the vertices. Choose one with"
    refused(DataError, several, load_dataset, tmp_path)
    np.testing.assert_array_equal(load_dataset(tmp_path, labels="file:iface").train[0].labels, iface)
    for labels, message in (
        ("file:charge", "ply: file:charge should be whole numbers"),
        ("file:face", "no labels for file:face. Expected one of .* it has iface, "),
        ("groups", "ply: the file has no groups"),
    ):
        refused(DataError, message, load_dataset, tmp_path, labels=labels)
    for i in range(2):
        (tmp_path / f"p{i}.patch.txt").write_text("\n".join(map(str, chain)))
    np.testing.assert_array_equal(load_dataset(tmp_path, labels="file:patch").test[0].labels, chain)


def test_meshes_in_subfolders_of_any_depth(tmp_path: Path) -> None:
    write(tmp_path, *(f"sub-{i}/surf/{side}" for i in range(3) for side in ("lh", "rh")))
    data = load_dataset(tmp_path)
    assert sorted(names([*data.train, *data.test])) == [f"sub-{i}/surf/{s}" for i in range(3) for s in ("lh", "rh")]
    left = load_dataset(tmp_path, files="sub-*/surf/lh.obj", group_by="sub-[0-9]")
    assert sorted(names([*left.train, *left.test])) == [f"sub-{i}/surf/lh" for i in range(3)]
    (tmp_path / "train.txt").write_text("sub-0\nsub-2\n")
    (tmp_path / "test.txt").write_text("sub-1\n")
    assert parts(load_dataset(tmp_path))[2] == ["sub-1/surf/lh", "sub-1/surf/rh"]
    refused(DataError, r"no mesh \(.obj, .off, .* matches '\*/rh.ply'", load_dataset, tmp_path, files="*/rh.ply")
    refused(DataError, "files should be a pattern", load_dataset, tmp_path, files="/x")
    refused(DataError, "but the layout coseg tells the files", load_dataset, tmp_path, "coseg", files="*.off")


def test_classes_in_subfolders_of_any_depth() -> None:
    for files in (None, "*/*/models/*_normalized.obj"):
        data = load_classes(case("15d_shapenet"), files=files)
        assert data.label_names == ["02691156", "02828884"]
        assert data.test[0].name.endswith("/models/model_normalized")


def test_tables_of_participants(tmp_path: Path) -> None:
    """A line of a table belongs to all meshes of the participant."""
    write(tmp_path, *(f"sub-{i}/surf/{side}" for i in range(1, 11) for side in ("lh", "rh")), labels=None)
    lines = [f"sub-{i}\t{20 + i if i > 2 else 'n/a'}\t{'FM'[i % 2]}\t{i / 2}" for i in range(1, 11)]
    table = tmp_path / "participants.tsv"
    table.write_text("participant_id\tage\tsex\tsize\n" + "\n".join(lines))
    left = load_targets(table, "age", conditions="size", files="sub-*/surf/lh.obj")
    targets = {item.name: item.labels[0, 0] for item in (*left.train, *left.test)}
    assert (len(targets), sum(item.conditions.sum() for item in (*left.train, *left.test))) == (10, 55 / 2)
    assert conditions_of([tmp_path / "sub-10/surf/rh.obj"], [str(table)], ["size"]) == [{"size": 5}]
    assert (targets["sub-10/surf/lh.obj"], targets["sub-3/surf/lh.obj"]) == (30, 23)
    assert np.isnan(targets["sub-1/surf/lh.obj"])  # sub-1 is not sub-10
    refused(DataError, "are of one participant, and a random division", load_targets, table, "age")
    both = load_classes(table, labels="sex", group_by="^[^/]+")
    others = tmp_path / "others.tsv"
    others.write_text(table.read_text().replace("\tM\t1.5", "\tn/a\t1.5").replace(lines[-1], ""))
    without = (
        "meshes of participants that are not in the table: sub-10/surf/lh.obj",
        "meshes without a label in the column 'sex': sub-3/surf/lh.obj",
    )
    assert load_classes(others, labels="sex", files="sub-*/surf/lh.obj").left_out == without
    assert (both.label_names, len(both.train) + len(both.test)) == (["F", "M"], 20)
    assert not {name.split("/")[0] for name in names(both.train)} & {name.split("/")[0] for name in names(both.test)}
    refused(DataError, "no column 'height'; the columns are file, age, sex", load_targets, table, "height")
    refused(DataError, "labels is 'sex', but labels at elements are auto", load_dataset, tmp_path, labels="sex")
    refused(DataError, "classes need the name of a column", load_classes, table, labels="file:sex")
    table.write_text("participant_id\tage\nsub-11\t3\n")
    refused(DataError, "line 2: no mesh below .* has 'sub-11' in its path", load_targets, table)


def write_cortices(root: Path) -> Path:
    """Subjects in the folders of FreeSurfer, with thickness, and regions without a label on the medial wall."""
    verts, faces = CORTEX.vertices, CORTEX.faces
    colors = np.array([[25, 5, 25, 0, 0], [25, 100, 40, 0, 0], [100, 25, 0, 0, 0]])
    for i in range(4):
        surf, label = root / f"sub-{i}/surf", root / f"sub-{i}/label"
        surf.mkdir(parents=True), label.mkdir()
        for name in ("pial", "white"):
            nibabel.freesurfer.write_geometry(surf / f"lh.{name}", verts * (1 + i / 10), faces)
        nibabel.freesurfer.write_morph_data(surf / "lh.thickness", 2 + verts[:, 2])
        names = ["unknown", "precentral", "insula"]
        nibabel.freesurfer.write_annot(label / "lh.aparc.annot", REGIONS, colors, names, fill_ctab=True)
    return root


@pytest.mark.usefixtures("small_pictures")
def test_cortices_of_freesurfer(tmp_path: Path) -> None:
    root, pattern = write_cortices(tmp_path / "set"), "sub-*/surf/lh.pial"
    data = load_dataset(root, labels="file:aparc", files=pattern)
    assert data.label_names == ["insula", "precentral", "unknown"]
    labels = {-1: -1, 1: 1, 2: 0}  # precentral is 1 in the file, and insula 2
    np.testing.assert_array_equal(data.train[0].labels, [labels[i] for i in REGIONS.tolist()])
    refused(DataError, "'lh' occurs twice", load_dataset, root, labels="file:aparc")  # the pial and the white surface
    run = ["train", "segmentation", "--data", root, "--files", pattern, "--labels", "file:aparc", "--ignore", "unknown"]
    output(*run, "--out", tmp_path / "run", *SMALL[:8], "--features", "log-hks+file:thickness")
    one = root / "sub-0/surf/lh.pial"
    for name in ("lh.new.annot", "new.label.gii"):
        output("predict", one, "--checkpoint", tmp_path / "run", "--out", tmp_path / name)
    output("predict", one, "--checkpoint", tmp_path / "run", "--out", tmp_path / "new.txt")
    expected = np.loadtxt(tmp_path / "new.txt", dtype=int)
    for name in ("lh.new.annot", "new.label.gii"):
        values, names, colors = read_values(tmp_path / name)
        assert (names, colors.tolist()) == (["insula", "precentral"], [[100, 25, 0], [25, 100, 40]])
        np.testing.assert_array_equal(values, expected)
    targets = load_targets(root, "file:thickness", files=pattern)
    assert targets.labels_at == "vertices"
    np.testing.assert_allclose(targets.train[0].labels, 2 + CORTEX.vertices[:, 2:], atol=1e-6)


def testclass_colors_annotations(tmp_path: Path) -> None:
    """A vertex with another color than those of the table has no label, and neither has one of `???` or of black."""
    colors = np.array([[190, 190, 190, 0, 0], [40, 50, 60, 0, 0], [0, 0, 0, 0, 0], [70, 80, 90, 0, 0]])
    regions = np.arange(8) % 4
    file = tmp_path / "lh.r.annot"
    nibabel.freesurfer.write_annot(file, regions, colors, ["???", "a", "Unknown", "b"], fill_ctab=True)
    content = bytearray(file.read_bytes())
    content[8 * 5 + 8 : 8 * 5 + 12] = (55 + 66 * 256 + 77 * 65536).to_bytes(4, "big")  # the color of vertex 5
    file.write_bytes(content)
    values, names, table = read_values(file)
    assert values.tolist() == [-1, 0, -1, 1, -1, -1, -1, 1]
    assert table is not None
    assert (names, table.tolist()) == (["a", "b"], [[40, 50, 60], [70, 80, 90]])


def test_classes_without_a_color_of_their_own_get_another_one() -> None:
    names, colors = ["a", "b", "c", "d"], {"a": [0, 114, 178], "b": [40, 50, 60], "c": [40, 50, 60]}
    network = NetworkInput(TrainOptions(), True, names, "vertices", {}, label_colors=colors)
    assert class_colors(network).tolist() == [[0, 114, 178], [40, 50, 60], [230, 159, 0], [0, 158, 115]]


INSIDE = np.arange(len(REGIONS)) % 5 > 0


def write_mask(label: Path, form: str) -> None:
    """The mask INSIDE, in the forms in which people have it."""
    if form == "npy":
        np.save(label.parent / "surf" / "lh.cortex.npy", np.where(INSIDE, 1.0, np.nan))
    elif form == "annot":
        colors, names = np.array([[25, 5, 25, 0, 0], [220, 20, 10, 0, 0]]), ["Medial_wall", "x"]
        nibabel.freesurfer.write_annot(label / "lh.cortex.annot", INSIDE.astype(int), colors, names, fill_ctab=True)
    else:
        rows = "".join(f"{i} 0.0 0.0 0.0 0.0\n" for i in np.flatnonzero(INSIDE))
        (label / "lh.cortex.label").write_text(f"#!ascii label\n{INSIDE.sum()}\n{rows}")


@pytest.mark.parametrize("form", ["label", "annot", "npy"])
def test_forms_of_masks(tmp_path: Path, form: str) -> None:
    root = write_cortices(tmp_path)
    one = root / "sub-0/surf/lh.pial"
    write_mask(root / "sub-0/label", form)
    arrays = own_arrays(load_mesh(one), "file:thickness+mask:cortex")
    np.testing.assert_array_equal(arrays["cortex"][:, 0], INSIDE)
    thickness = np.where(INSIDE, 2 + CORTEX.vertices[:, 2], 0)
    np.testing.assert_allclose(arrays["thickness"][:, 0], thickness, atol=1e-6)
    statistics: Any = {"thickness": {"mean": [2.0], "std": [2.0]}}
    features = input_features(load_mesh(one), precompute(one, k=4), "file:thickness+mask:cortex", statistics=statistics)
    np.testing.assert_allclose(features[:, 0], np.where(INSIDE, CORTEX.vertices[:, 2] / 2, 0), atol=1e-6)
    np.testing.assert_array_equal(features[:, 1], INSIDE)


@pytest.mark.usefixtures("small_pictures")
def test_the_medial_wall(tmp_path: Path) -> None:
    """Nothing is learned, scored and predicted outside of a mask, where features may be NaN."""
    root = write_cortices(tmp_path / "set")
    for i in range(4):
        thickness = np.where(INSIDE, 2 + CORTEX.vertices[:, 2], np.nan)
        nibabel.freesurfer.write_morph_data(root / f"sub-{i}/surf/lh.thickness", thickness)
        write_mask(root / f"sub-{i}/label", "label")
    of_set = ["--data", root, "--files", "sub-*/surf/lh.pial", "--labels", "file:aparc", "--cache", tmp_path / "c"]
    run = ["train", "segmentation", *of_set, *SMALL[:8], *SMALL[10:], "--features", "file:thickness"]
    assert "file:thickness should hold finite numbers" in complaint(*run, "--out", tmp_path / "no")
    text = output(*run, "--out", tmp_path / "run", "--mask", "label/lh.cortex.label")
    assert "features: file:thickness+mask:cortex" in text
    labeled = str((INSIDE & (REGIONS >= 0)).sum())
    assert [row["labeled"] for row in table_of(tmp_path / "run" / "per_mesh.csv")] == [labeled]
    network = ["--checkpoint", tmp_path / "run", "--cache", tmp_path / "c"]
    output("predict", root / "sub-0/surf/lh.pial", *network, "--out", tmp_path / "lh.new.annot")
    np.testing.assert_array_equal(read_values(tmp_path / "lh.new.annot").values >= 0, INSIDE)
    output("evaluate", *of_set[:6], *network, "--out", tmp_path / "e", "--jobs", 1)
    assert {row["labeled"] for row in table_of(tmp_path / "e" / "per_mesh.csv")} == {labeled}


def test_a_mask_at_faces_and_of_targets() -> None:
    """A face counts if all of its vertices do."""
    mesh, labels = make_mesh(CORTEX.vertices, CORTEX.faces), np.zeros(len(CORTEX.faces), np.int64)
    data = LabeledMeshes([LabeledMesh("m", mesh, labels, {"in": INSIDE})], [], ["0"], "faces")
    masked = labels_on_surface(data, "radius", "xyz+mask:in").train[0].labels
    np.testing.assert_array_equal(masked >= 0, INSIDE[CORTEX.faces].all(1))
    data = LabeledMeshes([LabeledMesh("m", mesh, np.ones((len(INSIDE), 1)), {"in": INSIDE})], [], ["t"], "vertices")
    masked = labels_on_surface(data, "radius", "xyz+mask:in").train[0].labels
    np.testing.assert_array_equal(np.isnan(masked[:, 0]), ~INSIDE)
    refused(OptionError, "should have one mask", labels_on_surface, data, "radius", "mask:a+mask:b")
    refused(OptionError, "mask should be file:NAME or a file such as label/lh.cortex.label, got 'x'", checked_mask, "x")


def test_cortices_of_gifti(tmp_path: Path) -> None:
    data = load_dataset(case("10_gifti"))
    assert (data.labels_at, data.label_names, len(data.train)) == ("vertices", ["0", "1"], 3)
    assert sorted(names([*data.train, *data.test])) == [f"sub-{i}_hemi-L" for i in range(4)]
    values = np.arange(5.0)[:, None] * [1, 2]
    (tmp_path / "a.shape.gii").write_bytes(values_bytes(".shape.gii", values))
    np.testing.assert_array_equal(read_values(tmp_path / "a.shape.gii").values, values)
    files = value_files(tmp_path, "sub-1_hemi-L_pial", "thickness")
    assert tmp_path / "sub-1_hemi-L_thickness.shape.gii" in files
    (tmp_path / "a.surf.gii").write_text("<?xml version='1.0'?><GIFTI>")
    refused(MeshError, "a.surf.gii: the file can't be read: nibabel can't read it", load_mesh, tmp_path / "a.surf.gii")
    (tmp_path / "a.surf.gii").write_bytes(values_bytes(".shape.gii", values))
    refused(MeshError, "no points or no triangles", load_mesh, tmp_path / "a.surf.gii")


def test_commands_take_patterns_and_named_labels(tmp_path: Path) -> None:
    run = ["train", "segmentation", "--data", case("12_obj_groups"), "--labels", "groups", "--files", "a*.obj"]
    small = ["--epochs", 1, "--k", 8, "--width", 8, "--features", "log-hks", "--score", "roc-auc"]
    shown = output(*run, "--out", tmp_path / "run", *small)
    results = json.loads((tmp_path / "run/results.json").read_text())
    header, row = ((tmp_path / "run" / name).read_text().splitlines() for name in ("metrics.csv", "per_mesh.csv"))
    scores = dict(zip(row[0].split(","), row[1].split(","), strict=True))
    assert float(scores["roc_auc"]) == pytest.approx(results["roc_auc"], abs=1e-5)  # of the one test mesh
    assert float(scores["dice"]) == pytest.approx(results["dice"], abs=1e-5)
    tested = dict(zip(header[0].split(","), header[1].split(","), strict=True))["test_roc_auc"]
    assert float(tested) == pytest.approx(results["roc_auc"], abs=1e-2)  # log-odds are rounded
    page = (tmp_path / "run/predictions.html").read_text()
    assert "Scores of each mesh" in page
    assert "Ranking by probability" in page
    assert "labels: groups" in shown
    assert "classes: 2 at the faces" in shown
    scored = ["evaluate", "--checkpoint", tmp_path / "run", "--data", case("12_obj_groups"), "--out"]
    output(*scored, tmp_path / "scores")  # the labels of the training
    assert "Ranking by probability" in (tmp_path / "scores/predictions.html").read_text()
    assert "score is teeth, which is for" in complaint(*scored, tmp_path / "other", "--score", "teeth")
    assert "the file has no colors" in complaint(*scored, tmp_path / "other", "--labels", "colors")
    predicted = tmp_path / "predicted"
    pattern = ["--files", "a[01].obj", "--format", "txt"]
    for threshold, value in ((0, "1"), (1, "0")):
        call = ["predict", case("12_obj_groups"), "--checkpoint", tmp_path / "run", "--out", predicted / value]
        output(*call, *pattern, "--threshold", threshold)
        files = sorted((predicted / value).glob("*.txt"))
        assert [path.name for path in files] == ["a0.txt", "a1.txt"]
        assert set(files[0].read_text().split()) == {value}
    assert "--threshold is for a network with two classes" in complaint(*call, "--threshold", 0.5, "--smooth", 1)


def test_files_that_were_seen_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"There is .*a0_seg\.txt, but the labels of a0\.obj should be in a0\.txt$"):
        load_dataset(case("24_name_seg"))
    write(tmp_path / "some", "a", "b")
    (tmp_path / "some" / "b.txt").rename(tmp_path / "some" / "b-labels.txt")
    refused(DataError, r"no labels .* for b\.obj.*There is .*b-labels\.txt", load_dataset, tmp_path / "some")
    write(tmp_path / "table", "a", "b", labels=None, a__csv="x,y\n1,2\n", b__csv="x,y\n1,2\n")
    message = r"for [ab]\.obj.*There is .*[ab]\.csv, but it has neither a column called label nor"
    refused(DataError, message, load_dataset, tmp_path / "table")


def test_each_reason_and_each_mesh_counts_once(tmp_path: Path) -> None:
    write(tmp_path, *(f"m{i}" for i in range(8)), labels=None)
    for i in range(7):
        (tmp_path / f"m{i}.txt").write_text("arm")
    (tmp_path / "m7.txt").write_text("\n".join(map(str, LABELS)))
    with pytest.raises(DataError) as caught:
        index_dataset(tmp_path, tmp_path / "cache", jobs=1)
    message = str(caught.value)
    assert message.startswith("7 of 8 meshes can't be used: ")
    assert (message.count("is not a whole number"), message.count("/m"), message.count("label_names.txt")) == (1, 5, 1)


def test_a_run_says_what_its_set_holds(tmp_path: Path) -> None:
    root = write(tmp_path / "set", "train/a", "train/b", "val/c", "test/d", "e")
    (root / "train" / "notes.txt").write_text("by hand")
    mesh = (root / "train" / "a.obj").read_text().splitlines()
    turned = [" ".join(("f", *reversed(line.split()[1:]))) if line.startswith("f ") else line for line in mesh]
    (root / "train" / "a.obj").write_text("\n".join(turned))
    where = ("--out", tmp_path / "run", "--cache", tmp_path / "cache")
    lines = output("train", "segmentation", "--data", root, *where, *SMALL).splitlines()
    assert lines[:8] == [
        "meshes: 2 to train on, 1 to validate on, 1 to test on",
        "divided: by the folders train, val, test",
        "classes: 2 at the vertices, without the test part: 0 18, 1 18",
        "features: log-hks",
        "training: 1 epoch, learning rate 0.002",
        "inside out: 1 mesh whose normals are turned: a",
        "left out: meshes beside the folders train, val, test: e.obj",
        "left out: files without labels and without a mesh: train/notes.txt",
    ]
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["meshes"] == {"train": ["a", "b"], "validation": ["c"], "test": ["d"]}
    assert (results["train_meshes"], results["validation_meshes"], results["test_meshes"]) == (2, 1, 1)
    assert results["divided"] == "by the folders train, val, test"
    assert "validation_accuracy" in (tmp_path / "run" / "metrics.csv").read_text()
    message = complaint("train", "segmentation", "--data", root, "--out", tmp_path / "x", "--validation", 0.5, *SMALL)
    assert message.startswith("--validation is 0.5, but the set has 1 mesh for validation")


def test_groups_on_the_command_line(tmp_path: Path) -> None:
    root = write(tmp_path / "set", *(f"p{p}_{i}" for p in range(4) for i in range(2)))
    where = ("--out", tmp_path / "run", "--cache", tmp_path / "cache", "--group-by", "^p.", "--validation", 0.3)
    output("train", "segmentation", "--data", root, *where, *SMALL)
    found = json.loads((tmp_path / "run" / "results.json").read_text())["meshes"]
    patients = [{name[:2] for name in found[part]} for part in ("train", "validation", "test")]
    assert [len(own) for own in patients] == [2, 1, 1]
    assert len(set.union(*patients)) == 4


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_labeled_bodies() -> None:
    data = load_dataset(BODIES)
    parts = ["head", "torso", "upper_arm", "lower_arm", "hand", "upper_leg", "lower_leg", "foot"]
    assert (data.label_names, data.labels_at) == (parts, "faces")
    assert (len(data.train), len(data.test)) == (24, 8)
    for item in [*data.train, *data.test]:
        assert 500 < len(item.mesh.verts) < 1600
        assert np.unique(item.labels).tolist() == list(range(8))
    vertices = load_dataset(BODIES, labels_at="vertices", needs_train=False)
    assert [len(item.labels) for item in vertices.test] == [len(item.mesh.verts) for item in data.test]


def test_bodies_in_pairs() -> None:
    data = load_pairs(BODY_MAPS)
    assert (len(data.train), len(data.test)) == (8, 2)
    assert data.is_supervised
    for shape in data.train + data.test:
        assert 1500 < len(shape.mesh.verts) < 2500
        assert not len(open_edges(shape.mesh.faces, len(shape.mesh.verts)))
        assert len(np.unique(shape.template)) > 1000


def test_packed_sets_can_be_packed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pack.main([str(BODIES), str(BODY_MAPS), "--out", str(tmp_path)])
    assert contents(tmp_path) | {"README.md": b""} == contents(BODIES.parent) | {"README.md": b""}
    assert "MB" in capsys.readouterr().out


def test_they_are_small_and_free() -> None:
    content = contents(BODIES.parent)
    assert sum(map(len, content.values())) < 1e6  # of all files, which are compressed
    assert b"CC0 1.0" in content["README.md"]
