"""The elastic basis of the measurement of hybrid bases."""

from __future__ import annotations

import numpy as np
import torch
from shapes import ellipsoid
from torch import Tensor

from diffnet.benchmarks.bodies.elastic import RIGID, elastic_functions, elastic_hessian, elastic_modes
from diffnet.geometry import Mesh, make_mesh, precompute

BENDING = 0.3


def body(subdivisions: int = 1) -> Mesh:
    """An uneven closed surface."""
    mesh = ellipsoid(0, subdivisions)
    mesh.verts[:] += 0.05 * np.random.default_rng(0).normal(size=mesh.verts.shape)
    return mesh


def energy(verts: Tensor, rest: Tensor, faces: Tensor) -> Tensor:
    """The nonlinear energy of Hartwig et al.: metrics of faces and angles of edges, without its derivatives."""

    def metric(x: Tensor) -> Tensor:
        sides = torch.stack([x[faces[:, 1]] - x[faces[:, 0]], x[faces[:, 2]] - x[faces[:, 0]]], 2)
        return sides.mT @ sides

    def area_vectors(x: Tensor) -> Tensor:
        return torch.linalg.cross(x[faces[:, 1]] - x[faces[:, 0]], x[faces[:, 2]] - x[faces[:, 0]])

    g = torch.linalg.solve(metric(rest), metric(verts))
    areas = area_vectors(rest).norm(dim=1) / 2
    det, trace = torch.linalg.det(g), g.diagonal(dim1=1, dim2=2).sum(1)
    membrane = areas * (trace / 2 + det / 4 - 0.75 * det.log() - 1.25)

    pairs = {}
    for number, (a, b, c) in enumerate(faces.tolist()):
        pairs |= {(a, b): number, (b, c): number, (c, a): number}
    inner = [(a, b, face, pairs[b, a]) for (a, b), face in pairs.items() if a < b]
    i, j, left, right = torch.tensor(inner).T

    def angles(x: Tensor) -> Tensor:
        normals, edge = area_vectors(x), x[j] - x[i]
        turned = torch.linalg.cross(normals[left], normals[right])
        return torch.atan2((turned * edge).sum(1) / edge.norm(dim=1), (normals[left] * normals[right]).sum(1))

    length = (rest[j] - rest[i]).norm(dim=1)
    bent = (angles(verts) - angles(rest)) ** 2 * length**2 / ((areas[left] + areas[right]) / 3)
    return membrane.sum() + BENDING * bent.sum()


def test_hessian_is_the_second_derivative_of_the_nonlinear_energy() -> None:
    mesh = body()
    rest, faces = torch.from_numpy(mesh.verts).double(), torch.from_numpy(mesh.faces).long()
    expected = torch.autograd.functional.hessian(lambda x: energy(x.view(-1, 3), rest, faces), rest.flatten())
    found = elastic_hessian(rest.numpy(), faces.numpy(), BENDING).toarray()
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-10 * np.abs(found).max())


def test_rigid_motions_alone_have_no_energy() -> None:
    mesh = body()
    verts = mesh.verts.astype(np.float64)
    hessian = elastic_hessian(verts, mesh.faces, BENDING).toarray()
    np.testing.assert_allclose(hessian, hessian.T, rtol=0, atol=1e-12 * np.abs(hessian).max())
    moves = [np.broadcast_to(axis, verts.shape) for axis in np.eye(3)]
    moves += [np.cross(axis, verts) for axis in np.eye(3)]
    motions = np.stack([move.ravel() for move in moves], 1)
    assert np.linalg.matrix_rank(motions) == RIGID
    assert np.abs(hessian @ motions).max() < 1e-11 * np.abs(hessian).max()
    evals = np.linalg.eigvalsh(hessian)
    assert (np.abs(evals[:RIGID]) < 1e-11 * evals[-1]).all()
    assert evals[RIGID] > 1e-6 * evals[-1]


def test_modes_solve_the_eigenproblem() -> None:
    mesh = body(2)
    verts = mesh.verts.astype(np.float64)
    mass = precompute(mesh, k=4).mass.numpy().astype(np.float64)
    evals, modes = elastic_modes(verts, mesh.faces, mass, 12)
    flat, weights = modes.reshape(-1, 12), np.repeat(mass, 3)[:, None]
    np.testing.assert_allclose(flat.T @ (weights * flat), np.eye(12), atol=1e-9)
    images = elastic_hessian(verts, mesh.faces) @ flat
    np.testing.assert_allclose(images, evals * weights * flat, atol=1e-8 * np.abs(images).max())
    assert evals[0] > 0
    assert (np.diff(evals) >= 0).all()


def test_functions_are_the_modes_along_normals_of_any_scale() -> None:
    mesh = body(2)
    large = make_mesh(7 * mesh.verts, mesh.faces)
    operators = precompute(mesh, k=4)
    found, others = elastic_functions(mesh, operators, 6), elastic_functions(large, precompute(large, k=4), 6)
    torch.testing.assert_close(found[0], others[0], rtol=1e-5, atol=0)
    hybrid = operators.with_span(torch.cat([operators.evecs.double(), found[1]], 1))
    assert hybrid.k == 10
    # A basis that is orthonormal in the areas has all of the elastic functions in its span.
    coefficients = hybrid.evecs.double().mT @ (operators.mass.double()[:, None] * found[1])
    torch.testing.assert_close(hybrid.evecs.double() @ coefficients, found[1], rtol=0, atol=1e-5)
