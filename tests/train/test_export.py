"""`diffnet export` and `diffnet precompute --npz`: files of plain operations that run without diffnet."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from command import complaint, output
from torch import nn

from diffnet import DiffusionNet, Operators, collate, precompute
from diffnet.geometry import with_k_ring
from diffnet.train import export_network, exported_inputs
from diffnet.train.inference.network_input import load_network, network_input
from diffnet.train.inference.predict import input_sample, load_mesh

pytestmark = pytest.mark.usefixtures("one_thread")

METADATA = {"features": "hks", "k": 12, "normalize": True, "label_names": ["a", "b", "c"]}
ALONE = """
import json, sys
sys.modules["diffnet"] = None
import numpy as np, torch
texts = {"diffnet.json": ""}
network = torch.export.load(sys.argv[1], extra_files=texts).module()
names = list(json.loads(texts["diffnet.json"])["inputs"])
for path in sys.argv[2:]:
    arrays = np.load(path)
    assert list(arrays) == names
    inputs = {name: torch.from_numpy(arrays[name]) for name in reversed(names)}
    np.save(path + ".npy", network(**inputs).detach().numpy())
"""


@pytest.fixture(scope="module")
def meshes() -> list[Operators]:
    shapes = (trimesh.creation.icosphere(2), trimesh.creation.torus(1, 0.3, 16, 12), trimesh.creation.box().subdivide())
    return [precompute(shape, k=k) for shape, k in zip(shapes, (12, 16, 8), strict=True)]


def network_of(**options: Any) -> DiffusionNet:
    torch.manual_seed(0)
    return DiffusionNet(3, 5, **{"width": 16, "blocks": 1, "initial_times": "spread", **options})


@pytest.mark.parametrize(
    "options",
    [
        {"blocks": 2},
        {"outputs_at": "faces", "mlp_norm": "layer", "last_activation": torch.sigmoid},
        pytest.param({"outputs_at": "edges", "gradient": "sparse"}, marks=pytest.mark.slow),
        pytest.param({"outputs_at": "global_mean", "gradient_rotation": "swapped"}, marks=pytest.mark.slow),
        pytest.param({"gradient_features": False}, marks=pytest.mark.slow),
        {"attention_heads": 2},
        {"condition_channels": 2, "global_tokens": 3},
    ],
    ids=lambda options: " ".join(options),  # names alone, because the text of a function differs between processes
)
def test_export(meshes: list[Operators], options: dict[str, Any], tmp_path: Path) -> None:
    network = network_of(**options)
    export_network(network, tmp_path / "net.pt2")
    assert network.training  # it stays as it is
    network.eval()
    texts = {"diffnet.json": ""}
    program = torch.export.load(tmp_path / "net.pt2", extra_files=texts)
    called = {node.target for node in program.graph.nodes if node.op == "call_function"}
    assert {f.namespace for f in called if isinstance(f, torch._ops.OpOverload)} == {"aten"}
    assert "repeat_interleave" not in str(called)  # ONNX has none with a size
    adds = [n for n in program.graph.nodes if n.op == "call_function" and "index_add" in str(n.target)]
    assert all(node.args[2].meta["val"].dtype == torch.int64 for node in adds)
    assert {f.__module__ for f in called if not isinstance(f, torch._ops.OpOverload)} <= {"_operator", "math", "torch"}
    for i, operators in enumerate(meshes):
        given = with_k_ring(operators, 2) if i == 1 else operators
        conditions = torch.randn(1, 2) if network.condition_channels else None
        inputs = exported_inputs(network, given.normals, given, conditions)
        expected = network(given.normals, given, conditions)
        torch.testing.assert_close(program.module()(**inputs), expected, rtol=1e-5, atol=1e-5)
        assert list(json.loads(texts["diffnet.json"])["inputs"]) == list(inputs)


def test_networks_that_are_refused(meshes: list[Operators], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="implicit diffusion takes a number of steps that depends on the mesh"):
        export_network(network_of(diffusion="implicit"), tmp_path / "net.pt2")
    with pytest.raises(ValueError, match="a network with attention in pairs takes two meshes"):
        export_network(network_of(pair_attention=1), tmp_path / "net.pt2")
    with pytest.raises(ValueError, match="export a network with --vector-head space"):
        export_network(network_of(vectors=1), tmp_path / "net.pt2")
    network = network_of()
    (block,) = network.blocks
    block.gradient_features = nn.Sequential(block.gradient_features)  # reads the sparse gradient
    with pytest.raises(ValueError, match=r"differ by up to .* whose largest is .*; export a network of other layers"):
        export_network(network, tmp_path / "net.pt2")
    assert not (tmp_path / "net.pt2").exists()
    with pytest.raises(ValueError, match="takes one mesh, got operators of 2"):
        exported_inputs(network, meshes[0].normals, collate([meshes[0], meshes[0]]))


@pytest.mark.slow
def test_commands(tmp_path: Path) -> None:
    """The files run in a process that can't import diffnet, and give what the network gives."""
    sources = [tmp_path / f"{name}.ply" for name in ("sphere", "torus", "box")]
    shapes = (trimesh.creation.icosphere(2), trimesh.creation.torus(1, 0.3), trimesh.creation.box().subdivide())
    for source, shape in zip(sources, shapes, strict=True):
        shape.export(source)
    torch.manual_seed(0)
    checkpoint = tmp_path / "net.safetensors"
    DiffusionNet(16, 3, width=16, blocks=2).save(checkpoint, **METADATA)
    assert output("export", "--checkpoint", checkpoint, "--out", tmp_path / "net.pt2").startswith("wrote ")
    written = output("precompute", *sources, "--npz", tmp_path / "npz", "--checkpoint", checkpoint, "--cache", tmp_path)
    arrays = [tmp_path / "npz" / f"{source.stem}.npz" for source in sources]
    assert [f"wrote {path}" for path in arrays] == [line for line in written.splitlines() if line.startswith("wrote")]
    subprocess.run([sys.executable, "-c", ALONE, tmp_path / "net.pt2", *arrays], check=True, timeout=240)
    network = load_network(checkpoint)
    for source, path in zip(sources, arrays, strict=True):
        sample = input_sample(load_mesh(source), network_input(network), tmp_path)
        expected = network(sample.features, sample.operators).detach().numpy()
        np.testing.assert_allclose(np.load(f"{path}.npy"), expected, rtol=1e-5, atol=1e-5)
    output("precompute", sources[0], "--npz", tmp_path / "one.npz", "--checkpoint", checkpoint, "--cache", tmp_path)
    assert np.load(tmp_path / "one.npz")["gradient_evecs"].shape == (2, 162, 12)


def test_conditions_of_inputs(tmp_path: Path) -> None:
    """They are standardized, and come from the command line or a table."""
    facts = {"conditions": "speed,yaw", "condition_statistics": {"mean": [1.0, 2.0], "std": [1.0, 4.0]}}
    checkpoint = tmp_path / "net.safetensors"
    DiffusionNet(16, 3, width=16, blocks=1, condition_channels=2).save(checkpoint, **METADATA, **facts)
    for name in "ba":
        trimesh.creation.icosphere(1).export(tmp_path / f"{name}.ply")
    (tmp_path / "t.csv").write_text("file,yaw\na.ply,6\nb.ply,10")
    command = ["precompute", tmp_path / "b.ply", tmp_path / "a.ply", "--npz", tmp_path / "npz", "--cache", tmp_path]
    command += ["--checkpoint", checkpoint, "--condition", "speed=3"]
    output(*command, "--condition", tmp_path / "t.csv")
    for name, yaw in (("a", 6), ("b", 10)):
        np.testing.assert_allclose(np.load(tmp_path / "npz" / f"{name}.npz")["conditions"], [2, (yaw - 2) / 4])
    assert "--condition yaw=NUMBER is missing" in complaint(*command)


def test_messages(tmp_path: Path) -> None:
    checkpoint = tmp_path / "net.safetensors"
    DiffusionNet(16, 3, width=16, blocks=1, outputs_at="faces").save(checkpoint, **METADATA)
    trimesh.creation.icosphere(1).export(tmp_path / "mesh.ply")
    trimesh.PointCloud(trimesh.creation.icosphere(1).vertices).export(tmp_path / "cloud.ply")
    written = ("--npz", tmp_path / "npz", "--checkpoint", checkpoint)
    mesh = ("precompute", tmp_path / "mesh.ply")
    assert complaint(*mesh, *written[:2]) == "--npz needs --checkpoint, the network that takes the arrays"
    assert complaint(*mesh, *written[2:]) == "--checkpoint is for --npz"
    assert complaint(*mesh, *written, "--k", 4).endswith("as the network of --checkpoint needs it; leave out --k")
    line = complaint("precompute", tmp_path / "cloud.ply", *written, "--cache", tmp_path)
    assert "the network labels faces, and a point cloud has none" in line
    export = ("export", "--checkpoint", checkpoint, "--out")
    assert "--out should be a .pt2 file" in complaint(*export, tmp_path / "a.onnx")
    assert "leave out --labels-at" in complaint(*export, tmp_path / "net.pt2", "--labels-at", "faces")
