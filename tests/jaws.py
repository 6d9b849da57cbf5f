"""Sets as people bring them: jaws with FDI numbers of teeth, and bodies with vectors at their vertices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import trimesh

from diffnet.data import LabelsAt, labels_at

ALONG, ACROSS, TEETH = 48, 7, 7  # vertices along and across the arch, teeth on each side


class Jaw(NamedTuple):
    """verts (336, 3), faces (564, 3), and labels (336,): FDI numbers of the teeth, 0 for the gum."""

    verts: np.ndarray
    faces: np.ndarray
    labels: np.ndarray

    def write(self, path: Path) -> None:
        trimesh.Trimesh(self.verts, self.faces, process=False).export(path)


def jaw(seed: int, *, lower: bool = False) -> Jaw:
    """An arch that stands upright, with its front in direction y and the patient's right at negative x.

    Upper jaws have the quadrants 1 (right) and 2 (left), lower ones 4 and 3. Both sides are alike but for noise.
    """
    rng = np.random.default_rng(seed)
    side, place = np.linspace(-1, 1, ALONG), np.linspace(-1, 1, ACROSS)
    s, v = (grid.reshape(-1) for grid in np.meshgrid(side, place, indexing="ij"))
    tooth = np.minimum(np.abs(s) * TEETH, TEETH - 1e-9)  # from the middle, a unit for each tooth
    number, phase = tooth.astype(int) + 1, tooth % 1
    on_tooth = (np.abs(v) < 0.6) & (phase > 0.1) & (phase < 0.9)
    height = np.where(on_tooth, (1.4 - 0.1 * number) * np.sin(np.pi * phase), 0) - 0.5 * v**2
    angle, (wide, deep) = 1.4 * s, rng.uniform(0.9, 1.1, 2) * (0.9 if lower else 1.0)
    outward = 1 + 0.25 * v
    verts = np.stack([2.5 * wide * np.sin(angle) * outward, 3 * deep * np.cos(angle) * outward, height], 1)
    quadrant = np.where(s < 0, 4 if lower else 1, 3 if lower else 2)
    labels = np.where(on_tooth, 10 * quadrant + number, 0)
    corner = (np.arange(ALONG - 1)[:, None] * ACROSS + np.arange(ACROSS - 1)).reshape(-1, 1)
    faces = (corner + np.array([0, ACROSS, 1, 1, ACROSS, ACROSS + 1])).reshape(-1, 3)
    return Jaw(verts + rng.normal(scale=0.02, size=verts.shape), faces, labels)


def write_jaws(
    folder: Path, count: int, suffix: str = ".ply", at: LabelsAt = "vertices", *, shuffled: bool = False
) -> None:
    """Write jaws with labels beside them: JSON at vertices, as in Teeth3DS, and text at faces.

    shuffled: put the vertices, and the faces, of the files into another order, and leave that of the labels
    """
    folder.mkdir(parents=True, exist_ok=True)
    for seed in range(count):
        one = jaw(seed)
        labels = labels_at(one.labels, one.faces, source="vertices", target=at)
        if at == "vertices":
            (folder / f"jaw{seed}.json").write_text(json.dumps({"jaw": "upper", "labels": labels.tolist()}))
        else:
            (folder / f"jaw{seed}.txt").write_text("\n".join(map(str, labels)))
        if shuffled:
            order = np.random.default_rng(seed).permutation(len(one.verts))
            faces = np.random.default_rng(seed).permutation(np.argsort(order)[one.faces])
            one = Jaw(one.verts[order], faces, one.labels)
        one.write(folder / f"jaw{seed}{suffix}")


def write_bodies(folder: Path, count: int, name: str = "wind") -> None:
    """Write upright bodies (PLY) with a vector at each vertex, which depends on the place: NAME, (V, 3)."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed in range(count):
        ball = trimesh.creation.icosphere(2)
        verts = ball.vertices * np.random.default_rng(seed).uniform([0.3, 0.2, 0.8], [0.5, 0.3, 1.2])
        verts[:, 2] += 0.2 * np.exp(verts[:, 2])  # the head is not like the feet
        trimesh.Trimesh(verts, ball.faces, process=False).export(folder / f"body{seed}.ply")
        np.save(folder / f"body{seed}.{name}.npy", verts[:, [2, 0, 1]] + 0.5)
