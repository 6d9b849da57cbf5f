"""`TangentVectors`: its definition, turned and mirrored meshes, and other tangent frames."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from shapes import ellipsoid
from torch import Tensor

from diffnet import DiffusionNet, Operators, TangentVectors, collate, hks, precompute
from diffnet.geometry import random_rotations
from diffnet.ops import SparseMatrix

VERTS, FACES = (lambda mesh: (mesh.verts, mesh.faces))(ellipsoid(0, 2))
TURN = random_rotations(1, torch.Generator().manual_seed(0))[0].double().numpy()


@torch.no_grad()
def vectors(operators: Operators) -> Tensor:
    torch.manual_seed(0)
    network = DiffusionNet(16, 8, width=16, blocks=2, gradient_rotation=False, initial_times="spread").eval()
    return TangentVectors(8, 2, normal=True)(network(hks(operators), operators), operators)


@pytest.mark.parametrize(("matrix", "step"), [(TURN, 1), (np.diag([1, -1, 1]), -1), (TURN @ -np.eye(3), -1)])
def test_vectors_turn_and_mirror_with_the_mesh(matrix: np.ndarray, step: int) -> None:
    before = vectors(precompute((VERTS, FACES), k=24))
    after = vectors(precompute((VERTS @ matrix, FACES[:, ::step]), k=24))
    expected = before @ torch.from_numpy(matrix).float()
    assert float((after - expected).norm() / expected.norm()) < 1e-4


def test_other_frames_in_a_batch() -> None:
    plain = collate([precompute((VERTS * size, FACES), k=24) for size in (1, 1.5)])
    angle = 6 * torch.rand(plain.num_vertices)
    turn = torch.stack([angle.cos(), angle.sin(), -angle.sin(), angle.cos()], 1).reshape(-1, 2, 2)
    frames = torch.cat([turn @ plain.frames[:, :2], plain.frames[:, 2:]], 1)
    matrix = plain.gradient
    values = torch.einsum("eij,je->ie", turn[matrix.pattern.row_indices], matrix.values)
    other = replace(plain, frames=frames, gradient=SparseMatrix(matrix.pattern, values), gradient_evecs=None)
    torch.testing.assert_close(vectors(other), vectors(plain), rtol=1e-4, atol=1e-4)


def test_definition() -> None:
    """The gradient of a coordinate is its direction without the part along the normal."""
    operators = precompute((VERTS, FACES), k=8)
    layer, direction, normals = TangentVectors(3), torch.tensor([1.0, 0.0, -2.0]), operators.normals
    with torch.no_grad():
        layer.coefficients.weight.zero_()
        layer.coefficients.bias.copy_(direction)
        found = layer(torch.from_numpy(VERTS).float(), operators)[:, 0]
    expected = direction - (normals @ direction)[:, None] * normals
    assert float((found - expected).norm() / expected.norm()) < 0.05
    torch.testing.assert_close((found * normals).sum(1), torch.zeros(len(found)), rtol=0, atol=1e-5)
