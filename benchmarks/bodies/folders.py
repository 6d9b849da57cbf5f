"""Folders of bodies: labels of parts, or points that correspond.

    python -m diffnet.benchmarks.bodies.folders parts OUT --train 24 --test 8 --vertices 750 750
    python -m diffnet.benchmarks.bodies.folders maps OUT --train 8 --test 2 --vertices 2000 2000

Both write PLY files to train/ and test/, in meters. `parts` adds seg/NAME.seg, a number 1 to 8 for each face, and
label_names.txt; `maps` adds corres/NAME.vts, for each of the same points the nearest vertex, from 1. Every mesh has a
random stream of its own, so a larger set begins with the same meshes. --workers makes them side by side.

It needs `pip install diffnet[bodies]`.
"""

from __future__ import annotations

import argparse
import zlib
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from scipy import sparse
from scipy.spatial import KDTree
from trimesh import Trimesh

from diffnet.benchmarks.bodies.meshers import MESHERS, isotropic, remeshed, surface
from diffnet.benchmarks.bodies.people import PARTS, Body
from diffnet.geometry import SurfacePoints, closest_points, load_mesh
from diffnet.geometry.discretize.coincident import components
from diffnet.viz import write_ply

BIAS = 0.15  # σ of the logarithms of the factors by which the parts of a mesh are larger


@lru_cache
def body() -> Body:
    """The body of this process."""
    return Body()


@lru_cache
def template(count: int) -> SurfacePoints:
    """About so many points on the average person."""
    rest = body().rest
    return closest_points(load_mesh(rest), isotropic(rest, count).vertices)


def nearest(
    points: np.ndarray, normals: np.ndarray, others: np.ndarray, other_normals: np.ndarray, weight: float
) -> np.ndarray:
    """For each of the others the nearest point with a normal like its own, so not across a finger.

    weight: the distance in meters that counts as much as a difference of 1 between normals
    """
    tree = KDTree(np.column_stack([points, weight * normals]))
    return tree.query(np.column_stack([others, weight * other_normals]))[1]


def part_labels(posed: Trimesh, mesh: Trimesh, rng: np.random.Generator) -> np.ndarray:
    """The part (F,) of each face of a mesh of the posed body. Islands get the part around them."""
    near = nearest(posed.triangles_center, posed.face_normals, mesh.triangles_center, mesh.face_normals, 0.06)
    factors = np.exp(rng.normal(0, BIAS, len(PARTS)))
    shares = body().shares[posed.faces[near]].mean(1) * factors
    pairs = np.concatenate([mesh.face_adjacency, mesh.face_adjacency[:, ::-1]])
    graph = sparse.coo_matrix((np.ones(len(pairs)), pairs.T), (len(near),) * 2).tocsr()
    labels = (shares + graph @ shares / 3).argmax(1)
    for _ in range(20):
        piece = components(pairs[labels[pairs[:, 0]] == labels[pairs[:, 1]]], len(labels))
        is_island = np.bincount(piece)[piece] < 0.006 * len(labels)
        votes = graph @ (np.eye(len(PARTS))[labels] * ~is_island[:, None])
        labels = np.where(is_island & (votes.sum(1) > 0), votes.argmax(1), labels)
    return labels


def make_parts(out: Path, vertices: tuple[int, int], seed: int, part: str, number: int) -> str:
    """Write a mesh with labels. Returns its name."""
    rng = np.random.default_rng(zlib.crc32(f"{seed} parts {part} {number}".encode()))
    posed = body().posed(body().random_person(rng), rng)
    mesh = remeshed(posed, MESHERS[number % len(MESHERS)], int(rng.integers(vertices[0], vertices[1] + 1)), rng)
    name = f"body{number:04d}" if part == "train" else f"test{number:04d}"
    write_ply(out / part / f"{name}.ply", placed(mesh, rng))
    np.savetxt(out / "seg" / f"{name}.seg", 1 + part_labels(posed, mesh, rng), "%d")
    return name


def make_map(out: Path, vertices: tuple[int, int], poses: int, seed: int, part: str, number: int) -> str:
    """Write a mesh with points that correspond, as many as it has vertices at most. Returns its name."""
    who = number // poses
    key = f"{seed} maps {part}"
    rng = np.random.default_rng(zlib.crc32(f"{key} {number}".encode()))
    person = body().random_person(np.random.default_rng(zlib.crc32(f"{key} person {who}".encode())))
    posed = body().posed(person, rng)
    mesher = rng.choice(["isotropic", "collapsed", "scanned"], p=[0.6, 0.2, 0.2])
    mesh = remeshed(posed, mesher, int(rng.integers(vertices[0], vertices[1] + 1)), rng)
    points = template(vertices[1])
    places = np.einsum("pi,pij->pj", points.weights, posed.triangles[points.faces])
    near = nearest(mesh.vertices, mesh.vertex_normals, places, posed.face_normals[points.faces], 0.03)
    name = f"{part}_person{who:03d}_{number % poses}"
    write_ply(out / part / f"{name}.ply", placed(mesh, rng))
    np.savetxt(out / "corres" / f"{name}.vts", 1 + near, "%d")
    return name


def placed(mesh: Trimesh, rng: np.random.Generator) -> Trimesh:
    """A body that stands on z = 0, turned about z at random."""
    angle = rng.uniform(-np.pi, np.pi)
    turn = np.array([[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [0, 0, 1]])
    verts = mesh.vertices - (*mesh.vertices[:, :2].mean(0), mesh.vertices[:, 2].min())
    return surface(verts @ turn.T, mesh.faces)


def write_folder(args: argparse.Namespace) -> None:
    """Write the folder that the command line asks for."""
    kind, out, counts = args.kind, args.out, {"train": args.train, "test": args.test}
    vertices = tuple(args.vertices)
    for folder in (*counts, "seg" if kind == "parts" else "corres"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    if kind == "parts":
        (out / "label_names.txt").write_text("\n".join(PARTS) + "\n")
    by_kind = {"parts": partial(make_parts, out, vertices), "maps": partial(make_map, out, vertices, args.poses)}
    make = partial(by_kind[kind], args.seed)
    jobs = [(part, i) for part, count in counts.items() for i in range(count)]
    with ProcessPoolExecutor(args.workers) as pool:
        for name in pool.map(make, *zip(*jobs, strict=True)):
            print(name, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("parts", "maps"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", type=int, default=24)
    parser.add_argument("--test", type=int, default=8)
    parser.add_argument("--vertices", type=int, nargs=2, default=(750, 750), metavar=("LEAST", "MOST"))
    parser.add_argument("--poses", type=int, default=5, help="meshes of each person of maps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    write_folder(parser.parse_args())


if __name__ == "__main__":
    main()
