"""Maps between bodies of different shapes with eigenfunctions of the Laplacian, and with a hybrid basis.

    python -m diffnet.benchmarks.bodies.hybrid_basis MAPS OUT.csv [--cache DIR] [--jobs N]

MAPS is a set for `load_pairs` with template vertices. One test body of each person is paired with that of the next
person: the pairs `people`. In the pairs of `deformed`, the second body is also stretched and inflated at random places,
by fixed seeds.

A hybrid basis (Bastian et al. 2024) has eigenfunctions of the Laplacian and, in place of its last ones, modes of an
elastic energy along the normals. All bases have 200 functions. The column `basis` has one of these:

laplacian: 200 eigenfunctions
blocks N+M: two functional maps, of N eigenfunctions and of M elastic functions with their own inner product
span N+M: one functional map in the basis of `Operators.with_span`

Points are found by the nearest orthogonal map, in the commute-time distance as `diffnet match` does, or without weights
(`plain`). Features are those of the network body-maps, or 128 channels of `wks`. `area_change` is the standard
deviation of the logarithm of how much the deformation enlarges a face.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffnet import DiffusionNet, ops
from diffnet.benchmarks.bodies.elastic import elastic_functions
from diffnet.benchmarks.harness.results import write_csv
from diffnet.data import MeshPairs, PairShape, load_pairs, pair_errors
from diffnet.geometry import Operators, mean_error, mesh_mean, tangent_frames, to_spectral, wks
from diffnet.geometry.elements.elements import face_areas
from diffnet.train.inference.network_input import network_input
from diffnet.train.inference.predict import input_sample

K = 200
ELASTIC = (30, 60)  # of the K functions
SCALE = 3.0  # root mean square of features, as in training
WEIGHT, GAMMA = 100.0, 0.5  # of the regularizer, as in the library
BUMPS = 4  # of a deformed body


@dataclass(frozen=True)
class Body:
    """A mesh with its features by name, and elastic functions (V, M) with their eigenvalues (M,)."""

    shape: PairShape
    operators: Operators
    features: dict[str, Tensor]
    functions: Tensor
    evals: Tensor
    area_change: float = 0.0

    def spectra(self, operators: Operators, name: str) -> Tensor:
        return to_spectral(self.features[name], operators)[0].double()


@dataclass(frozen=True)
class Block:
    """A part of a basis: `vectors` (V, K) are orthonormal, and `evals` (K,) are eigenvalues of the Laplacian."""

    vectors: Tensor
    evals: Tensor


# ---- bodies ----


def deformed(shape: PairShape, seed: int) -> tuple[PairShape, float]:
    """A shape that is stretched along z and inflated or thinned at random places, and its `area_change`."""
    rng, mesh = np.random.default_rng(seed), shape.mesh
    verts = mesh.verts.astype(np.float64)
    height = np.ptp(verts[:, 2])
    normals = tangent_frames(mesh)[:, 2]
    for center in verts[rng.integers(len(verts), size=BUMPS)]:
        width = rng.uniform(0.06, 0.12) * height
        near = np.exp(-((verts - center) ** 2).sum(1) / (2 * width**2))
        verts = verts + rng.uniform(0.02, 0.06) * height * near[:, None] * normals
    phase = 2 * np.pi * (verts[:, 2] / height + rng.uniform())
    verts[:, 2] += 0.6 * height / (2 * np.pi) * np.sin(phase)
    verts[:, :2] *= 1 + 0.25 * np.cos(phase)[:, None]
    new = replace(mesh, verts=verts.astype(mesh.verts.dtype))
    change = np.log(face_areas(new) / face_areas(mesh)).std()
    return replace(shape, name=f"{shape.name}_deformed{seed}", mesh=new), float(change)


def load_body(shape_and_change: tuple[PairShape, float], cache: Path) -> Body:
    """Compute what the maps need. The cache keeps operators and elastic functions."""
    torch.set_num_threads(1)
    shape, change = shape_and_change
    network = DiffusionNet.from_pretrained("body-maps").eval()
    sample = input_sample(shape.mesh, network_input(network), cache)
    operators = sample.operators
    with torch.no_grad():
        features = {"body-maps": network(sample.features, operators), "wks": wks(operators, 128, unit=True)}
    size = {name: mesh_mean(x.square().mean(1, keepdim=True), operators).sqrt() for name, x in features.items()}
    features = {name: SCALE * x / size[name] for name, x in features.items()}

    file = cache / f"elastic-{zlib.crc32(shape.mesh.verts.tobytes()):08x}.pt"
    if not file.exists():
        torch.save(elastic_functions(shape.mesh, operators, max(ELASTIC)), file)
    evals, functions = torch.load(file)
    return Body(shape, operators, features, functions, evals, change)


# ---- maps ----


def elastic_block(body: Body, count: int) -> tuple[Operators, Tensor, Tensor]:
    """The span of the first elastic functions as a basis, the root of their Gram matrix, and a turn.

    The functions are Ψ, and Ψ G^−½ is orthonormal. The turn Q makes it the basis Ψ G^−½ Q of the operators.
    """
    functions, mass = body.functions[:, :count], body.operators.mass.double()[:, None]
    span = body.operators.with_span(functions)
    values, vectors = torch.linalg.eigh(functions.mT @ (mass * functions))
    root, inverse = ((vectors * values**power) @ vectors.mT for power in (0.5, -0.5))
    return span, root, inverse @ (functions.mT @ (mass * span.evecs.double()))


def elastic_map(a: Body, b: Body, name: str, count: int) -> tuple[Tensor, Block, Block]:
    """The functional map of elastic functions, in orthonormal bases of their spans.

    The map C minimizes ‖C A − B‖² + weight ‖R_b C − C R_a‖² with the resolvents R of the elastic eigenvalues, in the
    norms that belong to the Gram matrices of the functions. In the basis Ψ G^−½ these are Frobenius norms, and R
    becomes G^½ R G^−½, which isn't diagonal. So one linear system has all entries of C.
    """
    (span_a, root_a, turn_a), (span_b, root_b, turn_b) = (elastic_block(x, count) for x in (a, b))
    data_a, data_b = turn_a @ a.spectra(span_a, name), turn_b @ b.spectra(span_b, name)
    scale = torch.maximum(a.evals[count - 1], b.evals[count - 1])
    powers = [(x.evals[:count] / scale) ** GAMMA for x in (a, b)]
    parts = [[torch.diag(p / (p * p + 1)) for p in powers], [torch.diag(1 / (p * p + 1)) for p in powers]]
    resolvents = [
        (root_a @ of_a @ torch.linalg.inv(root_a), root_b @ of_b @ torch.linalg.inv(root_b)) for of_a, of_b in parts
    ]
    one = torch.eye(count, dtype=torch.float64)
    system = torch.kron(one, data_a @ data_a.mT)
    for of_a, of_b in resolvents:
        system += WEIGHT * (torch.kron(of_b.mT @ of_b, one) + torch.kron(one, of_a @ of_a.mT))
        system -= WEIGHT * (torch.kron(of_b.mT, of_a.mT) + torch.kron(of_b, of_a))
    # The system is positive definite.
    c = torch.cholesky_solve((data_b @ data_a.mT).reshape(-1, 1), torch.linalg.cholesky(system))
    turned = turn_b.mT @ c.view(count, count) @ turn_a
    return turned, _block(span_a), _block(span_b)


def plain_map(a: Body, b: Body, name: str, a_basis: Operators, b_basis: Operators) -> tuple[Tensor, Block, Block]:
    """The functional map in bases that are orthonormal."""
    coefficients = (a.spectra(a_basis, name)[None], b.spectra(b_basis, name)[None])
    c = ops.functional_map(*coefficients, a_basis.evals.double(), b_basis.evals.double(), weight=WEIGHT, gamma=GAMMA)
    return c[0], _block(a_basis), _block(b_basis)


def _block(operators: Operators) -> Block:
    return Block(operators.evecs.double(), operators.evals[0].double())


def points(parts: list[tuple[Tensor, Block, Block]], weighted: bool) -> np.ndarray:
    """A vertex of a for each vertex of b, from the nearest orthogonal map of each block."""
    maps = []
    for c, _, _ in parts:
        u, _, vh = torch.linalg.svd(c)
        maps.append(u @ vh)
    of_a = torch.cat([block.vectors for _, block, _ in parts], 1).float()
    of_b = torch.cat([block.vectors for _, _, block in parts], 1).float()
    evals = torch.cat([block.evals for _, block, _ in parts]).float() if weighted else None
    c = torch.block_diag(*maps).float()  # type: ignore[no-untyped-call]
    return ops.point_map(c, of_a, of_b, evals).numpy()


def maps_of(a: Body, b: Body, name: str) -> Iterator[tuple[str, str, np.ndarray]]:
    """Basis, rule and map of points, for all bases."""
    bases = {"laplacian": [plain_map(a, b, name, a.operators, b.operators)]}
    for count in ELASTIC:
        first = K - count
        low = [x.operators.truncated(first) for x in (a, b)]
        bases[f"blocks {first}+{count}"] = [plain_map(a, b, name, *low), elastic_map(a, b, name, count)]
        spans = [
            x.operators.with_span(torch.cat([x.operators.evecs[:, :first].double(), x.functions[:, :count]], 1))
            for x in (a, b)
        ]
        bases[f"span {first}+{count}"] = [plain_map(a, b, name, *spans)]
    for basis, parts in bases.items():
        yield basis, "commute time", points(parts, weighted=True)
        if not basis.startswith("span"):
            yield basis, "plain", points(parts, weighted=False)


def rows_of(kind: str, a: Body, b: Body, data: MeshPairs, cache: Path) -> list[dict[str, Any]]:
    """The rows of the table for one pair."""
    torch.set_num_threads(1)
    maps = [(name, *each) for name in a.features for each in maps_of(a, b, name)]
    pairs = [(b.shape, a.shape)] * len(maps)
    errors = pair_errors(data, pairs, [matches for *_, matches in maps], cache_dir=cache, jobs=1)
    names = {"pairs": kind, "a": a.shape.name, "b": b.shape.name, "area_change": round(b.area_change, 3)}
    table = []
    for (name, basis, rule, _), each in zip(maps, errors, strict=True):
        score = round(100 * mean_error(each.errors), 3)
        table.append({**names, "features": name, "basis": basis, "points": rule, "mean_error_x100": score})
    return table


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("maps", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cache", type=Path, default=Path("hybrid-cache"))
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(arguments)
    options.cache.mkdir(parents=True, exist_ok=True)
    data = load_pairs(options.maps)
    people: dict[str, list[PairShape]] = {}
    for shape in data.test:
        people.setdefault(shape.name.split("_")[0], []).append(shape)
    # Another pose of each person.
    shapes = [poses[number % len(poses)] for number, poses in enumerate(people.values())]
    changed = [deformed(shape, seed) for seed, shape in enumerate(shapes)]
    count, table = len(shapes), list[dict[str, Any]]()
    with ProcessPoolExecutor(options.jobs) as pool:
        bodies = list(pool.map(partial(load_body, cache=options.cache), [*((s, 0.0) for s in shapes), *changed]))
        # Each person with the next one.
        jobs = [
            pool.submit(rows_of, kind, bodies[i], bodies[first + (i + 1) % count], data, options.cache)
            for kind, first in (("people", 0), ("deformed", count))
            for i in range(count)
        ]
        for job in jobs:
            table += job.result()
            write_csv(options.out, table)


if __name__ == "__main__":
    main()
