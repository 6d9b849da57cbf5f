"""`diffnet precompute --write-shards`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import trimesh
from command import complaint, diffnet, output
from shapes import ellipsoid

from diffnet.data import DataError, load_classes, load_dataset, load_shards, load_targets
from diffnet.data.shards.reading import INDEX, is_shards

pytestmark = pytest.mark.usefixtures("one_thread")


def write_set(root: Path, task: str) -> Path:
    """Six ellipsoids, of which a and d are for testing."""
    rows = ["file,size,split"]
    for seed, name in enumerate("abcdef"):
        mesh, part = ellipsoid(seed, 1), "test" if name in "ad" else "train"
        folder = root / ("cat", "dog")[seed // 3] / part if task == "classification" else root / part
        folder.mkdir(parents=True, exist_ok=True)
        trimesh.Trimesh(mesh.verts, mesh.faces, process=False).export(folder / f"{name}.ply")
        if task == "segmentation":
            np.savetxt(folder / f"{name}.txt", (mesh.verts[:, 0] > 0) * 5, fmt="%d")
        rows.append(f"{part}/{name}.ply,{seed / 7},{part}")
    if task == "regression":
        (root / "targets.csv").write_text("\n".join(rows))
    return root


@pytest.mark.parametrize("task", ["segmentation", "classification", "regression"])
def test_labeled_sets(tmp_path: Path, task: str) -> None:
    root, out, cache = write_set(tmp_path / "set", task), tmp_path / "out", tmp_path / "cache"
    call = ("precompute", root, "--write-shards", out, "--task", task, "--k", 6, "--jobs", 1, "--cache", cache)
    assert f"6 of 6 meshes are in {out}" in output(*call)
    load = {"segmentation": load_dataset, "classification": load_classes, "regression": load_targets}[task]
    found, expected = load_shards(out), load(root)
    assert (found.label_names, found.labels_at) == (expected.label_names, expected.labels_at)
    assert found.label_numbers == expected.label_numbers
    for part, whole in ((found.train, expected.train), (found.test, expected.test)):
        for item, other in zip(part, whole, strict=True):
            assert item.name == other.name
            np.testing.assert_array_equal(item.labels, other.labels)
            np.testing.assert_array_equal(item.mesh.verts, other.mesh.verts)


def test_meshes_without_labels(tmp_path: Path) -> None:
    """A mesh that can't be used is listed, and left out. Shards may be in the same folder."""
    root, out = write_set(tmp_path / "set", ""), tmp_path / "set" / "out"
    (root / "train" / "bad.ply").write_text("ply")
    for _ in range(2):
        code, printed, error = diffnet(
            "precompute", root, "--write-shards", out, "--k", 6, "--jobs", 1, "--cache", tmp_path / "cache"
        )
        assert (code, error.count("\n")) == (1, 1)
        assert f"6 of 7 meshes are in {out}" in printed
        assert "bad.ply" in error
    data = load_shards(out)
    assert (len(data.train), len(data.test), data.label_names) == (6, 0, [])
    assert data.train[0].labels == -1
    assert not list((tmp_path / "cache").rglob("*.operators.*"))


def test_options_that_do_not_go_together(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set", "segmentation")
    call = ("precompute", root, "--cache", tmp_path / "cache", "--jobs", 1)
    assert complaint(*call, "--task", "segmentation") == "--task, --targets and --features are for --write-shards"
    call = (*call, "--write-shards", tmp_path / "out")
    assert complaint(*call, root, "--task", "segmentation") == "--task segmentation takes one data set, got 2 paths"
    assert complaint(*call, "--targets", "file:u") == "--targets is for --task regression"
    expected = "sets for correspondence can't be written into shards"
    assert complaint(*call, "--task", "correspondence") == expected
    output(*call, "--task", "segmentation", "--k", 6)
    assert "its shards have options" in complaint(*call, "--task", "segmentation", "--k", 7)


def test_parts_together_are_the_set(tmp_path: Path) -> None:
    """A part may fail, and the call without --part writes the index."""
    root, out = write_set(tmp_path / "set", "segmentation"), tmp_path / "out"
    call = ("precompute", root, "--write-shards", out, "--task", "segmentation", "--k", 6, "--jobs", 1)
    call = (*call, "--cache", tmp_path / "cache")
    assert f"3 of 3 meshes of part 2/2 are in {out}. When all parts are done" in output(*call, "--part", "2/2")
    with pytest.raises(DataError, match="the shards have no index"):
        is_shards(out)
    output(*call, "--part", "1/2")
    kept = sorted(path.name for path in out.iterdir())
    assert len(kept) == 2
    assert f"6 of 6 meshes are in {out}" in output(*call)
    assert sorted(path.name for path in out.iterdir()) == sorted([*kept, INDEX])
    assert [item.name for item in load_shards(out).train] == ["b", "c", "e", "f"]
    assert "--part should be I/N" in complaint(*call, "--part", "3/2")
