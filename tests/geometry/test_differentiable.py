"""`assemble`: operators as functions of the positions."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse
import torch
import trimesh
from torch import Tensor

from diffnet import DiffusionNet
from diffnet.geometry import (
    LAPLACIANS,
    Connectivity,
    LaplacianKind,
    assemble,
    gradient_values,
    laplacian_and_mass,
    make_mesh,
    one_ring,
    tangent_frames,
)
from diffnet.ops import SparseMatrix, implicit_diffusion


def scattered(mesh: trimesh.Trimesh, missing: int = 0) -> tuple[Tensor, Tensor]:
    """Positions of a mesh with noise, and its faces without the last ones."""
    verts = torch.from_numpy(mesh.vertices.copy())
    noise = torch.randn(verts.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return verts + 0.1 * mesh.scale / len(verts) ** 0.5 * noise, torch.from_numpy(
        mesh.faces[: len(mesh.faces) - missing]
    )


CLOSED = scattered(trimesh.creation.icosphere(1))
OPEN = scattered(trimesh.creation.torus(2, 0.5, major_sections=8, minor_sections=5), missing=7)
# Vertex 5 has no face, one face has a repeated corner, one has no area, and slivers raise the smaller eigenvalue of
# the normal equations of the gradient.
POOR = (
    torch.tensor([[0, 0, 0], [1, 0, 0], [0, 0.02, 0], [1, 0.03, 0.01], [0.5, 0, 0], [9, 9, 9.0]]).double(),
    torch.tensor([[0, 1, 2], [1, 3, 2], [0, 4, 1], [2, 2, 1]]),
)
MESHES = {"closed": CLOSED, "open": OPEN, "poor": POOR}


def dense(matrix: SparseMatrix, which: int | None = None) -> np.ndarray:
    values = matrix.values if which is None else matrix.values[which]
    return SparseMatrix(matrix.pattern, values).to_scipy().toarray()


@pytest.mark.parametrize("kind", LAPLACIANS)
@pytest.mark.parametrize("name", MESHES)
def test_values_are_those_of_preprocessing(name: str, kind: LaplacianKind) -> None:
    verts, faces = MESHES[name]
    operators = assemble(verts, Connectivity(faces, len(verts)), kind)
    usable = [face for face in faces.tolist() if len(set(face)) == 3]
    mesh = make_mesh(verts.numpy(), np.array(usable))
    laplacian, mass = laplacian_and_mass(mesh, kind)
    frames, edges = tangent_frames(mesh), one_ring(mesh.faces, len(verts))
    np.testing.assert_allclose(operators.mass, mass, rtol=1e-12)
    np.testing.assert_allclose(dense(operators.laplacian), laplacian.toarray(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(operators.frames, frames, atol=1e-12)
    for component, values in enumerate(gradient_values(mesh.verts, frames, edges)):
        expected = scipy.sparse.csr_matrix((values, edges.indices, edges.indptr), edges.shape).toarray()
        np.testing.assert_allclose(dense(operators.gradient, component), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", LAPLACIANS)
@pytest.mark.parametrize("name", ["closed", "open"])
def test_gradients_against_finite_differences(name: str, kind: LaplacianKind) -> None:
    verts, faces = MESHES[name]
    connectivity = Connectivity(faces, len(verts))

    def values(verts: Tensor) -> tuple[Tensor, ...]:
        o = assemble(verts, connectivity, kind)
        return o.mass, o.laplacian.values, o.gradient.values, o.frames

    assert torch.autograd.gradcheck(values, verts.clone().requires_grad_(), fast_mode=True)


@pytest.mark.parametrize("kind", LAPLACIANS)
def test_gradients_where_faces_have_no_area_are_finite(kind: LaplacianKind) -> None:
    verts, faces = POOR
    moving = verts.clone().requires_grad_()
    o = assemble(moving, Connectivity(faces, len(verts)), kind)
    sum(values.square().sum() for values in (o.mass, o.gradient.values, o.frames)).backward()
    assert moving.grad is not None
    assert moving.grad.isfinite().all()
    assert moving.grad.any()


def test_gradients_through_implicit_diffusion() -> None:
    verts, faces = OPEN
    connectivity = Connectivity(faces, len(verts))
    x, time = torch.randn(len(verts), 2, dtype=torch.float64), torch.tensor([0.1, 0.01], dtype=torch.float64)

    def diffused(verts: Tensor) -> Tensor:
        o = assemble(verts, connectivity)
        return implicit_diffusion(x, time, o.laplacian, o.mass, o.ptr, o.lengths, tolerance=1e-12)

    assert torch.autograd.gradcheck(diffused, verts.clone().requires_grad_(), fast_mode=True)


def test_a_network_feels_the_metric() -> None:
    verts, faces = (CLOSED[0].float().requires_grad_(), CLOSED[1])
    network = DiffusionNet(2, 3, width=8, blocks=1, diffusion="implicit", initial_times="spread").eval()
    network(torch.ones(len(verts), 2), assemble(verts, Connectivity(faces, len(verts)))).square().sum().backward()
    assert verts.grad is not None
    assert verts.grad.isfinite().all()
    assert verts.grad.any()


def test_a_batch_is_its_meshes() -> None:
    parts = [CLOSED, (1e3 * OPEN[0], OPEN[1]), CLOSED]
    lengths = [len(verts) for verts, _ in parts]
    starts = [sum(lengths[:i]) for i in range(len(parts))]
    faces = torch.cat([faces + start for (_, faces), start in zip(parts, starts, strict=True)])
    batch = assemble(torch.cat([verts for verts, _ in parts]), Connectivity(faces, sum(lengths), lengths))
    for one, (verts, faces) in zip(batch.split(), parts, strict=True):
        alone = assemble(verts, Connectivity(faces, len(verts)))
        for name in ("mass", "frames", "faces"):
            torch.testing.assert_close(getattr(one, name), getattr(alone, name), rtol=1e-12, atol=0)
        for name in ("laplacian", "gradient"):
            torch.testing.assert_close(getattr(one, name).values, getattr(alone, name).values, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(getattr(one, name).pattern.indices, alone.gradient.pattern.indices)


@pytest.mark.parametrize(
    ("faces", "vertices", "lengths", "message"),
    [
        (torch.tensor([[0, 1, 3]]), 3, None, "faces should be from 0 to 2, got 0 to 3"),
        (torch.tensor([[0, 1]]), 3, None, r"faces should have shape \(F, 3\)"),
        (torch.tensor([[0, 1, 2]]), 4, [2, 2], "a face joins vertices of two meshes"),
        (torch.tensor([[0, 1, 2]]), 4, [3], "lengths should add up to the 4 rows"),
        (torch.tensor([[0, 1, 1]]), 3, None, "none of the 1 faces has three distinct corners"),
    ],
    ids=["range", "shape", "meshes", "lengths", "degenerate"],
)
def test_faces_that_do_not_fit(faces: Tensor, vertices: int, lengths: list[int] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Connectivity(faces, vertices, lengths)


def test_arguments_of_other_types_and_shapes() -> None:
    connectivity = Connectivity(torch.tensor([[0, 1, 2]]), 3)
    with pytest.raises(TypeError, match="faces should be integers"):
        Connectivity(torch.zeros(1, 3), 3)
    with pytest.raises(TypeError, match="verts should be floating point"):
        assemble(torch.zeros(3, 3, dtype=torch.int64), connectivity)
    with pytest.raises(ValueError, match=r"verts should have shape \(3, 3\), shape is \(4, 3\)"):
        assemble(torch.zeros(4, 3), connectivity)


@pytest.mark.gpu
def test_results_on_a_gpu_are_those_of_the_cpu_and_the_same_in_every_run() -> None:
    verts, faces = scattered(trimesh.creation.icosphere(5))

    def results(device: str) -> list[Tensor]:
        moving = verts.to(device).requires_grad_()
        o = assemble(moving, Connectivity(faces.to(device), len(verts)))
        values = [o.mass, o.laplacian.values, o.gradient.values, o.frames]
        sum(v.square().sum() for v in values).backward()
        assert moving.grad is not None
        return [v.detach() for v in (*values, moving.grad)]

    first, second, on_cpu = results("cuda"), results("cuda"), results("cpu")
    assert all(map(torch.equal, first, second))
    for found, expected in zip(first, on_cpu, strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-9, atol=1e-9 * float(expected.abs().max()))
