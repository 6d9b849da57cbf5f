"""The network as the original implementation computes it, written plainly.

Gradients are sparse COO products, meshes are processed in a loop, and every intermediate result is in memory.
The network takes the parameters of a `DiffusionNet` and computes the same function.

Source: Sharp et al. 2022, and the behavior of https://github.com/nmwsharp/diffusion-net.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from diffnet import DiffusionNet, DiffusionNetBlock, Operators
from diffnet.mlp import MLP


@dataclass(frozen=True)
class OriginalMesh:
    """The operators of one mesh: mass (V,), evals (K,), evecs (V, K), grad_x and grad_y sparse COO (V, V)."""

    mass: Tensor
    evals: Tensor
    evecs: Tensor
    grad_x: Tensor
    grad_y: Tensor


def original_meshes(operators: Operators) -> list[OriginalMesh]:
    """The meshes of a packed batch, one by one."""
    meshes = []
    for o in operators.split():
        pattern = o.gradient.pattern
        entries = torch.stack([pattern.row_indices, pattern.column_indices]).long()
        grad_x, grad_y = (torch.sparse_coo_tensor(entries, v, pattern.shape).coalesce() for v in o.gradient.values)
        meshes.append(OriginalMesh(o.mass, o.evals[0], o.evecs, grad_x, grad_y))
    return meshes


def original_network(model: DiffusionNet, x: Tensor, meshes: list[OriginalMesh], lengths: list[int]) -> Tensor:
    """Compute `model(x, operators)` for a model on the backend "torch". x (V, C_in) → (V, C_out)"""
    outputs = []
    for features, mesh in zip(torch.split(x, lengths), meshes, strict=True):
        h = model.first(features)
        for block in model.blocks:
            assert isinstance(block, DiffusionNetBlock)
            h = _block(block, h, mesh)
        outputs.append(model.last(h))
    return torch.cat(outputs)


def original_to_spectral(x: Tensor, evecs: Tensor, mass: Tensor) -> Tensor:
    """Φᵀ(m ∘ x). x (V, C), evecs (V, K), mass (V,) → (K, C)"""
    return evecs.transpose(0, 1) @ (x * mass[:, None])


def original_gradient_features(gx: Tensor, gy: Tensor, a_re: Tensor, a_im: Tensor) -> Tensor:
    """tanh(Re(ḡ ∘ A g)). gx, gy (V, C), a_re, a_im (C, C) → (V, C)"""
    bx = F.linear(gx, a_re) - F.linear(gy, a_im)
    by = F.linear(gy, a_re) + F.linear(gx, a_im)
    return torch.tanh(gx * bx + gy * by)


def _block(block: DiffusionNetBlock, x: Tensor, mesh: OriginalMesh) -> Tensor:
    spectrum = original_to_spectral(x, mesh.evecs, mesh.mass)
    time = torch.clamp(block.diffusion.time, min=0)
    diffused = mesh.evecs @ (torch.exp(-mesh.evals[:, None] * time) * spectrum)
    gx, gy = torch.mm(mesh.grad_x, diffused), torch.mm(mesh.grad_y, diffused)
    features = block.gradient_features
    assert features is not None
    assert features.a_im is not None
    f = original_gradient_features(gx, gy, features.a_re, features.a_im)
    return original_mlp(block.mlp, torch.cat([x, diffused, f], dim=-1)) + x


def original_mlp(mlp: MLP, x: Tensor) -> Tensor:
    """Linear layers with ReLU between them, and dropout before every layer but the first. (V, C) → (V, C')"""
    for i, layer in enumerate(mlp.layers):
        if i > 0:
            x = mlp.dropout(F.relu(x))
        x = layer(x)
    return x
