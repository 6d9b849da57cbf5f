"""A new option of a network: three places, which are its declaration, its use and this test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import trimesh
from rooms import ROOMS, ROOT

# The places: the file, the text before the new lines, and the new lines.
DECLARATION = (
    "diffnet/options.py",
    "class BlockArchitecture(Checked):\n",
    """    strength: float = field(default=1.0, metadata=about("Factor of the weights of the last layers.", least=0))
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
    with pytest.raises(ValueError, match="strength should be at least 0, got -1.0"):
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
