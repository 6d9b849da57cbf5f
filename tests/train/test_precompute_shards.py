"""`diffnet precompute --write-shards`, and parts of `diffnet precompute` for array jobs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import trimesh
from command import complaint, diffnet, output
from runs import ball, results_of, write_ball
from shapes import ellipsoid

from diffnet.data import DataError, load_classes, load_dataset, load_shards, load_targets
from diffnet.data.shards.reading import INDEX, is_shards
from diffnet.geometry.preprocessing import recipe
from diffnet.train.checkpoint import load_checkpoint
from diffnet.train.commands.mesh_files import part_of

pytestmark = pytest.mark.usefixtures("one_thread", "small_pictures")

TRAINING = ("--features", "hks", "--k", 6, "--epochs", 2, "--width", 8, "--blocks", 1, "--device", "cpu", "--jobs", 1)


def write_set(root: Path, task: str) -> Path:
    """Six balls, of which a and d are for testing."""
    rows = ["file,size,split"]
    for seed, name in enumerate("abcdef"):
        part = "test" if name in "ad" else "train"
        folder = root / ("cat", "dog")[seed // 3] / part if task == "classification" else root / part
        write_ball(folder / f"{name}.ply", seed)
        if task == "segmentation":
            np.savetxt(folder / f"{name}.txt", (ball(seed).vertices[:, 0] > 0) * 5, fmt="%d")
        rows.append(f"{part}/{name}.ply,{seed / 7},{part}")
    if task == "regression":
        (root / "targets.csv").write_text("\n".join(rows))
    return root


def test_meshes_without_labels(tmp_path: Path) -> None:
    """A mesh that can't be used is listed, and left out. Shards may be in the same folder."""
    root, out = write_set(tmp_path / "set", ""), tmp_path / "set" / "out"
    (root / "train" / "bad.ply").write_text("ply")
    call = ("precompute", root, "--write-shards", out, "--k", 6, "--jobs", 1, "--cache", tmp_path / "cache")
    for _ in range(2):
        code, printed, error = diffnet(*call)
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
    line = complaint(*call, "--task", "segmentation")
    assert line == "--task, --targets, --labels, --group-by and --features are for --write-shards"
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


def test_variants_of_meshes_in_shards(tmp_path: Path) -> None:
    """Only the operators of the variants are computed. The bits are those of a run on the files."""
    root, shards, cache = write_set(tmp_path / "set", "segmentation"), tmp_path / "shards", tmp_path / "cache"
    options = (*TRAINING, "--cut", 0.3, "--variants", 1)
    call = ("precompute", root, "--write-shards", shards, "--task", "segmentation", "--k", 6, "--jobs", 1)
    output(*call, "--cache", cache)
    for data, out, folder in ((root, "files", tmp_path / "other"), (shards, "run", cache)):
        output("train", "segmentation", "--data", data, "--out", tmp_path / out, "--cache", folder, *options)
    assert len(list(cache.rglob("*.operators.*"))) == 4
    first, second = (load_checkpoint(tmp_path / name / "last.pt")["model"] for name in ("files", "run"))
    for name, weight in first.items():
        torch.testing.assert_close(second[name], weight, rtol=0, atol=0)


@pytest.mark.usefixtures("addresses")
@pytest.mark.parametrize("task", ["segmentation", "classification", "regression"])
def test_training_and_evaluation_read_shards(tmp_path: Path, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of a run on the files. No operators are computed or stored."""
    root, shards, cache = write_set(tmp_path / "set", task), tmp_path / "shards", tmp_path / "cache"
    call = ("precompute", root, "--write-shards", shards, "--task", task, "--k", 6, "--jobs", 1, "--cache", cache)
    assert f"6 of 6 meshes are in {shards}" in output(*call)
    load = {"segmentation": load_dataset, "classification": load_classes, "regression": load_targets}[task]
    data, expected = load_shards(shards), load(root)
    assert (data.label_names, data.labels_at) == (expected.label_names, expected.labels_at)
    assert data.label_numbers == expected.label_numbers
    for part, whole in ((data.train, expected.train), (data.test, expected.test)):
        for item, other in zip(part, whole, strict=True):
            assert item.name == other.name
            np.testing.assert_array_equal(item.labels, other.labels)
            np.testing.assert_array_equal(item.mesh.verts, other.mesh.verts)
    output("train", task, "--data", root, "--out", tmp_path / "files", "--cache", tmp_path / "other", *TRAINING)
    monkeypatch.setattr(recipe, "discretize", None)
    output("train", task, "--data", shards, "--out", tmp_path / "run", "--cache", cache, *TRAINING)
    assert not list(cache.rglob("*.operators.*"))
    first, second = (load_checkpoint(tmp_path / name / "last.pt") for name in ("files", "run"))
    assert first["label_names"] == second["label_names"]
    assert first["train_meshes"] == second["train_meshes"]
    for name, weight in first["model"].items():
        torch.testing.assert_close(second["model"][name], weight, rtol=0, atol=0)
    call = ("evaluate", "--checkpoint", tmp_path / "run" / "last.pt", "--data", shards, "--cache", cache, "--jobs", 1)
    printed = output(*call, "--out", tmp_path / "report", "--device", "cpu")
    assert "scored meshes in the training part: 0 of 2" in printed
    scores = [results_of(tmp_path / name) for name in ("run", "report")]
    key = "columns" if task == "regression" else "classes"
    assert scores[0][key] == scores[1][key]
    refused = complaint("train", task, "--data", shards, "--out", tmp_path / "bad", *TRAINING, "--k", 7)
    assert refused.startswith(f"--k is 7, and the shards in {shards} were written with 6. Use k=6, on the command line")
    assert not (tmp_path / "bad").exists()


def test_shards_without_what_a_task_needs(tmp_path: Path) -> None:
    bare, labels = tmp_path / "bare", tmp_path / "labels"
    root = write_set(tmp_path / "set", "segmentation")
    call = ("precompute", root, "--k", 6, "--jobs", 1, "--cache", tmp_path / "cache", "--write-shards")
    output(*call, bare)
    output(*call, labels, "--task", "segmentation")
    for task, folder, found in (
        ("segmentation", bare, "neither labels nor targets"),
        ("regression", labels, "labels, not targets"),
    ):
        expected = f"{folder}: these shards have {found}. Write them with --task"
        assert complaint("train", task, "--data", folder, "--out", tmp_path / "run") == expected


def test_own_arrays_are_written_again_when_they_change(tmp_path: Path) -> None:
    root, out = write_set(tmp_path / "set", "segmentation"), tmp_path / "out"
    for number, path in enumerate(sorted(root.rglob("*.ply"))):
        np.save(path.with_suffix(".shade.npy"), np.full(42, number))
    call = ("precompute", root, "--write-shards", out, "--task", "segmentation", "--k", 6, "--jobs", 1)
    call = (*call, "--features", "file:shade+xyz", "--cache", tmp_path / "cache")
    output(*call)
    np.save(root / "test" / "d.shade.npy", np.full((42, 1), 7))
    output(*call)
    data = load_shards(out)
    assert [item.arrays["shade"][0, 0] for item in (*data.test, *data.train)] == [0, 7, 2, 3, 4, 5]
    (first, second) = sorted(out.glob("*.shard.zip"), key=lambda path: path.stat().st_mtime_ns)
    first.unlink()
    output(*call)
    assert second.is_file()
    assert [item.arrays["shade"][0, 0] for item in load_shards(out).test] == [0, 7]


def test_parts_are_balanced_and_do_not_depend_on_the_order(tmp_path: Path) -> None:
    sizes = np.random.default_rng(0).integers(0, 4000, 40)
    files = [tmp_path / f"{i}.off" for i in range(41)]  # the last one is missing
    for file, size in zip(files, sizes, strict=False):
        file.write_bytes(bytes(int(size)))
    parts = [part_of(files, f"{i}/3") for i in (1, 2, 3)]
    assert sorted(file for part in parts for file in part) == sorted(files)
    totals = [sum(file.stat().st_size for file in part if file.exists()) for part in parts]
    assert max(totals) - min(totals) < 0.02 * sum(totals)
    for i, part in enumerate(parts, start=1):
        assert part == [file for file in files if file in part]
        assert part_of(files[::-1], f"{i}/3") == part[::-1]
    assert part_of(files, "1/1") == files
    many = [part_of(files[:2], f"{i}/999999999") for i in (1, 2, 3, 999999999)]
    assert [len(part) for part in many] == [1, 1, 0, 0]


def test_precompute_in_parts(tmp_path: Path) -> None:
    for i in range(5):
        trimesh.Trimesh(ellipsoid(i).verts, ellipsoid(i).faces, process=False).export(tmp_path / f"{i}.off")
    cache = tmp_path / "cache"
    arguments = ["precompute", tmp_path, "--cache", cache, "--k", 4, "--jobs", 1, "--part"]
    for part in ("0/4", "5/4", "a/b", "1/0", "1", "1/4/2", ""):
        message = complaint(*arguments, part)
        assert message == f"--part should be I/N with I from 1 to N, such as 1/4, got {part!r}"
    assert not cache.exists()

    def written() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in cache.rglob("*.operators.*")}

    out = output(*arguments, "1/2").replace("\n", " ")
    first = written()
    assert f"{len(first)} of {len(first)} meshes of part 1/2 are in {cache}" in out
    assert len(first) in (2, 3)
    next(iter(first)).unlink()
    kept = written()
    output(*arguments, "1/2")  # computes what is missing
    assert written().keys() == first.keys()
    assert written().items() >= kept.items()
    output(*arguments, "2/2")
    assert len(written()) == 5
