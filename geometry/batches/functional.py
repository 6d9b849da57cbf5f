"""The operations of `diffnet.ops` as functions of features and `Operators`.

Each calls the operation of the same name with the fields that it needs. Shapes: V packed vertices, B meshes, K
eigenpairs, C channels.
"""

from __future__ import annotations

from torch import Tensor

from diffnet import ops
from diffnet.geometry.operators import Operators
from diffnet.ops import Backend


def to_spectral(x: Tensor, operators: Operators, *, backend: Backend = "auto") -> Tensor:
    """Project functions onto the eigenbasis of each mesh, Φᵀ (mass ∘ x).

    x: (V, C) floating point
    backend: see `ops.to_spectral`

    Returns (B, K, C). It is differentiable in x. Raises ValueError for operators without eigenpairs and for other
    shapes, TypeError for arguments of other types.

    >>> import torch
    >>> from diffnet.geometry import precompute
    >>> triangle = precompute(([[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[0, 1, 2]]), k=3)
    >>> x = torch.tensor([[1.0], [2.0], [3.0]])
    >>> torch.allclose(from_spectral(to_spectral(x, triangle), triangle), x, atol=1e-5)  # K = V
    True
    """
    o = with_eigenpairs("to_spectral", operators)
    return ops.to_spectral(x, o.evecs, o.mass, o.ptr, o.lengths, backend)


def from_spectral(coefficients: Tensor, operators: Operators, *, backend: Backend = "auto") -> Tensor:
    """Evaluate coefficients (B, K, C) of the eigenbasis at the vertices, (V, C).

    It is differentiable in the coefficients. For backend and errors see `to_spectral`.
    """
    o = with_eigenpairs("from_spectral", operators)
    return ops.from_spectral(coefficients, o.evecs, o.ptr, o.lengths, backend)


def diffuse(x: Tensor, operators: Operators, time: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Diffuse each channel of x (V, C) for its own time, in the eigenbasis. Returns (V, C).

    time: (C,), at least 0, in the squared unit of the positions

    It is differentiable in x and the times. Functions outside of the K eigenvectors are lost. For backend and errors
    see `to_spectral`.
    """
    o = with_eigenpairs("diffuse", operators)
    coefficients = ops.diffuse(to_spectral(x, o, backend=backend), o.evals, time, backend)
    return from_spectral(coefficients, o, backend=backend)


def gradient(x: Tensor, operators: Operators, *, backend: Backend = "auto") -> Tensor:
    """Compute the tangent gradients of functions x (V, C). Returns (2, V, C): the X and Y components.

    The unit is that of x per length. `operators.frames[:, :2]` are the directions of X and Y in space. It is
    differentiable in x. `ops.gradient_features` takes the result.

    >>> import torch
    >>> from diffnet.geometry import precompute
    >>> verts = [[0, 0, 0], [1, 0, 0], [0, 1, 0]]
    >>> triangle = precompute((verts, [[0, 1, 2]]), k=2)
    >>> slope = gradient(torch.tensor([[0.0], [2.0], [0.0]]), triangle)  # twice the first coordinate
    >>> torch.einsum("dvc,vdx->vcx", slope, triangle.frames[:, :2])[0].round(decimals=4).abs()
    tensor([[2., 0., 0.]])
    """
    _check_rows(x, operators)
    return ops.spmm(operators.gradient.pattern, operators.gradient.values, x, backend=backend)


def mesh_mean(x: Tensor, operators: Operators, *, backend: Backend = "auto") -> Tensor:
    """Average functions x (V, C) over each mesh, weighted by vertex areas. Returns (B, C). Differentiable in x."""
    _check_rows(x, operators)
    return ops.segment_mean(x, operators.mass, operators.ptr, operators.lengths, backend)


def with_eigenpairs(name: str, operators: Operators, hint: str = "") -> Operators:
    """Return the operators if they have eigenpairs. Raises TypeError for another type, else ValueError with `hint`."""
    check_operators(operators)
    if operators.k == 0:
        raise ValueError(f"{name} needs eigenpairs, but the operators have k = 0; write precompute(mesh, k=128){hint}")
    return operators


def check_operators(operators: object) -> None:
    """Check that an argument is `Operators`. Raises TypeError that says what to write instead."""
    if isinstance(operators, Operators):
        return
    several = isinstance(operators, (list, tuple)) and all(isinstance(o, Operators) for o in operators)
    hint = "collate(operators)" if several else "precompute(mesh)"
    raise TypeError(f"operators should be Operators, got {type(operators).__name__}; write {hint}")


def _check_rows(x: Tensor, operators: Operators) -> None:
    check_operators(operators)
    if isinstance(x, Tensor) and (x.ndim < 2 or x.shape[-2] != operators.num_vertices):
        raise ValueError(f"x should have shape ({operators.num_vertices}, C), shape is {tuple(x.shape)}")
