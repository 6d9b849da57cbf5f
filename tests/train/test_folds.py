"""k folds: their division, the runs of all tasks, their scores, and how they are resumed."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import complaint, output
from runs import TINY, results_of, table_of, write_ball, write_balls

from diffnet.data import load_dataset
from diffnet.data.folders.division import folds_of
from diffnet.geometry.errors import OptionError

pytestmark = pytest.mark.usefixtures("one_thread", "small_pictures")


@pytest.mark.parametrize("seed", range(3))
def test_folds_leave_groups_together_and_share_each_kind(seed: int) -> None:
    groups = [i // 3 for i in range(30)]
    kinds = [group % 2 for group in groups]
    folds = folds_of(groups, kinds, 5, seed)
    assert len(set(zip(groups, folds, strict=True))) == 10
    assert Counter(zip(folds, kinds, strict=True)) == {(fold, kind): 3 for fold in range(5) for kind in range(2)}
    uneven = [0, *[1] * 2, *[2] * 3, *[3] * 9]
    assert len(set(folds_of(uneven, [0] * 15, 4, seed))) == 4  # each group is a fold
    assert Counter(folds_of(range(11), [0] * 11, 4, seed)).most_common()[-1][1] == 2
    with pytest.raises(OptionError, match="folds is 5, but there are only 4 groups of meshes"):
        folds_of(uneven, [0] * 15, 5, seed)


def write_set(root: Path, task: str) -> tuple[Path, list[object]]:
    """A set for a task that nothing divides, and the options of a run."""
    if task == "segmentation":
        return write_balls(root, 6), ["--group-by", "m[0-9]", "--class-weights", "balanced"]
    if task == "classification":
        for i in range(8):
            write_ball(root / ("ab"[i % 2]) / f"m{i}.obj", i)
    if task == "regression":
        lines = [f"{write_ball(root / f'm{i}.obj', i).name},{i}" for i in range(6)]
        (root / "targets.csv").write_text("\n".join(["file,size", *lines]))
    if task == "correspondence":
        for i in range(6):
            write_ball(root / f"m{i}.obj", i)
            np.savetxt(root / f"m{i}.vts", range(1, 43), fmt="%d")
        return root, ["--map-k", 5, "--channels", 4]
    return root, []


SCORES = {
    "segmentation": ["test_accuracy", "mean_iou", "0 iou"],
    "classification": ["test_accuracy", "b accuracy"],
    "regression": ["size mae"],
    "correspondence": ["mean_error"],
}


@pytest.mark.parametrize("task", SCORES)
def test_each_task_trains_folds(task: str, tmp_path: Path) -> None:
    data, more = write_set(tmp_path / "data", task)
    out = tmp_path / "run"
    where = ["train", task, "--data", data, "--out", out, "--cache", tmp_path / "cache"]
    text = output(*where, *TINY, *more, "--features", "xyz", "--folds", 2)
    assert "mean of 2 folds" in text
    runs = [results_of(out / f"fold_{i}") for i in (1, 2)]
    tests = [set(run["meshes"]["test"]) for run in runs]
    assert [{*run["meshes"]["train"]} for run in runs] == tests[::-1]
    assert not tests[0] & tests[1]
    results, rows = results_of(out), table_of(out / "folds.csv")
    assert [row["fold"] for row in rows] == ["1", "2", "mean", "spread"]
    for name in SCORES[task]:
        first, second, mean, spread = (float(row[name]) for row in rows)
        assert results["scores"][name] == {"mean": mean, "spread": spread}
        assert mean == pytest.approx((first + second) / 2)
        assert spread == pytest.approx(abs(first - second) / 2**0.5)
    assert {row["fold"] for row in table_of(out / "per_mesh.csv")} == {"1", "2"}
    assert "already holds a run (fold_1/last.pt); add --resume" in complaint(*where, "--folds", 2)


def test_folds_are_resumed(tmp_path: Path) -> None:
    """A complete fold stays, one that has begun goes on, and others begin with the options of the first call."""
    data, more = write_set(tmp_path / "data", "segmentation")
    out = tmp_path / "run"
    where: list[Any] = ["train", "segmentation", "--data", data, "--out", out, "--cache", tmp_path / "cache"]
    output(*where, *TINY, *more, "--folds", 3)
    before = {name: (out / name).read_text() for name in ("folds.csv", "per_mesh.csv", "results.json")}
    options = results_of(out / "fold_3")["options"]
    complete = (out / "fold_1" / "predictions.html").stat()
    (out / "fold_2" / "predictions.html").unlink()
    for file in sorted((out / "fold_3").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    text = output(*where, "--resume", "--jobs", 1, "--device", "cpu")
    assert f"fold 1 of 3: {out}" not in text
    assert f"resuming {out / 'fold_2'}" in text
    assert (out / "fold_1" / "predictions.html").stat() == complete
    assert results_of(out / "fold_3")["options"] == options
    assert {name: (out / name).read_text() for name in before} == before
    assert json.loads((out / "folds.json").read_text())["folds"] == 3
    assert f"--folds is 2, but {out} was started with 3; resumed" in complaint(*where, "--resume", "--folds", 2)
    assert f"--seed is 5, but {out} was started without it" in complaint(*where, "--resume", "--seed", 5)
    others = ["train", "classification", *where[2:]]
    assert f"task is classification, but {out} was started with segmentation" in complaint(*others, "--resume")
    assert "nowhere" in complaint(*where[:3], "nowhere", *where[4:], "--resume")
    # One fold of another set
    for file in sorted((out / "fold_3").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    mesh = sorted(data.rglob("m0.obj"))[0]
    mesh.rename(mesh.with_name("n0.obj"))
    mesh.with_suffix(".txt").rename(mesh.with_name("n0.txt"))
    assert "the set has changed between the folds. m" in complaint(*where, "--resume")


def test_folds_of_a_set_that_is_divided(tmp_path: Path) -> None:
    data = write_balls(tmp_path / "data", 4)
    (data / "train.txt").write_text("m0\nm1\nm2")
    (data / "test.txt").write_text("m3")
    where = ["--data", data, "--cache", tmp_path / "cache", *TINY, "--folds", 2]
    line = complaint("train", "segmentation", "--out", tmp_path / "run", *where)
    assert line == "--folds is 2, but the set is divided by the lists train.txt, test.txt"
    with pytest.raises(OptionError, match="folds is 2, but the set is divided by the lists"):
        load_dataset(data, fold=(0, 2))
    table = data / "table.csv"
    table.write_text("file,labels,split\n" + "".join(f"m{i}.obj,m{i}.txt,{'test' if i else 'train'}\n" for i in (0, 1)))
    with pytest.raises(OptionError, match="folds is 2, but the set is divided by the table"):
        load_dataset(table, fold=(0, 2))
    table.unlink()
    (data / "train.txt").unlink()
    (data / "test.txt").unlink()
    output("train", "segmentation", "--out", tmp_path / "run", *where)  # nothing of the first call is in the way
    line = complaint("train", "segmentation", "--out", tmp_path / "other", "--resume", *where)
    assert "there are no folds in this folder to resume" in line


def spoil(data: Path, task: str) -> list[str]:
    """Make files of a set of `write_set` unusable, in all ways that a set of the task has. → their names"""
    if task == "segmentation":
        write_balls(data, 9)
    damaged, flat = (next(data.rglob(f"m{i}.obj")) for i in (0, 1))
    damaged.write_text("v 0 zero 0\nf 1 2 3\n")
    flat.write_text("v 0 0 0\n" * 42 + "f 1 2 3\n")  # only its operators can't be computed
    names = [damaged.name, flat.name]
    if task == "segmentation":
        (data / "m2.txt").unlink()
        (data / "m3.txt").write_text("1\n" * 41)
        (data / "m4.txt").write_text("one\ntwo\n3\n")
        names += ["m2.obj", "m3.txt", "m4.txt, line"]
    if task == "regression":
        with (data / "targets.csv").open("a") as table:
            table.write("\ngone.obj,3")
        names += ["gone.obj"]
    if task == "correspondence":
        for i in (6, 7):
            write_ball(data / f"m{i}.obj", i)
            np.savetxt(data / f"m{i}.vts", range(1, 43), fmt="%d")
        (data / "m2.vts").unlink()
        (data / "test_pairs.txt").write_text("m4 m5\nm0 m4\nm1 m4\nm2 m4\n")
        names += ["m2.obj"]
    return names


def test_a_new_run_leaves_out_nothing_of_an_earlier_one(tmp_path: Path) -> None:
    """Also where the earlier run ended before its first checkpoint."""
    data, more = write_set(tmp_path / "data", "regression")
    out = tmp_path / "run"
    out.mkdir()
    (out / "left_out.json").write_text(json.dumps({str(next(data.rglob("*.obj"))): "unusable"}))
    train = ["train", "regression", "--data", data, "--cache", tmp_path / "cache", "--out", out, *TINY, *more]
    for resume in ([], ["--resume"]):
        output(*train, *resume)
        assert results_of(out)["left_out"] == []


@pytest.mark.parametrize("task", SCORES)
def test_unusable_meshes_are_left_out(task: str, tmp_path: Path) -> None:
    """Training, also in folds, and `evaluate` name them in results.json, on the page and on the terminal."""
    data, more = write_set(tmp_path / "data", task)
    names, out, where = spoil(data, task), tmp_path / "run", ["--data", data, "--cache", tmp_path / "cache"]
    train = ["train", task, "--out", out, *where, *TINY, *more, "--features", "xyz"]
    complaint(*train)
    text = output(*train, "--skip-unusable", *(["--folds", 2] if task == "segmentation" else []))
    out = out / "fold_2" if task == "segmentation" else out
    if task != "segmentation":
        assert output(*train, "--resume")  # which leaves out the same meshes
        assert len(json.loads((out / "left_out.json").read_text())) == len(names)
    text += output("evaluate", "--checkpoint", out, "--out", tmp_path / "scores", *where, "--skip-unusable")
    for folder in (out, tmp_path / "scores"):
        reasons = results_of(folder)["left_out"]
        assert len(reasons) == len(names)
        assert all(any(name in reason for reason in reasons) for name in names)
        assert all(f"left out: {reason}\n" in text for reason in reasons)
        assert "<dt>Left out</dt>" in (folder / "predictions.html").read_text()
    for file in data.rglob("*.obj"):
        file.write_text("v 0 zero 0\nf 1 2 3\n")
    assert re.search(
        "no (train |test )?(meshes|pairs)|has no", complaint(*train, "--skip-unusable", "--out", tmp_path / "none")
    )
