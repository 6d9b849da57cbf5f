"""`diffnet train correspondence` and `diffnet match`: targets, losses, runs, reports, and matches of two meshes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from command import complaint, output
from graph_emulator import DEVICES, EmulatedGraph
from PIL import Image
from refusals import refused
from rich.console import Console
from runs import results_of, table_of
from scipy.integrate import trapezoid
from scipy.spatial import cKDTree

from diffnet import DiffusionNet, Operators, ops, precompute
from diffnet.cuda_graphs.forward import Settings, use_graphs
from diffnet.data import (
    DataError,
    LabeledMesh,
    MeshPairs,
    PairSample,
    PairShape,
    Preprocessing,
    Sample,
    collate_pairs,
    load_pairs,
    make_sample,
    paired_meshes,
)
from diffnet.data.options import Variants
from diffnet.data.pairs.partial import with_partial_copies
from diffnet.data.pairs.shapes import boundary_length
from diffnet.geometry import MeshError, cut_by_plane, load_mesh, make_mesh, point_map
from diffnet.geometry.errors import OptionError
from diffnet.ops import functional_map
from diffnet.train import run
from diffnet.train.checkpoint import CheckpointError, build_model, load_checkpoint
from diffnet.train.correspondence.maps import pair_maps, point_map_of, unsupervised_loss
from diffnet.train.correspondence.partial import coherent_map
from diffnet.train.correspondence.targets import PairSamples, pair_samples
from diffnet.train.fine_tuning import copy_weights
from diffnet.train.inference.matching import match_meshes
from diffnet.train.inference.predict import predict_labels
from diffnet.train.loop import RunData, train
from diffnet.train.options import TrainOptions
from diffnet.train.steps.step import TrainingStep
from diffnet.train.tasks.correspondence import TASK
from diffnet.train.tasks.task import MetadataError

pytestmark = pytest.mark.usefixtures("small_pictures", "one_thread")

CPU, QUIET = torch.device("cpu"), Console(quiet=True)
SMALL = ["--k", 20, "--map-k", 8, "--width", 16, "--blocks", 1, "--channels", 16, "--jobs", 1, "--device", "cpu"]


def order_of(seed: int, count: int = 162) -> np.ndarray:
    """For each vertex of the template, the vertex of body `seed`."""
    return np.random.default_rng(seed).permutation(count)


def body(seed: int, stretch: float = 0.1) -> trimesh.Trimesh:
    """A body without symmetry, stretched differently for each seed, with its own order of vertices."""
    ball = trimesh.creation.icosphere(2)
    verts = ball.vertices * [1.0, 0.8, 0.6]
    verts = verts * (1 + 0.3 * np.sin(3 * verts.sum(axis=1, keepdims=True)))
    verts = verts * (1 + stretch * np.random.default_rng(seed).uniform(-1, 1, 3))
    place = order_of(seed)
    placed = np.empty_like(verts)
    placed[place] = verts
    return trimesh.Trimesh(placed, place[ball.faces], process=False)


def write_set(folder: Path, supervised: bool = True) -> Path:
    """Four bodies for training, three for testing."""
    for part, seeds in (("train", range(4)), ("test", range(4, 7))):
        (folder / part).mkdir(parents=True)
        for seed in seeds:
            body(seed).export(folder / part / f"b{seed}.ply")
            if supervised:
                np.savetxt(folder / part / f"b{seed}.vts", order_of(seed), fmt="%d")
    return folder


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory, small_pictures: None) -> Path:
    """A folder with a set of pairs, a cache and a supervised run."""
    folder = tmp_path_factory.mktemp("pairs")
    data = write_set(folder / "data")
    arguments = ["--data", data, "--out", folder / "run", "--cache", folder / "cache", "--epochs", 12, "--lr", 0.01]
    # Some tests match bodies with subdivided flat faces, on which curvature is not that of the training.
    output("train", "correspondence", *arguments, *SMALL, "--features", "wks")
    return folder


def samples_of(data: MeshPairs, part: str, features: str = "hks", k: int = 20) -> list[Sample]:
    shapes = data.train if part == "train" else data.test
    options = Preprocessing(k=k, features=features, normalize="area")
    return [make_sample(LabeledMesh(s.name, s.mesh, np.zeros(0, np.int64)), options) for s in shapes]


def two_bodies(stretch: float = 0.0) -> MeshPairs:
    """One pair. Without stretch, the second body is the first one with its vertices in another order."""
    shapes = []
    for seed in (0, 1):
        mesh = body(seed, stretch)
        shapes.append(PairShape(f"b{seed}", make_mesh(mesh.vertices, mesh.faces), order_of(seed)))
    return MeshPairs(shapes, shapes, [(0, 1)], [(0, 1)])


def small(**given: Any) -> TrainOptions:
    sizes = {"features": "xyz", "k": 20, "map_k": 8, "width": 16, "blocks": 1}
    return TrainOptions(task="correspondence", **{**sizes, **given})


def network_of(options: TrainOptions) -> DiffusionNet:
    torch.manual_seed(0)
    return build_model(options, ["u"] * 16, "vertices")


def pairs_of(data: MeshPairs, **given: Any) -> list[PairSample]:
    return pair_samples(data, "train", samples_of(data, "train", **given), 8)


def test_targets_are_the_functional_maps_of_the_correspondences() -> None:
    (pair,) = pairs_of(two_bodies())
    target = pair.target()
    assert target.shape == (1, 8, 8)
    second, first = pair.a.operators, pair.b.operators
    at_first = first.evecs[torch.as_tensor(order_of(0)), :8]
    at_second = second.evecs[torch.as_tensor(order_of(1)), :8]
    torch.testing.assert_close(at_first @ target[0], at_second, atol=1e-4, rtol=1e-3)
    # The map of points takes each vertex of the first mesh to the vertex of the second at the same template point.
    truth = np.empty(162, np.int64)
    truth[order_of(0)] = order_of(1)
    np.testing.assert_array_equal(point_map_of(target, second, first).numpy(), truth)
    np.testing.assert_array_equal(point_map_of(target[:, :5, :5], second, first, refine=True).numpy(), truth)
    # The same with template points of two classes in other orders.
    shapes = [replace(shape, folder=shape.name) for shape in two_bodies().train]
    shapes[1] = replace(shapes[1], template=np.roll(order_of(1), 1))
    between = {("b0", "b1"): np.roll(np.arange(162), -1)}
    (other,) = pairs_of(MeshPairs(shapes, shapes, [(0, 1)], [(0, 1)], between=between))
    torch.testing.assert_close(other.target(), target, atol=1e-4, rtol=1e-3)
    # ZoomOut leaves a map of all eigenpairs as it is.
    few = [side.truncated(8) for side in (second, first)]
    rough = target + 0.2 * torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(point_map_of(rough, *few, refine=True), point_map_of(rough, *few))
    weak = target * torch.logspace(0, -2, 8)  # high frequencies, which the nearest orthogonal map restores
    np.testing.assert_array_equal(point_map_of(weak, second, first).numpy(), truth)
    assert (point_map(weak, second, first).numpy() != truth).any()


def test_targets_of_maps_equal_those_of_template_points() -> None:
    data = two_bodies(0.1)
    samples = samples_of(data, "train")
    (expected,) = (pair.target() for pair in pairs_of(data))
    own = np.empty(162, np.int64)
    own[order_of(0)] = order_of(1)
    bare = [PairShape(shape.name, shape.mesh) for shape in data.train]
    mapped = MeshPairs(bare, bare, [(0, 1)], [(0, 1)], maps={("b0", "b1"): own})
    torch.testing.assert_close(pair_samples(mapped, "train", samples, 8)[0].target(), expected, atol=1e-4, rtol=1e-3)
    unknown = pair_samples(MeshPairs(bare, bare, [(0, 1)], [(0, 1)]), "train", samples, 8)[0].target()
    assert unknown.shape == (1, 8, 8)
    assert unknown.isnan().all()


def test_a_mesh_with_fewer_vertices_than_eigenpairs_is_refused() -> None:
    data = two_bodies()
    with pytest.raises(DataError, match="b0: 162 vertices are too few for maps of 163 eigenpairs; lower --map-k"):
        pair_samples(data, "train", samples_of(data, "train"), 163)


def packed_pairs(k: int = 10) -> tuple[torch.Tensor, Operators, list[Operators]]:
    """Random features and the operators of two pairs of meshes with different numbers of vertices."""
    meshes = [trimesh.creation.icosphere(level) for level in (1, 2, 2, 1)]
    each = [
        precompute((mesh.vertices * [1, 0.8 + 0.1 * i, 0.5], mesh.faces), k=k, normalize="area")
        for i, mesh in enumerate(meshes)
    ]
    samples = [Sample((str(i),), torch.randn(o.num_vertices, 24), torch.zeros(0), o) for i, o in enumerate(each)]
    pairs = [PairSample(a, b, lambda: torch.zeros(1, 6, 6)) for a, b in (samples[:2], samples[2:])]
    batch = collate_pairs(pairs)
    assert batch.labels.shape == (2, 6, 6)
    return batch.features, batch.operators, each


@pytest.mark.parametrize(
    ("method", "regularizer"),
    [("supervised", "squared_difference"), ("supervised", "resolvent"), ("unsupervised", "resolvent")],
)
def test_maps_of_a_batch_are_those_of_its_pairs(method: str, regularizer: str) -> None:
    torch.manual_seed(0)
    features, operators, each = packed_pairs()
    maps = pair_maps(features.requires_grad_(), operators, method, 6, 0, regularizer)
    without_gradients = pair_maps(features.detach(), operators, method, 6, 0, regularizer)
    assert without_gradients.shape[1] == {"supervised": 1, "unsupervised": 2}[method]
    assert torch.equal(without_gradients, maps[:, : without_gradients.shape[1]])
    rows = operators.unpack(features)
    for p in (0, 1):
        a, b = each[2 * p], each[2 * p + 1]
        x, y = (o.evecs[:, :6].mT @ (o.mass[:, None] * r) for o, r in ((a, rows[2 * p]), (b, rows[2 * p + 1])))
        solved = functional_map(x[None], y[None], a.evals[:, :6], b.evals[:, :6], regularizer=regularizer)[0]
        torch.testing.assert_close(maps[p, 0], solved, atol=1e-4, rtol=1e-3)
        if method == "unsupervised":
            unit = [torch.nn.functional.normalize(r, dim=1) for r in (rows[2 * p], rows[2 * p + 1])]
            soft = torch.softmax(unit[1] @ unit[0].mT / 0.07, 1)  # (V_b, V_a)
            expected = b.evecs[:, :6].mT @ (b.mass[:, None] * (soft @ a.evecs[:, :6]))
            torch.testing.assert_close(maps[p, 3], expected, atol=1e-5, rtol=1e-4)


def test_losses_are_those_of_the_papers() -> None:
    torch.manual_seed(0)
    maps, truth = torch.randn(2, 4, 5, 5, dtype=torch.float64), torch.randn(2, 5, 5, dtype=torch.float64)
    expected = 0.0
    for there, back, soft_back, soft_there in maps:
        eye = torch.eye(5, dtype=torch.float64)
        terms = (back @ there - eye, there @ back - eye, there.T @ there - eye, back.T @ back - eye)
        expected += sum(float(x.square().sum()) for x in (*terms, there - soft_there, back - soft_back)) / 2
    assert float(unsupervised_loss(maps)) == pytest.approx(expected)
    weighted = small(method="unsupervised", loss_weights="orthogonality=0.5, coupling=2")
    products = (maps[:, :2].mT @ maps[:, :2] - torch.eye(5)).square().sum() / 4
    coupled = (maps[:, :2] - maps[:, [3, 2]]).square().sum()
    assert float(TASK.loss(maps, truth, weighted)) == pytest.approx(float(products + coupled))
    for text, words in {"bijective=1": "got 'bijective=1'", "coupling": "of bij.*got", "coupling=0": "above 0"}.items():
        refused(OptionError, f"loss_weights should .*{words}", small, loss_weights=text)
    options = TrainOptions(task="correspondence")
    assert float(TASK.loss(maps[:, :1], truth, options)) == pytest.approx(
        float((maps[:, 0] - truth).square().sum() / 2)
    )
    tally, unknown = (TASK.tally(maps[:, 0], each, 3, options) for each in (truth, truth * torch.nan))
    r2 = 1 - float((maps[:, 0] - truth).square().sum() / truth.square().sum())
    assert TASK.score(tally, options) == pytest.approx(r2)
    assert np.isnan(TASK.score(unknown, options))


def test_scaled_features() -> None:
    """With a scale, maps don't depend on the size of the features. With 0 they do, because of the regularizer."""
    torch.manual_seed(0)
    features, operators, each = packed_pairs()
    sizes = torch.cat([torch.full((o.num_vertices, 1), 10.0**i) for i, o in enumerate(each)])
    for method in ("supervised", "unsupervised"):
        for scale in (0.0, 3.0):
            maps = pair_maps(features, operators, method, 6, scale)[:, 0]
            resized = pair_maps(features * sizes, operators, method, 6, scale)[:, 0]
            assert torch.allclose(maps, resized, atol=1e-4) == (scale > 0)
    rows = [*zip(operators.unpack(features), (o.mass[:, None] for o in each), strict=True)]
    scaled = torch.cat([x / ((mass * x.square()).sum() / x.shape[1] / mass.sum()) ** 0.5 for x, mass in rows])
    expected = pair_maps(scaled, operators, "supervised", 6)
    torch.testing.assert_close(pair_maps(features, operators, "supervised", 6, 1.0), expected, atol=1e-4, rtol=1e-3)


def test_clipped_gradients() -> None:
    """Adam's first moment after a step is a tenth of the gradient."""
    batch = collate_pairs(pairs_of(two_bodies(0.1)))
    norms = {}
    for clip in (0.0, 1e-3, 1e6):
        options = small(features="hks", clip=clip)
        model = network_of(options)
        step = TrainingStep(TASK, model, options, CPU)
        step(batch)
        moments = [step.optimizer.state[p]["exp_avg"] for p in model.parameters()]
        norms[clip] = 10 * float(torch.stack([m.square().sum() for m in moments]).sum().sqrt())
    assert norms[1e-3] == pytest.approx(1e-3, rel=1e-3)
    assert norms[0.0] == pytest.approx(norms[1e6], rel=1e-3)
    assert norms[0.0] > 2e-3
    refused(OptionError, "clip should be a finite number of at least 0, got -1", TrainOptions, clip=-1)


@pytest.mark.parametrize("method", ["supervised", "unsupervised"])
def test_steps_with_graphs_of_the_network_equal_plain_ones(method: str) -> None:
    options = small(method=method, dropout=0)
    batch = collate_pairs(pairs_of(two_bodies(0.1), features="xyz"))
    rotations = torch.eye(3)[[1, 2, 0]].expand(2, 3, 3)
    found = []
    for recorded in (False, True):
        model = network_of(options)
        if recorded:
            use_graphs(model, Settings("vertices", 0, recorder=EmulatedGraph))
        step = TrainingStep(TASK, model, options, CPU)
        found.append(torch.stack([step(batch, rotations) for _ in range(4)]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    assert found[0][-1] < found[0][0]


def test_a_supervised_run(room: Path) -> None:
    run = room / "run"
    results = results_of(run)
    assert (results["task"], results["options"]["normalize"]) == ("correspondence", "area")
    assert (results["train_pairs"], results["test_pairs"], results["train_meshes"]) == (6, 3, 4)
    assert results["mean_error_x100"] == pytest.approx(100 * results["mean_error"])
    assert results["mean_error"] < 0.01  # about 0.5 for a random map
    assert (results["flipped_pairs"], len(results["pairs"])) == (None, 3)
    rows = table_of(run / "per_mesh.csv")
    assert [{name: str(value) for name, value in pair.items()} for pair in results["pairs"]] == rows
    history = table_of(run / "metrics.csv")
    assert float(history[-1]["train_loss"]) < 0.5 * float(history[0]["train_loss"])
    assert float(history[-1]["test_r2"]) > float(history[0]["test_r2"])
    errors = table_of(run / "errors.csv")
    shares = [float(row["share"]) for row in errors]
    assert shares == sorted(shares)
    assert results["auc"] == pytest.approx(trapezoid(shares) / (len(shares) - 1), abs=1e-4)
    page = (run / "predictions.html").read_text()
    for number in range(3):
        assert f"pairs/{number:03d}.html" in page
        first, second = results["pairs"][number]["first"], results["pairs"][number]["second"]
        assert f'<a href="pairs/{number:03d}.html">{first} to {second}</a>' in page
        assert f"<title>{first} to {second}</title>" in (run / "pairs" / f"{number:03d}.html").read_text()
    assert (run / "errors.png").is_file()


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pair is read when a step or a test needs it, so a set need not fit into memory."""
    data, reads, read = two_bodies(0.1), [], PairSamples.__getitem__
    monkeypatch.setattr(PairSamples, "__getitem__", lambda self, key: reads.append(key) or read(self, key))
    pairs = pairs_of(data)
    run = RunData(TASK, paired_meshes(data, 16), pairs, pairs)
    options = small(features="hks", schedule="step", epochs=2)
    for parts in ([2], [1, 2]):
        for epochs in parts:
            out = tmp_path / str(len(parts))
            out.mkdir(exist_ok=True)
            train(run, replace(options, epochs=epochs), out, device=CPU, resume=epochs != parts[0])
    assert len(reads) == 4 + 3  # steps of four epochs, and tests at three ends
    whole, resumed = (load_checkpoint(tmp_path / name / "last.pt")["model"] for name in ("1", "2"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    other = RunData(TASK, paired_meshes(two_bodies(0.2), 16), pairs, pairs)
    with pytest.raises(CheckpointError, match="this run was started on a data set with other meshes"):
        train(other, replace(options, epochs=3), tmp_path / "1", device=CPU, resume=True)


def test_a_run_without_correspondences(room: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_set(tmp_path / "bare", supervised=False)
    supervised = ["train", "correspondence", "--data", data, "--cache", room / "cache", *SMALL, "--epochs", 3]
    unsupervised = [*supervised, "--method", "unsupervised", "--out"]
    line = complaint(*supervised, "--out", tmp_path / "a")
    assert f"{data}: the data have no correspondences; use --method unsupervised" in line
    out = output(*unsupervised, tmp_path / "b")
    assert "whose true correspondences are not known" in out
    assert "error ×100" not in out  # no table without rows
    assert "nan" not in out
    results = results_of(tmp_path / "b")
    assert results["mean_error"] is None
    assert results["options"]["features"] == "wks"
    history = table_of(tmp_path / "b" / "metrics.csv")
    assert float(history[-1]["train_loss"]) < float(history[0]["train_loss"])
    assert (tmp_path / "b" / "pairs" / "000.html").is_file()
    # Positions that are asked for are given, and with --no-rotate, meshes with another orientation are named.
    monkeypatch.setattr(run, "upright_axes", lambda items, options: () if options.rotates else (0.0, 0.0, 1.0))
    given = [*unsupervised[:-1], "--features", "xyz+wks", "--epochs", 1, "--out"]
    assert "xyz rotated at random about any axis" in output(*given, tmp_path / "c")
    with pytest.warns(UserWarning, match="b4, b5, b6: a principal axis"):  # the test meshes lie
        output(*given, tmp_path / "d", "--no-rotate")
    assert results_of(tmp_path / "d")["options"]["upright"] == [0, 0, 1]
    with pytest.warns(UserWarning, match="the first mesh, the second mesh: a principal axis"):
        match_meshes(body(4), body(5), DiffusionNet.load(tmp_path / "d" / "last.pt"))
    with pytest.raises(OptionError, match="map_k should be from 1 to k, which is 20, got 21"):
        TrainOptions(task="correspondence", k=20, map_k=21)


@pytest.mark.parametrize(
    ("given", "trained"),
    [
        ({}, 10_000),
        ({"start": "run/last.pt"}, 10_000),
        ({"method": "unsupervised"}, 1_500),
        ({"method": "unsupervised", "start": "run/last.pt"}, 180),
        ({"method": "unsupervised", "partial": True, "cut": 0.4, "variants": 2, "normalize": "none"}, 25_000),
    ],
)
def test_a_run_trains_on_a_number_of_pairs(given: dict[str, Any], trained: int) -> None:
    data = two_bodies(0.0)
    options = TASK.adapted(paired_meshes(data, 16), TrainOptions(task="correspondence", **given), set())
    count = len(data.train_pairs) * max(1, options.mesh_variants.count)
    assert options.epochs == round(trained / count)


def test_a_further_term_of_the_loss(room: Path, tmp_path: Path) -> None:
    data, options = (
        paired_meshes(load_pairs(room / "data"), 16),
        small(method="unsupervised", epochs=1, normalize="area"),
    )
    options, losses = replace(options, learning_rate=1e-30), []
    for number in (0, 3):
        out, how = tmp_path / str(number), {"device": CPU, "cache_dir": room / "cache", "jobs": 1}
        run.run_training(
            data, options, out, term=lambda maps, _, n=number: n * maps[:, 0].mean() ** 0, **how, console=QUIET
        )
        losses.append(float(table_of(out / "metrics.csv")[0]["train_loss"]))
    assert losses[1] - losses[0] == pytest.approx(3, abs=1e-3)


def test_networks_that_got_positions_in_principal_axes_are_refused(room: Path, tmp_path: Path) -> None:
    """Earlier versions stored `align` in every run. Without vectors among the features, it did nothing."""
    file = tmp_path / "last.pt"
    stored = torch.load(room / "run" / "last.pt")
    former = {"align": True}
    torch.save({**stored, "options": {**stored["options"], **former}}, file)
    assert load_checkpoint(file)["options"] == load_checkpoint(room / "run" / "last.pt")["options"]
    match_meshes(body(4), body(5), DiffusionNet.load(file))
    message = "align is true, so the network gets the vectors in xyz in the principal axes of each mesh. .* 1.0.0 of"
    torch.save({**stored, "options": {**stored["options"], **former, "features": "xyz"}}, file)
    refused(CheckpointError, f"last.pt: {message}", load_checkpoint, file)
    network = DiffusionNet(3, 16, width=16, blocks=1)
    network.metadata = {"task": "correspondence", "features": "xyz", "k": 20, "map_k": 8}
    network.metadata |= {"normalize": "area", "align": True}
    refused(MetadataError, message, match_meshes, body(4), body(5), network)


def test_a_run_with_stretched_copies_of_an_earlier_version(room: Path, tmp_path: Path) -> None:
    """Its network still matches. Only a run without copies, where `stretch` is 0, can be resumed."""
    stored, file = torch.load(room / "run" / "last.pt"), tmp_path / "last.pt"
    for stretch in (0.0, 0.3):
        torch.save({**stored, "options": {**stored["options"], "stretch": stretch}}, file)
        match_meshes(body(4), body(5), DiffusionNet.load(file))
        if stretch == 0:
            assert load_checkpoint(file)["options"] == load_checkpoint(room / "run" / "last.pt")["options"]
    refused(CheckpointError, r"last.pt: stretch is 0.3. .* 1\.0\.0 of .* was the last version", load_checkpoint, file)


def test_a_resumed_run_keeps_its_options(room: Path, tmp_path: Path) -> None:
    shutil.copytree(room / "run", tmp_path / "run")
    where = ["--data", room / "data", "--out", tmp_path / "run", "--cache", room / "cache", "--jobs", 1]
    assert "resuming" in output("train", "correspondence", *where, "--resume", "--device", "cpu")
    before, after = (load_checkpoint(folder / "run" / "last.pt") for folder in (room, tmp_path))
    assert after["options"] == before["options"]
    assert after["label_names"] == before["label_names"]


def test_match_writes_a_vertex_of_a_for_each_vertex_of_b(room: Path, tmp_path: Path) -> None:
    checkpoint = room / "run" / "last.pt"
    test = tmp_path / "set" / "test"
    test.mkdir(parents=True)
    body(4, 0.0).export(test / "a.ply")
    body(5, 0.0).export(test / "b.off")
    files = [test / "a.ply", test / "b.off", "--checkpoint", checkpoint, "--device", "cpu"]
    more = ["--html", tmp_path / "view.html", "--png", tmp_path / "view.png", "--functional-map", tmp_path / "c.npz"]
    output("match", *files, "--out", tmp_path / "map.txt", *more)
    truth = np.empty(162, np.int64)
    truth[order_of(5)] = order_of(4)
    found = np.loadtxt(tmp_path / "map.txt", dtype=np.int64)
    assert (found == truth).mean() > 0.95  # the two are one shape, so their features are equal
    for name in ("map.npy", "map.csv"):
        output("match", *files, "--out", tmp_path / name)
    np.testing.assert_array_equal(np.load(tmp_path / "map.npy"), found)
    assert (tmp_path / "map.csv").read_text() == "vertex\n" + (tmp_path / "map.txt").read_text()
    assert "--out should be a .txt or .csv or .npy file, got" in complaint("match", *files, "--out", tmp_path / "m.mat")
    page = (tmp_path / "view.html").read_text()
    assert "b.off" not in page
    assert '"texture"' in page
    drawn = Image.open(tmp_path / "view.png")
    assert drawn.width > 1.5 * drawn.height  # both meshes side by side
    c, *bases = (
        torch.from_numpy(np.load(tmp_path / "c.npz")[name])
        for name in ("functional_map", "evecs_a", "evecs_b", "evals_a", "evals_b", "mass_b")
    )
    u, _, vh = torch.linalg.svd(c)
    np.testing.assert_array_equal(ops.point_map(u @ vh, *bases[:3]), found)
    assert (len(bases[3]), len(bases[4])) == (8, 162)
    assert "<title>b to a</title>" in page  # as in b_a.txt
    # Saved as B_A.txt, it is a map of the data set.
    (tmp_path / "set" / "maps").mkdir()
    shutil.copy(tmp_path / "map.txt", tmp_path / "set" / "maps" / "b_a.txt")
    data = load_pairs(tmp_path / "set", base="0", needs_train=False)
    shapes = {shape.name: shape for shape in data.test}
    known = data.truth(shapes["b"], shapes["a"])
    assert known is not None
    np.testing.assert_array_equal(known.points, found)


@pytest.mark.parametrize("jobs", [None, 2])
def test_match_of_pairs_in_a_file(room: Path, tmp_path: Path, jobs: int | None) -> None:
    """Each pair as in a set of pairs. One that can't be matched doesn't stop the others, and is tried again."""
    scans, out = tmp_path / "scans", tmp_path / "out"
    for name, seed in {"a.ply": 4, "x/m.off": 5, "y/m.off": 6}.items():
        (scans / name).parent.mkdir(parents=True, exist_ok=True)
        body(seed, 0.0).export(scans / name)
    (scans / "bad.off").write_text("OFF")
    (scans / "pairs.txt").write_text("x/m.off a.ply\ny/m.off, a.ply\na.ply bad.off\na.ply x/m.off\na.ply x/m.off\n")
    checkpoint = ["--checkpoint", room / "run" / "last.pt", "--device", "cpu"]
    match = ["match", "--pairs", scans / "pairs.txt", *checkpoint, "--out", out]
    match += [] if jobs is None else ["--cache", tmp_path / "cache", "--jobs", jobs]
    assert "bad.off: the file can't be read" in complaint(*match)
    names = {"x/m.off/a.ply.txt", "y/m.off/a.ply.txt", "a_m.txt"}
    assert {str(path.relative_to(out)) for path in out.rglob("*.txt")} == names
    output("match", scans / "a.ply", scans / "x" / "m.off", *checkpoint, "--out", tmp_path / "map.txt")
    assert (out / "x" / "m.off" / "a.ply.txt").read_text() == (tmp_path / "map.txt").read_text()
    rows = table_of(out / "report.csv")
    assert [row["status"] for row in rows] == ["ok", "ok", "failed", "ok"]
    assert (rows[1]["first"], rows[1]["second"]) == (str(scans / "y" / "m.off"), str(scans / "a.ply"))
    body(7, 0.0).export(scans / "bad.off")
    (out / "a_m.txt").write_text("of an earlier call, which stays\n")
    output(*match, "--resume")
    assert (out / "a_m.txt").read_text() == "of an earlier call, which stays\n"
    assert len((out / "a_bad.txt").read_text().splitlines()) == 162
    assert complaint(*match, "--resume", "--zoomout").endswith("leave out --resume to replace them")


def test_match_refuses_what_is_no_list_of_pairs(room: Path, tmp_path: Path) -> None:
    checkpoint = ["--checkpoint", room / "run" / "last.pt", "--out", tmp_path / "out"]
    assert complaint("match", *checkpoint) == "give two meshes, A and B, or a file with --pairs"
    assert complaint("match", "a.off", "--pairs", "b", *checkpoint) == "--pairs is without A, B, --html and --png"
    assert complaint("match", "a.off", "b.off", "--format", "npy", *checkpoint) == "--format is for --pairs"
    (tmp_path / "pairs.txt").write_text("a.off b.off\nc.off\n")
    line = complaint("match", "--pairs", tmp_path / "pairs.txt", *checkpoint)
    assert line == f"{tmp_path / 'pairs.txt'}, line 2: expected the names of two meshes, got 'c.off'"


def test_match_of_different_sizes_with_fine_tuning(room: Path) -> None:
    network = DiffusionNet.load(room / "run" / "last.pt")
    before = {name: weight.clone() for name, weight in network.state_dict().items()}
    coarse = body(4, 0.0).subdivide()  # two meshes of one surface, finer than those of the training
    fine = coarse.subdivide()
    steps: list[int] = []
    plain = match_meshes(coarse, fine, network)
    tuned = match_meshes(coarse, fine, network, fine_tune=3, zoomout=True, after_step=lambda: steps.append(1))
    assert len(steps) == 3
    assert all(torch.equal(weight, before[name]) for name, weight in network.state_dict().items())
    for found in (plain, tuned):
        assert found.functional_map.shape == (8, 8)
        assert found.matches.shape == (len(fine.vertices),)
        away = np.linalg.norm(coarse.vertices[found.matches] - fine.vertices, axis=1)
        nearest, _ = cKDTree(coarse.vertices).query(fine.vertices)
        assert np.median(away) < 2 * np.median(nearest)  # about 1 for a random map; 8 eigenpairs blur neighbors


@pytest.mark.parametrize("method", ["supervised", "unsupervised"])
def test_fine_tuning_limits_gradients_as_the_training_did(room: Path, method: str) -> None:
    """Adam hardly moves weights whose gradients are much smaller than its epsilon, 1e-8."""
    network = DiffusionNet.load(room / "run" / "last.pt")
    network.metadata["method"] = method
    moved = {}
    for clip in (1.0, 1e-14):
        network.metadata["clip"] = clip
        plain, tuned = (match_meshes(body(4), body(5), network, fine_tune=steps) for steps in (0, 2))
        moved[clip] = float((tuned.functional_map - plain.functional_map).abs().max())
    assert moved[1.0] > 1e-3
    assert moved[1e-14] < 1e-5


def test_maps_have_at_most_as_many_eigenpairs_as_vertices(room: Path) -> None:
    network = DiffusionNet.load(room / "run" / "last.pt")
    network.metadata["map_k"] = 20
    small = trimesh.creation.icosahedron()
    found = match_meshes(body(4), small, network)
    assert found.functional_map.shape == (12, 12)
    matches = f"matches=({len(found.matches)},), functional_map=(12, 12))"
    assert repr(found) == f"Matched(a={found.a}, b={found.b}, {matches}"


def test_vertices_outside_of_a_mask_have_no_partner(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network, inside = DiffusionNet(4, 8, width=8, blocks=1), np.arange(162) % 4 > 0
    statistics = {"in": {"mean": [0.0], "std": [1.0]}}
    network.metadata = {"task": "correspondence", "features": "xyz+mask:in", "statistics": statistics, "map_k": 4}
    network.metadata |= {"k": 8, "normalize": True}
    for name in ("a", "b"):
        body(4).export(tmp_path / f"{name}.off")
        np.save(tmp_path / f"{name}.in.npy", inside)
    found = match_meshes(tmp_path / "a.off", tmp_path / "b.off", network)
    np.testing.assert_array_equal(found.matches >= 0, inside)


def test_partial_shapes_and_point_clouds_are_refused(room: Path, tmp_path: Path) -> None:
    network = DiffusionNet.load(room / "run" / "last.pt")
    whole = body(4)
    keep = whole.triangles_center[:, 0] < 0.3
    part = trimesh.Trimesh(whole.vertices, whole.faces[keep], process=False)
    part.remove_unreferenced_vertices()
    part.export(tmp_path / "part.ply")
    for pair in ((whole, tmp_path / "part.ply"), (tmp_path / "part.ply", whole)):
        refused(MeshError, r"part.ply: partial shapes are not supported; its boundary is", match_meshes, *pair, network)
    match_meshes(tmp_path / "part.ply", tmp_path / "part.ply", network)  # both are open
    with pytest.raises(MeshError, match="a point cloud has no faces; matching needs triangle meshes"):
        match_meshes(whole, whole.vertices, network)
    write_set(tmp_path / "set", supervised=False)
    assert len(load_pairs(tmp_path / "set").test_pairs) == 3
    shutil.copy(tmp_path / "part.ply", tmp_path / "set" / "test")
    refused(MeshError, r"part.ply: partial shapes are not supported; its boundary is", load_pairs, tmp_path / "set")


def test_point_clouds_are_trained_on_at_radius_1(tmp_path: Path) -> None:
    for seed in range(4):
        trimesh.PointCloud(body(seed).vertices).export(tmp_path / f"b{seed}.ply")
        np.savetxt(tmp_path / f"b{seed}.vts", order_of(seed), fmt="%d")
    arguments = ["train", "correspondence", "--data", tmp_path, *SMALL, "--epochs", 1, "--cache", tmp_path / "cache"]
    line = complaint(*arguments, "--out", tmp_path / "a")
    assert ".ply: a point cloud has no area to normalize; use --normalize radius" in line
    output(*arguments, "--out", tmp_path / "b", "--normalize", "radius")
    assert results_of(tmp_path / "b")["mean_error"] is not None


def test_length_of_boundaries() -> None:
    square = make_mesh([[0, 0, 0], [2, 0, 0], [2, 2, 0], [0, 2, 0]], [[0, 1, 2], [0, 2, 3]])
    assert boundary_length(square) == pytest.approx(4)
    soup = trimesh.creation.icosphere(1)
    soup.unmerge_vertices()
    assert boundary_length(load_mesh(soup)) == 0


def test_other_checkpoints_and_commands_are_refused(room: Path, tmp_path: Path) -> None:
    mesh, parts, checkpoint = tmp_path / "a.ply", tmp_path / "parts.safetensors", room / "run" / "last.pt"
    body(4).export(mesh)
    match = ["match", mesh, mesh, "--device", "cpu", "--out", tmp_path / "x.txt", "--checkpoint"]
    DiffusionNet(16, 3, width=8, blocks=1).save(parts, features="hks", k=8, normalize=True, task="segmentation")
    assert "parts.safetensors: the network is for segmentation; expected one of" in complaint(*match, parts)
    line = complaint(*match, checkpoint, "--out", mesh)
    assert f"{mesh}: this file is read and would be overwritten" in line
    line = complaint(*match, tmp_path / "none.pt", "--html", tmp_path / "x.htm")
    assert f"--html should be a .html file, got {tmp_path / 'x.htm'}" in line
    line = complaint("predict", mesh, "--checkpoint", checkpoint, "--out", tmp_path / "b.ply")
    assert f"{checkpoint}: the network is for correspondence" in line
    with pytest.raises(MetadataError, match="computes features for correspondence and no classes; call match_meshes"):
        predict_labels([mesh], DiffusionNet.load(checkpoint), "cpu")
    with pytest.raises(OptionError, match="method is for correspondence, and the task is segmentation"):
        TrainOptions(method="unsupervised")
    for name, value in {"mirror": True, "decimate": 0.5, "max_faces": 100, "validation": 0.5}.items():
        with pytest.raises(OptionError, match=f"{name} is not available for correspondence"):
            TrainOptions(task="correspondence", **{name: value})


def write_partial_set(folder: Path, turn: bool = False) -> Path:
    """Four whole bodies for training; for testing, two parts, whose missing points are -1, and a whole body."""
    write_set(folder)
    for seed, axis in ((4, 0), (5, 1)):
        mesh = load_mesh(folder / "test" / f"b{seed}.ply")
        part = cut_by_plane(mesh, np.eye(3)[axis], 0.4)
        verts = part.mesh.verts[:, [1, 2, 0]] if turn else part.mesh.verts
        trimesh.Trimesh(verts, part.mesh.faces, process=False).export(folder / "test" / f"b{seed}.ply")
        numbers = np.full(len(mesh.verts), -1)
        numbers[part.vertices] = np.arange(len(part.vertices))
        np.savetxt(folder / "test" / f"b{seed}.vts", numbers[order_of(seed)], fmt="%d")
    return folder


def test_partial_shapes_are_trained_on_scored_and_matched(tmp_path: Path) -> None:
    data, run, cache = write_partial_set(tmp_path / "data"), tmp_path / "run", ["--cache", tmp_path / "cache"]
    out = output(
        *("train", "correspondence", "--data", data, "--out", run, "--partial", "--variants", 3, *SMALL, *cache),
        *("--epochs", 2, "--lr", 0.01),
    )
    assert "16 to train on, 3 to test on" in out
    assert "pairs: 18 to train on, 3 to test on" in out
    results = results_of(run)
    assert results["options"]["units"] == pytest.approx(max(np.sqrt(body(seed).area) for seed in range(4)), rel=1e-3)
    assert results["options"]["batch_meshes"] == 4
    assert results["flipped_pairs"] is None
    rows = table_of(run / "per_mesh.csv")
    for name in ("overlap_iou", "overlap_balanced_accuracy"):
        assert 0 < results[name] < 1
        assert float(np.mean([float(row[name]) for row in rows])) == pytest.approx(results[name])
    assert f"IoU of the overlap {100 * results['overlap_iou']:.1f} %, balanced accuracy" in out
    assert table_of(run / "metrics.csv")[-1]["test_overlap_iou"]
    turned = write_partial_set(tmp_path / "turned", turn=True)
    evaluate = ["evaluate", "--checkpoint", run / "last.pt", *cache, "--jobs", 1, "--device", "cpu", "--data"]
    for folder, name in ((data, "a"), (turned, "b")):
        output(*evaluate, folder, "--out", tmp_path / name)
        for score in ("mean_error", "overlap_iou"):
            assert results_of(tmp_path / name)[score] == pytest.approx(results[score], rel=0 if name == "a" else 0.02)
    a, b = data / "test" / "b4.ply", data / "test" / "b6.ply"
    network = DiffusionNet.load(run / "last.pt")
    middle = torch.from_numpy(match_meshes(a, b, network).overlap[1]).median()
    network.last.bias.data[-1] -= torch.logit(middle)  # half of the vertices are in the overlap
    network.save(tmp_path / "half.safetensors")
    found = match_meshes(a, b, network)
    inside = found.overlap[1] > 0.5
    assert found.functional_map is None
    assert 0 < inside.sum() < len(inside) == 162
    np.testing.assert_array_equal(found.matches == -1, ~inside)
    half = ["--checkpoint", tmp_path / "half.safetensors", "--device", "cpu"]
    output("match", a, b, *half, "--out", tmp_path / "map.txt")
    np.testing.assert_array_equal(np.loadtxt(tmp_path / "map.txt"), found.matches)
    line = complaint("match", a, b, *half, "--out", tmp_path / "c.txt", "--functional-map", tmp_path / "c.npz")
    assert "a network for partial shapes computes no functional map" in line
    (tmp_path / "pairs.txt").write_text("b6 b4\n")
    pair = ["--data", data, "--pairs", tmp_path / "pairs.txt", *cache, "--jobs", 1]
    output("evaluate", *half, *pair, "--out", tmp_path / "c", "--save-maps", tmp_path / "maps")
    np.testing.assert_array_equal(np.loadtxt(tmp_path / "maps" / "b6_b4.txt"), found.matches)
    output("evaluate", "--maps", tmp_path / "maps", "--maps-base", 0, *pair, "--out", tmp_path / "d")
    truth = load_pairs(data, tmp_path / "pairs.txt", partial_shapes=True)
    vertices = truth.truth(*truth.test_shapes[0]).vertices
    assert results_of(tmp_path / "d")["unmatched"] == (found.matches[vertices] < 0).sum() > 0
    refused(OptionError, "zoomout and fine_tune are for whole shapes", match_meshes, a, b, network, fine_tune=1)


def test_partial_shapes_without_correspondences_learn_from_parts_of_one_mesh(tmp_path: Path) -> None:
    data = write_partial_set(tmp_path / "data")
    for file in data.rglob("*.vts"):
        file.unlink()
    command = ["train", "correspondence", "--data", data, "--partial", "--method", "unsupervised", *SMALL]
    out = output(*command, "--out", tmp_path / "run", "--variants", 3, "--epochs", 2, "--lr", 0.01)
    assert "pairs: 18 to train on, 3 to test on; their correspondences are not known" in out
    losses = [float(row["train_loss"]) for row in table_of(tmp_path / "run" / "metrics.csv")]
    assert 0 < losses[1] < losses[0]
    assert "partial shapes need parts of one mesh; use --cut 0.7" in complaint(
        *command, "--out", tmp_path / "b", "--cut", 0
    )
    pairs = with_partial_copies(load_pairs(data, partial_shapes=True), Variants(3, 0.5), 0, of_one=True)
    wholes = [[(shape.whole or shape).name for shape in (pairs.train[i], pairs.train[j])] for i, j in pairs.train_pairs]
    assert all(first == second for first, second in wholes)
    assert {first for first, _ in wholes} == {shape.name for shape in pairs.train[:4]}
    first, second = next((pairs.train[i], pairs.train[j]) for i, j in pairs.train_pairs if i >= 4 <= j and i != j)
    truth = pairs.truth(first, second)
    assert truth is not None
    np.testing.assert_array_equal(first.mesh.verts[truth.vertices], second.mesh.verts[truth.points])
    inside = np.isin(first.vertices, second.vertices)
    np.testing.assert_array_equal(pairs.overlap(first, second)[0], inside)
    assert 0 < inside.sum() == len(truth.vertices)


def test_the_loss_of_partial_shapes() -> None:
    """Two pairs, of which one has no overlap. Vertices without a known label or match don't count."""
    outputs = torch.tensor([[1.0, 0, 9], [0, 1, -9], [0, 1, -9], [1, 0, 9], [1, 0, -9], [1, 0, -9]])
    targets = torch.tensor([[1, 1, 0], [0, -1, 1], [-1, -1, 0], [1, 0, 1], [0, -1, 0], [0, -1, 0]])
    options = small(partial=True, normalize="none")
    assert float(TASK.loss(outputs, targets, options)) == pytest.approx(np.log1p(np.exp(-9)), rel=0.01)
    assert TASK.loss_weight(options)(targets) == 2
    targets[0, 1] = 0  # the other vertex, whose similarity is 0 and not 1
    assert float(TASK.loss(outputs, targets, options)) == pytest.approx(1 / 0.07 / 4, rel=0.01)
    targets[:, :2] = -1
    assert float(TASK.loss(outputs, targets, options)) == 0


def test_maps_of_partial_shapes_are_coherent() -> None:
    """The features of a fifth of the vertices are those of the other side."""
    ball = body(0, 0.0)
    operators = precompute(ball, k=30)
    sides = np.arange(162)
    sides[::5] = cKDTree(ball.vertices).query(ball.vertices[::5] * [-1, 1, 1])[1]
    scores = 10 * torch.eye(162)[sides] + 8 * torch.eye(162)
    places = operators.evecs[:, 1:] / operators.evals[0, 1:].sqrt()
    found = coherent_map(scores, operators.evecs, operators.mass, places)
    assert (scores.argmax(1) != torch.arange(162)).sum() > 25
    assert (found != torch.arange(162)).sum() < 3
    cut = operators.mass * (torch.arange(162) % 5 != 0)  # what is outside of the overlap doesn't count
    assert (coherent_map(scores, operators.evecs, cut, places) == torch.arange(162)).all()


def test_a_run_of_partial_shapes_starts_from_all_layers_of_another() -> None:
    options, names = small(partial=True, normalize="none"), ["0", "1", "overlap"]
    first, second = (build_model(options, names, "vertices") for _ in range(2))
    for parameter in first.parameters():
        torch.nn.init.normal_(parameter)
    first.metadata = {"task": "correspondence", "label_names": names}
    copy_weights(first, second, options, names, None, None)
    for name, weight in first.state_dict().items():
        torch.testing.assert_close(second.state_dict()[name], weight)


def test_partial_shapes_that_start_from_a_network_for_whole_ones_keep_their_size(tmp_path: Path) -> None:
    data, whole = write_partial_set(tmp_path / "data"), tmp_path / "whole.safetensors"
    network = DiffusionNet(3, 4, width=8, blocks=2)
    network.save(whole, task="correspondence", features="xyz", k=8, map_k=8, normalize="area", label_names=list("abcd"))
    output(
        *("train", "correspondence", "--data", data, "--out", tmp_path / "run", "--partial", "--variants", 1),
        *("--epochs", 1, "--from", whole, "--device", "cpu", "--jobs", 1),
    )
    options = results_of(tmp_path / "run")["options"]
    assert (options["normalize"], options["features"], options["width"]) == ("none", "xyz", 8)
    assert options["units"] == pytest.approx(max(np.sqrt(body(seed).area) for seed in range(4)), rel=1e-3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"partial": True}, "a part's area says nothing of its size; use --normalize none, got radius"),
        ({"partial": True, "normalize": "none", "zoomout": True}, "zoomout refines functional maps, and partial"),
        ({"cut": 0.5}, "cut needs --partial"),
        ({"features": "metric-curvature", "scale_range": 2.0}, "scale_range can't change metric-curvature"),
        ({"features": "diffused-offsets", "mirror": True}, "mirror can't change diffused-offsets"),
    ],
)
def test_options_of_partial_shapes_that_do_not_go_together(given: dict[str, Any], message: str) -> None:
    refused(OptionError, message, TrainOptions, task="correspondence", **given)


def test_evaluate_scores_the_test_pairs(room: Path, tmp_path: Path) -> None:
    known = results_of(room / "run")
    evaluate = ["evaluate", "--checkpoint", room / "run" / "last.pt", "--cache", room / "cache", "--jobs", 1]
    evaluate += ["--device", "cpu", "--data", room / "data", "--out"]
    out = output(*evaluate, tmp_path / "a")
    results = results_of(tmp_path / "a")
    assert results["mean_error"] == pytest.approx(known["mean_error"], rel=1e-6)
    assert results["pairs"] == known["pairs"]
    assert results["scored_training_meshes"] == 0
    assert "Correspondences of the test pairs" in (tmp_path / "a" / "predictions.html").read_text()
    assert "of 3 test pairs" in out
    out = output(*evaluate[:-3], "--data", room / "data" / "train", "--out", tmp_path / "trained")
    assert results_of(tmp_path / "trained")["scored_training_meshes"] == 4
    assert "Correspondences of the scored pairs" in (tmp_path / "trained" / "predictions.html").read_text()
    assert "scored meshes in the training part: 4 of 4" in out
    assert "of 6 pairs" in out
    (tmp_path / "two.txt").write_text("b4 b6\nb6 b5\nb4 b6\n")  # a pair counts once
    output(*evaluate, tmp_path / "b", "--pairs", tmp_path / "two.txt", "--zoomout")
    pairs = [(row["first"], row["second"]) for row in results_of(tmp_path / "b")["pairs"]]
    assert pairs == [("b4", "b6"), ("b6", "b5")]
    DiffusionNet(16, 3, width=8, blocks=1).save(tmp_path / "p.safetensors", features="hks", k=8, normalize=True)
    line = complaint(*evaluate, tmp_path / "c", "--checkpoint", tmp_path / "p.safetensors", "--zoomout")
    assert line == "--zoomout is for correspondence, and the network is one of segmentation"
    line = complaint(*evaluate, tmp_path / "d", "--checkpoint", tmp_path / "p.safetensors", "--data", tmp_path)
    assert line.startswith("segmentation takes one --data, got ")


def test_a_run_knows_the_maps_of_its_pairs(room: Path) -> None:
    data = paired_meshes(load_pairs(room / "data"), 8)
    maps = {("b0", "b1"): np.arange(5), ("b1", "b0"): np.arange(6)}
    sets = [
        data,
        *(replace(data, pairs=replace(data.pairs, maps=each)) for each in (maps, {("b0", "b1"): np.arange(5)})),
    ]
    assert len({TASK.pairs(each) for each in sets}) == 3


def test_maps_are_saved_and_scored_again(room: Path, tmp_path: Path) -> None:
    """Those of `evaluate` and of `match`, with names of a set, in each format, from 0 and from 1."""
    network = ["--checkpoint", room / "run" / "last.pt", "--device", "cpu"]
    common = ["--data", room / "data", "--cache", room / "cache", "--jobs", 1]
    output("evaluate", *network, *common, "--out", tmp_path / "first", "--save-maps", tmp_path / "maps")
    expected = results_of(tmp_path / "first")
    assert {path.name for path in (tmp_path / "maps").iterdir()} == {"b4_b5.txt", "b4_b6.txt", "b5_b6.txt"}
    (tmp_path / "list.txt").write_text("b4 b5\nb4.ply, b6\ntest/b5.ply b6\n")
    (tmp_path / "ones").mkdir()
    for form in ("csv", "npy"):
        matched = ["--pairs", tmp_path / "list.txt", "--data", room / "data", "--format", form]
        output("match", *network, *matched, "--out", tmp_path / form, "--functional-map", tmp_path / "c")
    assert len(list((tmp_path / "c").glob("*.npz"))) == 3
    for file in (tmp_path / "maps").iterdir():
        np.savetxt(tmp_path / "ones" / file.name.replace("_", "-"), np.loadtxt(file, dtype=int) + 1, fmt="%d")
    for name, base in {"maps": 0, "csv": 0, "npy": 0, "ones": 1}.items():
        scored = ["evaluate", "--maps", tmp_path / name, "--maps-base", base, *common]
        output(*scored, "--out", tmp_path / f"{name}-scores")
        results = results_of(tmp_path / f"{name}-scores")
        assert all(results[key] == expected[key] for key in ("mean_error", "auc", "unmatched", "pairs"))
    file = tmp_path / "ones" / "b4-b5.txt"
    file.write_text("-1\n" + file.read_text().partition("\n")[2])
    assert "without 1 vertex that the maps leave out" in output(*scored, "--out", tmp_path / "less")
    file.unlink()
    again = [*scored, "--out", tmp_path / "none"]
    assert complaint(*again) == f"{tmp_path / 'ones'}: no map (.txt, .csv, .npy, .map) for b4_b5"
    assert complaint(*again, "--zoomout") == "--zoomout is for a network; leave it out with --maps"
    assert complaint(*again, *network) == "give a network with --checkpoint, or maps with --maps"
    saved = ["evaluate", *network, *common, "--out", tmp_path / "none", "--save-maps", tmp_path / "maps"]
    assert "b4_b5.txt: this file would be overwritten; choose another folder" in complaint(*saved)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", ["supervised", "unsupervised"])
def test_captured_steps_on_pairs(method: str, device: str) -> None:
    """Graphs hold the functional maps, too. Meshes of other sizes share them."""
    bodies = [body(0), body(1), body(2).subdivide(), body(3)]
    shapes = [PairShape(f"b{i}", make_mesh(b.vertices, b.faces), order_of(i)) for i, b in enumerate(bodies)]
    data = MeshPairs(shapes, shapes, [(2, 0), (0, 1), (1, 2), (0, 3)], [])
    options = small(method=method, features="hks", dropout=0, learning_rate=1e-3, precision="fp32")
    samples = [sample.to(device) for sample in samples_of(data, "train")]
    pairs = pair_samples(data, "train", samples, 8, with_targets=method == "supervised")
    batches = [collate_pairs([pairs[i] for i in batch]).to(device) for batch in ([0, 1], [1], [2], [3])] * 5
    found = []
    for graphs in (False, True):
        step = TrainingStep(TASK, network_of(options).to(device), options, torch.device(device))
        if graphs:
            step.capture(pairs.sizes(), limits=(2, None), **({"recorder": EmulatedGraph} if device == "cpu" else {}))
        before = EmulatedGraph.replays
        losses = torch.stack([step(batch) for batch in batches])
        found.append((losses, step.tally))
    assert device != "cpu" or EmulatedGraph.replays - before == len(batches) - 3
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)
    assert losses[-4:].sum() < losses[:4].sum()


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["supervised", "unsupervised"])
def test_runs_with_graphs_equal_plain_ones_on_a_gpu(method: str, tmp_path: Path) -> None:
    options = small(method=method, map_k=12, width=32, blocks=2, dropout=0, epochs=4, eval_every=1, normalize="area")
    options = replace(options, precision="fp32")
    data, gpu = two_bodies(0.1), torch.device("cuda")
    samples = [sample.to(gpu) for sample in samples_of(data, "train", "xyz")]
    pairs = pair_samples(data, "train", samples, 12)
    found = []
    for capture in (False, True):
        out = tmp_path / str(capture)
        out.mkdir()
        run = train(RunData(TASK, paired_meshes(data, 16), pairs, pairs), options, out, device=gpu, capture=capture)
        found.append([(row["train_loss"], row["test_r2"]) for row in run["history"]])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-2, atol=1e-2)
