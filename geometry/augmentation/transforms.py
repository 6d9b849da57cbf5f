"""Operators of scaled, mirrored and rotated meshes, without preprocessing them again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diffnet.geometry.batches.functional import spread
from diffnet.geometry.operators import Operators, changed
from diffnet.geometry.positions.rotation import rotate
from diffnet.ops import SparseMatrix
from diffnet.ops.common.checks import check_number, check_tensor


def scaled(operators: Operators, factors: Tensor | float) -> Operators:
    """The operators of meshes whose positions are multiplied by a factor.

    With a factor s, masses are multiplied by s², eigenvalues by 1/s², eigenvectors and gradients by 1/s, and gradients
    of eigenvectors by 1/s². The Laplacian and the frames stay.

    factors: a positive number, or (B,) floating point with one for each mesh, on the device of the operators

    Fields are computed when they are first read. Nothing is read back from a GPU. Raises TypeError or ValueError for
    factors of another type or shape, and for a number that is not positive.

    >>> from diffnet.geometry import precompute
    >>> triangle = precompute(([[0, 0, 0], [1, 0, 0], [0, 1, 0]], [[0, 1, 2]]), k=2)
    >>> scaled(triangle, 2.0).mass.sum()  # the area, 1/2, times 2²
    tensor(2.)
    """
    o = operators
    if isinstance(factors, Tensor):
        check_tensor("factors", factors, (len(o),), o.device)
        factors = factors.to(o.mass.dtype)
        s: Any = spread(factors, o)
        of_mesh: Any = factors[:, None]
    else:
        check_number("factors", factors)
        if not 0 < factors < float("inf"):
            raise ValueError(f"factors should be positive and finite, got {factors}")
        s = of_mesh = factors
    columns = s[:, None] if isinstance(s, Tensor) else s
    return changed(
        o,
        {
            "mass": lambda mass: mass * s**2,
            "evals": lambda evals: evals / of_mesh**2,
            "evecs": lambda evecs: (evecs / columns).to(evecs.dtype),
            "gradient": lambda gradient: _with_values(gradient, gradient.values / _per_entry(gradient, s)),
            "gradient_evecs": lambda x: (x / columns**2).to(x.dtype),
        },
    )


def mirrored(operators: Operators, which: Tensor | None = None, *, axis: int = 0) -> Operators:
    """The operators of meshes that are mirrored at the plane where one coordinate is 0.

    Normals are mirrored with the positions, so they still point outward. Frames stay right-handed: tangent x is
    mirrored, and tangent y is mirrored and turned around, which changes the sign of G_Y. All other fields stay.
    `faces` keeps its corners, so faces and edges keep their numbers. A mirrored mesh has the same operators if the
    corners of its faces are also put into the opposite order, which keeps its outside outside.

    which: (B,) bool, on the device of the operators: which meshes are mirrored. None means all.
    axis: the coordinate whose sign changes, 0, 1 or 2

    Fields are computed when they are first read. Nothing is read back from a GPU. Raises TypeError or ValueError for
    another axis, or for `which` of another type or shape.
    """
    o = operators
    if axis not in (0, 1, 2):
        raise ValueError(f"axis should be 0, 1 or 2, got {axis!r}")
    if which is None:
        signs = o.mass.new_full((len(o),), -1.0)
    else:
        if not isinstance(which, Tensor) or which.dtype != torch.bool or which.shape != (len(o),):
            raise ValueError(f"which should be a tensor of {len(o)} booleans, got {which!r:.80}")
        signs = 1.0 - 2.0 * which.to(o.mass.dtype)
    sign = spread(signs, o)

    def turned(frames: Tensor) -> Tensor:
        frames = frames.clone()
        frames[:, :, axis] *= sign[:, None]
        frames[:, 1] *= sign[:, None]
        return frames

    def second_negated(values: Tensor, signs: Tensor) -> Tensor:
        return torch.stack([values[0], values[1] * signs.to(values.dtype)])

    return changed(
        o,
        {
            "frames": turned,
            "gradient": lambda g: _with_values(g, second_negated(g.values, _per_entry(g, sign))),
            "gradient_evecs": lambda x: second_negated(x, sign[:, None]),
        },
    )


def rotated(operators: Operators, rotations: Tensor) -> Operators:
    """The operators of meshes that are rotated about the origin. Only the frames turn; all other fields stay.

    rotations: (B, 3, 3), by which the positions are multiplied from the right, see `rotate` and `random_rotations`

    Raises TypeError or ValueError for rotations of another type or shape.
    """
    o = operators
    check_tensor("rotations", rotations, (len(o), 3, 3), o.device)
    ptr = 3 * o.ptr  # the three axes of a frame are rotated like three positions
    return changed(o, {"frames": lambda x: rotate(x.reshape(-1, 3), rotations, ptr).reshape(x.shape).to(x.dtype)})


def _per_entry(matrix: SparseMatrix, values: Any) -> Any:
    """The values of the rows (V,) of a matrix for each of its entries."""
    return values[matrix.pattern.row_indices] if isinstance(values, Tensor) else values


def _with_values(matrix: SparseMatrix, values: Tensor) -> SparseMatrix:
    return SparseMatrix(matrix.pattern, values.to(matrix.values.dtype))
