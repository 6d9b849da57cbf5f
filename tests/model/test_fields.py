"""Fields of `Operators` and options of a network follow from their declaration, everywhere."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trimesh
from graph_emulator import EmulatedGraph, ReplayedGraph
from refusals import refused
from rooms import ROOMS, ROOT
from torch import Tensor, nn

from diffnet.cuda_graphs.buffers import Arena, BatchBuffers
from diffnet.cuda_graphs.forward import Settings, use_graphs
from diffnet.cuda_graphs.sizes import BatchSize, size_of
from diffnet.cuda_graphs.static_operators import StaticOperators
from diffnet.geometry import Operators, collate, precompute, with_k_ring
from diffnet.geometry.fields import FIELDS, declared, kinds_of
from diffnet.geometry.preprocessing import recipe
from diffnet.ops import Pattern, SparseMatrix
from diffnet.ops.common.cuda_graph import NotCapturable

with_fields: Callable[..., Any] = replace  # type checkers don't know the added fields


@dataclass(frozen=True, eq=False)
class Extended(Operators):
    quality: Tensor | None = field(default=None, metadata=declared("values", ("V",), stored=True))
    opposite: Tensor | None = field(default=None, metadata=declared("vertices", ("V",), stored=True, padding="own"))


@pytest.fixture
def meshes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Meshes of 42 and 12 vertices, with two more fields in the declaration."""
    for name in ("__init__", "__dataclass_fields__"):
        monkeypatch.setattr(Operators, name, getattr(Extended, name))
    for name in ("quality", "opposite"):
        monkeypatch.setattr(Operators, name, None, raising=False)
        monkeypatch.setitem(FIELDS, name, kinds_of(Extended)[name])
    spheres = [precompute(trimesh.creation.icosphere(i), k=4) for i in (1, 0)]
    return [
        with_fields(o, quality=torch.rand(o.num_vertices), opposite=torch.arange(o.num_vertices).flip(0))
        for o in spheres
    ]


def test_an_added_field_is_in_batches_and_parts(meshes: list[Any]) -> None:
    a, b = meshes
    batch: Any = collate(meshes)
    assert torch.equal(batch.quality, torch.cat([a.quality, b.quality]))
    assert torch.equal(batch.opposite, torch.cat([a.opposite, b.opposite + 42]))
    for part, mesh in zip([*batch.split(), batch[1:], pickle.loads(pickle.dumps(b))], [a, b, b, b], strict=True):
        assert torch.equal(part.quality, mesh.quality)
        assert torch.equal(part.opposite, mesh.opposite)
    lacking: Any = collate([a, with_fields(b, quality=None)])
    assert lacking.quality is None
    assert lacking.opposite is not None


def test_an_added_field_is_moved_and_checked(meshes: list[Any]) -> None:
    a: Any = meshes[0]
    moved = a.to("meta")
    assert moved.quality.is_meta
    assert moved.opposite.is_meta
    assert a.to(torch.float64).quality.dtype == torch.float64
    assert with_fields(a, quality=a.quality.double()).to(torch.float32).quality.dtype == torch.float32
    refused(ValueError, r"quality should have shape \(42,\), shape is \(41,\)", with_fields, a, quality=a.quality[1:])
    refused(TypeError, "opposite should be int32 or int64, got", with_fields, a, opposite=a.quality)


class ReadsFields(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor, operators: Any) -> Tensor:
        y: Tensor = self.linear(x)
        if operators.quality is not None:
            y = y * operators.quality[:, None]
        return (y + y[operators.opposite]) / len(operators)


def test_an_added_field_is_read_under_graphs(meshes: list[Any]) -> None:
    torch.manual_seed(0)
    plain = ReadsFields()
    model = use_graphs(ReadsFields(), Settings("vertices", 1, recorder=ReplayedGraph))
    model.load_state_dict(plain.state_dict())
    before = EmulatedGraph.replays
    for changed in range(3):
        for mesh in [*meshes, with_fields(meshes[0], quality=None), collate(meshes)]:
            operators = mesh if mesh.quality is None else with_fields(mesh, quality=mesh.quality + changed)
            x = torch.randn(operators.num_vertices, 3)
            # Graphs multiply more rows, so products may be rounded differently.
            torch.testing.assert_close(model(x, operators), plain(x, operators))
    assert EmulatedGraph.replays > before


def test_an_added_field_is_in_cache_entries(meshes: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sphere = trimesh.creation.icosphere(0)
    quality, opposite = meshes[1].quality, meshes[1].opposite
    computed = partial(recipe.operator_arrays, quality=quality.numpy(), opposite=opposite.numpy())
    with monkeypatch.context() as patched:
        patched.setattr(recipe, "operator_arrays", computed)
        precompute(sphere, k=4, cache_dir=tmp_path)
    read: Any = precompute(sphere, k=4, cache_dir=tmp_path)
    assert torch.equal(read.quality, quality)
    assert torch.equal(read.opposite, opposite)
    assert read.opposite.dtype == torch.int64
    empty: Any = precompute(sphere, k=4, cache_dir=tmp_path / "empty")
    assert empty.quality is empty.opposite is None
    out_of_range = partial(computed, opposite=np.arange(1, 13))
    with monkeypatch.context() as patched:
        patched.setattr(recipe, "operator_arrays", out_of_range)
        precompute(sphere, k=3, cache_dir=tmp_path)
    with pytest.warns(UserWarning, match="opposite has indices that are not from 0 to 11"):
        precompute(sphere, k=3, cache_dir=tmp_path)


def test_all_fields_are_known_under_graphs() -> None:
    sphere = trimesh.creation.icosphere(0)
    soup = sphere.vertices[sphere.faces].reshape(-1, 3), np.arange(60).reshape(-1, 3)
    batch = collate([with_k_ring(precompute(mesh, k=4).with_gradient_evecs(), 1) for mesh in (sphere, soup)])
    counted = frozenset({"faces", "edges", "entries", "neighbors"})
    size = size_of(batch, counted).rounded()
    assert {kind.count for kind in FIELDS.values()} <= {"", *BatchSize.__annotations__}
    static = StaticOperators(BatchBuffers(Arena(batch.device, size), size, counted, batch))
    for name, kind in FIELDS.items():
        given = getattr(batch, name)
        assert given is not None, name
        if kind.refused:
            refused(NotCapturable, kind.refused, getattr, static, name)
            continue
        found = getattr(static, name)
        if isinstance(given, SparseMatrix):
            assert found.values.shape[:-1] == given.values.shape[:-1], name
            assert torch.equal(found.values[..., : given.pattern.nnz], given.values), name
            found, given = found.pattern, given.pattern
        if isinstance(given, Pattern):
            assert torch.equal(found.stored_indices[: given.nnz], given.stored_indices), name
        elif kind.kind != "extents":
            rows, values = (x.movedim(kind.packed_dim, 0) for x in (found, given))
            count = len(values)
            assert torch.equal(rows[:count], values), name
            last, own = size.vertices - 1, torch.arange(count, len(rows))
            added: Any = {"own": own, "last": last}.get(str(kind.padding), kind.padding)
            assert (rows[count:].movedim(0, -1) == added).all(), name
    assert torch.equal(static.ptr[: len(batch)], batch.ptr[:-1])
    assert static.ptr[-1] == size.vertices
    assert static.joined is not None
    assert static.joined[-1] == size.vertices - 1  # added vertices are joined with no other
    assert (static.faces[-1] == size.vertices - 1).all()


# The places: the file, the text before the new lines, and the new lines.
DECLARATION = (
    "diffnet/options.py",
    "class BlockArchitecture(Checked):\n",
    """    strength: float = of_network(1.0, "Factor of the weights of the last layers.", least=0)
""",
)
USE = (
    "diffnet/block.py",
    "self.mlp = MLP([inputs, *hidden, channels], o.dropout, o.backend)\n",
    "        self.mlp.layers[-1].weight.data *= o.strength\n",
)

PROGRAM = """
import inspect, json, sys
import pytest, torch
from diffnet import DiffusionNet, DiffusionNetBlock
from diffnet.train import TrainOptions, cli

_, folder, *run = sys.argv
assert inspect.signature(DiffusionNet).parameters["strength"].default == 1.0
assert "strength: Factor of the weights of the last layers." in DiffusionNet.__init__.__doc__
assert not DiffusionNetBlock(8, strength=0).mlp.layers[-1].weight.any()
for wrong in (DiffusionNet, TrainOptions):
    with pytest.raises(ValueError, match="strength should be a finite number of at least 0, got -1.0"):
        wrong(**{"in_channels": 3, "out_channels": 5} if wrong is DiffusionNet else {}, strength=-1.0)

network = DiffusionNet(3, 5, width=8, blocks=1, strength=0)
assert network.strength == network.architecture["strength"] == 0.0
network.save(f"{folder}/network.safetensors")
assert DiffusionNet.load(f"{folder}/network.safetensors").strength == 0.0

for arguments in (["--help"], ["--strength", "0", *run]):
    sys.argv = ["diffnet", "train", "segmentation", *arguments]
    try:
        cli.main()
    except SystemExit as end:
        assert not end.code
options = json.load(open(f"{folder}/run/results.json"))["options"]
assert options["strength"] == 0.0
assert DiffusionNet.load(f"{folder}/run/last.pt").strength == 0.0
checkpoint = torch.load(f"{folder}/run/last.pt", weights_only=True)
del checkpoint["options"]["strength"]
torch.save(checkpoint, f"{folder}/older.pt")
assert DiffusionNet.load(f"{folder}/older.pt").strength == 1.0
"""


def test_an_option_is_declared_once(tmp_path: Path) -> None:
    """It is in the block, the network, a saved file, the help, a training run, and an older checkpoint has its default.

    The lines are added to a copy of the package.
    """
    for room in ROOMS:
        shutil.copytree(ROOT / room, tmp_path / "copy" / room, ignore=shutil.ignore_patterns("results", "*.pyc"))
    for file, before, lines in (DECLARATION, USE):
        text = (tmp_path / "copy" / file).read_text()
        start, end = text.split(before)
        (tmp_path / "copy" / file).write_text(start + before + lines + end)
    data = tmp_path / "data"
    data.mkdir()
    sphere = trimesh.creation.icosphere(1)
    for i in range(4):
        trimesh.Trimesh(sphere.vertices * (1, 1, 1 + i), sphere.faces, process=False).export(data / f"m{i}.ply")
        np.savetxt(data / f"m{i}.txt", sphere.vertices[:, 2] > 0, "%d")
    small = ["--features", "xyz", "--k", "8", "--width", "8", "--blocks", "1", "--epochs", "1"]
    where = ["--data", data, "--out", tmp_path / "run", "--cache", tmp_path / "cache", "--jobs", "1", "--device", "cpu"]
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path, *map(str, where), *small],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "copy"), "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "--strength" in ran.stdout
    assert "Factor of the weights of the last layers." in ran.stdout
