"""A folder of partial shapes in pairs, from a set of whole shapes with points that correspond.

    python -m diffnet.benchmarks.bodies.partial_pairs MAPS OUT
    python -m diffnet.benchmarks.bodies.partial_pairs MAPS TURNED --turned

MAPS is a set for `load_pairs` with template vertices. OUT gets its meshes as they are, and for each seed a part of each
test mesh, which lacks 20 to 60 % of the area: half of them are cut by a plane, and half have one to three holes. The
largest connected part stays. Points that a part lacks are -1 in corres/NAME.vts.

test_pairs.txt has two pairs for each part: with a whole test mesh, and with a part of the same seed. The second mesh is
another body or pose. --turned turns each test mesh at random. The parts and the pairs are the same.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.spatial.transform import Rotation

from diffnet.data import PairShape, load_pairs
from diffnet.geometry import MeshPart, cut_by_plane
from diffnet.geometry.augmentation.reduction import cut_holes, largest_component
from diffnet.geometry.elements.elements import face_areas
from diffnet.viz import write_ply

LEAST, MOST = 0.2, 0.6  # of the area that a part lacks


def random_part(shape: PairShape, kind: str, rng: np.random.Generator) -> MeshPart:
    """A connected part that lacks LEAST to MOST of the area."""
    mesh = shape.mesh
    while True:
        share = rng.uniform(LEAST, MOST)
        if kind == "plane":
            part = cut_by_plane(mesh, rng.normal(size=3), share)
        else:
            part = cut_holes(mesh, rng.integers(len(mesh.verts), size=rng.integers(1, 4)), share)
        part = largest_component(part)
        if LEAST <= 1 - face_areas(part.mesh).sum() / face_areas(mesh).sum() <= MOST:
            return part


def part_of(shape: PairShape, seed: int, number: int) -> PairShape:
    """The part of a shape with its template vertices. number: that of the shape"""
    kind = "plane" if (seed + number) % 2 else "holes"
    part = random_part(shape, kind, np.random.default_rng([seed, number]))
    numbers = np.full(len(shape.mesh.verts), -1)
    numbers[part.vertices] = np.arange(len(part.vertices))
    assert isinstance(shape.template, np.ndarray)
    return PairShape(f"{shape.name}_{kind}{seed}", part.mesh, numbers[shape.template])


def write_shape(out: Path, part: str, shape: PairShape) -> None:
    write_ply(out / part / f"{shape.name}.ply", shape.mesh)
    assert isinstance(shape.template, np.ndarray)
    np.savetxt(out / "corres" / f"{shape.name}.vts", np.where(shape.template < 0, -1, shape.template + 1), "%d")


def turned(shape: PairShape, number: int) -> PairShape:
    verts = Rotation.random(random_state=number).apply(shape.mesh.verts)
    return replace(shape, mesh=replace(shape.mesh, verts=verts))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("maps", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--turned", action="store_true")
    options = parser.parse_args(arguments)
    data, out = load_pairs(options.maps), options.out
    for folder in ("train", "test", "corres"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    for shape in data.train:
        write_shape(out, "train", shape)
    tests, pairs, count = list(data.test), list[tuple[str, str]](), len(data.test)
    for seed in range(options.seeds):
        parts = [part_of(shape, seed, number) for number, shape in enumerate(data.test)]
        steps = np.random.default_rng(seed).integers(1, count, size=(2, count))  # to another body
        for number, part in enumerate(parts):
            whole, other = ((number + step) % count for step in steps[:, number])
            pairs += [(part.name, data.test[whole].name), (part.name, parts[other].name)]
        tests += parts
    for number, shape in enumerate(tests):
        write_shape(out, "test", turned(shape, number) if options.turned else shape)
    (out / "test_pairs.txt").write_text("".join(f"{first} {second}\n" for first, second in pairs))


if __name__ == "__main__":
    main()
