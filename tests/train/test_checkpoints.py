"""Damaged, foreign and crafted checkpoints. Each gives one line, and nothing large is allocated."""

from __future__ import annotations

import copy
import functools
import io
import math
import re
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import untrained

from diffnet import DiffnetError, DiffusionNet, MeshError, WeightAverage
from diffnet.checkpoints.files import CheckpointError
from diffnet.data import Preprocessing
from diffnet.geometry.errors import OptionError
from diffnet.train.checkpoint import build_model, load_checkpoint, restore_model, save_checkpoint
from diffnet.train.fine_tuning import start_network
from diffnet.train.inference.network_input import load_network, network_input
from diffnet.train.inference.predict import predict_labels
from diffnet.train.options import TrainOptions
from diffnet.train.run_folder import columns
from diffnet.train.steps.step import make_optimizer, restore_optimizer
from diffnet.train.tasks.task import MetadataError, NetworkInput

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = TrainOptions(features="xyz", k=8, width=8, blocks=2, attention_heads=2)
ROW = dict.fromkeys(columns("accuracy"), 1)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The content of a checkpoint after one step, as a dictionary."""
    path, checkpoint = tmp_path_factory.mktemp("stored") / "a.pt", untrained(OPTIONS)
    model, _ = restore_model({**checkpoint, "format": 2, "statistics": {}})
    optimizer = make_optimizer(model, OPTIONS, torch.device("cpu"))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    history = [{**dict.fromkeys(ROW, 0.5), "epoch": 1, "test_accuracy": None}]
    save_checkpoint(path, {**checkpoint, "optimizer": optimizer.state_dict(), "history": history})
    return load_checkpoint(path)


def message(read: Callable[[Path], object], path: Path) -> str:
    """The line of the error of `read(path)`."""
    with pytest.raises(CheckpointError) as caught:
        read(path)
    line = str(caught.value)
    assert line.startswith(str(path))
    assert "\n" not in line
    assert len(line) < 600
    assert isinstance(caught.value, (DiffnetError, ValueError))
    return line


@pytest.fixture
def refused(stored: dict[str, Any], tmp_path: Path) -> Callable[..., str]:
    """The message about a checkpoint with changed content."""

    def refuse(**changes: object) -> str:
        torch.save({**stored, **changes}, tmp_path / "a.pt")
        return message(load_checkpoint, tmp_path / "a.pt")

    return refuse


def test_a_checkpoint_is_read_back(stored: dict[str, Any], tmp_path: Path) -> None:
    model, options = restore_model(stored)
    assert options == OPTIONS
    optimizer = make_optimizer(model, options, torch.device("cpu"))
    restore_optimizer(optimizer, stored["optimizer"])
    assert all(state["step"] == 1 for state in optimizer.state.values())
    older = {name: value for name, value in stored.items() if name != "version"}
    newer = {"basis", "join", "rotate_about", "scale_range", "jitter", "cut", "variants", "mirror", "decimate", "start"}
    older["options"] = {name: value for name, value in stored["options"].items() if name not in newer}
    torch.save(older, tmp_path / "older.pt")
    loaded = load_checkpoint(tmp_path / "older.pt")
    assert loaded.keys() == older.keys()
    _, options = restore_model(loaded)
    assert options == replace(OPTIONS, join="never")  # older versions joined no vertices
    assert stored["options"]["join"] == "auto"


def test_files_without_a_run(stored: dict[str, Any], tmp_path: Path) -> None:
    def line(content: object) -> str:
        torch.save(content, tmp_path / "a.pt")
        return message(load_checkpoint, tmp_path / "a.pt")

    for content in ({"weights": torch.zeros(3)}, [1, 2, 3], torch.zeros(3)):
        assert "diffnet train" in line(content)
    assert "model" in line({"format": stored["format"]})
    assert "damaged" in line({"format": stored["format"], "path": Path("code")})  # no code is loaded
    for garbage in (b".", b"garbage", b"\x80\x02.", b"}q\x00h\x05."):
        (tmp_path / "a.pt").write_bytes(garbage)
        assert "damaged" in message(load_checkpoint, tmp_path / "a.pt")


def test_a_newer_version_says_so(stored: dict[str, Any], refused: Callable[..., str]) -> None:
    assert stored["version"]
    line = refused(format=stored["format"] + 1, version="9.8", model=None)
    assert "newer version (diffnet 9.8, checkpoint format 3)" in line
    assert "Update diffnet" in line
    assert "newer version" in refused(options={**stored["options"], "curvature": 1})
    for wrong, named in ((0, "format 0"), (True, "format True"), ([1], "format of type list")):
        assert named in refused(format=wrong)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"blocks": 3}, "lacks weights: blocks.2"),
        ({"blocks": 1}, "unknown weights: blocks.1"),
        ({"width": 16}, "width is 16"),
        *(({"width": width}, "option width") for width in (2**31, 8.0, True, "8")),
        ({"k": 10**40}, "option k has the value of type int"),
        ({"features": "colors"}, "got 'colors'"),
        ({"features": "hks"}, "first.weight should have shape (8, 16)"),
        ({"dropout": math.nan}, "dropout"),
        ({"rotate": 1}, "option rotate"),
        ({"diffusion": ["spectral"]}, "option diffusion"),
        ({"attention_heads": 3}, "attention_heads"),
        ({7: 7}, "unknown option 7"),
    ],
)
def test_options_are_checked(refused: Callable[..., str], changes: dict[Any, Any], named: str) -> None:
    assert named in refused(options={**OPTIONS.as_dict(), **changes})


def test_options_allocate_nothing_large(refused: Callable[..., str]) -> None:
    tracemalloc.start()
    for name in ("width", "blocks"):
        assert f"{name} is 1000000000" in refused(options={**OPTIONS.as_dict(), name: 10**9})
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"options": []}, "options"),
        ({"model": [torch.zeros(3)]}, "weights should be a dictionary"),
        ({"model": {"first.weight": 1}}, "first.weight: int"),
        ({"model": {1: torch.zeros(3)}}, "1: Tensor"),
        ({"model": {}}, "width"),
        ({"label_names": ["a", "b", "c"]}, "last.weight should have shape (3, 8)"),
        ({"optimizer": {"state": {0: {}}}}, "optimizer.0.exp_avg"),
        *(({"label_names": wrong}, "label_names") for wrong in ([], "ab", ["a", 2])),
        *(({"labels_at": wrong}, "labels_at") for wrong in ("corners", None)),
        *(({name: wrong}, name) for name, wrong in (("best", "good"), ("data", None), ("optimizer", []))),
        *(({"optimizer": {"state": wrong}}, "optimizer") for wrong in ({99: {}}, {"0": {}})),
        *(({"history": wrong}, "history") for wrong in ({}, [1], [{**ROW, "seconds": "1"}])),
        *(({"history": [dict.fromkeys(ROW, wrong)]}, "history") for wrong in (3, torch.zeros(2))),
    ],
)
def test_values_are_checked(refused: Callable[..., str], changes: dict[Any, Any], named: str) -> None:
    assert named in refused(**changes)


def test_weights_are_checked(stored: dict[str, Any], refused: Callable[..., str]) -> None:
    optimizer = copy.deepcopy(stored["optimizer"])
    for tensor, named in (
        (torch.zeros(8, 4), "should have shape"),
        (torch.zeros(1).expand(8, 10**9), "claim"),
        *((torch.zeros(8, 3, dtype=dtype), "real numbers") for dtype in (torch.int64, torch.complex64)),
        *((tensor, "dense") for tensor in (torch.zeros(8, 3).to_sparse(), torch.zeros(8, 3, device="meta"))),
        *((torch.full((8, 3), x), "not finite") for x in (math.inf, math.nan)),
        (torch.full((8, 3), 1e300, dtype=torch.float64), "not finite"),
        (torch.zeros(()), "width"),
    ):
        assert named in refused(model={**stored["model"], "first.weight": tensor})
        optimizer["state"][0]["exp_avg"] = tensor
        if tensor.ndim == 2:
            assert named in refused(optimizer=optimizer)


def as_original(seed: int = 0) -> dict[str, torch.Tensor]:
    """A state dict with the original's names: width 8, two blocks, 3 → 5 channels."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"first_lin.weight": (8, 3), "first_lin.bias": (8,), "last_lin.weight": (5, 8), "last_lin.bias": (5,)}
    for b in range(2):
        shapes[f"block_{b}.diffusion.diffusion_time"] = (8,)
        shapes[f"block_{b}.gradient_features.A_re.weight"] = (8, 8)
        shapes[f"block_{b}.gradient_features.A_im.weight"] = (8, 8)
        for i, inputs in enumerate((24, 8, 8)):
            shapes[f"block_{b}.mlp.miniMLP_mlp_layer_{i:03}.weight"] = (8, inputs)
            shapes[f"block_{b}.mlp.miniMLP_mlp_layer_{i:03}.bias"] = (8,)
    return {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}


def test_networks_that_are_not_the_originals(tmp_path: Path) -> None:
    path, state = tmp_path / "a.pth", as_original()
    torch.save(state, path)
    assert len(DiffusionNet.from_original_checkpoint(path).blocks) == 2

    def line(content: object) -> str:
        torch.save(content, path)
        return message(DiffusionNet.from_original_checkpoint, path)

    for foreign in ([], "text", 3, None, torch.zeros(3), {}, torch.nn.Linear(2, 2).state_dict(), {1: 2}):
        assert "not a checkpoint of the original implementation" in line(foreign)
    assert "dictionary of tensors" in line({**state, "first_lin.bias": 3})
    assert "not finite" in line({**state, "first_lin.bias": torch.full((8,), math.nan)})
    assert "unknown weights" in line({**state, "other": torch.zeros(3)})
    assert "first.weight" in line({**state, "first_lin.weight": torch.zeros(8)})
    assert "claim" in line({**state, "first_lin.weight": torch.zeros(1).expand(10**9, 3)})
    assert "should have shape" in line({**state, "block_1.diffusion.diffusion_time": torch.zeros(9)})
    assert "lacks" in line({name: w for name, w in state.items() if "block_1.mlp" not in name})
    assert "block 999999999" in line({**state, "block_999999999.x": torch.zeros(1)})
    assert "unknown weights" in line({**state, f"block_{'9' * 5000}.x": torch.zeros(1)})


def test_kinds_of_other_programs(tmp_path: Path) -> None:
    """Names decide the kind. The kind decides the form of gradient features and the last activation."""
    path, state = tmp_path / "a.pth", as_original()
    correspondence = {f"feature_extractor.{name}": w for name, w in state.items()}
    renamed = (("_lin.", "_linear."), ("block_", "blocks."), ("miniMLP_mlp_layer", "miniMLP_linear"))
    unsupervised = {functools.reduce(lambda n, r: n.replace(*r), renamed, name): w for name, w in state.items()}
    contents = {
        "original": state,
        "original correspondence": correspondence,
        "unsupervised correspondence": {"networks": {"feature_extractor": unsupervised, "fmap_net": {}}},
    }
    found = {}
    for kind, content in contents.items():
        torch.save(content, path)
        found[kind] = network = DiffusionNet.from_original_checkpoint(path)
        scale = "radius" if kind == "original" else "area"
        expected = {"kind": kind, "features": "xyz", "k": 128, "normalize": scale, "operators": "original"}
        if kind != "original":
            method = "supervised" if kind == "original correspondence" else "unsupervised"
            map_k = 30 if method == "supervised" else 128
            expected |= {"task": "correspondence", "method": method, "map_k": map_k}
        assert network.metadata == expected
        assert network.gradient_rotation == ("swapped" if kind.startswith("unsupervised") else True)
        assert (network.last_activation is None) == (kind != "original")
        assert "write DiffusionNet.from_original_checkpoint(path)" in message(DiffusionNet.load, path)
        if kind != "original":
            assert "computes features and no labels" in message(load_network, path)
        for other in found.values():
            for a, b in zip(network.parameters(), other.parameters(), strict=True):
                assert torch.equal(a, b)
    saved = tmp_path / "a.safetensors"
    found["unsupervised correspondence"].save(saved)
    loaded = DiffusionNet.load(saved)
    assert loaded.gradient_rotation == "swapped"
    assert loaded.blocks[0].gradient_features.swapped
    assert loaded.metadata["kind"] == "unsupervised correspondence"
    assert "computes features and no labels" in message(load_network, saved)

    # Larger modules and dictionaries around them.
    wrapped = {f"module.backbone.{name}": w for name, w in unsupervised.items()} | {"module.head.weight": state}
    parts = {f"module.feature_extractor.{name}": w for name, w in state.items()}
    for kind, content in {"unsupervised": wrapped, "original c": parts, "original": {"model": state}}.items():
        torch.save({"epoch": 3, "state_dict": content}, path)
        network = DiffusionNet.from_original_checkpoint(path)
        assert network.metadata["kind"].startswith(kind)
        assert all(map(torch.equal, network.state_dict().values(), found["original"].state_dict().values()))
    torch.save({f"module.{name}": w for name, w in state.items()} | {"head": torch.zeros(3)}, path)
    assert "start with module., but not head; leave it out" in message(DiffusionNet.from_original_checkpoint, path)
    unsupervised["first_linear.weight"] = torch.zeros(8, 128)
    assert network_input(DiffusionNet.from_original_state_dict(unsupervised)).options.features == "wks-128"

    torch.save({**correspondence, "other": torch.zeros(3)}, path)
    assert "start with feature_extractor., but not other" in message(DiffusionNet.from_original_checkpoint, path)
    torch.save({"networks": {"feature_extractor": {"first_linear.weight": torch.zeros(8, 3)}}}, path)
    assert "without last.weight" in message(DiffusionNet.from_original_checkpoint, path)
    circle: dict[str, Any] = {}
    circle["model"] = circle
    for foreign in ({"networks": 3}, {"networks": {"feature_extractor": []}}, {"networks": {"other": {}}}, circle):
        torch.save(foreign, path)
        assert "not a checkpoint of the original implementation" in message(DiffusionNet.from_original_checkpoint, path)


def test_labels_of_networks_of_the_original(tmp_path: Path) -> None:
    path, own = tmp_path / "a.pth", tmp_path / "a.safetensors"
    torch.save(as_original(), path)
    network = load_network(path, ["a", "b", "c", "d", "e"], "faces")
    expected = network_input(network)
    assert (expected.labels_at, expected.label_names) == ("faces", ["a", "b", "c", "d", "e"])
    assert expected.normalize
    assert expected.options.preprocessing == Preprocessing(128, "cotan", "xyz", operators="original")
    assert network_input(load_network(path, labels_at="meshes")).options.task == "classification"
    assert start_network(TrainOptions(start=str(path), features="xyz", width=8, blocks=2)).out_channels == 5
    with pytest.raises(OptionError, match=r"width is 256, and 8 in the network of .*a\.pth"):
        start_network(TrainOptions(start=str(path), features="xyz", blocks=2))
    DiffusionNet(3, 2, width=8, blocks=1).save(own, **NEEDED)
    assert network_input(load_network(own, ["x", "y"])).label_names == ["x", "y"]
    with pytest.raises(OptionError, match="leave out --labels-at"):
        load_network(own, labels_at="faces")
    DiffusionNet(3, 2, width=8, blocks=1).save(own, **NEEDED, label_names=["x", "y"])
    with pytest.raises(OptionError, match="leave out --class-names"):
        load_network(own, ["v", "w"])


def test_operators_and_scale_of_a_run(stored: dict[str, Any], tmp_path: Path) -> None:
    """A checkpoint stores them, and an older one lacks them."""

    def read(options: object, file_format: int = 2) -> Preprocessing:
        torch.save({**stored, "options": options, "format": file_format}, tmp_path / "a.pt")
        loaded = load_checkpoint(tmp_path / "a.pt")
        assert loaded["options"]["normalize"] == DiffusionNet.load(tmp_path / "a.pt").metadata["normalize"]
        return network_input(DiffusionNet.load(tmp_path / "a.pt")).options.preprocessing

    options = {**stored["options"], "operators": "original", "normalize": "area", "laplacian": "cotan"}
    assert (read(options).operators, read(options).normalize) == ("original", "all-area")
    scales = {name: read({**stored["options"], "normalize": name}).normalize for name in ("area", "all-radius")}
    assert scales == {"area": "area", "all-radius": "all-radius"}
    scales = {name: read({**stored["options"], "normalize": name}, 1).normalize for name in ("area", "radius")}
    assert scales == {"area": "all-area", "radius": "all-radius"}  # as older versions did
    older = {name: value for name, value in stored["options"].items() if name not in ("operators", "normalize")}
    assert (read(older).operators, read(older).normalize) == ("diffnet", "all-radius")
    assert TrainOptions(operators="original").laplacian == "cotan"
    with pytest.raises(OptionError, match="the original's operators have the cotangent Laplacian"):
        TrainOptions(operators="original", laplacian="robust")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")  # a flipped bit
@pytest.mark.parametrize("kind", ["own", "original", "old file format"])
def test_damaged_files(stored: dict[str, Any], tmp_path: Path, kind: str) -> None:
    """Files that were cut or have flipped bits are read or give one line. Nothing else happens."""
    path = tmp_path / "a.pt"
    read = load_checkpoint if kind == "own" else DiffusionNet.from_original_checkpoint
    buffer = io.BytesIO()
    content = stored if kind == "own" else as_original()
    torch.save(content, buffer, _use_new_zipfile_serialization=kind != "old file format")
    whole = buffer.getvalue()
    rng = np.random.default_rng(0)
    for length in [0, 1, 2, 10, *rng.integers(0, len(whole), 25), len(whole) - 1]:
        path.write_bytes(whole[:length])
        message(read, path)
    unread = 0
    for _ in range(60):
        damaged = bytearray(whole)
        # Half of the bits are near the start, where the pickle is.
        places = rng.integers(0, len(whole) if rng.random() < 0.5 else 3000, 1 + rng.integers(4))
        for place in places:
            damaged[place] ^= 1 << rng.integers(8)
        path.write_bytes(damaged)
        try:
            read(path)
        except CheckpointError:
            unread += 1
            message(read, path)
    assert unread > 20
    path.unlink()
    assert "no such" in message(read, path)
    path.mkdir()
    assert message(read, path).endswith("this is a folder, expected a checkpoint")
    (path / "last.pt").touch()
    assert message(read, path).endswith("this is a folder, expected a checkpoint; it holds last.pt")


def test_a_file_that_expands_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 10**6)
    for read in (load_checkpoint, DiffusionNet.from_original_checkpoint):
        assert "more than its size" in message(read, path)


def test_damaged_averages_of_weights(stored: dict[str, Any], refused: Callable[..., str], tmp_path: Path) -> None:
    averaged = {**stored["options"], "average_weights": 0.9}
    model = build_model(TrainOptions(**averaged), ["a", "b"], "vertices")
    average = WeightAverage(model, 0.9)
    average.update()
    state = average.state_dict()
    torch.save({**stored, "options": averaged, "averaging": state}, tmp_path / "a.pt")
    restored = load_checkpoint(tmp_path / "a.pt")["averaging"]
    assert "average_weights is 0.9, averaging is None" in refused(options=averaged)
    assert "average_weights is 0.0, averaging is of type dict" in refused(averaging=state)
    for name in ("trained", "averages", "total"):
        assert all(torch.equal(restored[name][key], tensor) for key, tensor in state[name].items())
        assert "weights" in refused(options=averaged, averaging={**state, name: {}})
        assert "weights should be a dictionary" in refused(options=averaged, averaging={**state, name: [1]})


# ---- DiffusionNet.load ----


def test_a_checkpoint_is_a_network(stored: dict[str, Any], tmp_path: Path) -> None:
    """`DiffusionNet.load` reads the files of a run. Saved anew, the network keeps what `predict` needs."""
    save_checkpoint(tmp_path / "a.pt", stored)
    network = DiffusionNet.load(tmp_path / "a.pt")
    expected, _ = restore_model(stored)
    assert network.architecture == expected.architecture
    assert network.metadata == expected.metadata
    assert not network.training
    for name, weight in expected.state_dict().items():
        assert torch.equal(network.state_dict()[name], weight)
    assert network_input(network) == NetworkInput(
        TrainOptions(features="xyz", k=8), True, ["a", "b"], "vertices", statistics={}, label_numbers=(0, 1)
    )
    network.save(tmp_path / "a.safetensors")
    again = DiffusionNet.load(tmp_path / "a.safetensors")
    assert (again.architecture, again.metadata) == (network.architecture, network.metadata)
    network.save_pretrained(tmp_path / "shared", data_license="unknown")
    shared = DiffusionNet.from_pretrained(tmp_path / "shared")
    assert network_input(shared) == network_input(network)
    assert network_input(load_network(tmp_path / "shared" / "model.safetensors")) == network_input(network)


def test_checkpoints_that_are_no_network(stored: dict[str, Any], tmp_path: Path) -> None:
    options = OPTIONS.as_dict()
    bare = {name: value for name, value in stored.items() if name != "label_names"}
    for content, named in (
        (bare, "lacks label_names"),
        ({**stored, "format": 3, "version": "9.8"}, "newer version (diffnet 9.8, checkpoint format 3)"),
        ({**stored, "options": []}, "options should be a dictionary"),
        ({**stored, "options": {}}, "the options of the network lack"),
        ({**stored, "options": {**options, "width": 10**9}}, "width is 1000000000"),
        ({**stored, "options": {**options, "blocks": torch.zeros(2)}}, "blocks is of type Tensor"),
        ({**stored, "options": {**options, "dropout": torch.zeros(2)}}, "dropout is of type Tensor"),
        ({**stored, "options": {**options, "diffusion": torch.zeros(2)}}, "diffusion should be one of"),
        ({**stored, "labels_at": "corners"}, "outputs_at should be one of"),
        ({**stored, "model": [1]}, "weights should be a dictionary"),
        ({**stored, "model": {}}, "should be matrices"),
    ):
        torch.save(content, tmp_path / "a.pt")
        assert named in message(DiffusionNet.load, tmp_path / "a.pt")


NEEDED = {"features": "xyz", "k": 8, "normalize": True}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"features": ...}, 'lack features; write for example model.save(path, features="hks", k=128, normalize=True)'),
        ({"k": ..., "normalize": ...}, "lack k, normalize;"),
        ({"normalize": "yes"}, "got 'yes', in the metadata"),
        ({"features": "colors"}, "features should be one or several of xyz, normals,"),
        ({"features": ["hks"]}, "features should be text such as"),
        ({"features": "hks"}, "the features hks have 16 channels, and the network takes 3"),
        ({"k": "8"}, "k should be an integer, got '8'"),
        ({"k": 0}, "k should be at least 1 for spectral diffusion"),
        ({"k": 10**9}, "k should be at most 65536, got 1000000000"),
        ({"k": 10**40}, "k should be at most 65536, got 100"),
        ({"max_faces": "a"}, "max_faces has the value 'a', which is not allowed"),
        ({"max_faces": 8.5}, "max_faces has the value 8.5, which is not allowed"),
        *(
            (
                {"label_numbers": wrong},
                "label_numbers in the metadata should be a list of 2 different whole numbers below",
            )
            for wrong in ([1, 1], [1, 2**63], [True, 2])
        ),
        ({"laplacian": "graph"}, "laplacian should be one of"),
        ({"precision": "fp8"}, "precision should be one of"),
        ({"task": "classification"}, "the task classification, but the network has outputs at vertices"),
        ({"label_names": ["a"]}, "label_names in the metadata should be a list of 2 names, got ['a']"),
        ({"label_names": "ab"}, "got 'ab'"),
    ],
)
def test_metadata_of_a_network(changes: dict[Any, Any], named: str) -> None:
    network = DiffusionNet(3, 2, width=8, blocks=1)
    network.metadata = {name: value for name, value in {**NEEDED, **changes}.items() if value is not ...}
    with pytest.raises(MetadataError, match=re.escape(named)):
        network_input(network)


def test_wrong_arguments_of_predictions(tmp_path: Path) -> None:
    network = DiffusionNet(3, 2, width=8, blocks=1)
    network.metadata = dict(NEEDED)
    with pytest.raises(MeshError, match=r"expected a list of meshes, got one, 'a\.obj'"):
        predict_labels("a.obj", network, "cpu")
    with pytest.raises(TypeError, match=r"network should be a DiffusionNet, got str; write DiffusionNet\.load\(path\)"):
        predict_labels(["a.obj"], "last.pt", "cpu")
    with pytest.raises(OptionError, match="device should be cpu, cuda or cuda:N, got 'gpu'"):
        predict_labels(["a.obj"], network, "gpu")


def test_defaults_of_metadata() -> None:
    network = DiffusionNet(3, 2, width=8, blocks=1)
    network.metadata = {**NEEDED, "own": [1, 2]}
    found = network_input(network)
    expected = TrainOptions(features="xyz", k=8, precision="fp32"), True, ["0", "1"], "vertices", {}
    assert found == NetworkInput(*expected, label_numbers=(0, 1))
    network.metadata |= {"laplacian": "cotan", "join": "never", "precision": "auto", "label_names": ["a", "b"]}
    found = network_input(network)
    assert found.options == TrainOptions(features="xyz", k=8, laplacian="cotan", join="never")
    assert found.label_names == ["a", "b"]
