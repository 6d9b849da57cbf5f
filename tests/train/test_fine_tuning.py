"""Runs that start from a network: `--from` and `--freeze`, and the names of networks."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from command import complaint, output
from runs import ball, results_of, write_ball

from diffnet import DiffusionNet, pretrained
from diffnet.train import fine_tuning, predict_values

pytestmark = pytest.mark.usefixtures("small_pictures", "one_thread")

SMALL = ["--k", 8, "--width", 8, "--blocks", 2, "--jobs", 1, "--device", "cpu", "--epochs", 2]
QUICK = ["--jobs", 1, "--device", "cpu", "--epochs", 1]
TASKS: dict[str, list[str]] = {
    "segmentation": [],
    "classification": [],
    "regression": ["--targets", "file:x"],
    "correspondence": [],
}
PAIRS = [(task, source) for i, task in enumerate(TASKS) for source in (task, [*TASKS][i - 1])]


def write_set(root: Path, names: str = "low\nhigh\n", factor: float = 1.0) -> Path:
    """Stretched balls with labels, targets and correspondences, and a table of their classes."""
    rows = ["file,label,split"]
    for i in range(6):
        part, verts = root / ("train" if i < 4 else "test"), ball(i).vertices
        write_ball(part / f"m{i}.obj", i)
        np.savetxt(part / f"m{i}.txt", verts[:, 2] > 0, fmt="%d")
        np.savetxt(part / f"m{i}.vts", np.arange(42), fmt="%d")
        np.save(part / f"m{i}.x.npy", factor * verts[:, 0] + 100 * (factor - 1))
        np.save(part / f"m{i}.own.npy", factor * verts[:, :2] + factor)
        rows.append(f"{part.name}/m{i}.obj,{names.split()[i % 2]},{part.name}")
    (root / "label_names.txt").write_text(names)
    (root / "classes.csv").write_text("\n".join(rows))
    return root


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory, small_pictures: None) -> Path:
    """A set, a cache, and a run of each task."""
    root = tmp_path_factory.mktemp("room")
    write_set(root / "data")
    for task in TASKS:
        run(root, task, root / task, *SMALL, "--features", "xyz", *(["--map-k", 6] if task == "correspondence" else []))
    return root


def run(room: Path, task: str, out: Path, *options: object, data: Path | None = None) -> str:
    folder = data or room / "data"
    where = ["--data", folder / "classes.csv" if task == "classification" else folder, "--cache", room / "cache"]
    return output("train", task, *where, "--out", out, *TASKS[task], *options)


def weights(path: Path) -> dict[str, torch.Tensor]:
    return DiffusionNet.from_pretrained(path).state_dict()


@pytest.mark.parametrize(("task", "source"), PAIRS)
def test_blocks_serve_all_tasks(
    room: Path, tmp_path: Path, task: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frozen blocks keep their bits, also in an average. Only a network of the same task brings its last layer."""
    read = Mock(wraps=fine_tuning.load_any_network)
    monkeypatch.setattr(fine_tuning, "load_any_network", read)
    more = ["--map-k", 6] if task == "correspondence" else []
    out = run(
        room, task, tmp_path, *QUICK, *more, "--from", room / source, "--freeze", "blocks", "--average-weights", 0.9
    )
    read.assert_called_once()
    last = "all layers" if task == source else "all layers but the last"
    assert f"note: starts with {last} of {room / source}" in out.replace("\n", "")
    before, after = weights(room / source), weights(tmp_path)
    for name in after:
        assert torch.equal(before[name], after[name]) == (not name.startswith("last.")), name
    results = results_of(tmp_path)["options"]
    assert (results["start"], results["freeze"], results["learning_rate"]) == (str(room / source), "blocks", 5e-4)
    assert [results[name] for name in ("features", "k", "width", "blocks")] == ["xyz", 8, 8, 2]
    assert DiffusionNet.from_pretrained(tmp_path).metadata["start"] == str(room / source)


def start_of(room: Path, task: str, out: Path, *options: object, data: Path | None = None) -> dict[str, torch.Tensor]:
    """The weights of a run with a rate that changes nothing."""
    run(room, task, out, *QUICK, "--lr", 1e-30, *options, data=data)
    return weights(out)


def test_the_last_layer_follows_the_names_of_classes(room: Path, tmp_path: Path) -> None:
    before, start = weights(room / "segmentation"), ["--from", room / "segmentation"]
    for names in ("high\nlow\n", "top\nlow\n", "low\nhigh\nmid\n"):
        data = write_set(tmp_path / names[:3], names)
        after = start_of(room, "segmentation", tmp_path / f"run {names[:3]}", *start, data=data)
        for name in (name for name in before if not name.startswith("last.")):
            expected = before[name].clamp(min=0) if name.endswith(".time") else before[name]  # as a step does
            assert (after[name] - expected).abs().max() < 1e-25
        rows = after["last.weight"]
        assert len(rows) == len(names.split())
        assert torch.equal(rows, before["last.weight"].flip(0)) == (names == "high\nlow\n")
        assert not torch.isin(rows, before["last.weight"]).any() or names == "high\nlow\n"


def test_other_units_change_no_prediction(room: Path, tmp_path: Path) -> None:
    """Own arrays and targets of the new set have other means and deviations. The layers that see them follow."""
    run(room, "regression", tmp_path / "a", *SMALL, "--features", "file:own+xyz", "--no-rotate")
    other = write_set(tmp_path / "other", factor=3.0)
    start_of(room, "regression", tmp_path / "b", "--from", tmp_path / "a", "--no-rotate", data=other)
    networks = [DiffusionNet.from_pretrained(tmp_path / name) for name in "ab"]
    assert networks[0].metadata["target_statistics"] != networks[1].metadata["target_statistics"]
    assert networks[0].metadata["statistics"] != networks[1].metadata["statistics"]
    mesh = other / "test" / "m5.obj"
    (_, first), (_, second) = (predict_values([mesh], network, "cpu")[0] for network in networks)
    np.testing.assert_allclose(second, first, rtol=1e-5, atol=200 * np.finfo(np.float32).eps)  # of the new mean


def test_options_of_the_user_win_or_name_what_does_not_fit(room: Path, tmp_path: Path) -> None:
    start = room / "segmentation"
    network = DiffusionNet.from_pretrained(start)
    run(room, "segmentation", tmp_path / "a", *QUICK, "--from", start, "--k", 6, "--dropout", 0, "--lr", 0.01)
    results = results_of(tmp_path / "a")["options"]
    assert [results[name] for name in ("k", "dropout", "learning_rate")] == [6, 0, 0.01]
    network.save(tmp_path / "a.safetensors")
    small = DiffusionNet(3, 2, width=8, blocks=2, mlp_hidden=[4])
    small.save(tmp_path / "small.safetensors", features="xyz", k=8, normalize=True)
    DiffusionNet(3, 2, width=8).save(tmp_path / "bare.safetensors")
    where = ["--data", room / "data", "--out", tmp_path / "b"]
    for options, message in (
        (["--width", 16], f"--width is 16, and 8 in the network of {tmp_path / 'a.safetensors'}"),
        (["--blocks", 3], "--blocks is 3, and 2 in the network of "),
        (["--features", "hks"], "--features is hks, and xyz in the network of "),
        (["--mlp-norm", "rms"], "--mlp-norm is rms, and none in the network of "),
        (["--attention-heads", 2], "--attention-heads is 2, and 0 in the network of "),
        (["--from", tmp_path / "small.safetensors"], "mlp_hidden is [8, 8], and [4] in the network of "),
        (["--from", tmp_path / "bare.safetensors"], "the network, which takes 3 channels, lack features, k"),
        (["--from", tmp_path / "none.pt"], "none.pt: no such checkpoint"),
        (["--from", room], "this is a folder, expected a checkpoint"),
    ):
        tuned = ["--from", tmp_path / "a.safetensors", *options]
        assert message in complaint("train", "segmentation", *where, *tuned)
    alone = complaint("train", "segmentation", *where, "--freeze", "blocks")
    assert alone == "--freeze is blocks, but there is no network to start from; add --from"
    assert not (tmp_path / "b").exists()


def test_a_resumed_run_keeps_its_start(room: Path, tmp_path: Path) -> None:
    """Its first network is no longer needed."""
    start = tmp_path / "start.safetensors"
    network = DiffusionNet.from_pretrained(room / "segmentation")
    network.save(start, train_meshes=["0" * 16])
    common = ["--from", start, "--freeze", "blocks", "--schedule", "step"]
    run(room, "segmentation", tmp_path / "whole", *common, *QUICK, "--epochs", 2)
    run(room, "segmentation", tmp_path / "run", *common, *QUICK)
    start.unlink()
    again = ["train", "segmentation", "--data", room / "data", "--cache", room / "cache", "--out", tmp_path / "run"]
    again += ["--resume", "--jobs", 1, "--device", "cpu"]
    other = complaint(*again, "--from", room / "segmentation")
    assert f"--from is {room / 'segmentation'}, and the run in {tmp_path / 'run'} was started with {start}" in other
    output(*again, "--epochs", 2, "--recipe", "default")
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "run")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    network = DiffusionNet.from_pretrained(tmp_path / "run")
    assert network.metadata["start"] == str(start)
    assert len(network.metadata["train_meshes"]) == 5  # four, and those that the first network has seen
    assert network.metadata["train_meshes"][4] == "0" * 16
    network.save_pretrained(tmp_path / "shared", data_license="CC0-1.0")
    assert f"| trained from | {start} |" in (tmp_path / "shared" / "README.md").read_text()


# ---- the names of networks ----


def test_names_of_networks(room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command takes a file, a folder or the name of a built-in network. Of a run, last.pt counts."""
    monkeypatch.setattr(pretrained, "FOLDER", tmp_path / "networks")
    (tmp_path / "networks").mkdir()
    network = DiffusionNet.from_pretrained(room / "segmentation")
    for name in ("body-parts", "body-maps"):
        network.save(tmp_path / "networks" / f"{name}.safetensors", data_license="CC0-1.0")
    network.save_pretrained(tmp_path / "shared", data_license="CC0-1.0")
    mesh, table = room / "data" / "test" / "m5.obj", tmp_path / "labels.txt"
    for name in ("body-parts", room / "segmentation", tmp_path / "shared", room / "segmentation" / "last.pt"):
        output("predict", mesh, "--checkpoint", name, "--out", table, "--device", "cpu")
        assert len(table.read_text().split()) == 42
        table.unlink()
    assert DiffusionNet.from_pretrained("body-parts").metadata["label_names"] == ["low", "high"]
    message = complaint("predict", mesh, "--checkpoint", "body-part", "--out", table)
    assert message == "body-part: no such checkpoint; the built-in networks are body-maps, body-parts"
    out = run(room, "segmentation", tmp_path / "run", *QUICK, "--from", "body-parts")
    assert "note: starts with all layers of body-parts" in out
    monkeypatch.chdir(tmp_path)
    Path("body-parts").mkdir()  # a folder of this name wins
    assert complaint("predict", mesh, "--checkpoint", "body-parts", "--out", table).startswith("body-parts: this is a")
