"""Input features in any combination, and own arrays."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from refusals import refused
from rich.console import Console
from scipy.spatial import cKDTree
from scipy.spatial.transform import Rotation
from set_files import write, write_ply
from shapes import ellipsoid
from torch import Tensor

from diffnet import DiffusionNet, viz
from diffnet.data import (
    BODIES,
    FEATURE_CHANNELS,
    DataError,
    LabeledMesh,
    Preprocessing,
    array_statistics,
    augmented,
    canonical_features,
    check_statistics,
    feature_channels,
    feature_parts,
    input_features,
    load_classes,
    load_dataset,
    make_sample,
    own_arrays,
    prepare,
    rotate_vectors,
    shapes,
    vector_channels,
)
from diffnet.data.feature_names import KINDS
from diffnet.geometry import (
    Mesh,
    Operators,
    collate,
    curvature,
    cut_by_plane,
    decimate,
    diffused_curvature,
    load_mesh,
    make_mesh,
    precompute,
    random_rotations,
    scaled,
)
from diffnet.geometry.errors import OptionError
from diffnet.train.checkpoint import load_checkpoint
from diffnet.train.inference.predict import predict_labels
from diffnet.train.inference.scoring import run_evaluation
from diffnet.train.options import TrainOptions
from diffnet.train.orientation import check_own_arrays
from diffnet.train.run import run_training

pytestmark = pytest.mark.usefixtures("one_thread")

ALL = "+".join(FEATURE_CHANNELS)
CPU = torch.device("cpu")
EYE = np.eye(3)
SMALL: dict[str, Any] = {"k": 4, "width": 8, "blocks": 1, "epochs": 12, "learning_rate": 0.02, "dropout": 0.0}
SMALL |= {"precision": "fp32"}


def ball(seed: int = 0, subdivisions: int = 2) -> Mesh:
    return replace(ellipsoid(seed, subdivisions), name=f"ball {seed}")


def obj(path: Path, mesh: Mesh, colors: np.ndarray | None = None) -> Mesh:
    rows = mesh.verts if colors is None else np.concatenate([mesh.verts, colors], 1)
    write(path.parent, {path.name: (rows, mesh.faces)})
    return load_mesh(path)


def test_metric_curvature_of_a_part_is_that_of_the_whole() -> None:
    sphere = trimesh.creation.icosphere(4, radius=0.5)
    whole = make_mesh(sphere.vertices, sphere.faces)
    part = cut_by_plane(whole, [1, 0, 0], 0.5)
    values = [input_features(mesh, precompute(mesh, k=128), "metric-curvature") for mesh in (whole, part.mesh)]
    assert values[0].shape[1] == 10
    torch.testing.assert_close(values[0].mean(0)[:2], torch.full((2,), np.arcsinh(2.0) / 2).float(), atol=0.01, rtol=0)
    inner = part.mesh.verts[:, 0] < -0.4
    away = (values[1] - values[0][part.vertices])[inner].abs().mean(0)
    assert away[[0, 1]].max() < 1e-3
    assert away[[4, 6]].max() < 0.03  # diffused; 128 eigenpairs blur the shortest time, and the border is near for 0.03


def test_offsets_of_diffused_positions_tell_left_from_right() -> None:
    """They stay if a mesh turns, and 128 eigenpairs give a part those of the whole. A mirror image exchanges signs."""
    ball = trimesh.creation.icosphere(3, radius=0.3)
    whole = make_mesh(ball.vertices * [1, 0.8, 0.6] + 0.1 * ball.vertices[:, [1, 2, 0]] ** 2, ball.faces)
    turned = replace(whole, verts=Rotation.random(random_state=0).apply(whole.verts))
    mirrored = make_mesh(whole.verts * [-1, 1, 1], whole.faces[:, ::-1])
    part = cut_by_plane(whole, [1, 0, 0], 0.3)
    values, same, other, cut = (
        input_features(mesh, precompute(mesh, k=128), "diffused-offsets")
        for mesh in (whole, turned, mirrored, part.mesh)
    )
    torch.testing.assert_close(same, values, atol=2e-3, rtol=0)
    torch.testing.assert_close(other[:, :14], values[:, :14], atol=1e-4, rtol=0)
    torch.testing.assert_close(other[:, 14:], -values[:, 14:], atol=2e-3, rtol=0)
    assert values[:, 14:].abs().mean() > 0.01
    away = (cut - values[part.vertices])[part.mesh.verts[:, 0] < -0.2].abs().mean(0)
    assert away[[0, 1, 4, 10, 11, 14]].max() < 5e-3  # those of the two short times


def test_parts_have_one_order() -> None:
    assert canonical_features("file:b+wks + normals+file:a+xyz") == "xyz+normals+wks+file:a+file:b"
    assert Preprocessing(features="hks+xyz").features == "xyz+hks" == TrainOptions(features="hks+xyz").features
    assert [part.channels for part in feature_parts("file:a+curvature")] == [2, None]
    assert vector_channels("curvature+normals") == [slice(0, 3)]
    assert vector_channels("hks+file:a") == []
    assert feature_channels(ALL) == sum(FEATURE_CHANNELS.values())
    assert feature_channels("xyz+file:a", {"a": {"mean": [0.0, 1.0], "std": [1.0, 1.0]}}) == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", f"{', '.join(FEATURE_CHANNELS)}, vector:NAME, scalar:NAME, file:NAME and mask:NAME, joined by +, got ''"),
        ("xyz+shot", "got 'shot' in 'xyz+shot'"),
        ("xyz+", "got '' in 'xyz+'"),
        ("file:", "got 'file:'"),
        ("file:../a", "got 'file:../a'"),
        ("file:a/b", "got 'file:a/b'"),
        ("xyz+hks+xyz", "each part once, got 'xyz' twice"),
        (["xyz"], "features should be text such as 'xyz+normals', got list"),
    ],
)
def test_bad_text(text: Any, message: str) -> None:
    for check in (canonical_features, lambda features: Preprocessing(features=features)):
        with pytest.raises(OptionError) as caught:
            check(text)
        assert message in str(caught.value)


@pytest.fixture(scope="module")
def prepared() -> tuple[Mesh, Operators]:
    return prepare(load_dataset(BODIES).train[0].mesh, Preprocessing(k=32))


@pytest.mark.parametrize("kind", list(FEATURE_CHANNELS))
def test_parts_of_a_combination(prepared: tuple[Mesh, Operators], kind: str) -> None:
    """They are those of the single kind, shifted and scaled by constants to values of about size 1."""
    alone = input_features(*prepared, kind).double()
    other = "xyz" if kind != "xyz" else "normals"
    first = sum(FEATURE_CHANNELS[k] for k in FEATURE_CHANNELS if k == other) * (kind != "xyz")
    both = input_features(*prepared, f"{kind}+{other}").double()[:, first : first + FEATURE_CHANNELS[kind]]
    torch.testing.assert_close(both, (alone - KINDS[kind].shift) * KINDS[kind].factor, atol=1e-4, rtol=1e-4)
    assert KINDS[kind].factor > 0
    assert alone.std() == 0 or 0.3 < both.square().mean().sqrt() < 2.5  # a constant has any size
    assert kind != "normals" or torch.equal(alone.float(), prepared[1].normals)


@pytest.mark.parametrize("cloud", [False, True])
def test_curvature_of_a_torus(cloud: bool) -> None:
    rng, big, small = np.random.default_rng(0), 1.0, 0.4
    torus = trimesh.creation.torus(big, small, major_sections=60, minor_sections=24)
    x, y, z = torus.vertices.T
    u = np.arctan2(y, x) + rng.uniform(-0.02, 0.02, len(x))
    v = np.arctan2(z, np.hypot(x, y) - big) + rng.uniform(-0.05, 0.05, len(x))
    around = big + small * np.cos(v)
    verts, faces = np.stack([around * np.cos(u), around * np.sin(u), small * np.sin(v)], 1), torus.faces
    gaussian = np.cos(v) / (small * (big + small * np.cos(v)))
    mean = (1 / small + np.cos(v) / (big + small * np.cos(v))) / 2
    found = curvature(precompute(verts if cloud else (verts, faces), k=0)).numpy()
    for column, expected in zip(found.T, (mean, gaussian), strict=True):
        assert np.corrcoef(column, expected)[0, 1] > (0.75 if cloud else 0.9)
        assert abs(np.median(column - expected)) < 0.1 * np.abs(expected).max()


@pytest.mark.parametrize("kind", ["curvature", "diffused-curvature"])
def test_curvature_ignores_size_position_and_orientation(kind: str) -> None:
    mesh, options = ball(1), Preprocessing(k=16)
    first = input_features(*prepare(mesh, options), kind)
    assert (first[:, ::2] > 0).all()
    moved = replace(mesh, verts=50 + 9 * mesh.verts)
    torch.testing.assert_close(input_features(*prepare(moved, options), kind), first, atol=1e-3, rtol=0)
    # Also with operators that are not normalized.
    own = input_features(moved, precompute(moved, k=16), kind)
    torch.testing.assert_close(own, first, atol=1e-3, rtol=0)
    inside_out = replace(mesh, faces=mesh.faces[:, ::-1].copy())
    torch.testing.assert_close(input_features(*prepare(inside_out, options), kind), first, atol=1e-3, rtol=0)


@pytest.mark.filterwarnings("ignore:mesh. every eigenvalue is 0")
@pytest.mark.parametrize("kind", ["curvature", "diffused-curvature"])
def test_curvature_of_bad_meshes_is_finite(kind: str) -> None:
    rng = np.random.default_rng(0)
    soup = make_mesh(rng.normal(size=(60, 3)), np.arange(60).reshape(20, 3))
    loose = make_mesh(np.concatenate([ball().verts, [[9, 9, 9]]]), ball().faces)
    for mesh in (soup, loose):
        features = input_features(*prepare(mesh, Preprocessing(k=1)), kind)
        assert features.isfinite().all()
        assert features.abs().max() < 20
    assert (features[-1] == 0).all()


def test_diffused_curvature_is_that_of_the_packed_meshes() -> None:
    """It stays with the mesh in a batch, and has the units of a length."""
    meshes = [ball(1), ball(2, subdivisions=1)]
    alone = [precompute(mesh, k=12) for mesh in meshes]
    positions = [torch.from_numpy(mesh.verts) for mesh in meshes]
    expected = [diffused_curvature(x, operators) for x, operators in zip(positions, alone, strict=True)]
    assert expected[0].shape == (len(meshes[0].verts), 4, 2)
    found = diffused_curvature(torch.cat(positions), collate(alone))
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-4, rtol=1e-4)
    twice = diffused_curvature(2 * torch.cat(positions), scaled(collate(alone), torch.tensor([2.0, 2.0])))
    torch.testing.assert_close(twice, found / torch.tensor([2.0, 4.0]), atol=1e-4, rtol=1e-4)


def test_diffused_curvature_survives_decimation() -> None:
    """Of the mean curvature, which `curvature` changes more."""
    fine = shapes(classes=2, train=1, test=1).train[0].mesh
    coarse = decimate(fine, len(fine.faces) // 2)
    near = cKDTree(fine.verts).query(coarse.verts)[1]
    options = Preprocessing(k=64)
    kept = {}
    for kind in ("curvature", "diffused-curvature"):
        one, other = (input_features(*prepare(mesh, options), kind).numpy() for mesh in (fine, coarse))
        errors = ((other - one[near]) ** 2).sum(0) / ((one[near] - one[near].mean(0)) ** 2).sum(0)
        kept[kind] = 1 - errors[::2]
    assert kept["diffused-curvature"].min() > 0.9
    assert kept["curvature"] < 0.8


@pytest.mark.parametrize(
    ("positions", "times", "message"),
    [
        (torch.zeros(41, 3), None, r"positions should have shape \(42, 3\)"),
        (torch.zeros(42, 3), torch.tensor([-1.0]), "times"),
        (torch.zeros(42, 3), torch.tensor(1.0), r"times should have shape \(T,\)"),
    ],
    ids=["rows", "negative", "rank"],
)
def test_bad_arguments_of_diffused_curvature(positions: Tensor, times: Any, message: str) -> None:
    small = precompute(ball(subdivisions=1), k=4)
    refused(ValueError, message, diffused_curvature, positions, small, times=times)


def test_rotation_is_the_default_if_a_part_is_a_vector() -> None:
    assert TrainOptions(features="hks+normals").rotates
    assert not TrainOptions(features="hks+normals", rotate=False).rotates
    assert not TrainOptions(features="hks+curvature").rotates
    with pytest.raises(OptionError, match=r"rotate needs features with .*, got 'curvature\+hks'"):
        TrainOptions(features="hks+curvature", rotate=True)


def test_own_arrays_are_found_beside_the_mesh(tmp_path: Path) -> None:
    mesh = obj(tmp_path / "off/a.b.obj", ball())
    one, two, three = (np.random.default_rng(i).normal(size=(162, *c)) for i, c in enumerate(((), (2,), (1,))))
    np.save(tmp_path / "off/a.b.one.npy", one)
    for name, array in (("off/two", two), ("three", three.astype(np.float32))):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "a.b.npy", array)
    found = own_arrays(mesh, "file:one+file:two+file:three+xyz")
    assert list(found) == ["one", "three", "two"]
    np.testing.assert_array_equal(found["one"], one[:, None])
    np.testing.assert_array_equal(found["two"], two)
    np.testing.assert_array_equal(found["three"], three.astype(np.float32))
    features = input_features(*prepare(mesh, Preprocessing(k=1)), "file:two+xyz")
    np.testing.assert_allclose(features[:, 3:], two, atol=1e-6)
    # The cache of parsed files knows the path, too.
    for _ in range(2):
        assert list(own_arrays(load_mesh(tmp_path / "off/a.b.obj", tmp_path / "cache"), "file:one")) == ["one"]


def test_colors_and_properties_are_features(tmp_path: Path) -> None:
    mesh = ball()
    colors = np.random.default_rng(0).uniform(size=(162, 3))
    read = obj(tmp_path / "a.obj", mesh, colors)
    np.testing.assert_allclose(own_arrays(read, "file:colors")["colors"], colors)
    levels = np.rint(255 * colors).astype(np.uint8)
    quality = np.arange(162, dtype=np.float32)
    channels = dict(zip(("red", "green", "blue"), levels.T, strict=True))
    write_ply(tmp_path / "b.ply", [("quality", quality), *channels.items()], mesh=(mesh.verts, mesh.faces))
    read = load_mesh(tmp_path / "b.ply")
    found = own_arrays(read, "file:colors+file:quality")
    np.testing.assert_allclose(found["colors"], levels / 255)
    np.testing.assert_array_equal(found["quality"], quality[:, None])
    np.save(tmp_path / "b.quality.npy", -quality)  # an array beside the file comes first
    np.testing.assert_array_equal(own_arrays(read, "file:quality")["quality"], -quality[:, None])


def test_what_is_missing_or_wrong_is_named(tmp_path: Path) -> None:
    mesh = obj(tmp_path / "a.obj", ball())
    place = tmp_path / "a.quality.npy"

    def message(features: str = "file:quality", mesh: Mesh = mesh, **given: Any) -> str:
        with pytest.raises(DataError) as caught:
            own_arrays(mesh, features, **given)
        text = str(caught.value)
        assert "\n" not in text
        assert "file:" in text
        return text

    text = message()
    expected = "no array for file:quality. Expected an array of shape (162,) or (162, C) in"
    assert text.startswith(f"{tmp_path / 'a.obj'}: {expected} {place} or ")
    assert str(tmp_path / "quality/a.npy") in text
    assert "or 'quality' in a PLY or VTK file" in text
    assert "or the colors of the vertices" in message("file:colors")
    assert "shape (162, 2) in" in message(statistics={"quality": {"mean": [0.0, 0.0], "std": [1.0, 1.0]}})
    assert "no array for file:quality: the mesh is not from a file" in message(mesh=ball())
    for array, expected in (
        (np.zeros(161), "file:quality should have shape (162,) or (162, C), one row for each vertex, but"),
        (np.zeros((162, 2, 2)), "has shape (162, 2, 2)"),
        (np.zeros((162, 0)), "has shape (162, 0)"),
        (np.full(162, np.nan), "finite numbers below 1e+30, but row 0 of"),
        (np.full(162, "a"), "should hold numbers"),
    ):
        np.save(place, array)
        text = message()
        assert expected in text
        assert str(tmp_path / "a.obj") in text
    for content in ("words", "PK\x03\x04 cut off"):
        place.write_text(content)
        assert f"{place}: the file is not a NumPy array of numbers for file:quality" in message()
    np.save(place, np.zeros((162, 2)))
    trained = {"quality": {"mean": [0.0], "std": [1.0]}}
    assert "file:quality has 2 channels in" in (text := message(statistics=trained))
    assert text.endswith("the network was trained with 1")
    (tmp_path / "quality").mkdir()
    np.save(tmp_path / "quality/a.npy", np.zeros(162))
    assert "more than one array for file:quality" in message()


def test_own_arrays_are_standardized_over_the_training_set(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = [1e6 + rng.normal(3, 7, (len(ball(i, i + 1).verts), 2)) * [1, 100] for i in range(2)]
    own = [{"a": array, "flat": np.full(len(array), 4)} for array in arrays]
    items = [LabeledMesh(f"{i}", ball(i, i + 1), np.zeros(len(a["a"]), np.int64), a) for i, a in enumerate(own)]
    statistics = array_statistics(items, "file:a+file:flat+hks")
    whole = np.concatenate(arrays)
    np.testing.assert_allclose(statistics["a"]["mean"], whole.mean(0))
    np.testing.assert_allclose(statistics["a"]["std"], whole.std(0), rtol=1e-6)
    assert statistics["flat"] == {"mean": [4.0], "std": [1.0]}
    assert check_statistics("file:a+file:flat", statistics) is statistics
    assert array_statistics(items, "hks") == {}
    options = Preprocessing(8, features="file:a+file:flat")
    features = torch.cat([make_sample(item, options, statistics=statistics).features for item in items])
    torch.testing.assert_close(features.mean(0), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(features.std(0, correction=0), torch.tensor([1.0, 1.0, 0.0]), atol=1e-4, rtol=0)
    wider = replace(items[1], arrays={"a": np.zeros((len(arrays[1]), 3))})
    with pytest.raises(DataError, match="ball 1: the own array a has 3 channels, but that of ball 0 has 2"):
        array_statistics([items[0], wider], "file:a")


@pytest.mark.parametrize(
    "statistics",
    [None, {}, {"b": {"mean": [0.0], "std": [1.0]}}, {"a": {"mean": [0.0], "std": []}}, {"a": {"mean": [0.0]}},
     {"a": {"mean": [0.0], "std": [0.0]}}, {"a": {"mean": ["0"], "std": [1.0]}},
     {"a": {"mean": [0.0], "std": [np.nan]}}, {"a": [[0.0], [1.0]]}],
)  # fmt: skip
def test_damaged_statistics(statistics: Any) -> None:
    refused(OptionError, "statistics", check_statistics, "xyz+file:a", statistics)


@pytest.mark.usefixtures("small_pictures")
def test_features_of_a_data_set_on_disk(tmp_path: Path) -> None:
    """Own arrays beside the meshes are no labels, and a network trains on them and predicts with them."""
    for i in range(3):
        mesh = obj(tmp_path / f"data/{i}.obj", ball(i, 1))
        labels = (mesh.verts[:, 2] > 0).astype(int)
        (tmp_path / f"data/{i}.txt").write_text("\n".join(map(str, labels)))
        np.save(tmp_path / f"data/{i}.half.npy", 1000 + 5.0 * labels)
    data = load_dataset(tmp_path / "data")
    options = TrainOptions(features="file:half+normals", **SMALL)
    where: Any = {"device": CPU, "cache_dir": tmp_path / "cache", "console": Console(quiet=True)}
    results = run_training(data, options, tmp_path / "run", jobs=1, **where)
    assert results["test_accuracy"] > 0.95  # one channel is the answer
    checkpoint = load_checkpoint(tmp_path / "run/last.pt")
    assert checkpoint["options"]["features"] == "normals+file:half"
    assert checkpoint["statistics"]["half"]["mean"][0] == pytest.approx(1002.5, abs=0.5)
    network = DiffusionNet.load(tmp_path / "run/last.pt")
    ((_, predicted),) = predict_labels([tmp_path / "data/0.obj"], network, CPU)
    (labels,) = (item.labels for item in data.train + data.test if item.name == "0")
    assert (predicted == labels).mean() > 0.95
    report = run_evaluation(data, network, tmp_path / "report", **where)
    assert report["test_accuracy"] == results["test_accuracy"]
    for file in (tmp_path / "data").glob("*.half.npy"):
        file.unlink()
    refused(DataError, r"0\.obj: no array for file:half", predict_labels, [tmp_path / "data/0.obj"], network, CPU)
    refused(DataError, r"\.obj: no array for file:half", run_evaluation, data, network, tmp_path / "new", **where)
    assert isinstance(data.train[0].mesh.path, str)
    assert Path(data.train[0].mesh.path).is_file()


@pytest.mark.usefixtures("small_pictures")
def test_classes_of_meshes_with_own_arrays(tmp_path: Path) -> None:
    """Only an own array tells the classes apart, and its values are large."""
    for i in range(6):
        file = tmp_path / f"data/{'ab'[i % 2]}/{'train' if i < 4 else 'test'}/{i}.obj"
        mesh = obj(file, ball(i, 1))
        np.save(file.with_name(f"{i}.half.npy"), np.full(len(mesh.verts), 1000 + 5.0 * (i % 2)))
    data = load_classes(tmp_path / "data")
    options = TrainOptions(task="classification", features="file:half+xyz", **SMALL)
    quiet = Console(quiet=True)
    results = run_training(data, options, tmp_path / "run", device=CPU, cache_dir=tmp_path, jobs=1, console=quiet)
    assert results["test_accuracy"] == 1
    checkpoint = load_checkpoint(tmp_path / "run/last.pt")
    assert checkpoint["statistics"] == {"half": {"mean": [1002.5], "std": [2.5]}}
    files = [tmp_path / "data/a/test/4.obj", tmp_path / "data/b/test/5.obj"]
    predictions = predict_labels(files, DiffusionNet.load(tmp_path / "run/last.pt"), "cpu")
    assert [labels.tolist() for _, labels in predictions] == [[0], [1]]


def windy(seed: int, turn: np.ndarray = EYE, **more: np.ndarray) -> LabeledMesh:
    """A turned shape without symmetries with a wind, which turns with it, and other own arrays."""
    mesh = ellipsoid(seed, 2)
    verts = mesh.verts + 0.2 * np.exp(mesh.verts)
    own = make_mesh(verts @ turn, mesh.faces if np.linalg.det(turn) > 0 else mesh.faces[:, ::-1])
    wind = np.cross(mesh.verts, [0.3, 0.5, 1.0]) + np.array([5.0, 0, 0])
    return LabeledMesh("", own, np.zeros(len(mesh.verts), np.int64), arrays={"wind": wind @ turn, **more})


def test_vectors_turn_with_the_mesh_in_features() -> None:
    turn = random_rotations(1, torch.Generator().manual_seed(0))[0].double().numpy()
    options = Preprocessing(k=8, features="vector:wind+log-hks+xyz+normals+curvature+scalar:side")
    rest = {"side": np.arange(162.0)}
    statistics = array_statistics([windy(0, **rest), windy(1, **rest)], options.features)
    assert len(set(statistics["wind"]["std"])) == 1
    before, after = (make_sample(windy(0, own, **rest), options, statistics=statistics) for own in (EYE, turn))
    vectors = vector_channels(options.features)
    assert vectors == [slice(0, 3), slice(3, 6), slice(6, 9)]
    turns = torch.from_numpy(turn).float()[None]
    expected = rotate_vectors(before.features, vectors, turns, before.operators.ptr)
    torch.testing.assert_close(after.features, expected, rtol=1e-3, atol=1e-3)


def test_vectors_turn_and_mirror_with_the_mesh_in_training() -> None:
    """What training changes at random gives the features of the changed mesh. The size of a mesh doesn't count."""
    features = "xyz+vector:wind"
    options = Preprocessing(k=8, features=features)
    turn, flip = random_rotations(1, torch.Generator().manual_seed(1)), np.diag([-1.0, 1, 1])
    sample = make_sample(windy(0), options)
    for changes, place in (
        ({"rotations": turn}, turn[0].double().numpy()),
        ({"mirror": torch.tensor([True])}, flip),
        ({"mirror": torch.tensor([True]), "rotations": turn}, flip @ turn[0].double().numpy()),
    ):
        found = augmented(sample, features, **changes).features
        torch.testing.assert_close(found, make_sample(windy(0, place), options).features, rtol=1e-4, atol=1e-4)
    larger = augmented(sample, features, factors=torch.tensor([2.0]))
    torch.testing.assert_close(larger.features[:, 3:], sample.features[:, 3:])


@pytest.mark.parametrize("ends", ["xyz", "012"])
def test_three_properties_are_a_vector(ends: str, tmp_path: Path) -> None:
    wind = np.arange(126.0).reshape(42, 3)
    viz.write_ply(tmp_path / "a.ply", ellipsoid(0), scalars={f"wind_{ends[i]}": wind[:, i] for i in range(3)})
    np.testing.assert_array_equal(own_arrays(load_mesh(tmp_path / "a.ply"), "vector:wind")["wind"], wind)


def test_three_columns_without_a_word_are_refused_where_meshes_turn() -> None:
    message = "file:wind has three columns, .* turns with the mesh, it is vector:wind. .*, it is scalar:wind"
    items = [windy(0, colors=np.zeros((162, 3)))]
    for own in ("file:wind", "file:wind+file:colors", "scalar:wind", "vector:wind", "file:colors"):
        features = "xyz+" + own
        sample = make_sample(items[0], Preprocessing(k=8, features=features))
        for given in ({}, {"rotate": False, "mirror": True}, {"rotate_about": "z"}):
            options = TrainOptions(features=features, **given)
            with pytest.raises(OptionError, match=message) if "file:wind" in own else nullcontext():
                check_own_arrays(items, options)
        check_own_arrays(items, TrainOptions(features=features, rotate=False))
        if own in ("file:wind", "vector:wind"):
            with pytest.raises(OptionError, match=message) if own == "file:wind" else nullcontext():
                augmented(sample, features, mirror=torch.tensor([True]))
    with pytest.raises(DataError, match="vector:colors has 2 channels in the array, a vector has 3"):
        own_arrays(items[0].mesh, "vector:colors", given={"colors": np.zeros((162, 2))})
    refused(OptionError, "each part once, got 'wind' twice", feature_parts, "vector:wind+file:wind")


@pytest.mark.filterwarnings("error")
def test_mirroring_names_own_scalars_of_both_signs() -> None:
    yaw, size = np.linspace(-1, 1, 162), np.linspace(0, 1, 162)
    options = TrainOptions(features="file:yaw+scalar:size+vector:wind", mirror=True)
    with pytest.warns(UserWarning, match="^--mirror leaves the values of file:yaw as they are, which have both signs"):
        check_own_arrays([windy(0, yaw=yaw, size=size)], options)
    check_own_arrays([windy(0, yaw=yaw, size=size)], replace(options, mirror=False))
    check_own_arrays([windy(0, yaw=-size, size=size)], options)
