"""Small balls, sets of them in folders, the checkpoint of a run, and what a run writes."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trimesh

from diffnet.data import LabeledMesh, LabeledMeshes, Sample
from diffnet.data.prepared import PreparedSamples
from diffnet.data.stored import SampleFacts
from diffnet.geometry import make_mesh, mesh_edges
from diffnet.train.checkpoint import build_model
from diffnet.train.options import TrainOptions
from diffnet.train.steps.step import make_optimizer

TINY = ("--k", 8, "--width", 8, "--blocks", 1, "--epochs", 1, "--jobs", 1, "--device", "cpu")


class InMemory(PreparedSamples):
    """Samples of plain meshes that are in memory, for `DeviceSamples`."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples, self.whole = samples, set()
        self.facts = []
        for sample in samples:
            o, entries = sample.operators, sample.operators.gradient.pattern.nnz
            counts = o.num_vertices, len(o.faces), len(o.edges)
            self.facts.append(SampleFacts(sample.names[0], "", "", *counts, entries))

    @property
    def k(self) -> int:
        return self.samples[0].operators.k

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> Sample:
        return self.samples[i]

    def pinned(self, i: int) -> Sample:
        return self.samples[i].pin_memory()


def ball(seed: int, subdivisions: int = 1) -> trimesh.Trimesh:
    """A ball, of 42 vertices by default, stretched along the axes by factors of the seed."""
    sphere = trimesh.creation.icosphere(subdivisions)
    sphere.vertices *= np.random.default_rng(seed).uniform(0.6, 1.4, 3)
    return sphere


def write_ball(path: Path, seed: int = 0, subdivisions: int = 1) -> Path:
    """Write a ball, and give its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ball(seed, subdivisions).export(path)
    return path


def write_balls(
    folder: Path, count: int = 5, suffix: str = ".obj", subdivisions: int = 1, labeled: bool = True
) -> Path:
    """Write balls m0, m1, … into a folder. Labels are the lower and the upper half."""
    for i in range(count):
        write_ball(folder / f"m{i}{suffix}", i, subdivisions)
        if labeled:
            np.savetxt(folder / f"m{i}.txt", ball(i, subdivisions).vertices[:, 2] > 0, fmt="%d")
    return folder


def labeled_ball(seed: int, at: str = "vertices", subdivisions: int = 1) -> LabeledMesh:
    """A ball whose lower and upper halves have different labels. For "cloud", it has no faces."""
    verts, faces = (np.asarray(x) for x in (ball(seed, subdivisions).vertices, ball(seed, subdivisions).faces))
    corners = {"faces": faces, "edges": mesh_edges(faces)}.get(at)
    height = verts[:, 2] if corners is None else verts[corners, 2].mean(axis=1)
    mesh = make_mesh(verts, None if at == "cloud" else faces, name=f"ball {seed}")
    return LabeledMesh(mesh.name, mesh, (height > 0).astype(np.int64))


def labeled_balls(train: int = 4, test: int = 2, at: str = "vertices", sizes: Sequence[int] = (1,)) -> LabeledMeshes:
    """A set of such balls. sizes: how often they are divided, in turn"""
    items = [labeled_ball(i, at, sizes[i % len(sizes)]) for i in range(train + test)]
    return LabeledMeshes(items[:train], items[train:], ["low", "high"], "vertices" if at == "cloud" else at)


def untrained(options: TrainOptions, names: Sequence[str] = ("a", "b"), at: Any = "vertices") -> dict[str, Any]:
    """The content of the checkpoint of a run before its first step."""
    torch.manual_seed(0)
    model = build_model(options, list(names), at)
    optimizer = make_optimizer(model, options, torch.device("cpu")).state_dict()
    content = {"model": model.state_dict(), "optimizer": optimizer, "history": [], "options": options.as_dict()}
    return {**content, "best": -math.inf, "label_names": list(names), "labels_at": at, "data": "0"}


def results_of(out: Path) -> dict[str, Any]:
    """The content of results.json in the folder of a run or an evaluation."""
    return json.loads((out / "results.json").read_text())


def table_of(path: Path) -> list[dict[str, str]]:
    """The rows of a table, such as metrics.csv."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
